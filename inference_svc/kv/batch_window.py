"""One sliding-window layer's KV of several sequences, decoded together: the batched form of `WindowKV`.

As in `batch_kv`, each sequence keeps its codes in its own buffers; the batch has the newest codes and a decoded copy.
That copy is a ring: position p lies in row p mod window of its sequence's slot. Where a row lies is a function of its
position alone, so a sequence's rows are summed in the same order whoever its mates are and however long it was away.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from inference_svc.kv.codec import Codec, Parts
from inference_svc.kv.row_exact import attention_width
from inference_svc.kv.slot_arrays import SlotArrays
from inference_svc.kv.window_kv import WindowKV

_STAGED_ROWS = 64


class BatchWindowKV:
    """K and V of one sliding-window layer of several sequences, in mlx-lm's cache protocol.

    Slot i is sequence `rows[i]`, a `WindowKV` that is extended in place but lags behind by what is staged until it is
    settled. Whoever gives a `WindowKV` that is still used elsewhere gives a fork of it.
    """

    def __init__(self, rows: Sequence[WindowKV] = (), *, keeps_decoded: bool = True) -> None:
        self.rows: list[WindowKV] = []
        self.keeps_decoded = keeps_decoded
        self._staged_rows: list[int] = []  # by slot
        self._staged = SlotArrays(_STAGED_ROWS)
        self._rings = SlotArrays()
        self._is_decoded: list[bool] = []  # by slot
        self._unread: list[int] | None = None  # while a right-padded prompt is computed: tokens left, by slot
        for row in rows:
            self.join(row)

    # --- what the model calls ---

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence has seen."""
        return [row.offset + staged for row, staged in zip(self.rows, self._staged_rows, strict=True)]

    @property
    def offset(self) -> mx.array:
        """`lengths` for the model, [slots]. A new array each time: the model may still hold the one before."""
        return mx.array(self.lengths)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [slots, kv_heads, n, dim] behind each sequence; return what they see, [slots, kv_heads, rows,
        dim], laid out as `make_mask` says.
        """
        key_codec, value_codec = self._codecs
        codes = (*key_codec.encode(keys), *value_codec.encode(values))
        if keys.shape[2] > 1 or self._unread is not None:
            return self._prefilled(codes, keys.dtype, values.dtype)
        lengths, width = self.lengths, self._width
        if not self.keeps_decoded:
            self._write(codes, [1] * len(self.rows))
            return self._ring_of_all(width, keys.dtype, values.dtype)
        new = self._decode(codes, keys.dtype, values.dtype)
        self._rings.reserve(len(self.rows), width, new)
        for slot, is_decoded in enumerate(self._is_decoded):
            if not is_decoded:
                self._is_decoded[slot] = True
                _fill(self._rings, slot, self.settle(slot), keys.dtype, values.dtype)
        # Codes have no reader in this step: without the dependency they would pile up unevaluated.
        new = tuple(mx.depends(list(new), self._stage(codes)))
        self._rings.put_each([length % self._window for length in lengths], new)
        ring_keys, ring_values = self._rings.read(len(self.rows), width)
        return ring_keys, ring_values

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

    # --- who is in the batch ---

    def join(self, row: WindowKV) -> None:
        """Add a sequence in a new, last slot."""
        self.rows.append(row)
        self._staged_rows.append(0)
        self._is_decoded.append(False)

    def settle(self, slot: int) -> WindowKV:
        """Write what is staged of a sequence to its own buffers; returns them."""
        row, count = self.rows[slot], self._staged_rows[slot]
        if count:
            row.append(self._staged.read_slot(slot, count))
            self._staged_rows[slot] = 0
        return row

    def leave(self, slot: int) -> WindowKV:
        """Settle a sequence and take it out. The last slot takes its place."""
        row, last = self.settle(slot), len(self.rows) - 1
        if slot != last:
            self._staged.move(last, slot, self._staged_rows[last])
            if self._is_decoded[last]:
                self._rings.move(last, slot, min(self.lengths[last], self._window))
        for by_slot in (self.rows, self._staged_rows, self._is_decoded):
            moved: Any = by_slot.pop()
            if slot != last:
                by_slot[slot] = moved
        if not self.rows:
            self._staged.clear()
        if 4 * len(self.rows) < self._rings.slots:
            self._forget_decoded()
        return row

    def keep_decoded(self, is_kept: bool) -> None:
        """Keep a decoded copy of the rows, or do without: it needs several times the memory of the codes."""
        if is_kept == self.keeps_decoded:
            return
        for slot in range(len(self.rows)):
            self.settle(slot)
        self._forget_decoded()
        self.keeps_decoded = is_kept

    # --- mlx-lm's words for the same ---

    @classmethod
    def merge(cls, caches: Sequence[WindowKV]) -> "BatchWindowKV":
        """A batch of sequences that go on alone as well; neither side sees what the other writes."""
        return cls([cache.fork() for cache in caches])

    def extend(self, other: "BatchWindowKV") -> None:
        """Add the sequences of another batch, which must not be used any more."""
        for slot in range(len(other.rows)):
            self.join(other.settle(slot))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the sequences of these slots, in this order."""
        kept: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        rows = [self.settle(slot) for slot in kept]
        self._forget_decoded()
        self.rows, self._staged_rows, self._is_decoded = rows, [0] * len(rows), [False] * len(rows)

    def extract(self, slot: int) -> WindowKV:
        """A sequence as it would be alone; the batch keeps its own."""
        return self.settle(slot).fork()

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say that of the rows to come only the first `lengths` of each sequence are its own, the rest padding."""
        if left_padding is not None and any(left_padding):
            raise ValueError("left_padding: no sequence is padded on the left")
        if lengths is not None and right_padding is not None and any(right_padding):
            self._unread = list(lengths)

    def finalize(self) -> None:
        """The padded rows are over. Padding was never stored, so nothing has to move."""
        self._unread = None

    def is_trimmable(self) -> bool:
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, count: int) -> int:
        """Forget the last rows of every sequence, at most as many as the shortest has; returns how many. Raises
        ValueError when what came before them was dropped, and changes nothing then.
        """
        count = min(count, *self.lengths)
        rows = [self.settle(slot) for slot in range(len(self.rows))]
        if not all(row.can_trim_to(row.offset - count) for row in rows):
            raise ValueError(f"not every window can go back {count} tokens")
        for row in rows:
            row.trim(count)
        # A ring has written over what the tokens before see.
        self._forget_decoded()
        return count

    def size(self) -> int:
        return max((min(length, self._window) for length in self.lengths), default=0)

    def empty(self) -> bool:
        return not any(self.lengths)

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [array for row in self.rows for array in row.state] + [*self._staged.arrays, *self._rings.arrays]

    @property
    def scratch_bytes(self) -> int:
        """What the batch holds beside its sequences' own buffers."""
        return self._staged.allocated_bytes + self._rings.allocated_bytes

    @property
    def decoded_values(self) -> int:
        """Values of a decoded copy of all rows, one more of each included."""
        per_row = sum(buffer.values_per_row for buffer in self.rows[0].buffers)
        return len(self.rows) * self._width * per_row

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows) + self.scratch_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchWindowKV":
        copied = BatchWindowKV([self.extract(slot) for slot in range(len(self.rows))], keeps_decoded=self.keeps_decoded)
        copied._unread = self._unread and list(self._unread)
        return copied

    # --- how ---

    @property
    def _window(self) -> int:
        return self.rows[0].window

    @property
    def _width(self) -> int:
        """Rows of the rings that attention sums over, after one more token."""
        return attention_width(min(max(self.lengths) + 1, self._window))

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return self.rows[0].keys.codec, self.rows[0].values.codec

    def _decode(self, codes: Parts, key_type: mx.Dtype, value_type: mx.Dtype) -> Parts:
        key_codec, value_codec = self._codecs
        split = key_codec.part_count
        return key_codec.decode(codes[:split], key_type), value_codec.decode(codes[split:], value_type)

    def _prefilled(self, codes: Parts, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Store several rows of each sequence; returns those before them that are seen, and themselves, in order."""
        count = codes[0].shape[2]
        new = self._decode(codes, key_type, value_type)
        kept = [self.settle(slot).kept_rows for slot in range(len(self.rows))]
        seen = []
        for slot, row in enumerate(self.rows):
            parts = [part[slot : slot + 1] for part in new]
            if kept[slot]:
                before = row.decoded(kept[slot], key_type, value_type)
                parts = [mx.concatenate([old, part], axis=2) for old, part in zip(before, parts, strict=True)]
            seen.append([_padded(part, max(kept) + count) for part in parts])
        taken = [count] * len(self.rows)
        if self._unread is not None:
            taken = [min(count, left) for left in self._unread]
            self._unread = [left - took for left, took in zip(self._unread, taken, strict=True)]
        self._write(codes, taken)
        self._forget_decoded()
        keys, values = (mx.concatenate(list(parts)) for parts in zip(*seen, strict=True))
        return keys, values

    def _write(self, codes: Parts, taken: Sequence[int]) -> None:
        for slot, rows in enumerate(taken):
            if rows:
                self.settle(slot).append(tuple(part[slot : slot + 1, :, :rows] for part in codes))

    def _stage(self, codes: Parts) -> list[mx.array]:
        """Stage one row of each sequence; returns the arrays that hold what became of it."""
        full = [slot for slot, count in enumerate(self._staged_rows) if count == _STAGED_ROWS]
        written = [array for slot in full for array in self.settle(slot).state]
        self._staged.reserve(len(self.rows), _STAGED_ROWS, codes)
        self._staged.put_each(self._staged_rows, codes)
        self._staged_rows = [count + 1 for count in self._staged_rows]
        return [*self._staged.arrays, *written]

    def _ring_of_all(self, width: int, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        rings = SlotArrays()
        rings.reserve(len(self.rows), width, self.rows[0].decoded(1, key_type, value_type))
        for slot, row in enumerate(self.rows):
            _fill(rings, slot, row, key_type, value_type)
        keys, values = rings.read(len(self.rows), width)
        return keys, values

    def _forget_decoded(self) -> None:
        self._rings.clear()
        self._is_decoded = [False] * len(self.rows)


def _fill(rings: SlotArrays, slot: int, row: WindowKV, key_type: mx.Dtype, value_type: mx.Dtype) -> None:
    """Put a sequence's rows where they belong in its ring."""
    rows = min(row.held_rows, row.window)
    if not rows:
        return
    start = (row.offset - rows) % row.window
    decoded = row.decoded(rows, key_type, value_type)
    until_end = min(rows, row.window - start)
    rings.put(slot, start, tuple(part[:, :, :until_end] for part in decoded))
    if until_end < rows:
        rings.put(slot, 0, tuple(part[:, :, until_end:] for part in decoded))


def _padded(rows: mx.array, width: int) -> mx.array:
    return mx.pad(rows, [(0, 0), (0, 0), (0, width - rows.shape[2]), (0, 0)])
