"""Cells of several sequences in one pass: each is cut into rows of equal length, and all rows are a batch over pages.
Only a cell's first row is filled up, in front; these tokens are neither written nor read (`short_pass`). The number of
rows is one of few (`rows_of_graph`), so that there are fewer graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.decode_step import nobodys_page, prepare_rows, table_width
from inference_svc.kv.batch.short_pass import ShortPass, most_kept_tokens
from inference_svc.kv.pages.block_table import BlockTable
from inference_svc.kv.pages.groups import groups_of
from inference_svc.kv.sequence_kv import PassRoom, SequenceKV

# Attention goes over a row's tokens once for all its queries; with half as many a block of the kernels is half empty.
ROW_TOKENS = 64
_NO_WINDOW = 1 << 30
_FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    kv: SequenceKV
    token_ids: Sequence[int]


def most_packed_tokens(identity: identity_pb2.KvIdentity, dialect: Dialect | None, compute_type: str) -> int:
    """The most tokens of a cell that may be packed: all stay in every window. 0 where no row's graph is kept."""
    if most_kept_tokens(identity, dialect, compute_type) < ROW_TOKENS:
        return 0
    return min(group.window - 1 if group.window else _NO_WINDOW for group in groups_of(identity.layers))


def rows_of_graph(rows: int) -> int:
    """Of the graph that computes so many rows. A graph's first pass takes 20 to 40 ms longer on an H200, and streams
    wait; of more than `_FEW_ROWS` a pass takes as long as one of the next multiple of four.
    """
    step = 2 if rows <= _FEW_ROWS else 4
    return -(-rows // step) * step


def can_pack(kv: SequenceKV, count: int) -> bool:
    """Whether so many tokens may be packed: the filling of the first row must see rows that are here."""
    filled_from = kv.length - _spare(count)
    return all(table.can_go_on_from(filled_from) for table in kv.tables if table.window)


def packed_logits(
    passes: ShortPass,
    cells: Sequence[Cell],
    meanwhile: Callable[[mx.array], None],
    early: Callable[[], None] = lambda: None,
) -> mx.array:
    """Store cells of different sequences; logits [cells, vocabulary]. See `ShortPass.evaluate`. Raises
    ResourceExhausted.
    """
    rooms = [PassRoom(cell.kv) for cell in cells]
    try:
        for cell, room in zip(cells, rooms, strict=True):
            room.take(len(cell.token_ids))
        logits = _computed(passes, cells, rooms)
        passes.evaluate(logits, meanwhile, early)
    except BaseException:
        for room in rooms:
            room.fail()
        raise
    for cell, room in zip(cells, rooms, strict=True):
        room.move_in()
        cell.kv.advanced(len(cell.token_ids))
    return logits


def keep_graph(passes: ShortPass, rows: int, depth: int) -> None:
    """Have MLX keep the graph of a pass of so many rows behind so many tokens, as `ShortPass.keep_graph`."""
    prepare_rows(passes.pool, rows, depth + ROW_TOKENS, ROW_TOKENS)
    with nobodys_page(passes.pool) as page:
        table = mx.full((rows, table_width(depth + ROW_TOKENS)), page, dtype=mx.int32)
        places = mx.array([[-1] * ROW_TOKENS] * (rows - 1) + [[-1] * (ROW_TOKENS - 1) + [0]], dtype=mx.int32)
        tokens, offsets = mx.zeros((rows, ROW_TOKENS), dtype=mx.uint32), mx.full((rows,), 1 - ROW_TOKENS, mx.int32)
        passes.evaluate(passes.computed(tokens, offsets, places, [table] * len(passes.pool.groups)))


def _computed(passes: ShortPass, cells: Sequence[Cell], rooms: Sequence[PassRoom]) -> mx.array:
    tokens: list[int] = []
    offsets: list[int] = []
    places: list[int] = []
    last_rows: list[int] = []
    tables: list[list[list[int]]] = [[] for _ in passes.pool.groups]
    numbers, width = passes.pool.numbers, table_width(max(cell.kv.length + len(cell.token_ids) for cell in cells))
    for cell, room in zip(cells, rooms, strict=True):
        start, count, spare = cell.kv.length, len(cell.token_ids), _spare(len(cell.token_ids))
        rows = range(start - spare, start + count, ROW_TOKENS)
        tokens += [0] * spare + list(cell.token_ids)
        places += [-1] * spare + list(range(start, start + count))
        offsets += rows
        last_rows.append(len(offsets) - 1)
        for group, table, pages in zip(tables, cell.kv.tables, room.pages, strict=True):
            group += [BlockTable(0, table.pages | pages).padded(width)] * len(rows)
    for _ in range(rows_of_graph(len(offsets)) - len(offsets)):  # rows of nobody's
        tokens += [0] * ROW_TOKENS
        places += [-1] * ROW_TOKENS
        offsets.append(-ROW_TOKENS)
        for group in tables:
            group.append([0] * width)
    logits = passes.computed(
        numbers.of(tokens, len(offsets), ROW_TOKENS, dtype=mx.uint32),
        numbers.of(offsets),
        numbers.of(places, len(offsets), ROW_TOKENS),
        [numbers.of([*chain.from_iterable(group)], len(offsets), width) for group in tables],
    )
    return logits[numbers.of(last_rows, dtype=mx.uint32)]  # as an embedding is: MLX compiles the two together


def _spare(count: int) -> int:
    return -count % ROW_TOKENS
