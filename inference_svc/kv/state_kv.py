"""The state of a sequence's recurrent layers: copied whole at rewind points, from which a sequence can continue. It is
stored in the types in which it is computed, as every later token would inherit an error. Models replace its tensors and
never write into them.
"""

import copy

import mlx.core as mx
import numpy as np

Tensors = list[mx.array | None]


class StateTensors:
    """A recurrent layer as mlx-lm's models call it, which read `lengths` and `left_padding`: there is none."""

    lengths: None = None
    left_padding: None = None
    tensors: Tensors

    def __getitem__(self, index: int) -> mx.array | None:
        return self.tensors[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self.tensors[index] = value

    def make_mask(self, count: int) -> None:
        """No mask: every token belongs to its sequence."""

    def advance(self, count: int) -> None:
        """Without effect: not every model calls it, see `advanced`."""

    @property
    def state(self) -> list[mx.array]:
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state)


class StateKV(StateTensors):
    """One recurrent layer of one sequence after `offset` tokens; tensors [1, …], None before the first token."""

    def __init__(self, tensors: Tensors, offset: int = 0) -> None:
        self.tensors = tensors
        self.offset = offset

    def advanced(self, count: int) -> None:
        """Count tokens that the model has seen: not every model reports them to the layer."""
        self.offset += count

    def fork(self) -> "StateKV":
        """The same state for a second sequence; neither side sees later changes of the other."""
        return StateKV([copy.copy(tensor) for tensor in self.tensors], self.offset)

    def compacted(self) -> "StateKV":
        """A copy with memory of its own: a model's state may be a view of a whole cell's tensors."""
        return StateKV([None if each is None else mx.contiguous(each) for each in self.tensors], self.offset)

    def to_bytes(self) -> list[bytes]:
        """Bytes of each tensor without its batch axis. They must have been evaluated."""
        return [np.asarray(_bits(tensor)[0]).tobytes() for tensor in self.state]


def _bits(tensor: mx.array) -> mx.array:
    return tensor.view(mx.uint16) if tensor.dtype == mx.bfloat16 else tensor
