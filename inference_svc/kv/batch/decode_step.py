"""What all layers of a decoding step share: the sequences by slot, their pages, and the places of the new rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import mlx.core as mx

from inference_svc.kv.page import PAGE_TOKENS, PageFormat
from inference_svc.kv.pages.block_table import BlockTable, blocks_of
from inference_svc.kv.pages.page_rows import row_columns
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV

_LEAST_WIDTH = 8  # blocks of the narrowest table; wider ones double, so that few widths occur


def table_width(tokens: int) -> int:
    return max(_LEAST_WIDTH, 1 << (blocks_of(tokens) - 1).bit_length())


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Where a token's row lies in a page (`page_rows.row_columns`), its parts in this order. Equal layers share one
    (`of`), because each of them looks its columns up in every step.
    """

    page_format: PageFormat
    order: tuple[int, ...]

    @staticmethod
    @cache
    def of(page_format: PageFormat, order: tuple[int, ...]) -> "RowPlaces":
        return RowPlaces(page_format, order)

    @cached_property
    def columns(self) -> tuple[mx.array, mx.array]:
        columns = row_columns(self.page_format, self.order)
        mx.eval(columns)  # engines of one process share them, and a lazy array belongs to the thread that made it
        return columns


class GroupRows:
    """One group of layers in one step: the page of each sequence's new row, private since this was made."""

    def __init__(self, tables: Sequence[BlockTable], lengths: Sequence[int], pages: list[int], slots: int) -> None:
        """`slots`: as many as there are sequences, or more, which are empty."""
        self._pages = pages
        self._slots = slots
        self._lengths = lengths
        self._tables = tables
        self._width = table_width(max(lengths) + 1)
        self._columns: dict[RowPlaces, mx.array] = {}

    @cached_property
    def block_table(self) -> mx.array:
        """Pages by sequence and block, int32 [slots, width]; 0 where there is none."""
        empty = [[0] * self._width] * (self._slots - len(self._tables))
        return mx.array([*(table.padded(self._width) for table in self._tables), *empty], dtype=mx.int32)

    @cached_property
    def pages(self) -> mx.array:
        return mx.array(self._pages, dtype=mx.int32)

    def columns(self, places: RowPlaces) -> mx.array:
        """Where in its page the units of each sequence's new row go, [slots, units]. Made once for equal layers."""
        if places not in self._columns:
            first, step = places.columns
            rows = mx.array([length % PAGE_TOKENS for length in self._lengths], dtype=mx.int32)
            self._columns[places] = first[None] + step[None] * rows[:, None]
        return self._columns[places]


@dataclass(frozen=True)
class DecodeStep:
    """One token of each sequence is about to be computed; `lengths` are stored. `slots` behind them are empty."""

    sequences: tuple[SequenceKV, ...]
    lengths: tuple[int, ...]
    groups: tuple[GroupRows, ...]
    slots: int

    @classmethod
    def of(cls, pool: KvPool, sequences: Sequence[SequenceKV], slots: int = 0) -> "DecodeStep":
        """Give each sequence a private page for its new row. Raises ResourceExhausted, and has changed nothing."""
        lengths = tuple(kv.length for kv in sequences)
        count, groups = len(sequences), []
        slots = max(slots, count)
        pages = _writable_pages(pool, sequences)
        for number in range(len(pool.groups)):
            tables = [kv.tables[number] for kv in sequences]
            groups.append(GroupRows(tables, lengths, pages[number * count : (number + 1) * count], slots))
        return cls(tuple(sequences), lengths, tuple(groups), slots)

    @cached_property
    def offsets(self) -> mx.array:
        return mx.array([*self.lengths, *[-1] * (self.slots - len(self.lengths))], dtype=mx.int32)


@dataclass(frozen=True, slots=True)
class PassArrays:
    """Arguments of kernels in a pass: how many tokens each sequence has stored, [slots]; the places of the new rows,
    [slots] or [slots, n], those at -1 being written nowhere; each group's block tables [slots, width]; the pool's
    arrays and `order`, which a graph that is kept takes as arguments, because a pool that grows has others.
    """

    offsets: mx.array
    places: mx.array
    block_tables: Sequence[mx.array]
    pages: Sequence[mx.array]
    order: Sequence[mx.array] = ()


def _writable_pages(pool: KvPool, sequences: Sequence[SequenceKV]) -> list[int]:
    """The private page of each sequence's next row, group by group. A sequence that shares the page gets a copy."""
    places = [
        (kv, kv.tables[number], kv.length // PAGE_TOKENS) for number in range(len(pool.groups)) for kv in sequences
    ]
    # All or none: a sequence with a new page that its rows were not copied to would have lost them.
    pages = pool.private_pages([table.pages.get(block) for _, table, block in places])
    for (kv, table, block), page in zip(places, pages, strict=True):
        kv.hold(table, {block: page})
    return pages


class KeptGraph:
    """A graph over a pool's arrays, forgotten when the pool changes their size."""

    def __init__(self, trace: Callable[..., mx.array]) -> None:
        self._trace = trace
        self._compiled: Any = None
        self._sizes: list[int] | None = None

    def __call__(self, pages: list[mx.array], *given: Any) -> mx.array:
        """The result of `trace`, not evaluated. `pages`: the pool's arrays."""
        if (sizes := [array.shape[0] for array in pages]) != self._sizes:
            self._compiled, self._sizes = mx.compile(self._trace), sizes
        made: mx.array = self._compiled(pages, *given)
        return made
