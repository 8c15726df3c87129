"""Steps between a model's products, done by the products' own kernels: the sum of a block's input and its result,
SwiGLU, and the changes of shape around attention. A GPU's decoding step is as long as the processor takes to enqueue
it, and these are three of a layer's fourteen kernels, and eight nodes without one.

A class is taken if its source is one that is known here, word for word: mlx-lm's models copy each other.
"""

import ast
import inspect
import sys
import textwrap
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import activations

from inference_svc.kv.batch.fused_layer import FusedLayer
from inference_svc.kv.model_hooks import attention_hook
from inference_svc.kv.model_hooks.step_attention import step_attention_of
from inference_svc.kv.model_hooks.whole_layers import frequencies_by_rotation, whole_layer_of

_GATED = "self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))"
_MLPS = (f"return {_GATED}", f"down_proj = {_GATED}\nreturn down_proj")
_HALVES = """r = self.self_attn(self.input_layernorm(x), mask, cache)
h = x + r
r = self.mlp(self.post_attention_layernorm(h))
"""
_BLOCKS = (f"{_HALVES}out = h + r\nreturn out", f"{_HALVES}return h + r")
_PROJECTED = "queries, keys, values = (self.q_proj(x), self.k_proj(x), self.v_proj(x))\n"
_CUT = """queries = queries.reshape(B, L, self.n_heads, -1).transpose(0, 2, 1, 3)
keys = keys.reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
"""
_NORMED = """queries = self.q_norm(queries.reshape(B, L, self.n_heads, -1)).transpose(0, 2, 1, 3)
keys = self.k_norm(keys.reshape(B, L, self.n_kv_heads, -1)).transpose(0, 2, 1, 3)
"""
_CUT_VALUES = "values = values.reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)\n"
_NORMS = "queries = self.q_norm(queries)\nkeys = self.k_norm(keys)\n"
_ATTENDED = """if cache is not None:
    queries = self.rope(queries, offset=cache.offset)
    keys = self.rope(keys, offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, values)
else:
    queries = self.rope(queries)
    keys = self.rope(keys)
output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
return self.o_proj(output)"""
_ATTENTIONS = (
    f"B, L, D = x.shape\n{_PROJECTED}{_CUT}{_CUT_VALUES}{_ATTENDED}",
    f"B, L, D = x.shape\n{_PROJECTED}{_NORMED}{_CUT_VALUES}{_ATTENDED}",
    f"B, L, _ = x.shape\n{_PROJECTED}{_CUT}{_CUT_VALUES}{_NORMS}{_ATTENDED}",
)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def join_steps(model: Module, *, whole: bool = False, attends: bool = False) -> None:
    """Let the blocks of a model whose products are `few_rows`' take less kernels. Their sums keep their bits.
    `whole`: of few rows each block may be one kernel, whose sums have another order. `attends`: a step's attention may
    be one.
    """
    modules: Any = model
    shared = frequencies_by_rotation(model) if whole or attends else {}
    for module in modules.modules():
        kind: Any = type(module)
        if whole and _is_llamas(module) and (layer := whole_layer_of(module, shared)) is not None:
            module.whole = layer
        if is_swiglu(kind):
            module.__class__ = with_call(kind, _gated_call)
        elif _source(kind) in _BLOCKS:
            for half, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
                if (last := _products(module[half], name)) is not None:
                    last.keeps_last = True
            module.__class__ = with_call(kind, _block_call)
        elif is_attention(kind):
            if attends and (step := step_attention_of(module, shared)) is not None:
                module.step = step
            module.__class__ = with_call(kind, _attention_call)


def has_llamas_blocks(model: Module) -> bool:
    """Whether a model has blocks that may be one kernel, if their weights are such."""
    modules: Any = model
    return any(map(_is_llamas, modules.modules()))


def _gated_call(self: Any, x: mx.array) -> mx.array:
    gate, up = _products(self, "gate_proj"), _products(self, "up_proj")
    is_plain = gate is not None and gate is up and "bias" not in self.gate_proj and "bias" not in self.up_proj
    if is_plain and gate.takes(x, 2) and self.gate_proj.weight.shape == self.up_proj.weight.shape:
        return self.down_proj(gate.gated(x))  # type: ignore[no-any-return]
    return self.down_proj(activations.swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def _attention_call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """Of one token each over pages, heads are cut and put side by side by the kernels' own results."""
    products = {_products(self, name) for name in _PROJECTIONS}
    joint = next(iter(products))
    is_plain = len(products) == 1 and joint is not None and not any("bias" in self[name] for name in _PROJECTIONS)
    if not (is_plain and isinstance(cache, FusedLayer) and x.ndim == 3 and x.shape[1] == 1 and joint.takes(x)):
        return type(self).unjoined.__call__(self, x, mask, cache)  # type: ignore[no-any-return]
    return self.o_proj(_attended(self, x, mask, cache))  # type: ignore[no-any-return]


def _attended(self: Any, x: mx.array, mask: Any, cache: FusedLayer) -> mx.array:
    """Attention's result for x, before the last projection."""
    queries, keys, values = _products(self, "q_proj").heads(x, (self.n_heads, self.n_kv_heads, self.n_kv_heads))
    if "q_norm" in self:
        queries, keys = self.q_norm(queries), self.k_norm(keys)
    step = getattr(self, "step", None)
    attended: mx.array | None = None
    if step is not None and mask is None:
        attended = step.result(queries, keys, values, cache)
    if attended is None:
        queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
        cache.update_and_fetch(keys, values)
        attended = cache.attend(queries, self.scale, mask, None, is_flat=True)
    return attended


def _is_llamas(block: Any) -> bool:
    """Whether a block is such that `whole_layers` can know it: before its parts are changed."""
    kind: Any = type(block)
    if _source(kind) not in _BLOCKS:
        return False
    attention: Any = type(block.self_attn)
    is_hooked = attention_hook.is_hooked(sys.modules[attention.__module__])
    return is_hooked and _source(attention) == _ATTENTIONS[0] and is_swiglu(type(block.mlp))


def _block_call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    whole = getattr(self, "whole", None)
    if whole is not None and mask is None and isinstance(cache, FusedLayer) and x.shape[1:2] == (1,):
        made: mx.array | None = whole.result(x, cache)
        if made is not None:
            return made
        if whole.has_result_behind(x, cache):
            attended = _attended(self.self_attn, self.input_layernorm(x), None, cache)
            return whole.result_behind(attended, x)  # type: ignore[no-any-return]
    attended = self.self_attn(self.input_layernorm(x), mask, cache)
    h = _sum(x, attended, _products(self.self_attn, "o_proj"))
    return _sum(h, self.mlp(self.post_attention_layernorm(h)), _products(self.mlp, "down_proj"))


def _sum(x: mx.array, product: mx.array, last: Any) -> mx.array:
    joined = last.plus(product, x) if last is not None else None
    return x + product if joined is None else joined


def _products(module: Any, name: str) -> Any:
    """The `JointProducts` of a module's projection; None where it has none."""
    return getattr(module[name], "together", None) if name in module else None


def is_swiglu(kind: Any) -> bool:
    """Whether a class's call is mlx-lm's SwiGLU between three projections."""
    return _source(kind) in _MLPS and getattr(sys.modules[kind.__module__], "swiglu", None) is activations.swiglu


def is_attention(kind: Any) -> bool:
    """Whether a class's call is one of mlx-lm's attentions whose hook is ours."""
    return _source(kind) in _ATTENTIONS and attention_hook.is_hooked(sys.modules[kind.__module__])


@cache
def with_call(kind: Any, call: Any) -> Any:
    """The class with another call."""
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "unjoined": kind})


@cache
def _source(kind: Any) -> str:
    """The statements of a class's call, as Python prints them; empty where there is no source."""
    if not kind.__module__.startswith("mlx_lm.models."):
        return ""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(kind.__call__))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    assert isinstance(function, ast.FunctionDef)
    return "\n".join(map(ast.unparse, function.body))
