"""One recurrent layer of several sequences, decoded together: the batched form of `StateKV`."""

import mlx.core as mx

from inference_svc.kv.state_kv import StateKV, StateTensors, Tensors


class BatchStateKV(StateTensors):
    """One recurrent layer of several sequences, tensors [slots, …]; slot i is `rows[i]`, which gets them by a flush."""

    def __init__(self) -> None:
        self.rows: list[StateKV] = []
        self.tensors: Tensors = []

    def advanced(self, count: int) -> None:
        for row in self.rows:
            row.offset += count

    @property
    def offset(self) -> mx.array:
        return mx.array([row.offset for row in self.rows])

    def join(self, row: StateKV) -> None:
        """Add a sequence, which has seen a token, in a new last slot. Until it is flushed the batch has its tensors."""
        if self.rows:
            self.tensors = [mx.concatenate(list(pair)) for pair in zip(self.state, row.state, strict=True)]
        else:
            self.tensors = list(row.tensors)
        row.tensors = [None] * len(row.tensors)
        self.rows.append(row)

    def flush(self, slot: int) -> StateKV:
        row = self.rows[slot]
        row.tensors = [mx.contiguous(tensor[slot : slot + 1]) for tensor in self.state]
        return row

    def leave(self, slot: int) -> StateKV:
        """Flush a sequence and take it out. The last slot takes its place."""
        row, last = self.flush(slot), self.rows.pop()
        order = list(range(len(self.rows)))
        if last is not row:
            self.rows[slot], order[slot] = last, len(self.rows)
        self.tensors = [tensor[mx.array(order)] for tensor in self.state] if order else []
        return row
