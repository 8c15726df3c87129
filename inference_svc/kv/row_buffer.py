"""Rows of K or V of one layer, encoded, in buffers that grow.

As far as Python can see, nothing is ever written in place: a write makes a new array from the old one. MLX reuses the
old array's memory if it has no other holder, and copies it otherwise, so no write reaches a fork or a reader.
"""

import copy

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from inference_svc.kv.capacity import capacity_rows
from inference_svc.kv.codec import Codec, EncodedRows


class RowBuffer:
    """Encoded rows; each part is an array [1, kv_heads, capacity, …]. The caller knows how many rows are valid."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.parts: EncodedRows = ()

    @property
    def capacity(self) -> int:
        return self.parts[0].shape[2] if self.parts else 0

    @property
    def allocated_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def values_per_row(self) -> int:
        """How many values a row decodes to, over all heads; 0 before the first write."""
        if not self.parts:
            return 0
        codes = self.parts[0]
        return int(codes.shape[1] * codes.shape[3] * codes.itemsize * 8 // self.codec.bits)

    def write(self, start: int, rows: EncodedRows) -> None:
        """Write rows at [start, start + rows). Earlier rows are kept; later ones are free."""
        stop = start + rows[0].shape[2]
        if stop > self.capacity:
            self._grow(start, capacity_rows(stop), rows)
        self.parts = tuple(_updated(part, start, new) for part, new in zip(self.parts, rows, strict=True))

    def read(self, start: int, stop: int) -> EncodedRows:
        if start == 0 and stop == self.capacity:
            return self.parts
        return tuple(part[:, :, start:stop] for part in self.parts)

    def decoded(self, stop: int, dtype: mx.Dtype) -> mx.array:
        """The first `stop` rows as values."""
        return self.codec.decode(self.read(0, stop), dtype)

    def fork(self) -> "RowBuffer":
        """The same rows, without copying them. Either side may write; the other does not see it."""
        other = RowBuffer(self.codec)
        other.parts = self.parts
        return other

    def shrink(self, rows: int) -> None:
        """Keep the first `rows` rows and the capacity that they need. Copies if that is less than now."""
        capacity = capacity_rows(rows)
        if capacity < self.capacity:
            self.parts = tuple(mx.contiguous(part[:, :, :capacity]) for part in self.parts)

    def to_bytes(self, start: int, stop: int) -> list[bytes]:
        """Bytes of rows [start, stop) of each part, [kv_heads, rows, …]. The parts must have been evaluated."""
        return [_host_view(part)[0, :, start:stop].tobytes() for part in self.parts]

    def _grow(self, kept: int, capacity: int, like: EncodedRows) -> None:
        grown = [mx.zeros((*new.shape[:2], capacity, *new.shape[3:]), dtype=new.dtype) for new in like]
        if kept:
            grown = [_updated(new, 0, old[:, :, :kept]) for new, old in zip(grown, self.parts, strict=True)]
        self.parts = tuple(grown)


def _updated(part: mx.array, start: int, rows: mx.array) -> mx.array:
    # The copy is of the reference: item assignment re-binds the object it is given, and a fork must keep the old one.
    result = copy.copy(part)
    result[:, :, start : start + rows.shape[2]] = rows
    return result


def _host_view(part: mx.array) -> npt.NDArray[np.generic]:
    """The array's own memory. It must be dropped before the next write, which would copy the whole buffer otherwise."""
    return np.asarray(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part)
