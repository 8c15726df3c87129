"""One layer of several sequences that are computed together, whose rows attention reads from the pages where they lie:
one token each, or a few of a single one (`short_pass`).
"""

import mlx.core as mx

from inference_svc.kv.attention.in_place import append_rows
from inference_svc.kv.attention.paged import paged_attention
from inference_svc.kv.batch.decode_step import DecodeStep, TracedStep
from inference_svc.kv.pages.pool import KvPool


class FusedLayer:
    """K and V of one layer, in the part of mlx-lm's cache protocol that its models call, and `attend`, which the hook
    of `attention_hook` calls instead of mlx-lm's attention. No attribute may be called `bits`.
    """

    attends = True

    def __init__(self, pool: KvPool, layer: int) -> None:
        self._pool = pool
        self._layer = layer
        self._format = pool.formats[layer]
        self._group = pool.group_number(layer)
        self._window = pool.groups[self._group].window
        self._step: DecodeStep | TracedStep | None = None
        self._stored = mx.array(0)  # tokens of each sequence, the new one included, once it is written

    # --- what the batch calls ---

    def begin(self, step: DecodeStep | TracedStep, *, keeps_decoded: bool) -> None:  # noqa: ARG002 - nothing is decoded here
        """The next pass computes the tokens of `step`."""
        self._step = step

    def leave(self, slot: int, last: int, last_length: int) -> None:  # noqa: ARG002
        """A sequence's rows lie in its pages alone: nothing moves."""
        self._step = None  # which holds the sequence, and so its pages

    def forget_decoded(self) -> None:
        """There is no copy."""
        self._step = None

    @property
    def scratch_bytes(self) -> int:
        return 0

    def decoded_values(self, slots: int, longest: int) -> int:  # noqa: ARG002
        return 0

    def has_spare(self, slots: int, longest: int) -> bool:  # noqa: ARG002
        return False

    # --- what the model calls ---

    @property
    def offset(self) -> mx.array:
        """Tokens that each sequence has stored, int32 [slots]."""
        return self._now.offsets

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: `attend` knows how long each sequence is, and the layer's window."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [slots, kv_heads, n, dim] at the step's places, and return them: `attend` reads the rest."""
        pool, now = self._pool, self._now
        array, table = pool.arrays[pool.slot_of(self._layer)], now.groups[self._group].block_table
        assert pool.dialect is not None
        self._stored = append_rows(keys, values, array, self._format, table, now.places, pool.dialect)
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        """Attention of queries [slots, heads, n, dim] over each sequence's rows, the new ones among them. Raises
        ValueError for a mask: it is not the one of `make_mask`, so the model adds scores of its own.
        """
        if mask is not None:
            raise ValueError("attention over pages takes no mask")
        now = self._now
        attended: mx.array = paged_attention(
            queries,
            self._pool.arrays[self._pool.slot_of(self._layer)],
            self._format,
            now.groups[self._group].block_table,
            self._stored if self._stored.ndim == 1 else self._stored[:, -1],
            scale=scale,
            window=self._window or None,
            sinks=sinks,
        )
        return attended

    @property
    def _now(self) -> DecodeStep | TracedStep:
        assert self._step is not None
        return self._step
