"""What every batched KV backend must do: a batch computes what each sequence computes alone, and nothing is shared."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import ResourceExhausted

from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.decode_step import DecodeStep
from inference_svc.kv.batch.decoded_layer import DecodedLayer
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.prefill_layer import prefill_layers
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.kv.greedy import (
    NONE,
    ROOMY,
    Greedy,
    alone,
    assert_same,
    computed,
    judged_prefilled,
    prefilled,
    tokens_of,
)
from tests.inference.kv.mlx_lm_batch import JudgedLayer, judged_layers
from tests.inference.kv.sequences import (
    fed,
    full,
    identity_of,
    page_bytes,
    poison_behind,
    pool_of,
    random_rows,
    stored,
)

NewKv = Callable[[], SequenceKV]
NewLayers = Callable[[], list[JudgedLayer]]
BORDERS = (1, 2, 63, 64, 65, 255, 256, 257, 300)

STORED_TO_THE_BIT = pytest.mark.cpu_only(
    "on a GPU only fixed numbers of rows keep bits: attention/test_batch_invariance.py"
)
in_blocks_too = pytest.mark.usefixtures("attention_step")  # as on a machine whose kernels sum in blocks


def layers_of(batch: DecodeBatch) -> list[DecodedLayer]:
    return list(batch._decoded.values())


@pytest.mark.long(5)
@STORED_TO_THE_BIT
@in_blocks_too
@pytest.mark.parametrize("budget", [ROOMY, NONE])
def test_a_batch_computes_what_each_computes_alone(model: Any, new_kv: NewKv, budget: int) -> None:
    prompts = {n: tokens_of(n, n) for n in BORDERS}
    together = Greedy(model, new_kv().pool, budget)
    for n, prompt in prompts.items():
        together.join(n, prefilled(model, new_kv(), prompt), prompt[-1])
    for _ in range(12):
        together.step()
    for n, prompt in prompts.items():
        kv = prefilled(model, new_kv(), prompt)
        assert_same(together.logits[n], alone(model, kv, prompt[-1], 12))
        assert stored(together.leave(n)) == stored(kv)


@pytest.mark.long(6)
@STORED_TO_THE_BIT
@in_blocks_too
def test_joins_and_leaves_at_every_offset_around_a_blocks_border_change_nobody(model: Any, new_kv: NewKv) -> None:
    together = Greedy(model, new_kv().pool)
    steps = {name: 4 + name % 7 for name in range(20)}
    prompts = {name: tokens_of(246 + name, name) for name in range(20)}
    finished: dict[int, list[bytes]] = {}
    for tick in range(40):
        if tick in prompts:
            together.join(tick, prefilled(model, new_kv(), prompts[tick]), prompts[tick][-1])
        if not together.names:
            break
        together.step()
        for name in [name for name in together.names if len(together.logits[name]) == steps[name]]:
            finished[name] = stored(together.leave(name))
    assert sorted(finished) == sorted(prompts)
    for name, prompt in prompts.items():
        kv = prefilled(model, new_kv(), prompt)
        assert_same(together.logits[name], alone(model, kv, prompt[-1], steps[name]))
        assert finished[name] == stored(kv)


@in_blocks_too
def test_decoding_on_read_and_from_the_decoded_copy_give_the_same_bits(model: Any, new_kv: NewKv) -> None:
    """Also when the budget is passed in the midst."""
    prompt = tokens_of(250, 1)
    expected = alone(model, prefilled(model, new_kv(), prompt), prompt[-1], 20)
    values_at_256 = 256 * 2 * 2 * 64 * len(model.layers)
    kv = prefilled(model, new_kv(), prompt)
    found = alone(model, kv, prompt[-1], 20, budget=values_at_256)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(alone(model, prefilled(model, new_kv(), prompt), prompt[-1], 20, NONE), expected)


def test_extracting_from_a_merge_gives_back_the_same_bits(model: Any) -> None:
    new_layers = judged_layers(identity_of([full()] * len(model.layers)))
    sequences = [judged_prefilled(model, new_layers(), tokens_of(n, n)) for n in BORDERS]
    before = [[stored(layer.kv) for layer in layers] for layers in sequences]
    for number in range(len(model.layers)):
        merged = sequences[0][number].merge([layers[number] for layers in sequences])
        merged.filter([8, 0, 3])
        assert [merged.extract(i).offset for i in range(3)] == [300, 1, 64]
        for slot, name in enumerate((8, 0, 3)):
            assert stored(merged.extract(slot).kv) == before[name][number]
    assert [[stored(layer.kv) for layer in layers] for layers in sequences] == before


def test_a_concurrent_merge_mixes_no_rows(model: Any) -> None:
    """(LESSONS 2)"""
    new_layers = judged_layers(identity_of([full()] * len(model.layers)))
    layers = [judged_prefilled(model, new_layers(), tokens_of(40 + n, n))[0] for n in range(8)]
    halves = [half[0].merge(half) for half in (layers[:3], layers[3:])]
    halves[0].extend(halves[1])
    halves[0].filter(mx.array([7, 2, 5]))
    for slot, name in enumerate((7, 2, 5)):
        assert stored(halves[0].extract(slot).kv) == stored(layers[name].kv)


@in_blocks_too
def test_a_trim_leaves_no_stale_tail_that_is_attended_to(model: Any, new_kv: NewKv) -> None:
    """Freed rows are poisoned: NaN behind the valid rows of the last page and in free pages, large finite values where
    others' rows are masked (LESSONS 1).
    """
    prompt = tokens_of(270, 3)
    expected = alone(model, prefilled(model, new_kv(), prompt), prompt[-1], 8)
    kv = prefilled(model, new_kv(), [*prompt, *tokens_of(330, 4)])
    kv.trim_to(270)
    poison_behind(kv)
    long = prefilled(model, new_kv(), tokens_of(400, 5))
    together = Greedy(model, kv.pool)
    together.join(1, long, 9)
    together.join(0, kv, prompt[-1])
    together.step()
    for layer in layers_of(together.batch):
        for array in layer._decoded.arrays:
            array[1:2, :, 271:] = 1e30
    for _ in range(7):
        together.step()
    assert_same(together.logits[0], expected)


@in_blocks_too
def test_a_slot_that_is_used_again_shows_nothing_of_who_left_it(model: Any, new_kv: NewKv) -> None:
    """(LESSONS 15)"""
    together = Greedy(model, new_kv().pool)
    together.join(0, prefilled(model, new_kv(), tokens_of(500, 1)), 5)
    together.join(1, prefilled(model, new_kv(), tokens_of(20, 2)), 6)
    for _ in range(3):
        together.step()
    together.leave(0)
    prompt = tokens_of(33, 7)
    together.join(2, prefilled(model, new_kv(), prompt), prompt[-1])
    for _ in range(6):
        together.step()
    assert_same(together.logits[2], alone(model, prefilled(model, new_kv(), prompt), prompt[-1], 6))


@in_blocks_too
def test_a_sequence_that_takes_a_slot_before_its_first_step_sees_its_own_rows(model: Any, new_kv: NewKv) -> None:
    """The slot's decoded rows are of the sequence that left (LESSONS 15)."""
    together = Greedy(model, new_kv().pool)
    together.join(0, prefilled(model, new_kv(), tokens_of(200, 1)), 5)
    together.join(1, prefilled(model, new_kv(), tokens_of(190, 2)), 6)
    together.step()
    prompt = tokens_of(150, 7)
    together.join(2, prefilled(model, new_kv(), prompt), prompt[-1])
    together.leave(0)
    for _ in range(4):
        together.step()
    assert_same(together.logits[2], alone(model, prefilled(model, new_kv(), prompt), prompt[-1], 4))


def test_forks_do_not_alias(model: Any, new_kv: NewKv) -> None:
    """(LESSONS 6)"""
    prompt = tokens_of(255, 8)
    kv = prefilled(model, new_kv(), prompt)
    before = stored(kv)
    fork, untouched = kv.fork(), kv.fork()
    together = Greedy(model, kv.pool)
    together.join(0, kv, 10)
    together.join(1, fork, 11)
    for _ in range(5):
        together.step()
    left, right = together.leave(0), together.leave(1)
    assert left.length == right.length == 260
    assert stored(left) != stored(right)
    left.trim_to(255)
    right.trim_to(255)
    assert stored(left) == stored(right) == stored(untouched) == before


def test_two_of_a_batch_that_share_their_last_page_write_a_page_each(model: Any, new_kv: NewKv) -> None:
    """The first one copies it; the second is its only holder then and may write it, in the same step."""
    prompt, firsts = tokens_of(100, 8), (10, 11, 12)
    kv = prefilled(model, new_kv(), prompt)
    forks = [kv, kv.fork(), kv.fork()]
    together = Greedy(model, kv.pool)
    for name, (one, first) in enumerate(zip(forks, firsts, strict=True)):
        together.join(name, one, first)
    for _ in range(4):
        together.step()
    assert kv.pool.allocator.shared == 0
    for name, first in enumerate(firsts):
        assert_same(together.logits[name], alone(model, prefilled(model, new_kv(), prompt), first, 4))


def test_a_step_without_room_changes_nobody(model: Any) -> None:
    """One of two got a page for its next row before the pool was found to be full."""
    pool = pool_of([full()] * len(model.layers), pages=4)
    prompt = tokens_of(100, 1)
    sharing = prefilled(model, SequenceKV(pool), prompt)
    memory = sharing.fork()  # its tail cannot be written by `sharing`
    others = [prefilled(model, SequenceKV(pool), tokens_of(PAGE_TOKENS, seed)) for seed in (2, 3)]
    before = [stored(kv) for kv in (sharing, memory, *others)]
    together = Greedy(model, pool)
    for name, kv in enumerate((sharing, *others)):
        together.join(name, kv, 9)
    assert pool.allocator.free == 1
    with pytest.raises(ResourceExhausted):
        together.step()
    assert [stored(kv) for kv in (sharing, memory, *others)] == before
    assert pool.allocator.free == 1
    for name in (1, 2):
        together.leave(name).release()
    together.step()
    roomy = prefilled(model, SequenceKV(pool_of([full()] * len(model.layers))), prompt)
    assert_same(together.logits[0], alone(model, roomy, 9, 1))


def test_a_step_writes_no_page_that_others_hold(model: Any, new_kv: NewKv) -> None:
    memory = prefilled(model, new_kv(), tokens_of(300, 8))
    held = page_bytes(memory.pool, memory.pages)
    together = Greedy(model, memory.pool)
    for name in range(3):
        together.join(name, memory.fork([256, 260, 300][name]), 10 + name)
    for _ in range(3):
        together.step()
    assert page_bytes(memory.pool, memory.pages) == held


def test_a_deep_copy_of_a_batch_goes_its_own_way(model: Any) -> None:
    layers = judged_prefilled(model, judged_layers(identity_of([full()] * len(model.layers)))(), tokens_of(70, 8))
    batches = [layer.merge([layer]) for layer in layers]
    copies = copy.deepcopy(batches)
    model(mx.array([[3]]), cache=copies)
    model(mx.array([[4]]), cache=batches)
    ours, theirs = batches[0].extract(0), copies[0].extract(0)
    assert stored(ours.kv) != stored(theirs.kv)
    ours.trim(1)
    theirs.trim(1)
    assert stored(ours.kv) == stored(theirs.kv) == stored(layers[0].kv)


def test_the_offset_that_a_model_holds_never_changes() -> None:
    """(LESSONS 4)"""
    kv = fed(SequenceKV(pool_of([full()])), [5])
    held: list[mx.array] = []

    def forward(_tokens: mx.array, caches: list[Any]) -> mx.array:
        held.append(caches[0].offset)
        seen, _ = caches[0].update_and_fetch(*(mx.concatenate([part] * 2) for part in random_rows(1, 1)))
        return mx.zeros((2, 1, 4)) + 0 * seen.sum()

    batch = DecodeBatch(kv.pool, forward, ROOMY)
    batch.join(kv.fork())
    batch.join(kv.fork())
    for _ in range(2):
        mx.eval(batch.step([1, 1]))
    assert [offset.tolist() for offset in held] == [[5, 5], [6, 6]]


def test_a_row_extracted_while_right_padding_is_pending_holds_its_own_tokens_only(model: Any) -> None:
    """(LESSONS 3)"""
    prompts = [tokens_of(7, 1), tokens_of(3, 2)]
    new_layers = judged_layers(identity_of([full()] * len(model.layers)))
    batches = [layer.merge([layer, layer]) for layer in new_layers()]
    for batch in batches:
        batch.prepare(lengths=[7, 3], right_padding=[0, 4])
    padded = mx.array([prompts[0], prompts[1] + [0] * 4])
    model(padded[:, :5], cache=batches)
    assert [batches[0].extract(slot).offset for slot in (0, 1)] == [5, 3]
    model(padded[:, 5:], cache=batches)
    for batch in batches:
        batch.finalize()
    expected = judged_prefilled(model, new_layers(), prompts[1])
    for batch, layer in zip(batches, expected, strict=True):
        assert stored(batch.extract(1).kv) == stored(layer.kv)


def test_what_a_step_stored_is_computed_in_that_step(model: Any, new_kv: NewKv) -> None:
    """Pages have no reader while the decoded copy is used: unevaluated, each step would hold the graph before it. Only
    evaluated arrays can be read on another thread.
    """
    kv = prefilled(model, new_kv(), tokens_of(60, 1))
    together = Greedy(model, kv.pool)
    together.join(0, kv, 3)
    for _ in range(70):
        together.step()
    arrays = [*kv.pool.arrays, *(array for layer in layers_of(together.batch) for array in layer._decoded.arrays)]
    with ThreadPoolExecutor(1) as other:
        for array in arrays:
            other.submit(np.array, array).result(60)


@pytest.mark.long(2)
@in_blocks_too
def test_the_decoded_copy_takes_no_more_room_than_it_may(model: Any, new_kv: NewKv) -> None:
    """Also room that who left has made: it is given back when it is too much."""
    per_row = len(model.layers) * 2 * 2 * 64
    budget = 5 * 768 * per_row
    together = Greedy(model, new_kv().pool, budget)
    for name in range(8):
        together.join(name, prefilled(model, new_kv(), tokens_of(20 + 60 * name, name)), 5)
    for name in range(8):
        for _ in range(3):
            together.step()
            decoded = [array for layer in layers_of(together.batch) for array in layer._decoded.arrays]
            assert sum(array.size for array in decoded) <= budget
        if name < 7:
            together.leave(name)
    assert decoded, "one row is within any budget"


def test_a_failed_step_is_forgotten_with_its_scratch(model: Any, new_kv: NewKv) -> None:
    """Its sequences go on in another batch as if it had not been tried."""
    prompt = tokens_of(80, 1)
    kv = prefilled(model, new_kv(), prompt)
    failing = DecodeBatch(kv.pool, lambda _tokens, _caches: mx.zeros((1 // 0,)), ROOMY)
    failing.join(kv)
    with pytest.raises(ZeroDivisionError):
        failing.step([5])
    assert (failing.discard(), len(failing)) == ([kv], 0)
    assert not [array for layer in layers_of(failing) for array in layer._decoded.arrays]
    assert_same(alone(model, kv, prompt[-1], 3), alone(model, prefilled(model, new_kv(), prompt), prompt[-1], 3))


class TestUnmodifiedBatchGenerator:
    """mlx-lm's own engine is the best independent judge of its cache protocol."""

    def run(
        self, model: Any, new_layers: NewLayers, prompts: list[list[int]], max_tokens: list[int], **kw: Any
    ) -> list[tuple[list[int], list[JudgedLayer]]]:
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(model, stop_tokens=[], prefill_step_size=64, **kw)
        uids = generator.insert(prompts, max_tokens, caches=[new_layers() for _ in prompts])
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        caches: dict[int, list[JudgedLayer]] = {}
        while len(caches) < len(uids):
            for response in generator.next()[1]:
                tokens[response.uid].append(response.token)
                if response.finish_reason is not None:
                    caches[response.uid] = response.prompt_cache
        generator.close()
        return [(tokens[uid], caches[uid]) for uid in uids]

    @pytest.mark.long(4)
    @in_blocks_too
    def test_ragged_prompts_joins_and_leaves_give_what_each_gives_alone(self, model: Any) -> None:
        new_layers = judged_layers(identity_of([full()] * len(model.layers)))
        prompts = [tokens_of(n, n) for n in (3, 64, 130, 17, 200, 65, 5)]
        limits = [9, 20, 5, 14, 11, 3, 30]
        found = self.run(model, new_layers, prompts, limits, completion_batch_size=4, prefill_batch_size=3)
        for prompt, limit, (tokens, cache) in zip(prompts, limits, found, strict=True):
            [(expected, _)] = self.run(model, new_layers, [prompt], [limit])
            assert tokens == expected
            assert [layer.offset for layer in cache] == [len(prompt) + limit] * len(cache)

    def test_an_extracted_cache_is_resumed_with_new_tokens_only(self, model: Any, new_kv: NewKv) -> None:
        from mlx_lm.generate import BatchGenerator

        new_layers = judged_layers(identity_of([full()] * len(model.layers)))
        prompts = [tokens_of(30, 1), tokens_of(41, 2)]
        first = self.run(model, new_layers, prompts, [6, 6])
        generator = BatchGenerator(model, stop_tokens=[])
        uids = generator.insert([[7, 8], [9]], [5, 5], caches=[cache for _, cache in first])
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        for _ in range(20):
            for response in generator.next()[1]:
                tokens[response.uid].append(response.token)
        generator.close()
        for (said, _), prompt, more, uid in zip(first, prompts, ([7, 8], [9]), uids, strict=True):
            kv = prefilled(model, new_kv(), prompt)
            for token in (*said, *more[:-1]):
                computed(model, kv, [token])
            assert tokens[uid] == [int(row.argmax()) for row in alone(model, kv, more[-1], 5)]


def test_several_tokens_of_a_sequence_at_once_are_refused_and_not_cut() -> None:
    kv = fed(SequenceKV(pool_of([full()])), [5])
    layer = DecodedLayer(kv.pool, 0)
    layer.begin(DecodeStep.of(kv.pool, [kv]), keeps_decoded=True)
    with pytest.raises(ValueError, match="a row of its own"):
        layer.update_and_fetch(*random_rows(3, 1))
    with pytest.raises(ValueError, match="a row of its own"):
        layer.make_mask(3)


def test_a_layer_that_keeps_all_tokens_refuses_to_be_a_window() -> None:
    kv = fed(SequenceKV(pool_of([full()])), [5])
    layer = DecodedLayer(kv.pool, 0)
    layer.begin(DecodeStep.of(kv.pool, [kv]), keeps_decoded=True)
    for cache, count in ((layer, 1), (prefill_layers(kv)[0], 5)):
        with pytest.raises(ValueError, match="window"):
            cache.make_mask(count, window_size=3)  # type: ignore[union-attr, call-arg]


@pytest.mark.parametrize("moves", [False, True], ids=["who takes the slot", "whom a leaving moves there"])
def test_numbers_that_are_none_are_not_left_to_the_next_sequence(model: Any, new_kv: NewKv, moves: bool) -> None:
    """What is masked still counts as 0 times what the slot holds there. The last slot's sequence takes the place of
    one that leaves, and may have fewer rows than that had.
    """
    prompt = tokens_of(60, 3)
    together = Greedy(model, new_kv().pool)
    together.join(0, prefilled(model, new_kv(), tokens_of(100 if moves else 200, 1)), 5)
    together.join(1, prefilled(model, new_kv(), tokens_of(190, 2)), 6)
    if moves:
        together.join(2, prefilled(model, new_kv(), prompt), prompt[-1])
    together.step()
    for layer in layers_of(together.batch):
        for array in layer._decoded.arrays:
            array[1:2] = float("nan")
    together.leave(1)
    if not moves:
        together.join(2, prefilled(model, new_kv(), prompt), prompt[-1])
    for _ in range(3 if moves else 4):
        together.step()
    assert_same(together.logits[2], alone(model, prefilled(model, new_kv(), prompt), prompt[-1], 4))
