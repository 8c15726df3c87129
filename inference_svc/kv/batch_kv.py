"""One layer's quantized KV of several sequences, decoded together: the batched form of `LayerKV`.

Each sequence's codes stay in its own buffers; joining and leaving copies none of them and quantizes nothing again. What
the batch adds is scratch: the newest codes, staged until there are enough to be worth a write, and a decoded copy of
the rows, so that a step de-quantizes only what is new. The copy may be done without (`keeps_decoded`): attention sees
the same bits either way.

Every sequence begins at position 0 of its slot and has its own length. Nothing is padded on the left, so a sequence's
rows lie, and are summed, as they would alone: with matrix products that treat every row alike (`row_exact`) its results
in a batch are bit for bit those it has alone.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from inference_svc.kv.capacity import capacity_rows
from inference_svc.kv.codec import Codec, Parts
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.row_exact import attention_width
from inference_svc.kv.slot_arrays import SlotArrays

_STAGED_ROWS = 64


class BatchQuantizedKVCache:
    """K and V of one layer of several sequences, in mlx-lm's cache protocol.

    Slot i is sequence `rows[i]`, a `LayerKV` that is extended in place but lags behind by what is staged until it is
    settled. Whoever gives a `LayerKV` that is still used elsewhere gives a fork of it.
    """

    def __init__(self, rows: Sequence[LayerKV] = (), *, keeps_decoded: bool = True) -> None:
        self.rows: list[LayerKV] = []
        self.keeps_decoded = keeps_decoded
        self._staged_rows: list[int] = []  # by slot
        self._staged = SlotArrays(_STAGED_ROWS)
        self._decoded = SlotArrays()
        self._is_decoded: list[bool] = []  # by slot
        self._unread: list[int] | None = None  # while a right-padded prompt is computed: tokens left, by slot
        for row in rows:
            self.join(row)

    # --- what the model calls ---

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [row.offset + staged for row, staged in zip(self.rows, self._staged_rows, strict=True)]

    @property
    def offset(self) -> mx.array:
        """`lengths` for the model, [slots]. A new array each time: the model may still hold the one before."""
        return mx.array(self.lengths)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [slots, kv_heads, n, dim] behind each sequence; return all rows as attention is to see them,
        [slots, kv_heads, longest + n or more, dim], in the same types. The mask hides what is no sequence's.
        """
        lengths, count = self.lengths, keys.shape[2]
        width = attention_width(max(lengths) + count)
        key_codec, value_codec = self._codecs
        codes = (*key_codec.encode(keys), *value_codec.encode(values))
        if not self.keeps_decoded:
            self._write(codes, self._taken(count))
            return self._assembled(width, keys.dtype, values.dtype)
        new = self._decode(codes, keys.dtype, values.dtype)
        self._decoded.reserve(len(self.rows), width, new)
        self._decode_joined(keys.dtype, values.dtype)
        if count == 1 and self._unread is None:
            # Codes have no reader in this step: without the dependency they would pile up unevaluated.
            stored = self._stage(codes)
            new = tuple(mx.depends(list(new), stored))
            self._decoded.put_each(lengths, new)
        else:
            taken = self._taken(count)
            self._write(codes, taken)
            for slot, (start, rows) in enumerate(zip(lengths, taken, strict=True)):
                self._decoded.put(slot, start, tuple(part[slot : slot + 1, :, :rows] for part in new))
        whole_keys, whole_values = self._decoded.read(len(self.rows), width)
        return whole_keys, whole_values

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

    # --- who is in the batch ---

    def join(self, row: LayerKV) -> None:
        """Add a sequence in a new, last slot."""
        self.rows.append(row)
        self._staged_rows.append(0)
        self._is_decoded.append(False)

    def settle(self, slot: int) -> LayerKV:
        """Write what is staged of a sequence to its own buffers; returns them."""
        row, count = self.rows[slot], self._staged_rows[slot]
        if count:
            row.append(self._staged.read_slot(slot, count))
            self._staged_rows[slot] = 0
        return row

    def leave(self, slot: int) -> LayerKV:
        """Settle a sequence and take it out. The last slot takes its place."""
        row, last = self.settle(slot), len(self.rows) - 1
        if slot != last:
            self._staged.move(last, slot, self._staged_rows[last])
            if self._is_decoded[last]:
                self._decoded.move(last, slot, self.lengths[last])
        for by_slot in (self.rows, self._staged_rows, self._is_decoded):
            moved: Any = by_slot.pop()
            if slot != last:
                by_slot[slot] = moved
        self._release_spare()
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
    def merge(cls, caches: Sequence[LayerKV]) -> "BatchQuantizedKVCache":
        """A batch of sequences that go on alone as well; neither side sees what the other writes."""
        return cls([cache.fork() for cache in caches])

    def extend(self, other: "BatchQuantizedKVCache") -> None:
        """Add the sequences of another batch, which must not be used any more."""
        for slot in range(len(other.rows)):
            self.join(other.settle(slot))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the sequences of these slots, in this order."""
        kept: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        rows = [self.settle(slot) for slot in kept]
        self._forget_decoded()
        self.rows, self._staged_rows, self._is_decoded = rows, [0] * len(rows), [False] * len(rows)

    def extract(self, slot: int) -> LayerKV:
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
            raise ValueError("left_padding: every sequence begins at position 0")
        if lengths is not None and right_padding is not None and any(right_padding):
            self._unread = list(lengths)

    def finalize(self) -> None:
        """The padded rows are over. Padding was never stored, so nothing has to move."""
        self._unread = None

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        """Forget the last rows of every sequence, at most as many as the shortest has; returns how many."""
        count = min(count, *self.lengths)
        for slot in range(len(self.rows)):
            self.settle(slot).trim(count)
        return count

    def size(self) -> int:
        return max(self.lengths, default=0)

    def empty(self) -> bool:
        return self.size() == 0

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [array for row in self.rows for array in row.state] + [*self._staged.arrays, *self._decoded.arrays]

    @property
    def scratch_bytes(self) -> int:
        """What the batch holds beside its sequences' own buffers."""
        return self._staged.allocated_bytes + self._decoded.allocated_bytes

    @property
    def decoded_values(self) -> int:
        """Values of a decoded copy of all rows, one more of each included."""
        per_row = sum(buffer.values_per_row for buffer in self.rows[0].buffers)
        return len(self.rows) * capacity_rows(attention_width(self.size() + 1)) * per_row

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows) + self.scratch_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchQuantizedKVCache":
        copied = BatchQuantizedKVCache(
            [self.extract(slot) for slot in range(len(self.rows))], keeps_decoded=self.keeps_decoded
        )
        copied._unread = self._unread and list(self._unread)
        return copied

    # --- how ---

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return self.rows[0].keys.codec, self.rows[0].values.codec

    def _decode(self, codes: Parts, key_type: mx.Dtype, value_type: mx.Dtype) -> Parts:
        key_codec, value_codec = self._codecs
        split = key_codec.part_count
        return key_codec.decode(codes[:split], key_type), value_codec.decode(codes[split:], value_type)

    def _taken(self, count: int) -> list[int]:
        """How many of the next `count` rows are each sequence's own."""
        if self._unread is None:
            return [count] * len(self.rows)
        taken = [min(count, left) for left in self._unread]
        self._unread = [left - took for left, took in zip(self._unread, taken, strict=True)]
        return taken

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

    def _decode_joined(self, key_type: mx.Dtype, value_type: mx.Dtype) -> None:
        for slot, is_decoded in enumerate(self._is_decoded):
            if not is_decoded:
                self._is_decoded[slot] = True
                row = self.settle(slot)
                if row.offset:
                    self._decoded.put(slot, 0, row.decoded(key_type, value_type))

    def _assembled(self, width: int, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        decoded = [row.decoded(key_type, value_type) for row in self.rows]
        keys, values = (
            mx.concatenate([_padded(part, width) for part in parts]) for parts in zip(*decoded, strict=True)
        )
        return keys, values

    def _forget_decoded(self) -> None:
        self._decoded.clear()
        self._is_decoded = [False] * len(self.rows)

    def _release_spare(self) -> None:
        """Give scratch back that is much larger than what is left needs; the next step decodes those rows again."""
        if not self.rows:
            self._staged.clear()
        if 4 * len(self.rows) * self.size() < self._decoded.slots * self._decoded.capacity:
            self._forget_decoded()


def _padded(rows: mx.array, width: int) -> mx.array:
    return mx.pad(rows, [(0, 0), (0, 0), (0, width - rows.shape[2]), (0, 0)])
