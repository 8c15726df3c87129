"""A sequence's KV as tensor files, and back: pages move as they are, and only tails are taken apart.

The layers that keep all tokens go into block files and a tail. What the other layers need at a rewind point, rows of
windows and recurrent states, goes into a state file.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_file import (
    FileIdentity,
    encode,
    encode_header,
    expected_state_tensors,
    expected_tensors,
)

from inference_svc.kv.attention.host_copy import to_device, to_host
from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.block_table import blocks_of, window_start
from inference_svc.kv.pages.page_rows import UNIT, joined_rows, pages_of_rows, rows_of_pages
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import RewindPoint, SequenceKV
from inference_svc.kv.state_kv import StateKV
from inference_svc.kv.tensor_files import Array, CheckedFile, exponents, not_finite, page_units, state_arrays

_MOST_PAGES = 32  # that leave the device at once


def files_of(kv: SequenceKV, identities: Sequence[FileIdentity]) -> list[bytes]:
    """The tensor files of blocks and tail, in the order of their rows, or of states at rewind points, as their
    identities say. Raises ValueError for rows or rewind points that the sequence does not have.
    """
    files: list[bytes] = []
    for kind, of_kind in groupby(identities, lambda identity: identity.kind):
        if kind == "state":
            files += [_state_file(kv, identity) for identity in of_kind]
        else:
            files += _row_files(kv, list(of_kind))
    return files


def row_layers(identity: identity_pb2.KvIdentity) -> list[int]:
    """The layers that keep all tokens."""
    kept = (identity_pb2.LAYER_KIND_FULL, identity_pb2.LAYER_KIND_LATENT)
    return [index for index, layer in enumerate(identity.layers) if layer.kind in kept]


def from_files(pool: KvPool, files: Sequence[CheckedFile], keep: int, states: Sequence[CheckedFile] = ()) -> SequenceKV:
    """The first `keep` tokens of files that cover them from position 0, with the rewind points of `states`. If the
    model has states, the last one is at `keep`.

    Evaluates. Raises DataLoss, which names the file, for a value that is not finite, and ResourceExhausted if the pool
    has no room.
    """
    kv = SequenceKV(pool)
    try:
        if layers := row_layers(pool.identity):
            _load_rows(kv, layers, files[: blocks_of(keep)])
        tensors = [(file.header.identity.tokens, state_arrays(pool.identity, file)) for file in states]
        for tokens, found in tensors:
            _load_state(kv, tokens, [_to_mlx(array, spec.dtype) for spec, array in found])
        kv.length = keep
        pool.evaluate()
        mx.eval(kv.state_arrays)
    except BaseException:
        kv.release()  # now: an error that is kept holds these frames, and with them the sequence
        raise
    return kv


# --- rows ---


def _row_files(kv: SequenceKV, identities: Sequence[FileIdentity]) -> Iterator[bytes]:
    for identity in identities:
        if identity.start + identity.tokens > kv.length:
            raise ValueError(f"rows: expected at most {kv.length}, asked for {identity}")
    layers = row_layers(kv.pool.identity)
    for first in range(0, len(identities), _MOST_PAGES):
        some = identities[first : first + _MOST_PAGES]
        blocks = [identity.start // PAGE_TOKENS for identity in some]
        pages = [kv.pool.pages_of(layer, [kv.table_of(layer).pages[block] for block in blocks]) for layer in layers]
        units = to_host(mx.concatenate(pages, axis=1))
        for identity, page in zip(some, units, strict=True):
            specs = expected_tensors(kv.pool.identity, identity.tokens)
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


def _load_rows(kv: SequenceKV, layers: Sequence[int], files: Sequence[CheckedFile]) -> None:
    if not files:
        return
    pool = kv.pool
    pages = to_device([page_units(pool.identity, file) for file in files])
    bits = mx.array(exponents(pool.identity))
    is_wrong = ((bits != 0) & ((pages & bits) == bits)).any(axis=1)
    found: Any = is_wrong.tolist()
    if any(found):
        raise not_finite(found.index(True))
    offset = 0
    for table, group in zip(kv.tables, pool.groups, strict=True):
        if not group.window:
            table.pages = dict(enumerate(pool.take(len(files))))
    for layer in layers:
        units = pool.formats[layer].units
        pool.write_pages(layer, kv.table_of(layer).held(range(len(files))), pages, offset)
        offset += units


# --- states ---


def _state_file(kv: SequenceKV, identity: FileIdentity) -> bytes:
    point = kv.point_at(identity.tokens)
    states = dict(zip(kv.states, point.states, strict=True))
    tensors: list[bytes] = []
    for index, layer in enumerate(kv.pool.identity.layers):
        if index in states:
            tensors += states[index].to_bytes()
        elif layer.window:
            tensors += _window_bytes(kv, index, point.tokens)
    specs = expected_state_tensors(kv.pool.identity, identity.tokens)
    return encode(identity, list(zip(specs, tensors, strict=True)))


def _window_bytes(kv: SequenceKV, layer: int, tokens: int) -> list[bytes]:
    rows = kv.rows(layer, window_start(kv.table_of(layer).window, tokens), tokens)
    return [] if rows is None else [np.asarray(mx.contiguous(part.view(UNIT))).tobytes() for part in rows]


def _load_state(kv: SequenceKV, tokens: int, arrays: Sequence[mx.array]) -> None:
    """Take over a state file's tensors [1, …], and make a rewind point of them."""
    rest, states = list(arrays), []
    spans = [_take_span(kv, number, tokens) for number in range(len(kv.tables))]
    for index, layer in enumerate(kv.pool.identity.layers):
        if index in kv.states:
            state = StateKV(len(layer.state_tensors))
            state.put_parts(tokens, rest[: len(layer.state_tensors)])
            del rest[: len(layer.state_tensors)]
            states.append(state)
        elif layer.window and (blocks := spans[kv.table_number(index)]):
            count = len(kv.pool.formats[index].parts)
            _write_window(kv, index, blocks, tokens, tuple(rest[:count]))
            del rest[:count]
    kv.set_point(RewindPoint(tokens, tuple(states)))


def _take_span(kv: SequenceKV, number: int, tokens: int) -> range:
    """Pages for the blocks that a window needs at this length; none for other layers."""
    table = kv.tables[number]
    if not table.window:
        return range(0)
    start = window_start(table.window, tokens)
    blocks = range(start // PAGE_TOKENS, blocks_of(tokens))
    missing = [block for block in blocks if block not in table.pages]
    table.pages |= dict(zip(missing, kv.pool.take(len(missing)), strict=True))
    table.valid_from = start
    return blocks


def _write_window(kv: SequenceKV, layer: int, blocks: range, tokens: int, rows: EncodedRows) -> None:
    """Write a window's rows behind what the first of their pages holds already."""
    table, page_format = kv.table_of(layer), kv.pool.formats[layer]
    start = window_start(table.window, tokens) - blocks.start * PAGE_TOKENS
    if start:
        first = kv.pool.pages_of(layer, [table.pages[blocks.start]])
        rows = joined_rows(rows_of_pages(page_format, first, 0, start), rows)
    kv.pool.write_pages(layer, table.held(blocks), pages_of_rows(page_format, rows))


def _to_mlx(array: Array, dtype: str) -> mx.array:
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == "BF16" else made
