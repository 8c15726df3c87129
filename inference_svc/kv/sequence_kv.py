"""One sequence's KV: a block table for each group of layers, and the states of its recurrent layers. Full pages are
immutable, so a fork shares all pages and copies nothing. A sequence copies its last page before writing if another
sequence holds it. Rows beyond `length` are garbage: a sequence that failed half-way has lost nothing. Recurrent layers
can only go back to a *rewind point*, a length at which their states were copied. Window layers can go back wherever the
pages are left that the window touches there; they are kept for the rewind points.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.block_table import BlockTable, blocks_of, needed_blocks, window_start
from inference_svc.kv.pages.page_rows import joined_rows, pages_of_rows, rows_of_pages
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.state_kv import StateKV


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """A length that the sequence can go back to, and the recurrent layers' states there. The states never change."""

    tokens: int
    states: tuple[StateKV, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Where a pass writes and reads a group's rows: pages by block, new rows' positions (-1: no later row sees it)."""

    block_table: mx.array
    places: mx.array


class PassRoom:
    """Private pages for the rows of one pass, which go back to the pool unless the pass ends with `move_in`."""

    def __init__(self, kv: "SequenceKV") -> None:
        self.pages: list[dict[int, int]] = []  # of each table by block, those to be written
        self._kv = kv
        self._new: list[int] = []
        self._spans: list[Span] = []

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        self._kv.pool.release(self._new)
        self._new = []

    def fail(self) -> None:
        self._kv.pool.forget_failed_pass()
        self.release()

    def take(self, count: int) -> None:
        """Have pages for `count` rows. Raises ResourceExhausted, and has changed nothing, if the pool has no room."""
        kv = self._kv
        blocks = [kv.span(table, kv.length + count) for table in kv.tables]
        held = [table.pages.get(block) for table, some in zip(kv.tables, blocks, strict=True) for block in some]
        pages = kv.pool.private_pages(held)
        self._new = [page for page, old in zip(pages, held, strict=True) if page != old]
        rest = iter(pages)
        self.pages = [{block: next(rest) for block in some} for some in blocks]

    def span(self, layer: int, count: int) -> Span:
        """Where kernels write a layer's rows. The first layer of a pass counts them; raises as `take`."""
        if not self._spans:
            self.take(count)
            positions = range(self._kv.length, self._kv.length + count)
            for table, pages in zip(self._kv.tables, self.pages, strict=True):
                places = [at if at // PAGE_TOKENS in pages else -1 for at in positions]
                padded = BlockTable(0, table.pages | pages).padded(blocks_of(positions.stop))
                self._spans.append(Span(mx.array(padded, dtype=mx.int32), mx.array(places, dtype=mx.int32)))
        return self._spans[self._kv.pool.group_number(layer)]

    def move_in(self) -> None:
        """Let the sequence hold the pages, in which the rows that follow are written."""
        for table, pages in zip(self._kv.tables, self.pages, strict=bool(self.pages)):
            self._kv.hold(table, pages)
        self._new = []


class SequenceKV:
    """KV of the first `length` tokens of a sequence. It gives its pages back when it is released or dropped."""

    def __init__(self, pool: KvPool) -> None:
        self.tables = [BlockTable(group.window) for group in pool.groups]
        self.pool = pool
        self.length = 0
        self.states = {
            index: StateKV([None] * len(layer.state_tensors))
            for index, layer in enumerate(pool.identity.layers)
            if pool.formats.get(index) is None
        }
        self._points: list[RewindPoint] = []

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give all pages back. The sequence is empty then. Idempotent."""
        for table in self.tables:
            self.pool.release(table.pages.values())
            table.pages.clear()

    # --- what it is ---

    @property
    def has_rewind_points(self) -> bool:
        return bool(self.states) or any(table.window for table in self.tables)

    @property
    def rewind_points(self) -> tuple[int, ...]:
        return tuple(point.tokens for point in self._points)

    @property
    def pages(self) -> Iterator[int]:
        return (page for table in self.tables for page in table.pages.values())

    @property
    def kept_pages(self) -> int:
        """How many pages it will never replace: full ones that all tokens keep, and those that nobody else holds."""
        kept, full = 0, self.length // PAGE_TOKENS
        for table in self.tables:
            others = table.pages if table.window else range(full, len(table.pages))
            kept += len(table.pages) - sum(self.pool.allocator.holders(table.pages[block]) > 1 for block in others)
        return kept

    @property
    def state_arrays(self) -> list[mx.array]:
        return [array for state in self.states.values() for array in state.state]

    @property
    def state_bytes(self) -> int:
        points = sum(state.nbytes for point in self._points for state in point.states)
        is_at_point = bool(self._points) and self._points[-1].tokens == self.length
        own = 0 if is_at_point else sum(state.nbytes for state in self.states.values())
        return points + own

    def table_of(self, layer: int) -> BlockTable:
        return self.tables[self.pool.group_number(layer)]

    def seen_rows(self, layer: int) -> EncodedRows | None:
        """The stored rows that the next token sees in one layer, as parts [1, kv_heads, n, width]; None if n is 0."""
        table = self.table_of(layer)
        return self.rows(layer, window_start(table.window, self.length), self.length)

    def rows(self, layer: int, start: int, stop: int) -> EncodedRows | None:
        """Rows [start, stop) of one layer, which must be here; None if there are none."""
        if start == stop:
            return None
        table, first = self.table_of(layer), start // PAGE_TOKENS
        pages = self.pool.pages_of(layer, [table.pages[block] for block in range(first, blocks_of(stop))])
        base = first * PAGE_TOKENS
        return rows_of_pages(self.pool.formats[layer], pages, start - base, stop - base)

    # --- going on ---

    def append(self, rows: dict[int, EncodedRows]) -> None:
        """Store the rows that follow, of each layer, unevaluated: [1, kv_heads, n, width]. Raises ResourceExhausted."""
        count = next(iter(rows.values()))[0].shape[2]
        room = PassRoom(self)
        room.take(count)
        places = {layer: room.pages[self.pool.group_number(layer)] for layer in rows}
        written = {layer: self._with_tail(layer, pages, rows[layer]) for layer, pages in places.items()}
        mx.eval(written)  # a tail that is still to be read would hold its array
        for layer, pages in places.items():
            self.pool.write_pages(layer, list(pages.values()), written[layer])
        room.move_in()
        self.advanced(count)

    def advanced(self, count: int) -> None:
        """So many more rows are stored. Window pages that neither the length nor a rewind point needs are released."""
        before, stop = self.length, self.length + count
        windows = [table for table in self.tables if table.window]  # other tables keep all, and so change nothing
        for table in windows:
            written = self.span(table, stop).start * PAGE_TOKENS
            if before % PAGE_TOKENS and written > before:
                # The block that these rows begin in may stay for a rewind point, without them.
                table.valid_from = written
        self.length = stop
        for table in windows:
            if needed_blocks(table.window, before).start != needed_blocks(table.window, stop).start:
                self._release_unneeded(table)

    def span(self, table: BlockTable, stop: int) -> range:
        """The blocks to write for rows up to `stop`: of a window only those that the row at `stop` sees."""
        start = max(self.length, window_start(table.window, stop))
        return range(start // PAGE_TOKENS, blocks_of(stop))

    def hold(self, table: BlockTable, pages: dict[int, int]) -> None:
        """Hold these pages, by block, instead of others. They must have the rows that are before the next one."""
        for block, page in pages.items():
            if (old := table.pages.get(block)) is not None and old != page:
                self.pool.release([old])
            table.pages[block] = page

    def _with_tail(self, layer: int, pages: dict[int, int], rows: EncodedRows) -> mx.array:
        """The content of private pages by block: the rows that the first one has, and those that follow."""
        page_format, first = self.pool.formats[layer], min(pages) * PAGE_TOKENS
        if first < self.length:
            tail = self.pool.pages_of(layer, [pages[min(pages)]])
            rows = joined_rows(rows_of_pages(page_format, tail, 0, self.length - first), rows)
        elif skipped := first - self.length:
            rows = tuple(part[:, :, skipped:] for part in rows)
        return pages_of_rows(page_format, rows)

    # --- back in time ---

    def mark(self) -> None:
        """Make a rewind point of the present length. Evaluates. Without effect if every layer keeps all its tokens."""
        if self.has_rewind_points and self.length not in self.rewind_points:
            states = tuple(state.compacted() for state in self.states.values())
            mx.eval([state.state for state in states])
            self.set_point(RewindPoint(self.length, states))

    def set_point(self, point: RewindPoint) -> None:
        """Add a rewind point behind all others; the sequence's states are those at it."""
        self._points.append(point)
        self._become(point.states)

    def point_at(self, tokens: int) -> RewindPoint:
        """The rewind point at a length. Raises ValueError if there is none."""
        for point in self._points:
            if point.tokens == tokens:
                return point
        raise ValueError(f"rewind points are at {self.rewind_points}, not at {tokens}")

    def keep_rewind_points(self, tokens: Collection[int]) -> None:
        self._points = [point for point in self._points if point.tokens in tokens]
        self._release_all_unneeded()

    def can_go_on_from(self, length: int) -> bool:
        """Whether after `trim_to(length)` the next token can be computed."""
        if not length or length in self.rewind_points:
            return length <= self.length
        is_here = length <= self.length and all(table.can_go_on_from(length) for table in self.tables)
        return is_here and self._has_states_of(length)

    def start_before(self, length: int) -> int:
        """The largest length, at most `length`, to go on from: itself, a rewind point, or a block's border."""
        if self.can_go_on_from(length):
            return length
        borders = () if self.states else range(0, length + 1, PAGE_TOKENS)
        lengths = {*self.rewind_points, *borders}
        return max((one for one in lengths if one <= length and self.can_go_on_from(one)), default=0)

    def trim_to(self, length: int) -> None:
        """Forget all behind `length` tokens; states go back to a rewind point. See `can_go_on_from`."""
        if self.can_go_on_from(length):
            for table in self.tables:
                table.valid_from = min(table.valid_from, needed_blocks(table.window, length).start * PAGE_TOKENS)
        self._points = [point for point in self._points if point.tokens <= length]
        if not self._has_states_of(length):
            no_states = [StateKV([None] * len(state.tensors)) for state in self.states.values()]
            self._become(self._points[-1].states if self._points else no_states)
        self.length = length
        self._release_all_unneeded()

    def fork(self, length: int | None = None) -> "SequenceKV":
        """A sequence with the same KV, or its first `length` tokens, in shared pages. Raises ValueError."""
        if length is not None and not self.can_go_on_from(length):
            raise ValueError(f"KV of {self.length} tokens cannot go on from {length}")
        forked = SequenceKV(self.pool)
        forked.tables = [table.copy() for table in self.tables]
        self.pool.allocator.share(forked.pages)
        forked._points, forked.length = list(self._points), self.length
        forked._become(list(self.states.values()))
        if length is not None:
            forked.trim_to(length)
        return forked

    def _has_states_of(self, length: int) -> bool:
        return all(state.offset == length for state in self.states.values())

    def _become(self, states: Sequence[StateKV]) -> None:
        self.states = {layer: state.fork() for layer, state in zip(self.states, states, strict=True)}

    def _release_all_unneeded(self) -> None:
        for table in self.tables:
            self._release_unneeded(table)

    def _release_unneeded(self, table: BlockTable) -> None:
        unneeded = list(table.unneeded((self.length, *self.rewind_points)))
        self.pool.release(table.pages.pop(block) for block in unneeded)
