"""Up to a block of tokens of one sequence, as a graph that MLX keeps: to build one takes longer than to compute it.
Tokens are filled up in front to one of a few lengths, neither written nor read. Where a window's keys in front are
gone, a part that needs no filling goes first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.tiles import most_queries
from inference_svc.kv.batch.decode_step import KeptGraph, PassArrays, nobodys_page, prepare_rows, table_width
from inference_svc.kv.batch.fused_layer import FusedLayer
from inference_svc.kv.page import PAGE_TOKENS, PageFormat
from inference_svc.kv.pages.block_table import BlockTable
from inference_svc.kv.pages.groups import groups_of
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import PassRoom, SequenceKV

KEPT_TOKENS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256)  # of a pass that keeps its graph
# Behind more than these, a block's attention over pages costs more than a kept graph saves: MLX's own is faster.
_DEEP_TOKENS = 32_768
FIRST_PART = 8  # one of so many parts of the layers: the device has these while the step before is reported


def most_kept_tokens(identity: identity_pb2.KvIdentity, dialect: Dialect | None, compute_type: str) -> int:
    """The most tokens whose pass keeps its graph: all stay in every window. 0 where not all layers have kernels."""
    groups = groups_of(identity.layers)
    formats = [PageFormat.of(identity, index) for group in groups for index in group.layers]
    if dialect is None or len(formats) < len(identity.layers):
        return 0
    served = (most_queries(each, compute_type) for each in formats)
    return min(KEPT_TOKENS[-1], *served, *(group.window - 1 for group in groups if group.window))


class ShortPass:
    """Passes over sequences whose layers all keep pages that kernels write. `forward` as in `DecodeBatch`."""

    def __init__(self, pool: KvPool, forward: Any, compute_type: str) -> None:
        self.pool = pool
        self._most_tokens = most_kept_tokens(pool.identity, pool.dialect, compute_type)
        self._forward = forward
        self._layers = [FusedLayer(pool, index) for index in sorted(pool.formats)]
        self._kept_graph = KeptGraph(self._traced)
        self._begun: mx.array | None = None  # by the first layers of the pass that was not evaluated yet
        self._is_begun = False  # the device has the first part of a pass, and no more of it

    def close(self) -> None:
        """Let go of the graph, which holds weights. On the thread that made it: there MLX keeps it."""
        self._kept_graph.forget()
        self._begun = None

    def takes(self, kv: SequenceKV, count: int) -> bool:
        """Whether it computes `count` tokens behind this sequence, in one part or two."""
        if not self.is_short(count, kv.length):
            return False
        first = _first_part(kv, count)
        return not first or _spare(count - first) <= first

    def is_short(self, count: int, depth: int) -> bool:
        """Whether `count` tokens behind so many are few enough."""
        return 0 < count <= self._most_tokens and (count <= PAGE_TOKENS // 2 or depth <= _DEEP_TOKENS)

    def logits(
        self,
        kv: SequenceKV,
        token_ids: Sequence[int],
        meanwhile: Callable[[mx.array], None],
        early: Callable[[], None] = lambda: None,
    ) -> mx.array:
        """Store the next tokens; logits [1, vocabulary] behind them. See `evaluate`. Raises ResourceExhausted."""
        count, start = len(token_ids), kv.length
        room = PassRoom(kv)
        room.take(count)
        try:
            held = [table.pages | pages for table, pages in zip(kv.tables, room.pages, strict=True)]
            width = table_width(start + count)
            tables = [self.pool.numbers.of(BlockTable(0, pages).padded(width), 1, width) for pages in held]
            first = _first_part(kv, count)
            if first:  # waited for: later work reads its rows, and need not be behind it on every device
                mx.eval(self._part(token_ids[:first], start, tables))
            logits = self._part(token_ids[first:], start + first, tables)
            self.evaluate(logits, meanwhile, early)
        except BaseException:
            room.fail()
            raise
        room.move_in()
        kv.advanced(count)
        return logits

    def evaluate(
        self,
        logits: mx.array,
        meanwhile: Callable[[mx.array], None] = lambda _: None,
        early: Callable[[], None] = lambda: None,
    ) -> None:
        """Enqueue the pass that ends with these and was made last, call `meanwhile`, and wait for it. To enqueue all of
        it takes the processor longer than the device a step: `early` is called when the first layers are there.
        """
        begun, self._begun = self._begun, None
        is_within, self._is_begun = self._is_begun, True
        try:
            mx.async_eval(begun)  # type: ignore[no-untyped-call]
            early()
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        finally:
            self._is_begun = is_within
        uses = self.pool.numbers.uses
        meanwhile(logits)
        mx.eval(logits)
        if not is_within:  # else the rest of a pass that began before is not even enqueued
            self.pool.numbers.completed(uses)

    def keep_graph(self, count: int, depth: int) -> None:
        """Have MLX keep the graph of a pass of `count` tokens, one of `KEPT_TOKENS`, behind so many: of one token on a
        page that is free again, filled up in front. Raises ResourceExhausted.
        """
        prepare_rows(self.pool, 1, depth + count, count)
        with nobodys_page(self.pool) as page:
            table = mx.full((1, table_width(depth + count)), page, dtype=mx.int32)
            places = mx.array([[-1] * (count - 1) + [0]], dtype=mx.int32)
            tokens, offsets = mx.zeros((1, count), dtype=mx.uint32), mx.array([1 - count], dtype=mx.int32)
            self.evaluate(self.computed(tokens, offsets, places, [table] * len(self.pool.groups)))

    def _part(self, token_ids: Sequence[int], start: int, tables: list[mx.array]) -> mx.array:
        """Logits of tokens that go to positions from `start` on, not evaluated."""
        count, spare, numbers = len(token_ids), _spare(len(token_ids)), self.pool.numbers
        tokens = numbers.of([0] * spare + list(token_ids), 1, spare + count, dtype=mx.uint32)
        places = numbers.of([-1] * spare + list(range(start, start + count)), 1, spare + count)
        return self.computed(tokens, numbers.of([start - spare]), places, tables)

    def computed(
        self, tokens: mx.array, offsets: mx.array, places: mx.array, block_tables: Sequence[mx.array]
    ) -> mx.array:
        """Logits [rows, vocabulary] behind rows of tokens [rows, n], not evaluated. Evaluating them stores the rows."""
        pool = self.pool
        made: list[mx.array] = self._kept_graph(pool.arrays, pool.order, tokens, offsets, places, *block_tables)
        logits, self._begun = made
        pool.enqueue_behind(logits)
        return logits

    def _traced(
        self,
        pages: list[mx.array],
        order: Sequence[mx.array],
        tokens: mx.array,
        offsets: mx.array,
        places: mx.array,
        *block_tables: mx.array,
    ) -> list[mx.array]:
        """Logits, and an array that the first layers lead to."""
        for layer in self._layers:
            layer.begin(PassArrays(offsets, places, block_tables, pages, order))
        logits = self._forward(tokens, self._layers)[:, -1]
        return [logits, self._layers[len(self._layers) // FIRST_PART].stored]


def _first_part(kv: SequenceKV, count: int) -> int:
    """How many of so many tokens behind the sequence go first, because those that would be filled up in front of all
    would not see rows that are there: a page of another sequence may hold what is no number. 0: none.
    """
    filled_from = kv.length - _spare(count)
    if all(table.can_go_on_from(filled_from) for table in kv.tables if table.window):
        return 0
    return max(kept for kept in KEPT_TOKENS if kept <= count)


def _spare(count: int) -> int:
    return next(kept for kept in KEPT_TOKENS if kept >= count) - count
