"""A sequence's KV as tensor files, and back: pages move as they are, and only tails are taken apart.

Each group of layers has block files and a tail of its own: the layers that keep all tokens, and those of each window.
The states of recurrent layers go into a state file at each rewind point.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_file import (
    FileIdentity,
    encode,
    encode_header,
    expected_state_tensors,
    expected_tensors,
)
from kvasir.formats.layer_groups import layers_of

from inference_svc.kv.attention.host_copy import to_device, to_host
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.block_table import blocks_of
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import RewindPoint, SequenceKV
from inference_svc.kv.state_kv import StateKV
from inference_svc.kv.tensor_files import Array, CheckedFile, exponents, not_finite, page_units, state_arrays

_MOST_PAGES = 32  # that leave or reach the device at once


def files_of(kv: SequenceKV, identities: Sequence[FileIdentity]) -> list[bytes]:
    """The tensor files of blocks and tails, those of a group in the order of their rows, or of states at rewind points,
    as their identities say. Raises ValueError for rows or rewind points that the sequence does not have.
    """
    files: list[bytes] = []
    for (is_state, group), found in groupby(identities, lambda each: (each.kind == "state", each.window)):
        some = list(found)
        files += [_state_file(kv, each) for each in some] if is_state else _row_files(kv, group, some)
    return files


def first_whole_block(kv: SequenceKV, window: int) -> int:
    """The first of the blocks that the layers of a window still hold whole, without a gap up to the sequence's end."""
    first = 0
    for table in kv.tables:
        if table.window == window:
            block = blocks_of(kv.length)
            while block and block - 1 in table.pages and (block - 1) * PAGE_TOKENS >= table.valid_from:
                block -= 1
            first = max(first, block)
    return first


def whole_blocks(kv: SequenceKV, window: int) -> list[int]:
    """The full blocks of which the layers of a window hold all rows, ascending: the last ones, and before a gap those
    of rewind points.
    """
    tables = [table for table in kv.tables if table.window == window]
    full = range(kv.length // PAGE_TOKENS)
    return [block for block in full if all(table.has_whole(block, kv.rewind_points) for table in tables)]


def from_files(
    pool: KvPool,
    files: Sequence[CheckedFile],
    keep: int,
    states: Sequence[CheckedFile] = (),
    windows: Mapping[int, Sequence[CheckedFile]] = MappingProxyType({}),
    points: Collection[int] = (),
) -> SequenceKV:
    """The first `keep` tokens of files that cover them from position 0, with the rewind points of `states`. If the
    model has recurrent layers, the last one is at `keep`. `windows`: files of each window, without a gap from a block
    that the token at `keep` sees, or earlier, to the last. `points`: rewind points of a model without states, beside
    `keep`, whose blocks are among these.

    Evaluates. Raises DataLoss, which names the file, for a value that is not finite, and ResourceExhausted if the pool
    has no room.
    """
    kv = SequenceKV(pool)
    try:
        _load_rows(kv, 0, files[: blocks_of(keep)])
        for window, some in windows.items():
            _load_rows(kv, window, [file for file in some if file.header.identity.start < keep])
        kv.length = keep
        for file in states:
            tokens, found = file.header.identity.tokens, state_arrays(file)
            arrays = [_to_mlx(array, spec.dtype) for spec, array in found]
            kv.set_point(RewindPoint(tokens, _states_of(pool, tokens, arrays)))
        if keep and kv.has_rewind_points and not kv.states:
            for point in sorted({*points, keep}):
                kv.set_point(RewindPoint(point, ()))
        kv.keep_rewind_points(kv.rewind_points)  # and no page that neither they nor the next token needs
        pool.evaluate()
        mx.eval(kv.state_arrays)
    except BaseException:
        pool.forget_writes()  # pages that are free again may be another's when they would be written
        kv.release()  # now: an error that is kept holds these frames, and with them the sequence
        raise
    return kv


# --- rows ---


def _row_files(kv: SequenceKV, group: int, identities: Sequence[FileIdentity]) -> Iterator[bytes]:
    layers = layers_of(kv.pool.identity, group)
    blocks = [identity.start // PAGE_TOKENS for identity in identities]
    for identity, block in zip(identities, blocks, strict=True):
        is_here = all(block in kv.table_of(layer).pages for layer in layers)
        if identity.start + identity.tokens > kv.length or not is_here:
            raise ValueError(f"rows: expected at most {kv.length}, of a window the last, asked for {identity}")
    for first in range(0, len(identities), _MOST_PAGES):
        some = slice(first, first + _MOST_PAGES)
        pages = [
            kv.pool.pages_of(layer, [kv.table_of(layer).pages[block] for block in blocks[some]]) for layer in layers
        ]
        units = to_host(mx.concatenate(pages, axis=1))
        for identity, page in zip(identities[some], units, strict=True):
            specs = expected_tensors(kv.pool.identity, identity.tokens, group)
            if identity.tokens == PAGE_TOKENS:
                yield encode_header(identity, specs) + page.tobytes()
            else:
                tensors = zip(specs, _cut(kv.pool, layers, page, identity.tokens), strict=True)
                yield encode(identity, list(tensors))


def _cut(pool: KvPool, layers: Sequence[int], page: Array, rows: int) -> Iterator[bytes]:
    """The bytes of each tensor of a page's first rows."""
    offset = 0
    for layer in layers:
        for part in pool.formats[layer].parts:
            tensor = page[offset : offset + part.size].reshape(part.kv_heads, PAGE_TOKENS, part.units)
            yield tensor[:, :rows].tobytes()
            offset += part.size


def _load_rows(kv: SequenceKV, group: int, files: Sequence[CheckedFile]) -> None:
    """Take pages for a group's files, which follow each other, and write them."""
    if not files:
        return
    pool = kv.pool
    first = files[0].header.identity.start // PAGE_TOKENS
    blocks = range(first, first + len(files))
    for table in kv.tables:
        if table.window == group:
            table.pages = dict(zip(blocks, pool.take(len(blocks)), strict=True))
    bits = mx.array(exponents(pool.identity, group))
    for begin in range(0, len(files), _MOST_PAGES):
        some = slice(begin, begin + _MOST_PAGES)
        pages = to_device([page_units(pool.identity, file) for file in files[some]])
        is_wrong = ((bits != 0) & ((pages & bits) == bits)).any(axis=1)
        found: Any = is_wrong.tolist()
        if any(found):
            raise not_finite(begin + found.index(True), group)
        offset = 0
        for layer in layers_of(pool.identity, group):
            pool.write_pages(layer, kv.table_of(layer).held(blocks[some]), pages, offset)
            offset += pool.formats[layer].units
        pool.evaluate()


# --- states ---


def _state_file(kv: SequenceKV, identity: FileIdentity) -> bytes:
    tensors = [data for state in kv.point_at(identity.tokens).states for data in state.to_bytes()]
    return encode(identity, list(zip(expected_state_tensors(kv.pool.identity), tensors, strict=True)))


def _states_of(pool: KvPool, tokens: int, arrays: Sequence[mx.array]) -> tuple[StateKV, ...]:
    """The recurrent layers' states of a state file's tensors [1, …]."""
    rest, states = list(arrays), []
    for layer in pool.identity.layers:
        if layer.kind == identity_pb2.LAYER_KIND_STATE:
            state = StateKV(0)
            state.tensors, state.offset = list(rest[: len(layer.state_tensors)]), tokens
            del rest[: len(layer.state_tensors)]
            states.append(state)
    return tuple(states)


def _to_mlx(array: Array, dtype: str) -> mx.array:
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == "BF16" else made
