"""Rows of KV: what is written is what is read, what is cut is never seen, and nothing is written through."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.prefill_layer import PrefillLayer, commit, prefill_layers
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.kv.sequences import (
    allocated_bytes,
    fed,
    full,
    page_bytes,
    poison_behind,
    pool_of,
    random_rows,
    recurrent,
    same,
    stored,
    values,
    windowed,
)


def sequence(counts: list[int]) -> SequenceKV:
    """Two layers, fed in pieces."""
    return fed(SequenceKV(pool_of([full(), full()])), counts)


def cut(rows: list[np.ndarray], count: int) -> list[np.ndarray]:
    return [value[:, :, :count] for value in rows]


def test_attention_sees_the_stored_rows_and_nothing_else() -> None:
    kv = SequenceKV(pool_of([full()]))
    seen: list[np.ndarray] = []
    for piece, count in enumerate((5, 300, 1, 700)):
        given = random_rows(count, piece)
        [layer] = prefill_layers(kv)
        assert isinstance(layer, PrefillLayer)
        keys, _values = layer.update_and_fetch(*given)
        commit(kv, [layer], count)
        seen.append(np.array(keys))
        assert keys.shape[2] == kv.length
        assert float(mx.abs(keys[:, :, -count:] - given[0]).max()) < 0.4, "four bits of a normal value"
        assert np.array_equal(values(kv)[0], seen[-1]), "what was seen is what is stored"
    for earlier, later in pairwise(seen):
        assert np.array_equal(later[:, :, : earlier.shape[2]], earlier), "a row never changes"


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "with a fork"])
@pytest.mark.parametrize("keep", [0, 1, 255, 256, 257, 511, 512, 520])
def test_cutting_feeding_and_growing_leave_what_was_kept(keep: int, is_shared: bool) -> None:
    """Rows that were cut are poisoned, as are pages that were freed."""
    kv = sequence([520])
    before = values(kv)
    others = [kv.fork()] if is_shared else []
    kv.trim_to(keep)
    assert same(values(kv), cut(before, keep))
    poison_behind(kv)
    fed(kv, [600], seed=5)
    after = values(kv)
    assert same(cut(after, keep), cut(before, keep))
    assert all(np.isfinite(value).all() for value in after), "a freed row was seen"
    fresh = sequence([520])
    fresh.trim_to(keep)
    assert same(values(fed(fresh, [600], seed=5)), after)
    assert all(same(values(other), before) for other in others)


def test_a_fork_shares_pages_until_somebody_writes() -> None:
    kv = sequence([300])
    before = values(kv)
    forks = [kv.fork(), kv.fork()]
    assert kv.pool.allocator.used == kv.pool.allocator.shared == 2
    used = []
    for number, one in enumerate((kv, *forks)):
        one.trim_to(200 + number)
        fed(one, [40], seed=number)
        used.append(kv.pool.allocator.used)
    assert used == [3, 4, 3], "the last one writes the old page, and the second block is nobody's"
    for number, one in enumerate((kv, *forks)):
        kept = 200 + number
        assert same(cut(values(one), kept), cut(before, kept))
        alone = fed(SequenceKV(kv.pool), [40], seed=number)
        assert same([value[:, :, kept:] for value in values(one)], values(alone))


def test_a_fork_copies_nothing_and_a_write_copies_one_page() -> None:
    """However long the sequence is."""
    kv = sequence([256] * 8 + [100])
    pool = kv.pool
    forks = [kv.fork() for _ in range(5)]
    assert (pool.allocator.used, pool.allocator.shared) == (9, 9)
    fed(forks[0], [1], seed=1)
    assert (pool.allocator.used, pool.allocator.shared) == (10, 9)
    prefix = kv.fork(1000)
    assert pool.allocator.used == 10
    for one in (*forks, prefix):
        one.release()
    assert (pool.allocator.used, pool.allocator.shared) == (9, 0)


def test_whoever_is_dropped_gives_its_pages_back() -> None:
    kv = sequence([600])
    pool, fork = kv.pool, kv.fork()
    del kv
    assert pool.allocator.used == 3
    del fork
    assert pool.allocator.used == 0


def test_arrays_that_were_read_do_not_change_when_the_sequence_goes_on() -> None:
    """Also those that were not computed yet."""
    kv = sequence([300])
    lazy, before = kv.rows(0, 256, 300), stored(kv)
    kv.trim_to(256)
    fed(kv, [40], seed=5)
    assert lazy is not None
    read = [np.array(mx.contiguous(part.view(mx.uint16))).tobytes() for part in lazy]
    expected = sequence([300])
    assert stored(expected) == before
    again = expected.rows(0, 256, 300)
    assert again is not None
    assert read == [np.array(mx.contiguous(part.view(mx.uint16))).tobytes() for part in again]


def test_a_shared_page_is_never_written() -> None:
    """Chunks, single tokens, cuts into it and growth behind it, by each of its holders in turn."""
    memory = sequence([300])
    held = page_bytes(memory.pool, memory.pages)
    for keep in (300, 299, 256, 255, 10, 0):
        for counts in ([1], [5, 1], [300]):
            turn = memory.fork(keep)
            fed(turn, counts, seed=keep)
            assert page_bytes(memory.pool, memory.pages) == held
            turn.release()
    assert memory.pool.allocator.used == 2


def test_a_length_that_it_does_not_have_is_refused() -> None:
    kv = sequence([300])
    with pytest.raises(ValueError, match="300 tokens cannot go on from 301"):
        kv.fork(301)
    assert not kv.can_go_on_from(301)
    assert kv.start_before(400) == PAGE_TOKENS, "of a length beyond its own: the last whole block"
    assert kv.start_before(300) == 300


def test_only_a_sequence_that_does_not_keep_all_tokens_has_rewind_points() -> None:
    kv = sequence([10])
    kv.mark()
    assert (kv.has_rewind_points, kv.rewind_points) == (False, ())
    kv = fed(SequenceKV(pool_of([windowed(8)])), [10])
    kv.mark()
    kv.mark()
    assert (kv.has_rewind_points, kv.rewind_points) == (True, (10,))
    assert kv.point_at(10).tokens == 10
    with pytest.raises(ValueError, match="not at 9"):
        kv.point_at(9)


def test_what_a_sequence_allocates_are_its_pages_and_states_once() -> None:
    kv = SequenceKV(pool_of([full(), recurrent(3)]))
    layers = prefill_layers(kv)
    layers[0].update_and_fetch(*random_rows(300, 1))  # type: ignore[union-attr]
    layers[1][0] = mx.ones((1, 3))  # type: ignore[index]
    layers[1].advanced(300)  # type: ignore[union-attr]
    commit(kv, layers, 300)
    pages = 2 * kv.pool.page_bytes
    assert allocated_bytes(kv) == pages + 12
    kv.mark()
    assert allocated_bytes(kv) == pages + 12, "the state at a rewind point is the sequence's own"
    assert allocated_bytes(kv.fork()) == pages + 12


def test_layers_with_a_window_and_others_take_their_pages_from_one_pool() -> None:
    """Gemma 3's shape: one layer in six keeps all tokens, and a page is a block of as many layers in each group."""
    pool = pool_of([windowed(100) if index % 6 else full() for index in range(12)], policy_of(Rung.Q4, "float32"))
    assert [(group.window, len(group.layers)) for group in pool.groups] == [(0, 2), *[(100, 2)] * 5]
    kv = fed(SequenceKV(pool), [256] * 20)
    assert pool.allocator.used == 20 + 5
    assert pool.pages_for(kv.length) == 20 + 5 * 6
