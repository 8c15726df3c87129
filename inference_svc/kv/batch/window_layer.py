"""One layer of a pass over windows of masks whose committed rows kernels store in pages: attention is over a sequence's
pages and, as they are computed, over the rows of this pass.
"""

import mlx.core as mx

from inference_svc.kv.attention.fused import TARGETS, attention_and_weight, window_attention
from inference_svc.kv.attention.in_place import append_rows
from inference_svc.kv.batch.decode_step import PassArrays
from inference_svc.kv.batch.fused_layer import FusedLayer
from inference_svc.kv.pages.pool import KvPool


class WindowLayer(FusedLayer):
    """K and V of one layer, whose rows [slots * n, heads, 1, dim] are those of slots, n each. A row sees its sequence's
    pages and the rows in front of it in its slot: of them those with a place as they are stored, others exact.
    `by_kernel`: by one kernel behind that of the splits, in place of some 35 operations, which take a host as long to
    hand over as a device to compute.
    """

    def __init__(self, pool: KvPool, layer: int, *, by_kernel: bool) -> None:
        super().__init__(pool, layer)
        self._by_kernel = by_kernel
        self._codecs = pool.codecs[layer]
        self._before = mx.array(0)  # by slot, tokens in pages before this pass
        self._rows = (mx.array(0), mx.array(0))  # K and V of this pass [slots, kv_heads, n, dim], as others see them

    def begin_window(self, arrays: PassArrays, before: mx.array) -> None:
        """As `begin`, with places [slots, n]. `before` [slots]: how many tokens have pages, without this pass."""
        self.begin(arrays)
        self._before = before

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the rows that have a place, and return all of them: `attend` reads the rest."""
        now, dialect = self._now, self._pool.dialect
        assert dialect is not None
        by_slot = self._by_slot(keys), self._by_slot(values)
        stored = append_rows(*by_slot, self._pages, now.places, dialect, now.order)
        if self._by_kernel:
            self.stored, self._rows = stored, (keys, values)
            return keys, values
        # The pass writes because 0 is added here: none of its kernels reads the rows that it writes.
        self.stored = self._before + mx.minimum(stored[:, 0], 0)
        has_place = (now.places >= 0)[:, None, :, None]
        encoded = (
            codec.decode(codec.encode(rows), rows.dtype) for codec, rows in zip(self._codecs, by_slot, strict=True)
        )
        seen_keys, seen_values = (mx.where(has_place, *pair) for pair in zip(encoded, by_slot, strict=True))
        self._rows = seen_keys, seen_values
        return keys, values

    def attend(
        self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None, *, is_flat: bool = False
    ) -> mx.array:
        """Attention of queries [slots * n, heads, 1, dim]. Raises ValueError for a model's mask, and for sinks."""
        if mask is not None or sinks is not None:
            raise ValueError("attention over a window takes no mask and no sinks")
        dialect = self._pool.dialect
        assert dialect is not None
        target, rows = TARGETS[dialect], self._pages
        if self._by_kernel:
            mixed = window_attention(queries, self._rows, self.stored, rows, self._before, scale, target)
            return mixed if is_flat else mixed.reshape(*queries.shape[:3], -1)
        keys, values = self._rows
        slots, kv_heads, count, dim = keys.shape
        shared = queries.shape[1] // kv_heads
        # To a slot's pages its rows are further heads of queries: each sees all of them.
        by_head = queries.reshape(slots, count, kv_heads, shared, dim).swapaxes(1, 2)
        by_head = by_head.reshape(slots, kv_heads * count * shared, 1, dim)
        before, weight = attention_and_weight(by_head, rows, self.stored, scale, target)
        shape = slots, kv_heads, count * shared
        scores = scale * by_head.reshape(*shape, dim).astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
        row = mx.arange(count * shared)[:, None] // shared
        scores = mx.where(mx.arange(count)[None] <= row, scores, -mx.inf)
        # All rows in pages count as one more row, whose value is their mix.
        weights = mx.softmax(mx.concatenate([weight.reshape(*shape, 1), scores], axis=-1), axis=-1)
        mixed = weights[..., :1] * before.reshape(*shape, -1) + weights[..., 1:] @ values.astype(mx.float32)
        by_row = mixed.reshape(slots, kv_heads, count, shared, -1).swapaxes(1, 2)
        shape_of_row = (1, -1) if is_flat else (kv_heads * shared, 1, -1)
        return by_row.reshape(slots * count, *shape_of_row).astype(queries.dtype)

    def _by_slot(self, rows: mx.array) -> mx.array:
        """Rows [slots * n, kv_heads, 1, dim] as [slots, kv_heads, n, dim]."""
        return rows.reshape(*self._now.places.shape, rows.shape[1], rows.shape[3]).swapaxes(1, 2)
