"""Fewer bits of weights: which matrices each choice takes, what it comes to, and that the model is whole afterwards."""

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from kvasir.errors import FailedPrecondition
from mlx_lm.models.cache import make_prompt_cache

from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.quality.exam import TASKS, Subject
from inference_svc.model.quality.material import QUICK
from inference_svc.model.quality.weights import CodedChoice, WeightExam, effective_bits, examine_weights
from tests.inference.engine.models.test_text_exam import SHEETS
from tests.inference.engine.tiny_models import QWEN3, write_model

KINDS = ["embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return ModelRunner(load(write_model(tmp_path_factory.mktemp("qwen3"), QWEN3, 1), "float32").model)


def examined(runner: ModelRunner, by_layer: bool = True) -> WeightExam:
    subject = Subject(runner, None, lambda: None, 4096, SHEETS[:2])
    return examine_weights(subject, QUICK, by_layer=by_layer, clock=time.monotonic, say=lambda _: None)


def test_bits_of_a_weight_count_scales_biases_and_uncoded_weights() -> None:
    sizes = {"a": 640, "b": 320}
    assert effective_bits(CodedChoice("", 4, frozenset({"a"})), sizes, 1000) == pytest.approx(
        (640 * 4.5 + 360 * 16) / 1000
    )
    assert effective_bits(CodedChoice("", 8, frozenset(sizes)), sizes, 960) == 8.5


@pytest.mark.long(1)
def test_each_choice_codes_its_own_matrices_and_leaves_the_model_whole(runner: ModelRunner) -> None:
    """If one stayed coded, the next choice would cost more than it does alone."""
    model: Any = runner.model
    before = mx.array(model.layers[1].mlp.up_proj.weight)
    exam = examined(runner)
    costs = {cost.choice.name: cost for cost in exam.costs}
    alone = [f"4 bits, {name} alone" for name in (*KINDS, "layer 0", "layer 1", "layer 2")]
    assert list(costs) == ["4 bits, all", "4 bits, selective", "8 bits, all", *alone]
    assert mx.array_equal(model.layers[1].mlp.up_proj.weight, before)
    assert (exam.material, exam.refused, exam.exact.kl) == (TASKS, {}, 0.0)
    whole = costs["4 bits, all"]
    assert all(0 < cost.found.kl < 1.5 * whole.found.kl for cost in exam.costs)
    assert costs["8 bits, all"].found.kl < 0.1 * whole.found.kl
    assert costs["4 bits, selective"].choice.paths == whole.choice.paths - {"model.embed_tokens"}
    assert len(costs["4 bits, layer 1 alone"].choice.paths) == 7
    assert costs["4 bits, selective"].weights_bytes > whole.weights_bytes
    again = {cost.choice.name: cost.found.kl for cost in examined(runner, by_layer=False).costs}
    assert again == {name: costs[name].found.kl for name in list(costs)[:11]}


def test_one_kind_alone_costs_as_much_as_a_model_with_these_values_differs(runner: ModelRunner) -> None:
    cost = next(cost for cost in examined(runner, by_layer=False).costs if cost.choice.name == "4 bits, o_proj alone")
    model: Any = runner.model
    own = [layer.self_attn.o_proj.weight for layer in model.layers]
    exact = runner.scores(make_prompt_cache(model), SHEETS[0].ids)
    for layer in model.layers:
        weight = layer.self_attn.o_proj.weight
        layer.self_attn.o_proj.weight = mx.dequantize(
            *mx.quantize(weight, group_size=64, bits=4), group_size=64, bits=4
        )
    coded = runner.scores(make_prompt_cache(model), SHEETS[0].ids)
    mx.eval(exact, coded)
    for layer, weight in zip(model.layers, own, strict=True):
        layer.self_attn.o_proj.weight = weight
    kl = (mx.exp(exact) * (exact - coded)).sum(-1)[:-1].mean()
    assert cost.found.texts[0].kl == pytest.approx(float(kl.item()), rel=1e-3)


def test_codes_and_rows_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    odd = ModelRunner(load(write_model(tmp_path, {**QWEN3, "intermediate_size": 96}, 1), "float32").model)
    refused = examined(odd, by_layer=False).refused
    assert list(refused) == [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
    assert refused["model.layers.0.mlp.down_proj"] == "rows of 96 weights are no whole groups of 64"
    nn.quantize(odd.model, class_predicate=lambda path, _: path.endswith("q_proj"))
    with pytest.raises(FailedPrecondition, match=r"layers\.0\.self_attn\.q_proj is codes already; expected weights of"):
        examined(odd)
