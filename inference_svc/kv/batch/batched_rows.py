"""What the batched forms of layers that store rows have in common: who is in the batch, and the codes that wait.

Each sequence's codes stay in its own buffers; joining and leaving copies none of them and quantizes nothing again. What
a batch adds is scratch: the newest codes, staged until there are enough to be worth a write, and a decoded copy of the
rows, so that a step de-quantizes only what is new. The copy may be done without (`keeps_decoded`): attention sees the
same bits either way.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar, cast

import mlx.core as mx

from inference_svc.kv.batch.slot_arrays import SlotArrays
from inference_svc.kv.codec import Parts
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.window_kv import WindowKV

_STAGED_ROWS = 64

RowT = TypeVar("RowT", bound=LayerKV | WindowKV)


class BatchedRows(ABC, Generic[RowT]):
    """Sequences by slot, in mlx-lm's cache protocol but for what attention is given.

    Slot i is sequence `rows[i]`, which is extended in place but lags behind by what is staged until it is settled.
    Whoever gives a sequence that is still used elsewhere gives a fork of it.
    """

    def __init__(self, rows: Sequence[RowT] = (), *, keeps_decoded: bool = True) -> None:
        self.rows: list[RowT] = []
        self.keeps_decoded = keeps_decoded
        self._staged_rows: list[int] = []  # by slot
        self._staged = SlotArrays(_STAGED_ROWS)
        self._decoded = SlotArrays()
        self._is_decoded: list[bool] = []  # by slot
        self._stacked_heads = (
            0  # where K and V are stored alike they are worked on as one, V's heads behind so many of K
        )
        self._unread: list[int] | None = None  # while a right-padded prompt is computed: tokens left, by slot
        for row in rows:
            self.join(row)

    # --- what each kind does its own way ---

    @abstractmethod
    def _rows_to_move(self, slot: int) -> int:
        """Rows of a slot's decoded copy that hold anything."""

    @abstractmethod
    def _has_spare(self) -> bool:
        """Whether the decoded copies are much larger than who is left needs."""

    @property
    @abstractmethod
    def _width(self) -> int:
        """Rows that attention sums over, after one more token of each sequence."""

    @abstractmethod
    def size(self) -> int:
        """Rows of the longest sequence."""

    # --- what the model reads ---

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence has seen."""
        return [row.offset + staged for row, staged in zip(self.rows, self._staged_rows, strict=True)]

    @property
    def offset(self) -> mx.array:
        """`lengths` for the model, [slots]. A new array each time: the model may still hold the one before."""
        return mx.array(self.lengths)

    # --- who is in the batch ---

    def join(self, row: RowT) -> None:
        """Add a sequence in a new, last slot."""
        self.rows.append(row)
        self._staged_rows.append(0)
        self._is_decoded.append(False)

    def settle(self, slot: int) -> RowT:
        """Write what is staged of a sequence to its own buffers; returns them."""
        row, count = self.rows[slot], self._staged_rows[slot]
        if count:
            row.append(self._unstacked(self._staged.read_slot(slot, count)))
            self._staged_rows[slot] = 0
        return row

    def leave(self, slot: int) -> RowT:
        """Settle a sequence and take it out. The last slot takes its place."""
        row, last = self.settle(slot), len(self.rows) - 1
        if slot != last:
            self._staged.move(last, slot, self._staged_rows[last])
            if self._is_decoded[last]:
                self._decoded.move(last, slot, self._rows_to_move(last))
        for by_slot in (self.rows, self._staged_rows, self._is_decoded):
            moved: Any = by_slot.pop()
            if slot != last:
                by_slot[slot] = moved
        if not self.rows:
            self._staged.clear()
        if self._has_spare():
            self._forget_decoded()
        return row

    def keep_decoded(self, is_kept: bool) -> None:
        """Keep a decoded copy of the rows, or do without: it needs several times the memory of the codes."""
        if is_kept == self.keeps_decoded:
            return
        self._settle_all()
        self._forget_decoded()
        self.keeps_decoded = is_kept

    # --- mlx-lm's words for the same ---

    @classmethod
    def merge(cls, caches: Sequence[RowT]) -> Self:
        """A batch of sequences that go on alone as well; neither side sees what the other writes."""
        return cls([cast("RowT", cache.fork()) for cache in caches])

    def extend(self, other: Self) -> None:
        """Add the sequences of another batch, which must not be used any more."""
        for row in other._settle_all():
            self.join(row)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the sequences of these slots, in this order."""
        kept: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        rows = [self.settle(slot) for slot in kept]
        self._forget_decoded()
        self.rows, self._staged_rows, self._is_decoded = rows, [0] * len(rows), [False] * len(rows)

    def extract(self, slot: int) -> RowT:
        """A sequence as it would be alone; the batch keeps its own."""
        return cast("RowT", self.settle(slot).fork())

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

    def empty(self) -> bool:
        return not any(self.lengths)

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
        """Values that the decoded copy would hold room for in the next step."""
        slots, capacity = self._decoded.reserved(len(self.rows), self._width)
        return slots * capacity * sum(buffer.values_per_row for buffer in self.rows[0].buffers)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows) + self.scratch_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        rows = [self.extract(slot) for slot in range(len(self.rows))]
        copied = type(self)(rows, keeps_decoded=self.keeps_decoded)
        copied._unread = self._unread and list(self._unread)
        return copied

    # --- codes ---

    def _encode(self, keys: mx.array, values: mx.array) -> Parts:
        key_codec, value_codec = self.rows[0].keys.codec, self.rows[0].values.codec
        if key_codec == value_codec and keys.shape == values.shape:
            self._stacked_heads = keys.shape[1]
            return key_codec.encode(mx.concatenate([keys, values], axis=1))
        return (*key_codec.encode(keys), *value_codec.encode(values))

    def _decode(self, codes: Parts, key_type: mx.Dtype, value_type: mx.Dtype) -> Parts:
        key_codec, value_codec = self.rows[0].keys.codec, self.rows[0].values.codec
        if self._stacked_heads:
            return (key_codec.decode(codes, key_type),)
        split = key_codec.part_count
        return key_codec.decode(codes[:split], key_type), value_codec.decode(codes[split:], value_type)

    def _unstacked(self, parts: Parts) -> Parts:
        """The parts of K, then those of V."""
        heads = self._stacked_heads
        if not heads:
            return parts
        return (*(part[:, :heads] for part in parts), *(part[:, heads:] for part in parts))

    def _stacked(self, keys: mx.array, values: mx.array) -> Parts:
        """Decoded rows as the decoded copy holds them."""
        return (mx.concatenate([keys, values], axis=1),) if self._stacked_heads else (keys, values)

    def _read_decoded(self, width: int) -> tuple[mx.array, mx.array]:
        keys, values = self._unstacked(self._decoded.read(len(self.rows), width))
        return keys, values

    def _put_newest(self, new: Parts, codes: Parts, places: Sequence[int]) -> None:
        """Stage the codes of one row of each sequence, and put the decoded row at its place."""
        # Codes have no reader in this step: without the dependency they would pile up unevaluated.
        self._decoded.put_each(places, tuple(mx.depends(list(new), self._stage(codes))))

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
                self.settle(slot).append(self._unstacked(tuple(part[slot : slot + 1, :, :rows] for part in codes)))

    def _stage(self, codes: Parts) -> list[mx.array]:
        """Stage one row of each sequence; returns the arrays that hold what became of it."""
        full = [slot for slot, count in enumerate(self._staged_rows) if count == _STAGED_ROWS]
        written: list[mx.array] = [array for slot in full for array in self.settle(slot).state]
        self._staged.reserve(len(self.rows), _STAGED_ROWS, codes)
        self._staged.put_each(self._staged_rows, codes)
        self._staged_rows = [count + 1 for count in self._staged_rows]
        return [*self._staged.arrays, *written]

    def _settle_all(self) -> list[RowT]:
        return [self.settle(slot) for slot in range(len(self.rows))]

    def _newly_joined(self) -> list[int]:
        """Slots whose decoded copy is still to be made; they count as decoded from now on."""
        joined = [slot for slot, is_decoded in enumerate(self._is_decoded) if not is_decoded]
        self._is_decoded = [True] * len(self.rows)
        return joined

    def _forget_decoded(self) -> None:
        self._decoded.clear()
        self._is_decoded = [False] * len(self.rows)


def padded(rows: mx.array, width: int) -> mx.array:
    """Rows [1, heads, n, dim] with zeros behind them, `width` in all."""
    return mx.pad(rows, [(0, 0), (0, 0), (0, width - rows.shape[2]), (0, 0)])
