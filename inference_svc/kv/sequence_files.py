"""Makes tensor files from a sequence's KV: pages become blocks byte for byte, tails are cut. `KvLoad` reverses it.

Each group of layers has block files and a tail of its own: the layers that keep all tokens, and those of each window.
The states of recurrent layers go into a state file at each rewind point.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import mlx.core as mx
from kvasir.formats.block_file import (
    FileIdentity,
    encode,
    expected_state_tensors,
    expected_tensors,
    header_with,
    tensor_entries,
)
from kvasir.formats.layer_groups import layers_of

from inference_svc.kv.attention.host_copy import to_host
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.block_table import blocks_of
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import Array

_MOST_PAGES = 32  # that leave the device at once


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


# --- rows ---


def _row_files(kv: SequenceKV, group: int, identities: Sequence[FileIdentity]) -> Iterator[bytes]:
    layers = layers_of(kv.pool.identity, group)
    blocks = [identity.start // PAGE_TOKENS for identity in identities]
    for identity, block in zip(identities, blocks, strict=True):
        is_here = all(block in kv.table_of(layer).pages for layer in layers)
        if identity.start + identity.tokens > kv.length or not is_here:
            raise ValueError(f"rows: expected at most {kv.length}, of a window the last, asked for {identity}")
    schemas = {rows: expected_tensors(kv.pool.identity, rows, group) for rows in {each.tokens for each in identities}}
    whole = tensor_entries(schemas.get(PAGE_TOKENS, ()))
    for first in range(0, len(identities), _MOST_PAGES):
        some = slice(first, first + _MOST_PAGES)
        pages = [
            kv.pool.pages_of(layer, [kv.table_of(layer).pages[block] for block in blocks[some]]) for layer in layers
        ]
        units = to_host(mx.concatenate(pages, axis=1))
        for identity, page in zip(identities[some], units, strict=True):
            if identity.tokens == PAGE_TOKENS:
                yield b"".join((header_with(identity, whole), memoryview(page)))  # copied once
            else:
                cut = _cut(kv.pool, layers, page, identity.tokens)
                yield encode(identity, list(zip(schemas[identity.tokens], cut, strict=True)))


def _cut(pool: KvPool, layers: Sequence[int], page: Array, rows: int) -> Iterator[bytes]:
    """The bytes of each tensor of a page's first rows."""
    offset = 0
    for layer in layers:
        for part in pool.formats[layer].parts:
            tensor = page[offset : offset + part.size].reshape(part.kv_heads, PAGE_TOKENS, part.units)
            yield tensor[:, :rows].tobytes()
            offset += part.size


# --- states ---


def _state_file(kv: SequenceKV, identity: FileIdentity) -> bytes:
    tensors = [data for state in kv.point_at(identity.tokens).states for data in state.to_bytes()]
    return encode(identity, list(zip(expected_state_tensors(kv.pool.identity), tensors, strict=True)))
