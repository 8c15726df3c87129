"""Numbers of the host's for the device, as arrays that wait for nothing it computes.

For a new array MLX's CUDA back end may give memory that the device used last; to write there it waits for all that is
enqueued, and the interpreter with it (`allocator.cpp`, `move_to_unified_memory`): in a crowd for 20 to 40 ms of a pass
of 50. So arrays are used again, each as soon as a result that was enqueued behind it has been read.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 2  # steps that are enqueued and not read
_HOST_BYTES = 8  # of an array that MLX has memory of both sides for


@dataclass(slots=True)
class _Slot:
    array: mx.array
    numbers: NDArray[Any]  # the array's memory
    used: int  # the newest use's number
    own_references: int = 0  # to the array, while nobody else has it

    @classmethod
    def of(cls, numbers: list[int], shape: tuple[int, ...], dtype: mx.Dtype, used: int) -> "_Slot":
        array = mx.array(np.array(numbers, np.uint32 if dtype == mx.uint32 else np.int32).reshape(shape))
        memory: Any = memoryview(array)  # type: ignore[arg-type]  # MLX's arrays have the buffer protocol
        slot = cls(array, np.asarray(memory).reshape(-1), used)
        del array
        slot.own_references = slot._references
        return slot

    @property
    def is_held(self) -> bool:
        return self._references > self.own_references

    @property
    def _references(self) -> int:
        """Counted in one place, because Python 3.14 lends a call its caller's variables, but not attributes."""
        return sys.getrefcount(self.array)


class HostNumbers:
    """`is_reused`: else each array is a new one, as on devices that write theirs without waiting. On the MLX thread."""

    def __init__(self, *, is_reused: bool) -> None:
        self.is_reused = is_reused
        self._slots: defaultdict[tuple[tuple[int, ...], mx.Dtype], list[_Slot]] = defaultdict(list)
        self.uses = 0
        """Uses so far: `completed` gets this number once a result is read that was enqueued behind all of them."""
        self._completed = 0

    def of(self, numbers: list[int], *shape: int, dtype: mx.Dtype = mx.int32) -> mx.array:
        """An array of them, for passes that are enqueued before its use is completed; `again` prolongs that."""
        shape = shape or (len(numbers),)
        if not self._has_slots(shape, dtype):
            return mx.array(numbers, dtype=dtype).reshape(shape)
        self.uses += 1
        slots = self._slots[shape, dtype]
        slot = next((each for each in slots if each.used <= self._completed and not each.is_held), None)
        if slot is None:
            slots.append(slot := _Slot.of(numbers, shape, dtype, self.uses))
        else:
            slot.numbers[:] = numbers
            slot.used = self.uses
        return slot.array

    def prepare(self, *shape: int, dtype: mx.Dtype = mx.int32) -> None:
        """Have arrays of this shape for a step and the one behind it: to make one, the device is waited for."""
        if not self._has_slots(shape, dtype):
            return
        slots = self._slots[shape, dtype]
        while len(slots) < _AT_ONCE:
            slots.append(_Slot.of([0] * prod(shape), shape, dtype, 0))

    def again(self, array: mx.array) -> mx.array:
        """The array, which the caller holds since `of`, is used once more."""
        self.uses += 1
        for slot in self._slots.get((array.shape, array.dtype), ()):
            if slot.array is array:
                slot.used = self.uses
        return array

    def _has_slots(self, shape: tuple[int, ...], dtype: mx.Dtype) -> bool:
        return self.is_reused and dtype.size * prod(shape) > _HOST_BYTES

    def completed(self, uses: int) -> None:
        """The device is through with the first so many uses."""
        self._completed = max(self._completed, uses)

    def forget(self) -> None:
        """Let go of all arrays."""
        self._slots.clear()


def carried_over(drawn: mx.array, slots: Sequence[int], known: Sequence[int | None], numbers: HostNumbers) -> mx.array:
    """Tokens of a step's rows, uint32: the known one, or the one that the step before drew in the row's slot."""
    spare = [0] * (-len(known) % (1 << (len(known) - 1).bit_length()))  # few lengths, whose arrays are used again
    # As a penalty's logits are taken: CUDA compiles 22 kernels for each other pair of types.
    tokens = drawn.view(mx.float32)[numbers.of([*slots, *spare], dtype=mx.uint32)].view(mx.uint32)
    given = numbers.of([-1 if token is None else token for token in known] + spare)
    return mx.where(given < 0, tokens, given.astype(mx.uint32))[: len(known)]
