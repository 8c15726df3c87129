"""Recurrent layers: the state that a token leaves for the next one, of one sequence and of several in a batch.

A state cannot be cut: it is kept whole at chosen moments and taken up again there. It is stored as it is computed, in
its own types: it is small, and an error in it would be carried on for ever. Models replace its tensors and never write
into them, and a copy of the references is made all the same, so that a fork cannot be written through.
"""

import copy
from collections.abc import Sequence
from typing import Any

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

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return False

    def fork(self) -> "StateKV":
        """The same state; neither side sees what the other makes of it."""
        other = StateKV(len(self.tensors))
        other.tensors, other.offset = [copy.copy(tensor) for tensor in self.tensors], self.offset
        return other

    def copied(self) -> "StateKV":
        """A copy that holds its own memory and no more: a model's state may be a view of a whole cell's tensors."""
        other = StateKV(len(self.tensors))
        other.tensors = [None if tensor is None else mx.contiguous(tensor) for tensor in self.tensors]
        other.offset = self.offset
        return other

    def fresh(self) -> "StateKV":
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

    def batched(self) -> "BatchStateKV":
        """An empty batch for layers like this one."""
        return BatchStateKV()

    def merge(self, caches: "Sequence[StateKV]") -> "BatchStateKV":
        """A batch of sequences; mlx-lm asks the first of them for it."""
        return BatchStateKV([cache.fork() for cache in caches])


class BatchStateKV:
    """One recurrent layer of several sequences, one token each per forward; tensors [slots, …].

    Slot i is sequence `rows[i]`, which has no tensors of its own until it is settled.
    """

    lengths: None = None
    left_padding: None = None

    def __init__(self, rows: Sequence[StateKV] = ()) -> None:
        self.rows: list[StateKV] = []
        self.tensors: Tensors = []
        for row in rows:
            self.join(row)

    # --- what the model calls ---

    def __getitem__(self, index: int) -> mx.array | None:
        return self.tensors[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self.tensors[index] = value

    def make_mask(self, count: int) -> None:
        """No mask: every token belongs to its sequence."""

    def advance(self, count: int) -> None:
        """Without effect: not every model calls it, see `advanced`."""

    # --- what the engine calls ---

    def advanced(self, count: int) -> None:
        """The model has seen `count` more tokens of every sequence."""
        for row in self.rows:
            row.offset += count

    @property
    def offset(self) -> mx.array:
        """Tokens that each sequence has seen, [slots]."""
        return mx.array([row.offset for row in self.rows])

    def join(self, row: StateKV) -> None:
        """Add a sequence in a new, last slot. Its tensors are the batch's until it is settled."""
        before = self.tensors or [None] * len(row.tensors)
        self.tensors = [_joined(old, len(self.rows), new) for old, new in zip(before, row.tensors, strict=True)]
        row.tensors = [None] * len(row.tensors)
        self.rows.append(row)

    def settle(self, slot: int) -> StateKV:
        """Give a sequence its own tensors; returns it."""
        row = self.rows[slot]
        row.tensors = [None if tensor is None else mx.contiguous(tensor[slot : slot + 1]) for tensor in self.tensors]
        return row

    def leave(self, slot: int) -> StateKV:
        """Settle a sequence and take it out. The last slot takes its place."""
        row, last = self.settle(slot), self.rows.pop()
        order = list(range(len(self.rows)))
        if last is not row:
            self.rows[slot], order[slot] = last, len(self.rows)
        self.tensors = self._of(order) if order else []
        return row

    def keep_decoded(self, is_kept: bool) -> None:
        """Without effect: a state is never encoded."""

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the sequences of these slots, in this order."""
        kept: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        self.tensors, self.rows = self._of(kept) if kept else [], [self.rows[slot] for slot in kept]

    def extend(self, other: "BatchStateKV") -> None:
        """Add the sequences of another batch, which must not be used any more."""
        for slot in range(len(other.rows)):
            self.join(other.settle(slot))

    def extract(self, slot: int) -> StateKV:
        """A sequence as it would be alone; the batch keeps its own."""
        return self.settle(slot).fork()

    def empty(self) -> bool:
        return all(row.empty() for row in self.rows)

    def is_trimmable(self) -> bool:
        return False

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def scratch_bytes(self) -> int:
        """What the batch holds beside its sequences' own tensors."""
        return sum(tensor.nbytes for tensor in self.state)

    @property
    def decoded_values(self) -> int:
        """None: a state is never encoded."""
        return 0

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows) + self.scratch_bytes

    def _of(self, slots: Sequence[int]) -> Tensors:
        chosen = mx.array(list(slots))
        return [None if tensor is None else tensor[chosen] for tensor in self.tensors]


def _joined(old: mx.array | None, slots: int, new: mx.array | None) -> mx.array | None:
    """`old` [slots, …] with a slot more. A sequence that has seen nothing has zeros, as in mlx-lm."""
    like = old if new is None else new
    if like is None:
        return None
    parts = [(old, slots), (new, 1)]
    return mx.concatenate(
        [mx.zeros((count, *like.shape[1:]), like.dtype) if part is None else part for part, count in parts if count]
    )


def _bits(tensor: mx.array) -> mx.array:
    return tensor.view(mx.uint16) if tensor.dtype == mx.bfloat16 else tensor
