"""Sorted experts multiply rows that lie one behind the other: MLX's product on CUDA reads others from elsewhere."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from inference_svc.kv.model_hooks.expert_rows import lay_expert_rows
from inference_svc.model.loading import load
from tests.inference.engine.families import GPT_OSS, write_family

TOKENS = mx.arange(106, dtype=mx.uint32)[None]  # two experts each: more rows than mlx-lm leaves unsorted
WIDTHS = {GPT_OSS["hidden_size"], GPT_OSS["intermediate_size"]}


def logits_of(model: Any) -> mx.array:
    found: mx.array = model(TOKENS, cache=make_prompt_cache(model))
    mx.eval(found)
    return found


def expert_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SwitchLinear)]


@pytest.fixture
def distances(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of sorted products: the rows' width, and what MLX takes for the distance of two. None of them is let go before it
    is over, as where a product's buffer is too large for the sum with its bias.
    """
    found, held, multiply = list[tuple[int, int]](), list[mx.array](), mx.gather_mm

    def gather_mm(x: mx.array, *given: Any, **options: Any) -> mx.array:
        mx.eval(x)
        if options["sorted_indices"]:
            strides = memoryview(x).strides  # type: ignore[arg-type]
            assert strides is not None
            found.append((x.shape[-1], strides[-2] // x.itemsize))
        held.append(multiply(x, *given, **options))
        return held[-1]

    monkeypatch.setattr(mx, "gather_mm", gather_mm)
    return found


def test_rows_lie_one_behind_the_other(tmp_path: Path, distances: list[tuple[int, int]]) -> None:
    model: Any = load(write_family(tmp_path, GPT_OSS), None).model
    logits_of(model)
    assert {width for width, _ in distances} == WIDTHS
    assert all(distance == width for width, distance in distances)


def test_rows_of_mlx_lm_lie_elsewhere(tmp_path: Path, distances: list[tuple[int, int]]) -> None:
    """Else the hook is needed no more."""
    model, _ = mlx_lm.utils.load_model(write_family(tmp_path, GPT_OSS), lazy=True)
    logits_of(model)
    assert (GPT_OSS["intermediate_size"], 1) in distances


def test_no_bit_changes_on_a_cpu(tmp_path: Path) -> None:
    model, _ = mlx_lm.utils.load_model(write_family(tmp_path, GPT_OSS), lazy=True)
    with mx.stream(mx.cpu):
        before = logits_of(model)
        lay_expert_rows(model)
        lay_expert_rows(model)
        assert len(expert_layers(model)) == 3 * GPT_OSS["num_hidden_layers"]
        assert mx.array_equal(logits_of(model), before)


def test_rows_that_lie_elsewhere_are_multiplied_as_they_are() -> None:
    """On CUDA, mlx-lm's own multiplies only each expert's first row right."""
    model: Any = nn.Module()
    model.experts = SwitchLinear(192, 128, 4, bias=False)
    lay_expert_rows(model)
    x = mx.random.normal((212, 192), key=mx.random.key(1))
    experts = mx.sort(mx.random.randint(0, 4, (212,), key=mx.random.key(2)).astype(mx.uint32))
    found = model.experts(mx.expand_dims(x, -2), experts, sorted_indices=True)[:, 0]
    exact = np.einsum("tk,tnk->tn", np.array(x), np.array(model.experts.weight[experts]))
    assert np.allclose(np.array(found), exact, rtol=0.02, atol=0.02)


def test_experts_of_codes_stay_what_they_are(tmp_path: Path) -> None:
    model: Any = load(write_family(tmp_path, GPT_OSS), None).model
    nn.quantize(model, class_predicate=lambda _, module: isinstance(module, SwitchLinear))
    lay_expert_rows(model)
    assert not expert_layers(model)
    assert any(type(module) is QuantizedSwitchLinear for module in model.modules())
    logits_of(model)
