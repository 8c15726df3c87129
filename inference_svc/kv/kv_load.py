"""Makes a sequence's KV from tensor files, a few at a time, so that others can compute in between. Blocks become pages
byte for byte; where files come to the device by themselves, some are on their way meanwhile. On the MLX thread.
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

from inference_svc.kv.damage import DamagedFile
from inference_svc.kv.host_copies.host_copy import copies_itself
from inference_svc.kv.host_copies.landings import LANDING_BYTES, Sent, may_send, send
from inference_svc.kv.page import PAGE_TOKENS, UNIT_BYTES
from inference_svc.kv.pages.block_table import blocks_of
from inference_svc.kv.sequence_kv import RewindPoint, SequenceKV
from inference_svc.kv.state_kv import StateKV
from inference_svc.kv.tensor_files import Array, CheckedFile, page_units, state_arrays

MOST_FILES = 32  # that are sent to the device at once
# Of files that come to the device by themselves. A smaller piece takes the processor as long: a restore of 8,192 tokens
# of Llama 3.1 8B spent most of its time on pieces of one file. Readers have room for more (`AHEAD_BYTES`).
_LEAST_BYTES = 32 << 20


@dataclass
class _GroupFiles:
    """The files of one group of layers, `count` in all, and how many of them were sent or are not needed."""

    group: int
    files: Sequence[CheckedFile]  # those that came
    count: int
    sent: int = 0
    least: int = 1  # so many are worth a piece, while more are to come

    @property
    def ready(self) -> int:
        came = max(0, min(len(self.files), self.count) - self.sent)
        return came if came >= min(self.least, self.count - self.sent) else 0


@dataclass(frozen=True)
class _Piece:
    """Files of one group, from the `first` of its files on, that were sent to the device, and their blocks."""

    group: int
    first: int
    blocks: Sequence[int]
    content: Sent


class KvLoad:
    """KV that is being made from files. If it is released or dropped before it is whole, its pages go back to the pool.
    `kv`: of whole leading blocks, which need no files, or empty. The files, those blocks' too, cover the first `keep`
    tokens from position 0, which are kept, with the rewind points of `states`. If the model has recurrent layers, the
    last one is at `keep`. `windows`: files of each window, without a gap from a block that the token at `keep` sees, or
    earlier, to the last. `points`: rewind points of a model without states, beside `keep`, whose blocks are among
    these. `files` may grow while the KV is made; those of windows are all there.
    """

    def __init__(
        self,
        kv: SequenceKV,
        files: Sequence[CheckedFile],
        keep: int,
        states: Sequence[CheckedFile] = (),
        windows: Mapping[int, Sequence[CheckedFile]] = MappingProxyType({}),
        points: Collection[int] = (),
    ) -> None:
        self.kv = kv  # but for pages as it was until it is whole
        self._keep = keep
        self._states = states
        self._points = points
        count = blocks_of(keep) if layers_of(kv.pool.identity, 0) else 0
        least = min(MOST_FILES, max(1, _LEAST_BYTES // self._file_bytes(0))) if count and copies_itself() else 1
        left = [_GroupFiles(0, files, count, kv.length // PAGE_TOKENS, least)]
        for window, some in windows.items():
            kept = [file for file in some if file.header.identity.start < keep]
            left.append(_GroupFiles(window, kept, len(kept)))
        self._left = deque(each for each in left if each.sent < each.count)
        self._coming = deque[_Piece]()  # sent, and not written to pages yet
        self._unchecked: list[tuple[_Piece, mx.array]] = []  # written, and which of their files hold what is no number

    @property
    def next_files(self) -> int:
        """How many files can be sent at once: of one group of layers. 1 if there are none."""
        if not self._left:
            return 1
        files = self._left[0]
        return max(1, min(MOST_FILES, LANDING_BYTES // self._file_bytes(files.group), files.ready))

    def _file_bytes(self, group: int) -> int:
        """Of a block's rows."""
        pool = self.kv.pool
        return UNIT_BYTES * sum(pool.formats[layer].units for layer in layers_of(pool.identity, group))

    @property
    def lacks_files(self) -> bool:
        """Whether `advance` has nothing to do before another file comes."""
        return bool(self._left) and not self._left[0].ready and not self._coming

    @property
    def awaits_bytes(self) -> bool:
        """Whether `advance` would only wait for files that come by themselves."""
        if self._coming:
            return not self._coming[0].content.is_there
        return bool(self._left) and not may_send()

    def cut(self, keep: int) -> None:
        """No file behind the first `keep` tokens comes. For a model whose layers all keep all tokens."""
        self._keep = min(self._keep, keep)
        for files in list(self._left):
            files.count = blocks_of(self._keep)
            if files.sent >= files.count:
                self._left.remove(files)

    def advance(self, most_files: int = MOST_FILES, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Send the next files to the device, at most so many, and write those that were sent in the call before. Files
        that do not come by themselves are written in the call that sends them. Returns whether the KV is whole.
        Evaluates; on a GPU it calls `meanwhile` before it waits for what is enqueued. Raises DataLoss, which names the
        file, for a value that is not finite, and ResourceExhausted if the pool has no room; nothing is left of the load
        then.
        """
        try:
            were_sent = bool(self._coming)
            if self._left and self._left[0].ready and (not were_sent or may_send()):
                self._coming.append(self._sent(self._left[0], min(most_files, MOST_FILES)))
            if self._coming and (were_sent or not self._coming[0].content.comes_by_itself):
                self._write(self._coming[0], meanwhile)
                self._coming.popleft()
            if self._left or self._coming:
                return False
            self._finish(meanwhile)
            return True
        except BaseException:
            self.kv.pool.forget_writes()  # pages that are free again may be another's when they would be written
            self.release()  # now: an error that is kept holds these frames, and with them the sequence
            raise

    def release(self) -> None:
        """Give all pages back, and the room of files that were sent. Idempotent."""
        while self._coming:
            self._coming.popleft().content.release(())
        self._unchecked.clear()
        self.kv.release()

    def _sent(self, files: _GroupFiles, most: int) -> _Piece:
        pool, group, first = self.kv.pool, files.group, files.sent
        some = files.files[first : first + min(most, files.ready)]
        blocks = [file.header.identity.start // PAGE_TOKENS for file in some]
        for table in self.kv.tables:
            if table.window == group:
                table.pages |= dict(zip(blocks, pool.take(len(blocks)), strict=True))
        units = pool.exponents(group).size
        piece = _Piece(group, first, blocks, send([page_units(file, units) for file in some]))
        files.sent += len(some)
        if files.sent == files.count:
            self._left.popleft()
        return piece

    def _write(self, piece: _Piece, meanwhile: Callable[[], None]) -> None:
        """Write files to their pages. Files that came by themselves are only enqueued, and checked at the end."""
        pool, bits, units = self.kv.pool, self.kv.pool.exponents(piece.group), piece.content.rows()
        found: mx.array = ((bits != 0) & ((units & bits) == bits)).any(axis=1)
        if not piece.content.comes_by_itself:
            if pool.dialect is not None:
                mx.async_eval(found)  # type: ignore[no-untyped-call]
                meanwhile()
            _check(piece, found)
        offset = 0
        for layer in layers_of(pool.identity, piece.group):
            pages = [self.kv.table_of(layer).pages[block] for block in piece.blocks]
            pool.write_pages(layer, pages, units, offset)
            offset += pool.formats[layer].units
        if piece.content.comes_by_itself:
            mx.async_eval(found)  # type: ignore[no-untyped-call]
            piece.content.release([found, *pool.begin_writes()])
            self._unchecked.append((piece, found))
        else:
            pool.evaluate()

    def _finish(self, meanwhile: Callable[[], None]) -> None:
        """All rows are written: check what was not checked yet, and set the length and the rewind points."""
        kv = self.kv
        if self._unchecked:
            meanwhile()
        for piece, found in self._unchecked:
            _check(piece, found)
        self._unchecked.clear()
        kv.length = self._keep
        for file in self._states:
            kv.set_point(_rewind_point(file, kv.pool.identity))
        if self._keep and kv.has_rewind_points and not kv.states:
            for point in sorted({*self._points, self._keep}):
                kv.set_point(RewindPoint(point, ()))
        kv.keep_rewind_points(kv.rewind_points)  # and no page that neither they nor the next token needs
        mx.eval(kv.state_arrays)


def _check(piece: _Piece, found: mx.array) -> None:
    """Raise DataLoss for the first file of a piece that holds what is no number. Waits."""
    is_wrong: Any = found.tolist()
    if any(is_wrong):
        what = "holds a value that is not finite"
        raise DamagedFile(what, blob=piece.first + is_wrong.index(True), window=piece.group)


def _rewind_point(file: CheckedFile, identity: identity_pb2.KvIdentity) -> RewindPoint:
    tokens = file.header.identity.tokens
    arrays = (_to_mlx(array, spec.dtype) for spec, array in state_arrays(file))
    counts = [len(layer.state_tensors) for layer in identity.layers if layer.kind == identity_pb2.LAYER_KIND_STATE]
    return RewindPoint(tokens, tuple(StateKV(list(islice(arrays, count)), tokens) for count in counts))


def _to_mlx(array: Array, dtype: str) -> mx.array:
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == "BF16" else made
