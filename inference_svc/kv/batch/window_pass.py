"""Windows of masks of several sequences in one pass over pages, as a graph that MLX keeps. Each sequence has a slot of
as many rows as the longest one needs: rows behind its own fill it up, which nobody writes or sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from inference_svc.kv.batch.decode_step import DecodeStep, Forward, KeptGraph, PassArrays, PassRows, table_width
from inference_svc.kv.batch.window_layer import WindowLayer
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV

_SLOT_ROWS = 8  # a slot has this or a multiple: few numbers, because each has a graph of its own


class WindowPass:
    """Over sequences whose layers all keep pages that kernels write. `forward` as in `DecodeBatch`; `by_kernel` as in
    `WindowLayer`.
    """

    def __init__(self, pool: KvPool, forward: Forward, *, by_kernel: bool) -> None:
        self._pool = pool
        self._forward = forward
        self._layers = [WindowLayer(pool, index, by_kernel=by_kernel) for index in sorted(pool.formats)]
        self._kept_graph = KeptGraph(self._traced)

    @staticmethod
    def rows_for(counts: Sequence[int]) -> int:
        """Rows that a pass computes for sequences of so many rows, with those that fill slots up."""
        slots, rows = _slots_for(counts)
        return slots * rows

    def logits(self, sequences: Sequence[SequenceKV], given: Sequence[PassRows], token_ids: Sequence[int]) -> mx.array:
        """Logits [rows, vocabulary] of the sequences' rows one behind another, not evaluated. Evaluating them stores
        the committed rows. Raises ResourceExhausted, and has changed nothing.
        """
        pool = self._pool
        DecodeStep.of_pass(pool, sequences, given)  # private pages for stored rows
        here = [(kv, each) for kv, each in zip(sequences, given, strict=True) if each.count]
        slots, slot_rows = _slots_for([each.count for _, each in here])
        rows, empty = _SlotRows(slot_rows), slots - len(here)
        for kv, each in here:
            rows.add(kv.length, each)
        for _ in range(empty):
            rows.add(0, PassRows(0))
        tokens = [0] * len(rows.positions)
        for place, token in zip(rows.own, token_ids, strict=True):
            tokens[place] = token
        width = table_width(max(kv.length + each.stored for kv, each in here))
        tables = [
            mx.array([*(kv.tables[group].padded(width) for kv, _ in here), *[[0] * width] * empty], dtype=mx.int32)
            for group in range(len(pool.groups))
        ]
        made: mx.array = self._kept_graph(
            pool.arrays,
            pool.order,
            mx.array(tokens, dtype=mx.uint32),
            mx.array(rows.positions, dtype=mx.int32),
            mx.array(rows.places, dtype=mx.int32).reshape(-1, rows.each),
            mx.array(rows.lengths, dtype=mx.int32),
            *tables,
        )
        pool.enqueue_behind(made)
        return made[mx.array(rows.own, dtype=mx.int32)]

    def forget(self) -> None:
        """Let go of its graph."""
        self._kept_graph.forget()

    def _traced(
        self,
        pages: list[mx.array],
        order: Sequence[mx.array],
        tokens: mx.array,
        positions: mx.array,
        places: mx.array,
        lengths: mx.array,
        *block_tables: mx.array,
    ) -> mx.array:
        for layer in self._layers:
            layer.begin_window(PassArrays(positions, places, block_tables, pages, order), lengths)
        return self._forward(tokens[:, None], list(self._layers))[:, -1]


def _slots_for(counts: Sequence[int]) -> tuple[int, int]:
    """How many slots, and rows of each, take sequences of so many rows."""
    return 1 << (len(counts) - 1).bit_length(), -(-max(counts) // _SLOT_ROWS) * _SLOT_ROWS


@dataclass
class _SlotRows:
    """Rows of slots that have `each` of them: by row the position that rotates it and its place, -1 for none."""

    each: int
    positions: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # by slot
    own: list[int] = field(default_factory=list)  # rows that fill nothing up

    def add(self, length: int, given: PassRows) -> None:
        """A slot of a sequence that has so many tokens."""
        first, spare = len(self.positions), self.each - given.count
        stored = range(length, length + given.stored)
        self.own += range(first, first + given.count)
        self.positions += [*stored, *given.positions, *[0] * spare]
        self.places += [*stored, *[-1] * (self.each - given.stored)]
        self.lengths.append(length)
