"""Arrays that several sequences share, one slot each; who joins or leaves moves its own slot and the last one."""

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from inference_svc.kv.codec import EncodedRows

_STEP_ROWS = 256


class SlotPlaces:
    """Where in its slot each new row of a step goes. Equal layers share one, whose arrays are made once."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions
        self._wide: dict[tuple[int, ...], mx.array] = {}

    def __len__(self) -> int:
        return len(self._positions)

    @cached_property
    def index(self) -> mx.array:
        return mx.array(list(self._positions))

    def like(self, shape: tuple[int, ...]) -> mx.array:
        """By value of rows [n, heads, 1, …]."""
        if shape not in self._wide:
            self._wide[shape] = mx.broadcast_to(self.index[:, None, None, None], shape)
        return self._wide[shape]


class SlotArrays:
    """Arrays [slots, heads, capacity, …] of equal slots and capacity. The caller knows how many rows are valid."""

    def __init__(self) -> None:
        self.arrays: EncodedRows = ()

    @property
    def slots(self) -> int:
        return self.arrays[0].shape[0] if self.arrays else 0

    @property
    def capacity(self) -> int:
        return self.arrays[0].shape[2] if self.arrays else 0

    def reserve(self, slots: int, capacity: int, like: EncodedRows) -> None:
        """Make room, in steps, for so many slots and rows, with the heads and types of `like` [any, heads, any, …]."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        new_slots, new_capacity = self.reserved(slots, capacity)
        grown = [mx.zeros((new_slots, part.shape[1], new_capacity, *part.shape[3:]), dtype=part.dtype) for part in like]
        for new, old in zip(grown, self.arrays, strict=False):
            new[: old.shape[0], :, : old.shape[2]] = old
        self.arrays = tuple(grown)

    def reserved(self, slots: int, capacity: int) -> tuple[int, int]:
        """The slots and the capacity after such a `reserve`: slots double, and neither ever shrinks."""
        new_slots = self.slots if slots <= self.slots else max(slots, 2 * self.slots)
        return new_slots, max(-(-capacity // _STEP_ROWS) * _STEP_ROWS, self.capacity)

    def put(self, slot: int, start: int, rows: EncodedRows) -> None:
        """Write rows [1, heads, n, …] of one slot from position `start` on."""
        for array, new in zip(self.arrays, rows, strict=True):
            array[slot : slot + 1, :, start : start + new.shape[2]] = new

    def zero(self, slot: int) -> None:
        for array in self.arrays:
            array[slot : slot + 1] = 0

    def put_each(self, places: SlotPlaces, rows: EncodedRows, slots: mx.array | None = None) -> None:
        """Write rows [n, heads, 1, …], each at its place of its slot in `slots`; None: of the first n slots."""
        count = len(places)
        if slots is None and count == self.slots:
            self.arrays = tuple(
                mx.put_along_axis(array, places.like(new.shape), new, axis=2)
                for array, new in zip(self.arrays, rows, strict=True)
            )
            return
        slots = mx.arange(count) if slots is None else slots
        for array, new in zip(self.arrays, rows, strict=True):
            array[slots, :, places.index] = new[:, :, 0]

    def read(self, slots: int, rows: int, chosen: mx.array | None = None) -> EncodedRows:
        """The first rows of the first slots, or of those `chosen` among them."""
        read = tuple(array[:slots, :, :rows] for array in self.arrays)
        if chosen is None:
            return read
        if slots == 1:  # each row reads the same one, which need not be copied
            return tuple(mx.broadcast_to(array, (chosen.size, *array.shape[1:])) for array in read)
        return tuple(array[chosen] for array in read)

    def move(self, source: int, target: int, rows: int) -> None:
        """A slot's first rows to another one, where nothing stays: a masked row counts as 0 times its values."""
        if source != target and rows:
            spare = [(0, 0), (0, 0), (0, self.capacity - rows)]
            moved = [array[source : source + 1, :, :rows] for array in self.arrays]
            self.put(target, 0, tuple(mx.pad(each, spare + [(0, 0)] * (each.ndim - 3)) for each in moved))

    def clear(self) -> None:
        self.arrays = ()
