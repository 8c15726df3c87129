"""Recurrent layers: the state that a token leaves for the next one, of one sequence.

A state cannot be cut: it is kept whole at chosen moments and taken up again there. It is stored as it is computed, in
its own types: it is small, and an error in it would be carried on for ever. Models replace its tensors and never write
into them, and a copy of the references is made all the same, so that a fork cannot be written through.
"""

import copy
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

Tensors = list[mx.array | None]


class StateKV:
    """One recurrent layer of one sequence after `offset` tokens; tensors [1, …], None before the first token.

    The attributes `lengths` and `left_padding` are mlx-lm's: its models ask for padding, and here there is none.
    """

    lengths: None = None
    left_padding: None = None

    def __init__(self, count: int) -> None:
        self.tensors: Tensors = [None] * count
        self.offset = 0

    # --- what the model calls ---

    def __getitem__(self, index: int) -> mx.array | None:
        return self.tensors[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self.tensors[index] = value

    def make_mask(self, count: int) -> None:
        """No mask: every token belongs to the sequence."""

    def advance(self, count: int) -> None:
        """Without effect: not every model calls it, see `advanced`."""

    # --- what the engine calls ---

    def advanced(self, count: int) -> None:
        """The model has seen `count` more tokens: the layer itself is never told."""
        self.offset += count

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state)

    def is_trimmable(self) -> bool:
        return False

    def fork(self) -> "StateKV":
        """The same state; neither side sees what the other makes of it."""
        other = StateKV(len(self.tensors))
        other.tensors, other.offset = [copy.copy(tensor) for tensor in self.tensors], self.offset
        return other

    def compacted(self) -> "StateKV":
        """A copy that holds its own memory and no more: a model's state may be a view of a whole cell's tensors."""
        other = StateKV(len(self.tensors))
        other.tensors = [None if tensor is None else mx.contiguous(tensor) for tensor in self.tensors]
        other.offset = self.offset
        return other

    def empty_like(self) -> "StateKV":
        """One like this that has seen nothing."""
        return StateKV(len(self.tensors))

    def part_count_after(self, tokens: int) -> int:  # noqa: ARG002 - a window has none after none
        """Tensors that a file of the state after `tokens` tokens has of this layer."""
        return len(self.tensors)

    def to_bytes(self) -> list[bytes]:
        """Bytes of each tensor without its batch axis. It must have been evaluated."""
        return [np.asarray(_bits(tensor)[0]).tobytes() for tensor in self.state]

    def put_parts(self, offset: int, parts: Sequence[mx.array]) -> None:
        """Become what a file says: tensors [1, …], after `offset` tokens."""
        self.tensors, self.offset = list(parts), offset


def _bits(tensor: mx.array) -> mx.array:
    return tensor.view(mx.uint16) if tensor.dtype == mx.bfloat16 else tensor
