"""One sliding-window layer's KV of several sequences, decoded together: the batched form of `WindowKV`.

The decoded copy is a ring: position p lies in row p mod window of its sequence's slot. Where a row lies is a function
of its position alone, so a sequence's rows are summed in the same order whatever its mates are and however long it was
away.
"""

import mlx.core as mx

from inference_svc.kv.batch.batched_rows import BatchedRows, check_one_token
from inference_svc.kv.batch.slot_arrays import SlotArrays
from inference_svc.kv.row_exact import attention_width
from inference_svc.kv.window_kv import WindowKV


class BatchWindowKV(BatchedRows[WindowKV]):
    """K and V of one sliding-window layer of several sequences."""

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Which rows of the ring the new token of each sequence may attend to, bool [slots, 1, 1, rows]. None when that
        is every row.
        """
        check_one_token(count)
        window = min(window_size or self._window, self._window)
        lengths, width = self.lengths, self._width
        if min(min(lengths) + 1, self._window) == width and window == self._window and not return_array:
            return None
        places, seen = mx.arange(width), mx.array(lengths)[:, None, None, None]
        age = (seen - places) % self._window
        return (age < mx.minimum(seen + 1, window)) & (places < self._window)

    @property
    def _window(self) -> int:
        return self._slots[0].row.window

    @property
    def _width(self) -> int:
        return attention_width(min(max(self.lengths) + 1, self._window))

    def _places(self) -> list[int]:
        return [length % self._window for length in self.lengths]

    def _fill(self, target: SlotArrays, slot: int, key_type: mx.Dtype, value_type: mx.Dtype) -> None:
        row = self.flush(slot)
        rows = min(row.held_rows, row.window)
        if not rows:
            return
        start = (row.offset - rows) % row.window
        decoded = self._stacked(*row.decoded(rows, key_type, value_type))
        until_end = min(rows, row.window - start)
        target.put(slot, start, tuple(part[:, :, :until_end] for part in decoded))
        if until_end < rows:
            target.put(slot, 0, tuple(part[:, :, until_end:] for part in decoded))

    def _decoded_on_read(self, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        width = attention_width(min(max(self.lengths), self._window))
        count, rings = len(self._slots), SlotArrays()
        rings.reserve(count, width, self._stacked(*self._slots[0].row.decoded(1, key_type, value_type)))
        for slot in range(count):
            self._fill(rings, slot, key_type, value_type)
        keys, values = self._unstacked(rings.read(count, width))
        return keys, values

    def _rows_to_move(self, slot: int) -> int:
        return min(self.lengths[slot], self._window)

    def _has_spare(self) -> bool:
        return 4 * len(self._slots) < self._decoded.slots
