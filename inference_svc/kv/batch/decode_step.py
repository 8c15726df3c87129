"""What all layers of a decoding step share: the sequences by slot, their pages, and the places of the new rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, chain
from typing import Any

import mlx.core as mx

from inference_svc.kv.batch.slot_arrays import SlotPlaces
from inference_svc.kv.batch.window_attention import hidden_of
from inference_svc.kv.host_numbers import HostNumbers
from inference_svc.kv.page import PAGE_TOKENS, PageFormat
from inference_svc.kv.pages.block_table import BlockTable, blocks_of
from inference_svc.kv.pages.page_rows import row_columns
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV

Forward = Callable[[mx.array, list[Any]], mx.array]  # tokens [rows, n] and the layers' KV to logits
_LEAST_PLACES = 4  # MLX 0.32 has two and less in the host's memory, where each of CUDA's kernels waits for them
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
    """One group of layers in one step: the page of each new row, private since this was made."""

    def __init__(self, tables: Sequence[BlockTable], lengths: Sequence[int], pages: list[int], rows: int) -> None:
        """`tables`, `lengths` and `pages` by row that is stored. `rows`: as many, or more, which are empty."""
        self.tables = tables
        self._pages = pages
        self._lengths = lengths
        self.shape = (rows, table_width(max(lengths, default=0) + 1))
        self._units: dict[RowPlaces, tuple[mx.array, mx.array]] = {}

    @property
    def block_table(self) -> list[int]:
        """Pages by row and block, [rows, width] in one; 0 where there is none."""
        rows, width = self.shape
        padded = {id(table): table.padded(width) for table in self.tables}
        empty = [0] * width * (rows - len(self.tables))
        return [*chain.from_iterable(padded[id(table)] for table in self.tables), *empty]

    def units(self, places: RowPlaces) -> tuple[mx.array, mx.array]:
        """By unit of each new row its page, and its column there, [rows, units]. Made once for equal layers."""
        if places not in self._units:
            first, step = places.columns
            rows = mx.array([length % PAGE_TOKENS for length in self._lengths], dtype=mx.int32)
            columns = first[None] + step[None] * rows[:, None]
            pages = mx.array(self._pages, dtype=mx.int32)[:, None]
            self._units[places] = mx.broadcast_to(pages, columns.shape), columns
        return self._units[places]


@dataclass(frozen=True, slots=True)
class PassRows:
    """A sequence's rows of one pass. The first `stored` become its KV. The rest are seen by those behind them as they
    are computed, not as they would be stored, and by nobody after the pass. `positions` of these, by which they are
    rotated, may be in any order. `is_first_alone`: over copies, attention of the first row has the sums of a pass of
    this token alone.
    """

    stored: int
    positions: tuple[int, ...] = ()
    is_first_alone: bool = False

    @property
    def count(self) -> int:
        return self.stored + len(self.positions)


@dataclass(frozen=True)
class DecodeStep:
    """Rows of sequences are about to be computed: of each its next token and, behind it, tokens that are tried ahead.
    `slot_of` has by row the slot of its sequence, `lengths` how many rows stand before it. `rows`: with empty ones.
    `stored`: the rows that are stored, None for all. `positions`: by which they are rotated, None for `lengths`.
    `alone`: the rows that `PassRows.is_first_alone` is about.
    """

    sequences: tuple[SequenceKV, ...]
    slot_of: tuple[int, ...]
    lengths: tuple[int, ...]
    groups: tuple[GroupRows, ...]
    rows: int
    stored: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    alone: tuple[int, ...] = ()
    kept_places: dict[int, SlotPlaces] = field(default_factory=dict, compare=False)  # of `places_of`

    @classmethod
    def of(
        cls, pool: KvPool, sequences: Sequence[SequenceKV], counts: Sequence[int] | None = None, rows: int = 0
    ) -> "DecodeStep":
        """Give each sequence private pages for its new rows, `counts` of them, or one. `rows`: at least so many. Raises
        ResourceExhausted, and has changed nothing.
        """
        if counts:
            slot_of, lengths = _places_of(sequences, counts)
        else:
            slot_of, lengths = tuple(range(len(sequences))), tuple([kv.length for kv in sequences])
        rows = max(rows, len(lengths))
        return cls(tuple(sequences), slot_of, lengths, _groups_of(pool, sequences, slot_of, lengths, rows), rows)

    @classmethod
    def of_pass(cls, pool: KvPool, sequences: Sequence[SequenceKV], given: Sequence[PassRows]) -> "DecodeStep":
        """As `of`; only rows that are stored get pages."""
        slot_of, lengths = _places_of(sequences, [each.count for each in given])
        stored_slots, stored_lengths = _places_of(sequences, [each.stored for each in given])
        groups = _groups_of(pool, sequences, stored_slots, stored_lengths, len(stored_lengths))
        firsts = [*accumulate((each.count for each in given), initial=0)]
        stored = tuple(first + row for first, each in zip(firsts, given, strict=False) for row in range(each.stored))
        positions = tuple(
            position
            for kv, each in zip(sequences, given, strict=True)
            for position in (*range(kv.length, kv.length + each.stored), *each.positions)
        )
        alone = tuple(first for first, each in zip(firsts, given, strict=False) if each.is_first_alone)
        return cls(tuple(sequences), slot_of, lengths, groups, len(lengths), stored, positions, alone)

    @cached_property
    def has_one_row_each(self) -> bool:
        """And none that is `alone`."""
        return not self.alone and self.slot_of == tuple(range(len(self.sequences)))

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each sequence."""
        return [self.slot_of.count(slot) for slot in range(len(self.sequences))]

    @cached_property
    def hidden(self) -> list[mx.array]:
        """By sequence that has rows that are not alone, for `attend_window`."""
        slots = zip(accumulate(self.counts, initial=0), self.counts, strict=False)
        own = (self.lengths[first + (first in self.alone) : first + count] for first, count in slots if count)
        return [hidden_of(lengths) for lengths in own if lengths]

    @cached_property
    def slots(self) -> mx.array:
        return mx.array(self.slot_of)

    @cached_property
    def seen(self) -> mx.array:
        """By row, how many rows stand before it; -1 of an empty one."""
        return mx.array(padded_lengths(self), dtype=mx.int32)

    @cached_property
    def offsets(self) -> mx.array:
        """By row, the position by which it is rotated."""
        return self.seen if self.positions is None else mx.array(self.positions, dtype=mx.int32)

    @cached_property
    def stored_rows(self) -> mx.array:
        return mx.array(list(self.stored or ()), dtype=mx.int32)

    @cached_property
    def is_exact(self) -> mx.array:
        """By row [rows, 1, 1, 1], whether others see it as it is computed."""
        stored = set(self.stored or ())
        return mx.array([row not in stored for row in range(self.rows)])[:, None, None, None]


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


def _places_of(sequences: Sequence[SequenceKV], counts: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By row, the slot of its sequence, and how many rows stand before it."""
    slot_of = tuple(slot for slot, count in enumerate(counts) for _ in range(count))
    lengths = tuple(kv.length + row for kv, count in zip(sequences, counts, strict=True) for row in range(count))
    return slot_of, lengths


def _groups_of(
    pool: KvPool, sequences: Sequence[SequenceKV], slot_of: Sequence[int], lengths: Sequence[int], rows: int
) -> tuple[GroupRows, ...]:
    pages, groups = _writable_pages(pool, sequences, slot_of, lengths), []
    for number in range(len(pool.groups)):
        tables = [sequences[slot].tables[number] for slot in slot_of]
        groups.append(GroupRows(tables, lengths, pages[number * len(lengths) :][: len(lengths)], rows))
    return tuple(groups)


def _writable_pages(
    pool: KvPool, sequences: Sequence[SequenceKV], slot_of: Sequence[int], lengths: Sequence[int]
) -> list[int]:
    """The private page of each new row, group by group. A sequence that shares a page gets a copy."""
    rows = [
        (number, slot, length // PAGE_TOKENS)
        for number in range(len(pool.groups))
        for slot, length in zip(slot_of, lengths, strict=True)
    ]
    places = list(dict.fromkeys(rows))  # rows of one sequence may have one page
    tables = [sequences[slot].tables[number] for number, slot, _ in places]
    # All or none: a sequence with a new page that its rows were not copied to would have lost them.
    held = [table.pages.get(block) for table, (_, _, block) in zip(tables, places, strict=True)]
    found = pool.private_pages(held)
    if found == held and len(places) == len(rows):  # most steps
        return found
    pages = dict(zip(places, found, strict=True))
    for place, table, old in zip(places, tables, held, strict=True):
        _, slot, block = place
        if pages[place] != old:
            sequences[slot].hold(table, {block: pages[place]})
    return [pages[row] for row in rows]


def prepare_rows(pool: KvPool, rows: int, tokens: int, of_each: int = 1) -> None:
    """Have arrays of the host's for passes of so many rows, `of_each` tokens each, of sequences of at most `tokens`."""
    width, is_step = table_width(tokens), of_each == 1
    for shape in (
        (max(rows, _LEAST_PLACES) if is_step else rows,),
        (rows, width),
        *(() if is_step else ((rows, of_each),)),
    ):
        pool.numbers.prepare(*shape)
    pool.numbers.prepare(*((rows,) if is_step else (rows, of_each)), dtype=mx.uint32)


def padded_lengths(step: DecodeStep) -> list[int]:
    """`DecodeStep.seen`, as numbers."""
    return [*step.lengths, *[-1] * (step.rows - len(step.lengths))]


def places_of(step: DecodeStep, window: int) -> SlotPlaces:
    """Where in a decoded copy, of so many rows at most if that is not 0, each row goes."""
    if window not in step.kept_places:
        places = [length % window for length in step.lengths] if window else step.lengths
        step.kept_places[window] = SlotPlaces(places)
    return step.kept_places[window]


@contextmanager
def nobodys_page(pool: KvPool) -> Iterator[int]:
    """A page for the rows of a pass whose graph alone is wanted. The pass is waited for within; then the page is free
    again, also where that failed. Raises ResourceExhausted if no page is free.
    """
    [page] = pool.take(1)
    try:
        yield page
    except BaseException:
        pool.forget_failed_pass()
        raise
    finally:
        pool.release([page])


class KeptTable:
    """A group's `block_table` on the device: in most steps no row gets a page, and that of the step before serves."""

    def __init__(self, numbers: HostNumbers) -> None:
        self._numbers = numbers
        self._shape = (0, 0)
        self._pages: list[dict[int, int]] = []  # by row, as it was made of them
        self._made: mx.array | None = None

    def of(self, group: GroupRows) -> mx.array:
        pages = [table.pages for table in group.tables]
        if self._made is None or (group.shape, pages) != (self._shape, self._pages):
            self._made = self._numbers.of(group.block_table, *group.shape)
            self._shape, self._pages = group.shape, [each.copy() for each in pages]
        return self._numbers.again(self._made)


class KeptPlaces:
    """The places of a step's rows. While the same rows go on, the device makes them of those of the step before: to
    move numbers of the host's there took 0.2 of 2.9 ms of a step of one row, and 0.06 of 4.9 (Llama 3.1 8B's shape in
    4 and 16 bits, an H200).
    """

    def __init__(self, numbers: HostNumbers) -> None:
        self._numbers = numbers
        self._now: list[int] = []
        self._made: mx.array | None = None  # of `_now`
        self._moves: mx.array | None = None  # 1 by row, 0 of an empty one

    def of(self, places: list[int]) -> mx.array:
        """By row, -1 of an empty one; of few rows some empty ones more."""
        places = places + [-1] * (_LEAST_PLACES - len(places))
        if self._made is None or places != self._now:
            self._now, self._made, self._moves = places, self._numbers.of(places), None
        return self._numbers.again(self._made)

    def gone_on(self, logits: mx.array) -> mx.array:
        """The logits of a step with the last places, with which those of the next step are computed."""
        if self._made is None or not self._numbers.is_reused:
            return logits
        self._now = [place + (place >= 0) for place in self._now]
        if self._moves is None:  # kept, because claims of up to eight rows lie in the host's memory
            self._moves = (self._made >= 0).astype(mx.int32)
        self._made = self._made + self._moves
        after: mx.array = mx.depends([logits], [self._made])[0]
        return after

    def forget(self) -> None:
        """Let go of the arrays."""
        self._now, self._made, self._moves = [], None, None


class KeptGraph:
    """A graph over a pool's arrays, forgotten when the pool changes their size."""

    def __init__(self, trace: Callable[..., Any]) -> None:
        self.trace = trace
        self._compiled: Any = None
        self._sizes: list[int] | None = None

    def forget(self) -> None:
        self._compiled = self._sizes = None

    def __call__(self, pages: list[mx.array], *given: Any) -> Any:
        """The result of `trace`, not evaluated. `pages`: the pool's arrays."""
        if (sizes := [array.shape[0] for array in pages]) != self._sizes:
            self._compiled, self._sizes = mx.compile(self.trace), sizes
        return self._compiled(pages, *given)
