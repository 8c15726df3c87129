"""The hook into mlx-lm's models: what it rests on in mlx-lm 0.32, and that other caches are served as before."""

import inspect

import mlx.core as mx
from mlx_lm.models import base, gpt_oss, llama
from mlx_lm.models.cache import KVCache

from inference_svc.kv.model_hooks import attention_hook


def test_mlx_lm_computes_attention_through_the_function_whose_place_the_hook_takes() -> None:
    """Fails when upstream changes what the hook rests on: its name, its arguments, or how models come by it."""
    parameters = list(inspect.signature(attention_hook._upstream).parameters)
    assert parameters == ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    attention_hook.install()
    for module in (base, llama, gpt_oss):  # from `base` a model gets it that is imported later
        assert module.scaled_dot_product_attention is attention_hook.attention
        assert "scaled_dot_product_attention(" in inspect.getsource(module)


def test_a_cache_of_mlx_lms_own_is_served_as_before() -> None:
    queries, keys, values = (mx.random.normal((1, 2, 5, 64), key=mx.random.key(seed)) for seed in range(3))
    given = {"cache": KVCache(), "scale": 0.125, "mask": "causal"}
    found = attention_hook.attention(queries, keys, values, **given)  # type: ignore[arg-type]
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.125, mask="causal")
    assert mx.array_equal(found, expected).item()
