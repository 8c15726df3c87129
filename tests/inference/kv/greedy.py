"""Sequences that are prefilled and decoded by hand, greedily, in one batch or each alone."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.prefill_layer import commit, prefill_layers
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.blas import load_optimized_blas
from inference_svc.model.loading import device
from tests.inference.engine.tiny_models import VOCABULARY
from tests.inference.kv.mlx_lm_batch import JudgedLayer

ROOMY, NONE = 1 << 40, 0  # budgets of decoded values: a copy of every row, or decoding on read
IS_MKL = device() == "cpu" and "mkl" in (load_optimized_blas() or "")


def tokens_of(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(8, VOCABULARY), k=count)


def prefilled(model: Any, kv: SequenceKV, token_ids: Sequence[int]) -> SequenceKV:
    for start in range(0, len(token_ids), 256):
        computed(model, kv, token_ids[start : start + 256])
    return kv


def computed(model: Any, kv: SequenceKV, token_ids: Sequence[int]) -> None:
    layers = prefill_layers(kv)
    model(mx.array([token_ids]), cache=layers)
    commit(kv, layers, len(token_ids))


def judged_prefilled(model: Any, layers: list[JudgedLayer], token_ids: Sequence[int]) -> list[JudgedLayer]:
    """Over caches of mlx-lm's protocol, one a layer."""
    for start in range(0, len(token_ids), 256):
        model(mx.array([token_ids[start : start + 256]]), cache=layers)
        mx.eval([layer.state for layer in layers])
    return layers


def forward(model: Any) -> Callable[[mx.array, list[Any]], mx.array]:
    return lambda tokens, caches: model(tokens, cache=caches)[:, -1:]


class Greedy:
    """Sequences that decode, greedily, in one batch or each in its own."""

    def __init__(self, model: Any, pool: KvPool, budget: int = ROOMY) -> None:
        self.batch = DecodeBatch(pool, forward(model), budget)
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
    single = Greedy(model, kv.pool, budget)
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
