"""A batch over pages where they lie: whose pages it holds, and when MLX may keep a step's graph."""

import re
from collections.abc import Sequence
from io import StringIO
from typing import Any

import mlx.core as mx
import pytest

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.decode_step import KeptGraph, KeptPlaces
from inference_svc.kv.host_numbers import HostNumbers
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.kv.sequences import full, identity_of, recurrent, windowed

LAYERS = [full(), windowed(100)]
PAGE_BYTES = KvPool(identity_of(LAYERS), 1).page_bytes


def pool(pages: int, dialect: Dialect | None = Dialect.CUDA, *, is_allocated: bool = True) -> KvPool:
    return KvPool(identity_of(LAYERS), pages * PAGE_BYTES, is_allocated=is_allocated, dialect=dialect)


def logits_of(tokens: mx.array, caches: list[Any]) -> mx.array:
    """Numbers that show what a step was told, without any kernel: tokens, lengths, and each group's last pages."""
    told = [tokens[:, 0], *(cache.offset for cache in caches)]
    told += [table.sum(axis=1) for table in caches[0]._now.block_tables]
    return mx.stack([one.astype(mx.float32) for one in told], axis=1)[:, None]


def batch_of(pool: KvPool, forward: Any = logits_of) -> DecodeBatch:
    return DecodeBatch(pool, forward, 0)


def told(batch: DecodeBatch, tokens: Sequence[int]) -> list[list[float]]:
    """What the next step must be told."""
    after = []
    for token, kv in zip(tokens, batch.sequences, strict=True):
        pages = [float(sum(table.pages.values())) for table in kv.tables]
        after.append([token, kv.length - 1, kv.length - 1, *pages])
    return after


def test_a_sequence_that_left_gives_its_pages_back_when_it_is_dropped() -> None:
    here = pool(20, is_allocated=False)
    batch = batch_of(here)
    for _ in range(2):
        batch.join(SequenceKV(here))
    mx.eval(batch.step([1, 2]))
    assert here.allocator.used == 4
    for left in (2, 0):
        batch.leave(batch.sequences[0])
        assert here.allocator.used == left


def test_a_discarded_batch_holds_no_page() -> None:
    def fail(_tokens: mx.array, _caches: list[Any]) -> mx.array:
        raise ZeroDivisionError

    here = pool(20, is_allocated=False)
    batch = batch_of(here, fail)
    batch.join(SequenceKV(here))
    with pytest.raises(ZeroDivisionError):
        batch.step([1])
    assert here.allocator.used == 2
    batch.discard()
    assert here.allocator.used == 0


def test_a_block_table_is_made_again_only_when_a_page_of_it_changes() -> None:
    here, given = pool(40), list[mx.array]()
    batch = batch_of(here)
    batch._kept_graph = lambda *each: given.append(each[-1]) or batch._traced(*each)  # type: ignore[func-returns-value]

    def step() -> mx.array:
        """What the step was given; it was told all that it must be."""
        tokens = [*range(len(batch))]
        assert batch.step(tokens).tolist() == told(batch, tokens)
        return given[-1]

    for _ in range(2):
        batch.join(SequenceKV(here))
    first = step()
    assert step() is first
    _, second = batch.sequences
    second.advanced(PAGE_TOKENS - second.length)
    longer = step()
    assert longer is not first
    second.trim_to(10)
    assert step() is not longer
    batch.leave(batch.sequences[0])
    assert step().shape[0] == 1
    batch.join(SequenceKV(here))
    assert step().shape[0] == 2


@pytest.mark.parametrize(("rows", "joins"), [(1, 1), (3, 2), (5, 4)])
def test_a_kept_graph_is_told_the_tokens_lengths_and_pages_of_each_step(rows: int, joins: int) -> None:
    here = pool(40)
    batch = batch_of(here)
    for _ in range(rows):
        batch.join(SequenceKV(here))
    traced = []
    batch._kept_graph = KeptGraph(lambda *given: traced.append(given) or batch._traced(*given))
    for step in range(4):
        tokens = [10 * step + row for row in range(rows)]
        logits = batch.step(tokens)
        assert logits.tolist() == told(batch, tokens)
        if step == 2:
            for _ in range(joins):
                batch.join(SequenceKV(here))
            rows += joins
    assert [given[2].shape[0] for given in traced] == [1 << (each - 1).bit_length() for each in (rows - joins, rows)]


@pytest.mark.parametrize(("pass_rows", "rows"), [(0, 1), (0, 3), (4, 6)])
def test_rows_that_go_on_give_the_device_no_places_of_the_hosts(pass_rows: int, rows: int) -> None:
    """Such an array costs each step of CUDA's a fault of a page."""
    here, made = pool(40), []
    batch = DecodeBatch(here, logits_of, 0, pass_rows=pass_rows)
    of = here.numbers.of
    here.numbers.of = lambda given, *shape, **more: made.append(shape) or of(given, *shape, **more)  # type: ignore
    for _ in range(rows):
        batch.join(SequenceKV(here))
    for step in range(6):
        if step == 3:
            batch.join(SequenceKV(here))
        tokens = [*range(len(batch))]
        made.clear()
        assert batch.step(mx.array(tokens, dtype=mx.uint32)).tolist() == told(batch, tokens)
        assert made.count(()) == (step in (0, 3))


def test_known_tokens_need_an_array_of_a_graphs_rows_whatever_their_number() -> None:
    """To make one, CUDA's device is waited for."""
    batch = batch_of(here := pool(40))
    for count in range(1, 9):
        batch.join(SequenceKV(here))
        if count > 4:
            tokens = [*range(10, 10 + count)]
            assert batch.step(tokens)[:, 0].tolist() == tokens
    assert {shape for shape, dtype in here.numbers._slots if dtype == mx.uint32} == {(8,)}


def test_places_of_the_next_step_are_there_with_the_logits_and_leave_empty_rows_empty() -> None:
    """The host writes its array again once logits are read; a row at a place that is none would go to a page."""
    numbers = HostNumbers(is_reused=True)
    kept = KeptPlaces(numbers)
    mx.eval(kept.gone_on(kept.of([5, 0, 7]).astype(mx.float32)))
    numbers.completed(numbers.uses)
    numbers.of([99] * 4)
    assert kept.of([6, 1, 8]).tolist() == [6, 1, 8, -1]
    assert len(numbers._slots[(4,), mx.int32]) == 1


def test_rows_that_go_on_cost_one_kernel_a_step() -> None:
    """Which rows are empty is computed once: claims of up to eight rows lie in memory of the host's."""
    numbers = HostNumbers(is_reused=True)
    kept = KeptPlaces(numbers)
    mx.eval(kept.gone_on(kept.of([5, 0]).astype(mx.float32)))
    for places in ([6, 1], [7, 2]):
        logits = mx.zeros((2, 8))
        mx.eval(logits, kept.of(places))
        after = kept.gone_on(logits)
        mx.export_to_dot(graph := StringIO(), after)
        assert sorted(re.findall(r'label ="(\w+)"', graph.getvalue())) == ["Add", "Depends"]
        mx.eval(after)
    assert kept.of([8, 9]).tolist() == [8, 9, -1, -1]
    mx.eval(kept.gone_on(mx.zeros((2, 8))))
    assert kept.of([9, 10]).tolist() == [9, 10, -1, -1]


def test_a_discarded_batch_makes_no_places_of_a_step_that_failed() -> None:
    batch = batch_of(here := pool(20))
    batch.join(SequenceKV(here))
    batch.step([1])
    batch.discard()
    assert batch._kept_places._made is None


@pytest.mark.parametrize(("pass_rows", "rows"), [(0, 1), (4, 1), (0, 4)])
def test_a_graph_kept_ahead_is_the_one_that_a_deep_turn_needs(pass_rows: int, rows: int) -> None:
    """Beside short turns, and for a row more than there are."""
    here = pool(40)
    batch = DecodeBatch(here, logits_of, 0, pass_rows=pass_rows)
    traced = []
    batch._kept_graph = KeptGraph(lambda *given: traced.append(given) or batch._traced(*given))
    batch.keep_graph(2100, rows)
    assert here.allocator.used == 0
    batch.join(kv := SequenceKV(here))
    tokens = [7] * max(1, rows - 1)
    for _ in tokens[1:]:
        batch.join(SequenceKV(here))
    for table in kv.tables:
        table.pages = dict(enumerate(here.take(9)))
    for length in (2099, 2100):
        kv.length = length
        mx.eval(batch.step(tokens))
    assert len(traced) == 1
    kv.length = 100
    mx.eval(batch.step(tokens))
    assert len(traced) == 2, "a narrower table"


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_passes_of_a_fixed_number_of_rows_are_told_the_same(rows: int) -> None:
    """Four rows a pass: the last one has empty rows, which have no length and no page."""
    here = pool(40)
    batch = DecodeBatch(here, logits_of, 0, pass_rows=4)
    for _ in range(rows):
        batch.join(SequenceKV(here))
    shapes = []
    traced = batch._traced
    batch._kept_graph = lambda *given: shapes.append([each.shape[0] for each in given[2:]]) or traced(*given)
    for given in ([*range(5, 5 + rows)], mx.arange(rows)):
        tokens = given if isinstance(given, list) else given.tolist()
        logits = batch.step(given)
        assert logits.tolist() == told(batch, tokens)
    assert shapes == [[4] * 4] * (2 * -(-rows // 4))


@pytest.mark.parametrize(("counts", "passes"), [([6], ["pass", "wait", "pass"]), ([1] * 6, ["pass", "pass"])])
def test_a_pass_waits_for_the_one_before_where_drafts_may_read_its_rows(
    counts: list[int], passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA computes two passes side by side if no array goes from one to the other."""
    here, seen, evaluate = KvPool(identity_of([full()]), 1 << 20, dialect=Dialect.CUDA), list[str](), mx.eval
    batch = DecodeBatch(here, logits_of, 0, pass_rows=4)
    for _ in counts:
        batch.join(SequenceKV(here))
    traced = batch._traced
    batch._kept_graph = lambda *given: seen.append("pass") or traced(*given)
    monkeypatch.setattr(mx, "eval", lambda *arrays: seen.append("wait") or evaluate(*arrays))
    logits = batch.step(range(6), counts if len(counts) == 1 else None)
    assert seen == passes
    assert logits.tolist()[0][0] == 0


def asks_for_a_kept_graph(here: KvPool) -> bool:
    asked = []
    batch = batch_of(here, lambda tokens, _caches: mx.zeros((*tokens.shape, 4)))
    compiled = batch._kept_graph
    batch._kept_graph = lambda *given: asked.append(given) or compiled(*given)
    batch.join(SequenceKV(here))
    mx.eval(batch.step([1]))
    return bool(asked)


def test_a_graph_is_kept_only_where_kernels_write_the_pages() -> None:
    """MLX's own write makes a new array."""
    assert asks_for_a_kept_graph(pool(20))
    assert not asks_for_a_kept_graph(pool(20, dialect=None))


def test_a_kept_graph_reads_the_arrays_that_a_pool_has_now() -> None:
    """A pool that grows, or gives memory back, has new ones. None of the old is kept, nor a graph over them."""

    def first_unit(_tokens: mx.array, caches: list[Any]) -> mx.array:
        now = caches[0]._now
        return now.pages[0][now.block_tables[0][:, 0], :1].astype(mx.float32)[:, None]

    here = pool(40, is_allocated=False)
    batch, traced = batch_of(here, first_unit), []
    batch._kept_graph = KeptGraph(lambda *given: traced.append(given) or batch._traced(*given))
    batch.join(SequenceKV(here))
    active = mx.get_active_memory()
    for wanted in (0, 10, 20, 0):
        others = here.take(wanted)
        here.give_back()
        batch.step([1])
        (page,) = batch.sequences[0].tables[0].pages.values()
        here.arrays[0][page, 0] = 100 + wanted
        assert batch.step([1]).tolist() == [[100 + wanted]]
        here.release(others)
    assert here.pages_in_memory == 8
    assert len({given[0][0].shape for given in traced}) == 3
    assert len(traced) == 4, "the first size's graph is gone when it comes again"
    traced.clear()
    mx.synchronize()  # a GPU's pass holds what it read a moment longer
    assert mx.get_active_memory() - active < 10 * PAGE_BYTES


def test_no_graph_is_kept_of_a_model_with_states() -> None:
    """They are other arrays after each step."""
    identity = identity_of([full(), recurrent(4)])
    assert not DecodeBatch(KvPool(identity, 1, dialect=Dialect.CUDA), logits_of, 0).keeps_graph


def test_a_closed_batch_holds_no_array_of_a_pass_that_was_traced() -> None:
    """It leads to all weights before its layer: a closed engine kept them for as long as anybody had it."""
    batch = batch_of(pool(20), logits_of)
    batch.join(SequenceKV(batch._pool))
    mx.eval(batch.step([1]))
    assert all(layer._pass is not None for layer in batch._fused.values())
    batch.close()
    assert all(layer._pass is None for layer in batch._fused.values())
