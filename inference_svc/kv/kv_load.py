"""Makes a sequence's KV from tensor files, a few at a time, so that others can compute in between.

Blocks become pages byte for byte; only a tail has to be spread over one. On the MLX thread.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.layer_groups import layers_of

from inference_svc.kv.attention.host_copy import to_device
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.block_table import blocks_of
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import RewindPoint, SequenceKV
from inference_svc.kv.state_kv import StateKV
from inference_svc.kv.tensor_files import Array, CheckedFile, not_finite, page_units, state_arrays

MOST_FILES = 32  # that reach the device at once


@dataclass
class _GroupFiles:
    """The files of one group of layers, which follow each other, and how many of them are loaded."""

    group: int
    files: Sequence[CheckedFile]
    loaded: int = 0


class KvLoad:
    """KV that is being made from files. If it is released or dropped before it is whole, its pages go back to the pool.

    The files cover the first `keep` tokens from position 0, which are kept, with the rewind points of `states`. If the
    model has recurrent layers, the last one is at `keep`. `windows`: files of each window, without a gap from a block
    that the token at `keep` sees, or earlier, to the last. `points`: rewind points of a model without states, beside
    `keep`, whose blocks are among these.
    """

    def __init__(
        self,
        pool: KvPool,
        files: Sequence[CheckedFile],
        keep: int,
        states: Sequence[CheckedFile] = (),
        windows: Mapping[int, Sequence[CheckedFile]] = MappingProxyType({}),
        points: Collection[int] = (),
    ) -> None:
        self.kv = SequenceKV(pool)  # empty, but for pages, until it is whole
        self._keep = keep
        self._states = states
        self._points = points
        kept = {0: files[: blocks_of(keep)]}
        kept |= {
            window: [file for file in some if file.header.identity.start < keep] for window, some in windows.items()
        }
        self._left = deque(_GroupFiles(group, some) for group, some in kept.items() if some)

    @property
    def next_files(self) -> int:
        """How many files can be loaded at once: of one group of layers. 1 if there are none."""
        return min(MOST_FILES, len(self._left[0].files) - self._left[0].loaded) if self._left else 1

    def advance(self, most_files: int = MOST_FILES, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Load the next files, at most so many; returns whether the KV is whole. Evaluates; on a GPU it
        calls `meanwhile` before it waits.

        Raises DataLoss, which names the file, for a value that is not finite, and ResourceExhausted if the pool has no
        room; nothing is left of the load then.
        """
        try:
            if self._left:
                self._load_rows(self._left[0], min(most_files, MOST_FILES), meanwhile)
            if not self._left:
                self._finish()
            self.kv.pool.evaluate()
        except BaseException:
            self.kv.pool.forget_writes()  # pages that are free again may be another's when they would be written
            self.release()  # now: an error that is kept holds these frames, and with them the sequence
            raise
        return not self._left

    def release(self) -> None:
        """Give all pages back. Idempotent."""
        self.kv.release()

    def _load_rows(self, files: _GroupFiles, most: int, meanwhile: Callable[[], None]) -> None:
        """Take pages for the next files of a group, and write them."""
        pool, group, first = self.kv.pool, files.group, files.loaded
        some = files.files[first : first + most]
        blocks = [file.header.identity.start // PAGE_TOKENS for file in some]
        files.loaded += len(some)
        for table in self.kv.tables:
            if table.window == group:
                table.pages |= dict(zip(blocks, pool.take(len(blocks)), strict=True))
        bits = pool.exponents(group)
        units = to_device([page_units(file, bits.size) for file in some])
        found: Any = ((bits != 0) & ((units & bits) == bits)).any(axis=1)
        if pool.dialect is not None:
            mx.async_eval(found)  # type: ignore[no-untyped-call]
            meanwhile()
        is_wrong = found.tolist()
        if any(is_wrong):
            raise not_finite(first + is_wrong.index(True), group)
        offset = 0
        for layer in layers_of(pool.identity, group):
            pool.write_pages(layer, [self.kv.table_of(layer).pages[block] for block in blocks], units, offset)
            offset += pool.formats[layer].units
        if files.loaded == len(files.files):
            self._left.popleft()

    def _finish(self) -> None:
        """All rows are there: set the length and the rewind points."""
        kv = self.kv
        kv.length = self._keep
        for file in self._states:
            kv.set_point(_rewind_point(file, kv.pool.identity))
        if self._keep and kv.has_rewind_points and not kv.states:
            for point in sorted({*self._points, self._keep}):
                kv.set_point(RewindPoint(point, ()))
        kv.keep_rewind_points(kv.rewind_points)  # and no page that neither they nor the next token needs
        mx.eval(kv.state_arrays)


def _rewind_point(file: CheckedFile, identity: identity_pb2.KvIdentity) -> RewindPoint:
    tokens = file.header.identity.tokens
    arrays = (_to_mlx(array, spec.dtype) for spec, array in state_arrays(file))
    counts = [len(layer.state_tensors) for layer in identity.layers if layer.kind == identity_pb2.LAYER_KIND_STATE]
    return RewindPoint(tokens, tuple(StateKV(list(islice(arrays, count)), tokens) for count in counts))


def _to_mlx(array: Array, dtype: str) -> mx.array:
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == "BF16" else made
