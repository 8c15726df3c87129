"""One layer of a batch whose attention reads pages where they lie: rows of a step, a short pass or a packed pass."""

from dataclasses import dataclass

import mlx.core as mx

from inference_svc.kv.attention.in_place import append_rows
from inference_svc.kv.attention.paged import paged_attention
from inference_svc.kv.attention.reference import LayerPages, Scoring
from inference_svc.kv.batch.decode_step import PassArrays
from inference_svc.kv.pages.pool import KvPool


@dataclass(frozen=True, slots=True)
class StepPages(LayerPages):
    """And places [slots] of new tokens, -1 for none."""

    places: mx.array


class FusedLayer:
    """K and V of one layer, for mlx-lm's models, and `attend` for `attention_hook`. None may be called `bits`."""

    attends = True

    def __init__(self, pool: KvPool, layer: int, *, is_alone: bool = False) -> None:
        """`is_alone`: no other pass is in a graph beside the layer's."""
        self._pool = pool
        self._is_alone = is_alone
        self._layer = layer
        self._format = pool.formats[layer]
        self._group = pool.group_number(layer)
        self._window = pool.groups[self._group].window
        self._pass: PassArrays | None = None
        self.stored = mx.array(0)  # tokens of each sequence, the new one included, once it is written

    def begin(self, arrays: PassArrays) -> None:
        """Take the arrays of the next pass; then the model computes."""
        self._pass = arrays

    def forget(self) -> None:
        """Let go of the last pass. Arrays of one that was only traced lead to all weights before this layer."""
        self._pass, self.stored = None, mx.array(0)

    def step_pages(self) -> StepPages | None:
        """For a kernel that computes a layer whole; None unless this is a step of one token each, without a window, and
        no other pass is in its graph.
        """
        now = self._now
        if not self._is_alone or self._window or now.places is not now.offsets:
            return None
        rows = self._pages
        return StepPages(rows.pages, rows.format, rows.block_table, now.places)

    # --- what the model calls ---

    @property
    def offset(self) -> mx.array:
        return self._now.offsets

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: `attend` knows how long each sequence is, and the layer's window."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [slots, kv_heads, n, dim] at the step's places, and return them: `attend` reads the rest."""
        now, dialect = self._now, self._pool.dialect
        assert dialect is not None
        self.stored = append_rows(keys, values, self._pages, now.places, dialect, now.order)
        return keys, values

    def attend(
        self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None, *, is_flat: bool = False
    ) -> mx.array:
        """Attention of queries [slots, heads, n, dim] over each one's rows. Raises ValueError for a model's mask.
        `is_flat`: as `paged_attention` has it.
        """
        if mask is not None:
            raise ValueError("attention over pages takes no mask")
        stored = self.stored if self.stored.ndim == 1 else self.stored[:, -1]
        scoring = Scoring(scale, self._window or None, sinks)
        return paged_attention(queries, self._pages, stored, scoring, self._pool.dialect, is_flat=is_flat)

    @property
    def _now(self) -> PassArrays:
        assert self._pass is not None
        return self._pass

    @property
    def _pages(self) -> LayerPages:
        now = self._now
        return LayerPages(now.pages[self._pool.slot_of(self._layer)], self._format, now.block_tables[self._group])
