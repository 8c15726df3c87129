"""One recurrent layer of several sequences, decoded together: the batched form of `StateKV`."""

import mlx.core as mx

from inference_svc.kv.state_kv import StateKV, StateTensors, Tensors


class BatchStateKV(StateTensors):
    """One recurrent layer of several sequences, one token each per forward; tensors [slots, …].

    Slot i is sequence `rows[i]`, which has no tensors of its own until it is flushed.
    """

    def __init__(self) -> None:
        self.rows: list[StateKV] = []
        self.tensors: Tensors = []

    def advanced(self, count: int) -> None:
        """Count tokens of every sequence that the model has seen."""
        for row in self.rows:
            row.offset += count

    @property
    def offset(self) -> mx.array:
        """Tokens that each sequence has seen, [slots]."""
        return mx.array([row.offset for row in self.rows])

    def join(self, row: StateKV) -> None:
        """Add a sequence in a new, last slot. Its tensors are the batch's until it is flushed."""
        before = self.tensors or [None] * len(row.tensors)
        self.tensors = [_joined(old, len(self.rows), new) for old, new in zip(before, row.tensors, strict=True)]
        row.tensors = [None] * len(row.tensors)
        self.rows.append(row)

    def flush(self, slot: int) -> StateKV:
        """Give a sequence its own tensors; returns it."""
        row = self.rows[slot]
        row.tensors = [None if tensor is None else mx.contiguous(tensor[slot : slot + 1]) for tensor in self.tensors]
        return row

    def leave(self, slot: int) -> StateKV:
        """Flush a sequence and take it out. The last slot takes its place."""
        row, last = self.flush(slot), self.rows.pop()
        order = list(range(len(self.rows)))
        if last is not row:
            self.rows[slot], order[slot] = last, len(self.rows)
        self.tensors = [None if each is None else each[mx.array(order)] for each in self.tensors] if order else []
        return row


def _joined(old: mx.array | None, slots: int, new: mx.array | None) -> mx.array | None:
    """`old` [slots, …] with one more slot. A sequence that has seen no token has zeros, as in mlx-lm."""
    like = old if new is None else new
    if like is None:
        return None
    parts = [(old, slots), (new, 1)]
    return mx.concatenate(
        [mx.zeros((count, *like.shape[1:]), like.dtype) if part is None else part for part, count in parts if count]
    )
