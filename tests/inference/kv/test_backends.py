"""What every batched KV backend must do: a batch computes what each sequence computes alone, and nothing is shared."""

import copy
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from inference_svc.kv.batch.batch_kv import BatchLayerKV
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.blas import load_optimized_blas
from inference_svc.model.loading import device
from tests.inference.engine.tiny_models import VOCABULARY
from tests.inference.kv.mlx_lm_batch import JudgedBatchKV, judged_layers

NewKv = Callable[[], SequenceKV]
BORDERS = (1, 2, 63, 64, 65, 255, 256, 257, 300)
ROOMY, NONE = 1 << 40, 0  # budgets of decoded values: a copy of every row, or decoding on read
IS_MKL = device() == "cpu" and "mkl" in (load_optimized_blas() or "")


def tokens_of(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(8, VOCABULARY), k=count)


def prefilled(model: Any, kv: SequenceKV, token_ids: Sequence[int]) -> SequenceKV:
    for start in range(0, len(token_ids), 256):
        model(mx.array([token_ids[start : start + 256]]), cache=kv.layers)
        mx.eval(kv.state)
    return kv


def forward(model: Any) -> Callable[[mx.array, list[Any]], mx.array]:
    return lambda tokens, caches: model(tokens, cache=caches)[:, -1:]


class Greedy:
    """Sequences that decode, greedily, in one batch or each in its own."""

    def __init__(self, model: Any, budget: int) -> None:
        self.batch = DecodeBatch(forward(model), budget)
        self.last: dict[int, int] = {}
        self.logits: dict[int, list[np.ndarray]] = {}
        self.names: dict[int, SequenceKV] = {}

    def join(self, name: int, kv: SequenceKV, first: int) -> None:
        self.batch.join(kv)
        self.last[name], self.names[name] = first, kv
        self.logits.setdefault(name, [])

    def leave(self, name: int) -> SequenceKV:
        kv = self.names.pop(name)
        self.batch.leave(kv)
        return kv

    def step(self) -> None:
        by_kv = {id(kv): name for name, kv in self.names.items()}
        order = [by_kv[id(kv)] for kv in self.batch.sequences]
        logits = np.array(self.batch.step([self.last[name] for name in order]))
        for name, row in zip(order, logits, strict=True):
            self.logits[name].append(row)
            self.last[name] = int(row.argmax())


def alone(model: Any, kv: SequenceKV, first: int, steps: int, budget: int = ROOMY) -> list[np.ndarray]:
    single = Greedy(model, budget)
    single.join(0, kv, first)
    for _ in range(steps):
        single.step()
    single.leave(0)
    return single.logits[0]


def assert_same(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert [row.argmax() for row in found] == [row.argmax() for row in expected]
    if IS_MKL:  # which treats rows alike from four on
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert np.array_equal(ours, theirs), f"step {step} differs by {abs(ours - theirs).max()}"


def stored(kv: SequenceKV) -> list[bytes]:
    return [data for layer in kv.layers for buffer in layer.buffers for data in buffer.to_bytes(0, layer.offset)]


@pytest.mark.parametrize("budget", [ROOMY, NONE])
def test_a_batch_computes_what_each_computes_alone(model: Any, new_kv: NewKv, budget: int) -> None:
    prompts = {n: tokens_of(n, n) for n in BORDERS}
    together = Greedy(model, budget)
    for n, prompt in prompts.items():
        together.join(n, prefilled(model, new_kv(), prompt), prompt[-1])
    for _ in range(12):
        together.step()
    for n, prompt in prompts.items():
        kv = prefilled(model, new_kv(), prompt)
        assert_same(together.logits[n], alone(model, kv, prompt[-1], 12))
        assert stored(together.leave(n)) == stored(kv)


def test_joins_and_leaves_at_every_offset_around_a_blocks_border_change_nobody(model: Any, new_kv: NewKv) -> None:
    together = Greedy(model, ROOMY)
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


def test_extracting_from_a_merge_gives_back_the_same_bits(model: Any, new_kv: NewKv) -> None:
    kvs = [prefilled(model, new_kv(), tokens_of(n, n)) for n in BORDERS]
    before = [stored(kv) for kv in kvs]
    for layer in range(len(model.layers)):
        merged = JudgedBatchKV.merge([kv.row_layers[layer] for kv in kvs])
        merged.filter([8, 0, 3])
        assert [merged.extract(i).offset for i in range(3)] == [300, 1, 64]
        assert merged.extract(0).buffers[0].to_bytes(0, 300) == kvs[8].layers[layer].buffers[0].to_bytes(0, 300)
        assert merged.extract(2).buffers[1].to_bytes(0, 64) == kvs[3].layers[layer].buffers[1].to_bytes(0, 64)
    assert [stored(kv) for kv in kvs] == before


def test_a_concurrent_merge_mixes_no_rows(model: Any, new_kv: NewKv) -> None:
    """(LESSONS 2)"""
    kvs = [prefilled(model, new_kv(), tokens_of(40 + n, n)) for n in range(8)]
    halves = [JudgedBatchKV.merge([kv.row_layers[0] for kv in half]) for half in (kvs[:3], kvs[3:])]
    halves[0].extend(halves[1])
    halves[0].filter(mx.array([7, 2, 5]))
    for slot, name in enumerate((7, 2, 5)):
        row = halves[0].extract(slot)
        assert [b.to_bytes(0, row.offset) for b in row.buffers] == [
            b.to_bytes(0, 40 + name) for b in kvs[name].layers[0].buffers
        ]


def test_a_trim_leaves_no_stale_tail_that_is_attended_to(model: Any, new_kv: NewKv) -> None:
    """Freed rows are poisoned: NaN behind the valid rows, large finite values where others' rows are masked
    (LESSONS 1).
    """
    prompt = tokens_of(270, 3)
    expected = alone(model, prefilled(model, new_kv(), prompt), prompt[-1], 8)
    kv = prefilled(model, new_kv(), [*prompt, *tokens_of(30, 4)])
    kv.trim_to(270)
    for layer in kv.layers:
        for buffer in layer.buffers:
            poison_behind(buffer, 270)
    long = prefilled(model, new_kv(), tokens_of(400, 5))
    together = Greedy(model, ROOMY)
    together.join(1, long, 9)
    together.join(0, kv, prompt[-1])
    together.step()
    for layer in together.batch._layers:
        for array in layer._decoded.arrays:
            array[1:2, :, 271:] = 1e30
    for _ in range(7):
        together.step()
    assert_same(together.logits[0], expected)


def poison_behind(buffer: Any, rows: int) -> None:
    codes, scales, biases = buffer.parts
    for part in (scales, biases):
        part[:, :, rows:] = float("nan")
    codes[:, :, rows:] = 0xFFFFFFFF
    buffer.parts = (codes, scales, biases)


def test_a_slot_that_is_used_again_shows_nothing_of_who_left_it(model: Any, new_kv: NewKv) -> None:
    """(LESSONS 15)"""
    together = Greedy(model, ROOMY)
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


def test_a_sequence_that_takes_a_slot_before_its_first_step_sees_its_own_rows(model: Any, new_kv: NewKv) -> None:
    """The slot's decoded rows are of the sequence that left (LESSONS 15)."""
    together = Greedy(model, ROOMY)
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
    fork = kv.fork()
    together = Greedy(model, ROOMY)
    together.join(0, kv, 10)
    together.join(1, fork, 11)
    for _ in range(5):
        together.step()
    left, right = together.leave(0), together.leave(1)
    assert left.length == right.length == 260
    assert stored(left) != stored(right)
    left.trim_to(255)
    right.trim_to(255)
    assert stored(left) == stored(right) == before


def test_a_deep_copy_of_a_batch_goes_its_own_way(model: Any, new_kv: NewKv) -> None:
    kv = prefilled(model, new_kv(), tokens_of(70, 8))
    batches = [JudgedBatchKV.merge([layer]) for layer in kv.row_layers]
    copies = copy.deepcopy(batches)
    model(mx.array([[3]]), cache=copies)
    model(mx.array([[4]]), cache=batches)
    mx.eval([batch.state for batch in (*batches, *copies)])
    ours, theirs = batches[0].extract(0), copies[0].extract(0)
    assert ours.buffers[0].to_bytes(0, 70) == theirs.buffers[0].to_bytes(0, 70)
    assert ours.buffers[0].to_bytes(70, 71) != theirs.buffers[0].to_bytes(70, 71)


def test_the_offset_that_a_model_holds_never_changes(model: Any, new_kv: NewKv) -> None:
    """(LESSONS 4)"""
    layer = prefilled(model, new_kv(), tokens_of(5, 1)).row_layers[0]
    batch = BatchLayerKV([layer.fork(), layer.fork()])
    held = batch.offset
    rows = mx.ones((2, 2, 1, 64))
    batch.update_and_fetch(rows, rows)
    assert held.tolist() == [5, 5]
    assert batch.offset.tolist() == [6, 6]


def test_a_row_extracted_while_right_padding_is_pending_holds_its_own_tokens_only(model: Any, new_kv: NewKv) -> None:
    """(LESSONS 3)"""
    prompts = [tokens_of(7, 1), tokens_of(3, 2)]
    batches = [JudgedBatchKV.merge([layer, layer]) for layer in new_kv().row_layers]
    for batch in batches:
        batch.prepare(lengths=[7, 3], right_padding=[0, 4])
    padded = mx.array([prompts[0], prompts[1] + [0] * 4])
    model(padded[:, :5], cache=batches)
    assert [batches[0].extract(slot).offset for slot in (0, 1)] == [5, 3]
    model(padded[:, 5:], cache=batches)
    for batch in batches:
        batch.finalize()
    expected = prefilled(model, new_kv(), prompts[1])
    assert stored(SequenceKV([batch.extract(1) for batch in batches])) == stored(expected)


def test_what_a_step_staged_is_computed_in_that_step(model: Any, new_kv: NewKv) -> None:
    """Codes have no reader while the decoded copy is used: unevaluated, each step would hold the graph before it. Only
    evaluated arrays can be read on another thread.
    """
    together = Greedy(model, ROOMY)
    together.join(0, prefilled(model, new_kv(), tokens_of(60, 1)), 3)
    for _ in range(70):
        together.step()
    arrays = [array for layer in together.batch._layers for array in layer.state]
    with ThreadPoolExecutor(1) as other:
        for array in arrays:
            other.submit(np.array, array).result(60)


def test_the_decoded_copy_takes_no_more_room_than_it_may(model: Any, new_kv: NewKv) -> None:
    """Also room that who left has made: it is given back when it is too much."""
    per_row = len(model.layers) * 2 * 2 * 64
    budget = 5 * 768 * per_row
    together = Greedy(model, budget)
    for name in range(8):
        together.join(name, prefilled(model, new_kv(), tokens_of(20 + 60 * name, name)), 5)
    for name in range(8):
        for _ in range(3):
            together.step()
            decoded = [array for layer in together.batch._layers for array in layer._decoded.arrays]
            assert sum(array.size for array in decoded) <= budget
        if name < 7:
            together.leave(name)
    assert decoded, "one row is within any budget"


class TestUnmodifiedBatchGenerator:
    """mlx-lm's own engine is the best independent judge of its cache protocol."""

    def run(self, model: Any, new_kv: NewKv, prompts: list[list[int]], max_tokens: list[int], **kw: Any) -> list[Any]:
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(model, stop_tokens=[], prefill_step_size=64, **kw)
        uids = generator.insert(prompts, max_tokens, caches=[judged_layers(new_kv().layers) for _ in prompts])
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        caches: dict[int, list[LayerKV]] = {}
        while len(caches) < len(uids):
            for response in generator.next()[1]:
                tokens[response.uid].append(response.token)
                if response.finish_reason is not None:
                    caches[response.uid] = response.prompt_cache
        generator.close()
        return [(tokens[uid], caches[uid]) for uid in uids]

    def test_ragged_prompts_joins_and_leaves_give_what_each_gives_alone(self, model: Any, new_kv: NewKv) -> None:
        prompts = [tokens_of(n, n) for n in (3, 64, 130, 17, 200, 65, 5)]
        limits = [9, 20, 5, 14, 11, 3, 30]
        found = self.run(model, new_kv, prompts, limits, completion_batch_size=4, prefill_batch_size=3)
        for prompt, limit, (tokens, cache) in zip(prompts, limits, found, strict=True):
            [(expected, _)] = self.run(model, new_kv, [prompt], [limit])
            assert tokens == expected
            assert [layer.offset for layer in cache] == [len(prompt) + limit] * len(cache)

    def test_an_extracted_cache_is_resumed_with_new_tokens_only(self, model: Any, new_kv: NewKv) -> None:
        from mlx_lm.generate import BatchGenerator

        prompts = [tokens_of(30, 1), tokens_of(41, 2)]
        first = self.run(model, new_kv, prompts, [6, 6])
        generator = BatchGenerator(model, stop_tokens=[])
        uids = generator.insert([[7, 8], [9]], [5, 5], caches=[cache for _, cache in first])
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        for _ in range(20):
            for response in generator.next()[1]:
                tokens[response.uid].append(response.token)
        generator.close()
        for (said, _), prompt, more, uid in zip(first, prompts, ([7, 8], [9]), uids, strict=True):
            kv = prefilled(model, new_kv(), prompt)
            for token in said:
                model(mx.array([[token]]), cache=kv.layers)
            for token in more[:-1]:
                model(mx.array([[token]]), cache=kv.layers)
            assert tokens[uid] == [int(row.argmax()) for row in alone(model, kv, more[-1], 5)]


def test_several_tokens_of_a_sequence_at_once_are_refused_and_not_cut() -> None:
    rows = mx.zeros((1, 2, 3, 64))
    with pytest.raises(ValueError, match="one token"):
        BatchLayerKV().update_and_fetch(rows, rows)
