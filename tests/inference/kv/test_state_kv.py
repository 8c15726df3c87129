"""Recurrent layers: states that are never cut, never mixed, and never written through a fork."""

import mlx.core as mx
import numpy as np

from inference_svc.kv.batch.batch_state import BatchStateKV
from inference_svc.kv.state_kv import StateKV


def state(value: float, offset: int = 5) -> StateKV:
    layer = StateKV([None, None])
    layer[0], layer[1] = mx.full((1, 3, 4), value), mx.full((1, 2, 2, 2), -value)
    layer.advanced(offset)
    return layer


def batch_of(rows: list[StateKV]) -> BatchStateKV:
    batch = BatchStateKV()
    for row in rows:
        batch.join(row)
    return batch


def values(layer: StateKV | BatchStateKV) -> list[float]:
    assert layer[0] is not None
    assert layer[1] is not None
    firsts, seconds = np.array(layer[0])[:, 0, 0], np.array(layer[1])[:, 0, 0, 0]
    assert np.array_equal(firsts, -seconds)
    return [float(value) for value in firsts]


def add(layer: StateKV | BatchStateKV, amounts: list[float]) -> None:
    """What a model does: a new tensor for each part."""
    step = mx.array(amounts)
    layer[0] = layer[0] + step[:, None, None]
    layer[1] = layer[1] - step[:, None, None, None]
    layer.advanced(1)


def test_sequences_join_and_leave_with_their_own_states() -> None:
    """The last slot takes the place of who leaves (LESSONS 15)."""
    batch = batch_of([state(1), state(2, offset=9), state(3)])
    add(batch, [10, 20, 30])
    assert batch.offset.tolist() == [6, 10, 6]
    first = batch.leave(0)
    assert (values(first), first.offset, values(batch)) == ([11], 6, [33, 22])
    batch.join(state(4))
    add(batch, [1, 1, 1])
    assert [values(batch.leave(slot)) for slot in (1, 1, 0)] == [[23], [5], [34]]
    assert (batch.rows, batch.state) == ([], [])
    batch.join(state(7))
    assert values(batch) == [7]


def test_neither_a_fork_nor_a_copy_nor_a_batch_of_forks_is_written_through() -> None:
    """In place or anew (LESSONS 6)."""
    layer = state(1)
    fork, copied, batch = layer.fork(), layer.compacted(), batch_of([layer.fork(), layer.fork()])
    assert layer[0] is not None
    layer[0][:, :, :] = 100.0
    add(fork, [5])
    add(batch, [7, 8])
    assert values(copied) == [1]
    assert values(fork) == [6]
    assert values(batch) == [8, 9]
    assert float(layer[0][0, 0, 0].item()) == 100
    extracted = batch.flush(1).fork()
    add(batch, [1, 1])
    assert values(extracted) == [9]


def test_a_copy_of_a_state_does_not_keep_the_cell_that_it_was_a_part_of() -> None:
    layer = StateKV([None])
    whole = mx.zeros((1, 100_000, 4))
    mx.eval(whole)
    layer[0] = whole[:, -3:]
    mx.eval(layer.state)
    before = mx.get_active_memory()
    copied = layer.compacted()
    mx.eval(copied.state)
    del whole, layer
    mx.synchronize()  # a GPU's memory is given back behind the work that used it
    assert mx.get_active_memory() < before - 1_000_000


def test_a_states_bytes_are_its_tensors_without_the_batch() -> None:
    layer = StateKV([None, None])
    layer[0], layer[1] = mx.arange(6, dtype=mx.float32).reshape(1, 2, 3), mx.ones((1, 4), mx.bfloat16)
    mx.eval(layer.state)
    first, second = layer.to_bytes()
    assert np.frombuffer(first, np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(second, np.uint16).tolist() == [0x3F80] * 4
