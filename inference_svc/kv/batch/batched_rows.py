"""The common part of the batched forms of layers that store rows: the sequences in the batch, and their staged codes.

Each sequence's codes stay in its own buffers; joining and leaving copies none of them and quantizes nothing again. What
a batch adds is scratch: the newest codes, staged until there are enough to be worth a write, and a decoded copy of the
rows, so that a step de-quantizes only the new row. The batch can work without the copy (`keeps_decoded`): attention
sees the same bits either way.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx

from inference_svc.kv.batch.slot_arrays import SlotArrays
from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.window_kv import WindowKV

_STAGED_ROWS = 64

RowT = TypeVar("RowT", bound=LayerKV | WindowKV)


@dataclass(slots=True)
class _Slot(Generic[RowT]):
    """A sequence in the batch: its own buffers, how many of its rows are staged, whether the decoded copy has it."""

    row: RowT
    staged: int = 0
    is_decoded: bool = False


class BatchedRows(ABC, Generic[RowT]):
    """Sequences by slot, one new token each per step, in the part of mlx-lm's cache protocol that its models call.

    The sequence of a slot is extended in place, but lags behind by its staged rows until it is flushed. A caller that
    still uses a sequence elsewhere must join a fork of it.
    """

    def __init__(self, rows: Sequence[RowT] = (), *, keeps_decoded: bool = True) -> None:
        self.keeps_decoded = keeps_decoded
        self._slots: list[_Slot[RowT]] = []
        self._staged = SlotArrays(_STAGED_ROWS)
        self._decoded = SlotArrays()
        # Where K and V are stored alike they are worked on as one array, V's heads behind this many heads of K.
        self._stacked_heads = 0
        for row in rows:
            self.join(row)

    # --- what each kind does its own way ---

    @property
    @abstractmethod
    def _width(self) -> int:
        """Rows that attention sums over, after one more token of each sequence."""

    @abstractmethod
    def _places(self) -> list[int]:
        """Where each sequence's next row goes in the decoded copy."""

    @abstractmethod
    def _fill(self, target: SlotArrays, slot: int, key_type: mx.Dtype, value_type: mx.Dtype) -> None:
        """Decode a sequence's rows into its slot of `target`."""

    @abstractmethod
    def _decoded_on_read(self, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        """All rows as attention is to see them, without a copy that lasts."""

    @abstractmethod
    def _rows_to_move(self, slot: int) -> int:
        """Rows of a slot's decoded copy that hold anything."""

    @abstractmethod
    def _has_spare(self) -> bool:
        """Whether the decoded copy is much larger than the remaining sequences need."""

    # --- what the model calls ---

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store one new row [slots, kv_heads, 1, dim] behind each sequence; return all rows as attention is to see
        them, [slots, kv_heads, rows, dim], in the same types. The mask hides the rows that are not a sequence's own.
        """
        check_one_token(keys.shape[2])
        codes = self._encode(keys, values)
        places, width = self._places(), self._width
        if not self.keeps_decoded:
            self._write(codes)
            return self._decoded_on_read(keys.dtype, values.dtype)
        new = self._decode(codes, keys.dtype, values.dtype)
        self._decoded.reserve(len(self._slots), width, new)
        self._decode_joined(keys.dtype, values.dtype)
        # Codes have no reader in this step: without the dependency they would pile up unevaluated.
        self._decoded.put_each(places, tuple(mx.depends(list(new), self._stage(codes))))
        read_keys, read_values = self._unstacked(self._decoded.read(len(self._slots), width))
        return read_keys, read_values

    @property
    def offset(self) -> mx.array:
        """`lengths` for the model, [slots]. A new array each time: the model may still hold the one before."""
        return mx.array(self.lengths)

    # --- the sequences in the batch ---

    @property
    def rows(self) -> list[RowT]:
        """Each slot's sequence, which lags behind by its staged rows."""
        return [slot.row for slot in self._slots]

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence has seen."""
        return [slot.row.offset + slot.staged for slot in self._slots]

    def join(self, row: RowT) -> None:
        """Add a sequence in a new, last slot."""
        self._slots.append(_Slot(row))

    def flush(self, slot: int) -> RowT:
        """Write a sequence's staged codes to its own buffers; returns them."""
        flushed = self._slots[slot]
        if flushed.staged:
            flushed.row.append(self._unstacked(self._staged.read_slot(slot, flushed.staged)))
            flushed.staged = 0
        return flushed.row

    def leave(self, slot: int) -> RowT:
        """Flush a sequence and take it out. The last slot takes its place."""
        row, last = self.flush(slot), len(self._slots) - 1
        if slot != last:
            self._staged.move(last, slot, self._slots[last].staged)
            if self._slots[last].is_decoded:
                self._decoded.move(last, slot, self._rows_to_move(last))
            self._slots[slot] = self._slots[last]
        self._slots.pop()
        if not self._slots:
            self._staged.clear()
        if self._has_spare():
            self._forget_decoded()
        return row

    def keep_decoded(self, is_kept: bool) -> None:
        """Keep a decoded copy of the rows, or do without: it needs several times the memory of the codes."""
        if is_kept == self.keeps_decoded:
            return
        self._flush_all()
        self._forget_decoded()
        self.keeps_decoded = is_kept

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        own = [array for slot in self._slots for array in slot.row.state]
        return [*own, *self._staged.arrays, *self._decoded.arrays]

    @property
    def scratch_bytes(self) -> int:
        """Bytes that the batch holds besides its sequences' own buffers."""
        return self._staged.allocated_bytes + self._decoded.allocated_bytes

    @property
    def decoded_values(self) -> int:
        """Values that the decoded copy would hold room for in the next step."""
        slots, capacity = self._decoded.reserved(len(self._slots), self._width)
        return slots * capacity * sum(buffer.values_per_row for buffer in self._slots[0].row.buffers)

    # --- codes ---

    def _encode(self, keys: mx.array, values: mx.array) -> EncodedRows:
        row = self._slots[0].row
        key_codec, value_codec = row.keys.codec, row.values.codec
        if key_codec == value_codec and keys.shape == values.shape:
            self._stacked_heads = keys.shape[1]
            return key_codec.encode(mx.concatenate([keys, values], axis=1))
        return (*key_codec.encode(keys), *value_codec.encode(values))

    def _decode(self, codes: EncodedRows, key_type: mx.Dtype, value_type: mx.Dtype) -> EncodedRows:
        row = self._slots[0].row
        key_codec, value_codec = row.keys.codec, row.values.codec
        if self._stacked_heads:
            return (key_codec.decode(codes, key_type),)
        split = key_codec.part_count
        return key_codec.decode(codes[:split], key_type), value_codec.decode(codes[split:], value_type)

    def _unstacked(self, parts: EncodedRows) -> EncodedRows:
        """The parts of K, then those of V."""
        heads = self._stacked_heads
        if not heads:
            return parts
        return (*(part[:, :heads] for part in parts), *(part[:, heads:] for part in parts))

    def _stacked(self, keys: mx.array, values: mx.array) -> EncodedRows:
        """Decoded rows as the decoded copy holds them."""
        return (mx.concatenate([keys, values], axis=1),) if self._stacked_heads else (keys, values)

    def _write(self, codes: EncodedRows) -> None:
        """Write one row of each sequence to its own buffers."""
        for slot in range(len(self._slots)):
            self.flush(slot).append(self._unstacked(tuple(part[slot : slot + 1] for part in codes)))

    def _stage(self, codes: EncodedRows) -> list[mx.array]:
        """Stage one row of each sequence; returns every array that this changed."""
        full = [number for number, slot in enumerate(self._slots) if slot.staged == _STAGED_ROWS]
        written: list[mx.array] = [array for slot in full for array in self.flush(slot).state]
        self._staged.reserve(len(self._slots), _STAGED_ROWS, codes)
        self._staged.put_each([slot.staged for slot in self._slots], codes)
        for slot in self._slots:
            slot.staged += 1
        return [*self._staged.arrays, *written]

    def _flush_all(self) -> list[RowT]:
        return [self.flush(slot) for slot in range(len(self._slots))]

    # --- the decoded copy ---

    def _decode_joined(self, key_type: mx.Dtype, value_type: mx.Dtype) -> None:
        """Make the decoded copy of the sequences that have none."""
        for number, slot in enumerate(self._slots):
            if not slot.is_decoded:
                self._fill(self._decoded, number, key_type, value_type)
                slot.is_decoded = True

    def _forget_decoded(self) -> None:
        self._decoded.clear()
        for slot in self._slots:
            slot.is_decoded = False


def check_one_token(count: int) -> None:
    """Raise ValueError for a step of several tokens a sequence: prompts are computed alone."""
    if count != 1:
        raise ValueError(f"a batch decodes one token of each sequence, not {count}")
