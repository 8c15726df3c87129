"""A norm that adds one to its weight at every call becomes a plain one: the same bits, and one operation less."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx import nn
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import make_prompt_cache

from inference_svc.kv.model_hooks.plain_norms import take_plain_norms
from inference_svc.model.loading import load
from tests.inference.engine.families import ALL, GEMMA3, write_family

TOKENS = mx.arange(40, dtype=mx.uint32)[None]
GEMMA_NORMS = 6 * GEMMA3["num_hidden_layers"] + 1


def logits_of(model: Any) -> mx.array:
    found: mx.array = model(TOKENS, cache=make_prompt_cache(model))
    mx.eval(found)
    return found


def disturbed(model: Any) -> Any:
    """The model with norms whose weights are not all alike."""
    for place, module in enumerate(model.modules()):
        if type(module).__name__ == "RMSNorm":
            shape, dtype = module.weight.shape, module.weight.dtype
            module.weight = mx.random.normal(shape, key=mx.random.key(place)).astype(dtype)
    return model


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("family", ["gemma3", "llama3.1"])
def test_plain_norms_change_no_bit(tmp_path: Path, family: str, dtype: mx.Dtype) -> None:
    model, _ = mlx_lm.utils.load_model(write_family(tmp_path, ALL[family]), lazy=True)
    model.set_dtype(dtype)
    before = logits_of(disturbed(model))
    take_plain_norms(model)
    modules: Any = model
    names = [type(module) for module in modules.modules() if type(module).__name__ == "RMSNorm"]
    assert set(names) == {RMSNorm}
    assert len(names) == GEMMA_NORMS or family != "gemma3"
    assert mx.array_equal(logits_of(model), before)


def test_a_loaded_model_adds_nothing_to_its_norms(tmp_path: Path) -> None:
    model: Any = load(write_family(tmp_path, GEMMA3), None).model
    assert not [module for module in model.modules() if isinstance(module, gemma3_text.RMSNorm)]


class _Doubled(gemma3_text.RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        found: mx.array = 2 * super().__call__(x)
        return found


class _Gated(gemma3_text.RMSNorm):
    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        found: mx.array = gate * super().__call__(x)
        return found


def test_a_norm_of_that_name_that_takes_more_than_its_input_stays_what_it_is() -> None:
    model: Any = nn.Module()
    model.norm = type("RMSNorm", (_Gated,), {})(8)
    take_plain_norms(model)
    assert isinstance(model.norm, _Gated)


def test_a_norm_of_that_name_that_computes_something_else_stays_what_it_is(tmp_path: Path) -> None:
    model, _ = mlx_lm.utils.load_model(write_family(tmp_path, GEMMA3), lazy=True)
    other = type("RMSNorm", (_Doubled,), {})
    model.model.norm.__class__ = other
    before = logits_of(disturbed(model))
    take_plain_norms(model)
    assert type(model.model.norm) is other
    assert mx.array_equal(logits_of(model), before)
