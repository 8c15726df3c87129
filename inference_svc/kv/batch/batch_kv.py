"""One layer's quantized KV of several sequences, decoded together: the batched form of `LayerKV`.

Every sequence begins at position 0 of its slot and has its own length. Nothing is padded on the left, so a sequence's
rows lie, and are summed, as they would alone: with sums that treat every row alike (`row_exact`) its results in a batch
are bit for bit those it has alone.
"""

import mlx.core as mx

from inference_svc.kv.batch.batched_rows import BatchedRows, padded
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.row_exact import attention_width


class BatchQuantizedKVCache(BatchedRows[LayerKV]):
    """K and V of one layer that keeps all tokens, of several sequences, in mlx-lm's cache protocol."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [slots, kv_heads, n, dim] behind each sequence; return all rows as attention is to see them,
        [slots, kv_heads, longest + n or more, dim], in the same types. The mask hides what is no sequence's.
        """
        lengths, count = self.lengths, keys.shape[2]
        width = attention_width(max(lengths) + count)
        codes = self._encode(keys, values)
        if not self.keeps_decoded:
            self._write(codes, self._taken(count))
            return self._assembled(width, keys.dtype, values.dtype)
        new = self._decode(codes, keys.dtype, values.dtype)
        self._decoded.reserve(len(self.rows), width, new)
        for slot in self._newly_joined():
            if (row := self.settle(slot)).offset:
                self._decoded.put(slot, 0, self._stacked(*row.decoded(keys.dtype, values.dtype)))
        if count == 1 and self._unread is None:
            self._put_newest(new, codes, lengths)
        else:
            taken = self._taken(count)
            self._write(codes, taken)
            for slot, (start, rows) in enumerate(zip(lengths, taken, strict=True)):
                self._decoded.put(slot, start, tuple(part[slot : slot + 1, :, :rows] for part in new))
        return self._read_decoded(width)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Which positions each of the `count` new tokens of each sequence may attend to, bool [slots, 1, count,
        longest + count or more]: its own sequence up to itself. None when that is all.
        """
        if window_size is not None:
            raise ValueError("a layer with a window cannot use a KV that keeps all tokens")
        lengths = self.lengths
        width = attention_width(max(lengths) + count)
        if count == 1 and min(lengths) + 1 == width and not return_array:
            return None
        positions = mx.arange(width)
        last = mx.array(lengths)[:, None] + mx.arange(count)
        return positions[None, None, None] <= last[:, None, :, None]

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        """Forget the last rows of every sequence, at most as many as the shortest has; returns how many."""
        count = min(count, *self.lengths)
        for row in self._settle_all():
            row.trim(count)
        return count

    def size(self) -> int:
        return max(self.lengths, default=0)

    @property
    def _width(self) -> int:
        return attention_width(self.size() + 1)

    def _rows_to_move(self, slot: int) -> int:
        return self.lengths[slot]

    def _has_spare(self) -> bool:
        return 4 * len(self.rows) * self.size() < self._decoded.slots * self._decoded.capacity

    def _assembled(self, width: int, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        decoded = [row.decoded(key_type, value_type) for row in self.rows]
        keys, values = (mx.concatenate([padded(part, width) for part in parts]) for parts in zip(*decoded, strict=True))
        return keys, values
