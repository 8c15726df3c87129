"""One sliding-window layer's KV of several sequences, decoded together: the batched form of `WindowKV`.

The decoded copy is a ring: position p lies in row p mod window of its sequence's slot. Where a row lies is a function
of its position alone, so a sequence's rows are summed in the same order whoever its mates are and however long it was
away.
"""

import mlx.core as mx

from inference_svc.kv.batch.batched_rows import BatchedRows, padded
from inference_svc.kv.batch.slot_arrays import SlotArrays
from inference_svc.kv.codec import Parts
from inference_svc.kv.row_exact import attention_width
from inference_svc.kv.window_kv import WindowKV


class BatchWindowKV(BatchedRows[WindowKV]):
    """K and V of one sliding-window layer of several sequences, in mlx-lm's cache protocol."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [slots, kv_heads, n, dim] behind each sequence; return what they see, [slots, kv_heads, rows,
        dim], laid out as `make_mask` says.
        """
        codes = self._encode(keys, values)
        if keys.shape[2] > 1 or self._unread is not None:
            return self._prefilled(codes, keys.dtype, values.dtype)
        lengths, width = self.lengths, self._width
        if not self.keeps_decoded:
            self._write(codes, [1] * len(self.rows))
            return self._ring_of_all(width, keys.dtype, values.dtype)
        new = self._decode(codes, keys.dtype, values.dtype)
        self._decoded.reserve(len(self.rows), width, new)
        for slot in self._newly_joined():
            self._fill(self._decoded, slot, keys.dtype, values.dtype)
        self._put_newest(new, codes, [length % self._window for length in lengths])
        return self._read_decoded(width)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Which rows each of the `count` new tokens of each sequence may attend to, bool [slots, 1, count, rows]. None
        when that is all. A single token sees a ring; several see the rows before them and themselves, in order.
        """
        window = min(window_size or self._window, self._window)
        lengths = mx.array(self.lengths)[:, None, None, None]
        if count > 1 or self._unread is not None:
            kept = mx.minimum(lengths, self._window - 1)
            rows = mx.arange(min(max(self.lengths), self._window - 1) + count)[None, None, None]
            last = kept + mx.arange(count)[None, None, :, None]
            return (rows <= last) & (rows > last - window)
        width = self._width
        if min(min(self.lengths) + 1, self._window) == width and window == self._window and not return_array:
            return None
        places = mx.arange(width)
        age = (lengths - places) % self._window
        return (age < mx.minimum(lengths + 1, window)) & (places < self._window)

    def is_trimmable(self) -> bool:
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, count: int) -> int:
        """Forget the last rows of every sequence, at most as many as the shortest has; returns how many. Raises
        ValueError when what came before them was dropped, and changes nothing then.
        """
        count = min(count, *self.lengths)
        rows = self._settle_all()
        if not all(row.can_trim_to(row.offset - count) for row in rows):
            raise ValueError(f"not every window can go back {count} tokens")
        for row in rows:
            row.trim(count)
        # A ring has written over what the tokens before see.
        self._forget_decoded()
        return count

    def size(self) -> int:
        return max((min(length, self._window) for length in self.lengths), default=0)

    @property
    def _window(self) -> int:
        return self.rows[0].window

    @property
    def _width(self) -> int:
        return attention_width(min(max(self.lengths) + 1, self._window))

    def _rows_to_move(self, slot: int) -> int:
        return min(self.lengths[slot], self._window)

    def _has_spare(self) -> bool:
        return 4 * len(self.rows) < self._decoded.slots

    def _prefilled(self, codes: Parts, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Store several rows of each sequence; returns those before them that are seen, and themselves, in order."""
        count = codes[0].shape[2]
        new = self._unstacked(self._decode(codes, key_type, value_type))
        kept = [self.settle(slot).kept_rows for slot in range(len(self.rows))]
        seen = []
        for slot, row in enumerate(self.rows):
            parts = [part[slot : slot + 1] for part in new]
            if kept[slot]:
                before = row.decoded(kept[slot], key_type, value_type)
                parts = [mx.concatenate([old, part], axis=2) for old, part in zip(before, parts, strict=True)]
            seen.append([padded(part, max(kept) + count) for part in parts])
        self._write(codes, self._taken(count))
        self._forget_decoded()
        keys, values = (mx.concatenate(list(parts)) for parts in zip(*seen, strict=True))
        return keys, values

    def _ring_of_all(self, width: int, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        rings = SlotArrays()
        rings.reserve(len(self.rows), width, self._stacked(*self.rows[0].decoded(1, key_type, value_type)))
        for slot in range(len(self.rows)):
            self._fill(rings, slot, key_type, value_type)
        keys, values = self._unstacked(rings.read(len(self.rows), width))
        return keys, values

    def _fill(self, rings: SlotArrays, slot: int, key_type: mx.Dtype, value_type: mx.Dtype) -> None:
        """Put a sequence's rows where they belong in its ring."""
        row = self.settle(slot)
        rows = min(row.held_rows, row.window)
        if not rows:
            return
        start = (row.offset - rows) % row.window
        decoded = self._stacked(*row.decoded(rows, key_type, value_type))
        until_end = min(rows, row.window - start)
        rings.put(slot, start, tuple(part[:, :, :until_end] for part in decoded))
        if until_end < rows:
            rings.put(slot, 0, tuple(part[:, :, until_end:] for part in decoded))
