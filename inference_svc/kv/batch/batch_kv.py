"""One layer's quantized KV of several sequences, decoded together: the batched form of `LayerKV`.

Every sequence begins at position 0 of its slot and has its own length. Nothing is padded on the left, so a sequence's
rows lie, and are summed, as they would alone: with sums that treat every row alike (`row_exact`) its results in a batch
are bit for bit those it has alone.
"""

import mlx.core as mx

from inference_svc.kv.batch.batched_rows import BatchedRows, check_one_token
from inference_svc.kv.batch.slot_arrays import SlotArrays
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.row_exact import attention_width


class BatchLayerKV(BatchedRows[LayerKV]):
    """K and V of one layer that keeps all tokens, of several sequences."""

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Which positions the new token of each sequence may attend to, bool [slots, 1, 1, longest + 1 or more]: its
        own sequence up to itself. None when that is every position.
        """
        if window_size is not None:
            raise ValueError("a layer with a window cannot use a KV that keeps all tokens")
        check_one_token(count)
        lengths, width = self.lengths, self._width
        if min(lengths) + 1 == width and not return_array:
            return None
        last = mx.array(lengths)[:, None, None, None]
        return mx.arange(width)[None, None, None] <= last

    @property
    def _width(self) -> int:
        return attention_width(max(self.lengths) + 1)

    def _places(self) -> list[int]:
        return self.lengths

    def _fill(self, target: SlotArrays, slot: int, key_type: mx.Dtype, value_type: mx.Dtype) -> None:
        if (row := self.flush(slot)).offset:
            target.put(slot, 0, self._stacked(*row.decoded(key_type, value_type)))

    def _decoded_on_read(self, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        width = attention_width(max(self.lengths))
        decoded = [row.decoded(key_type, value_type) for row in self._flush_all()]
        keys, values = (
            mx.concatenate([_padded(part, width) for part in parts]) for parts in zip(*decoded, strict=True)
        )
        return keys, values

    def _rows_to_move(self, slot: int) -> int:
        return self.lengths[slot]

    def _has_spare(self) -> bool:
        needed = len(self._slots) * max(self.lengths, default=0)
        return 4 * needed < self._decoded.slots * self._decoded.capacity


def _padded(rows: mx.array, width: int) -> mx.array:
    """Rows [1, heads, n, dim] with zeros behind them, `width` in all."""
    return mx.pad(rows, [(0, 0), (0, 0), (0, width - rows.shape[2]), (0, 0)])
