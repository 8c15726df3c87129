"""A decoding step's rows on a CPU as the matrix that they are: between the products of a layer of a small model, MLX
takes as long for the changes of shape, and for a number that it makes an array of, as for the sums. No bit changes.
"""

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm

from inference_svc.kv.batch.decoded_layer import DecodedLayer
from inference_svc.kv.model_hooks.joined_steps import is_attention, with_call
from inference_svc.kv.model_hooks.quick_swiglu import constant, is_quick, swiglu
from inference_svc.kv.model_hooks.row_exact import RowExactLinear, padded, unpadded

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")


def flatten_steps(model: Module) -> None:
    """For a model whose products are `row_exact`'s, and whose SwiGLUs `quick_swiglu`'s. Idempotent."""
    modules: Any = model
    for module in modules.modules():
        kind: Any = type(module)
        if is_attention(kind) and _are_row_exact(module, _PROJECTIONS):
            module.__class__ = with_call(kind, _attention_call)
        elif is_quick(kind) and _are_row_exact(module, _GATED):
            module.__class__ = with_call(kind, _gated_call)
        elif kind is RMSNorm and _is_as_known(module.weight.size, module.eps):
            module.__class__ = _FlatNorm


def _are_row_exact(module: Any, names: Iterable[str]) -> bool:
    return all(type(module[name]) is RowExactLinear for name in names)


def _attention_call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    if not isinstance(cache, DecodedLayer) or not _is_step(x):
        return type(self).unjoined.__call__(self, x, mask, cache)  # type: ignore[no-any-return]
    rows, heads, kv_heads = x.shape[0], self.n_heads, self.n_kv_heads
    flat = padded(x)
    joint = mx.concatenate([self[name].rows(flat) for name in _PROJECTIONS[:3]], axis=1)
    joint = (joint if rows == flat.shape[0] else joint[:rows]).reshape(rows, heads + 2 * kv_heads, 1, -1)
    ends = heads, heads + kv_heads
    if "q_norm" in self:
        queries = self.rope(self.q_norm(joint[:, : ends[0]]), offset=cache.offset)
        keys = self.rope(self.k_norm(joint[:, ends[0] : ends[1]]), offset=cache.offset)
    else:
        rotated = self.rope(joint[:, : ends[1]], offset=cache.offset)
        queries, keys = rotated[:, : ends[0]], rotated[:, ends[0] :]
    keys, values = cache.update_and_fetch(keys, joint[:, ends[1] :])
    attend = sys.modules[type(self).__module__].scaled_dot_product_attention  # type: ignore[attr-defined]
    attended = attend(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
    flat = attended.reshape(rows, 1, -1)
    return unpadded(self.o_proj.rows(padded(flat)), flat)


def _gated_call(self: Any, x: mx.array) -> mx.array:
    if not _is_step(x):
        return type(self).unjoined.__call__(self, x)  # type: ignore[no-any-return]
    rows, flat = x.shape[0], padded(x)
    gate, up = self["gate_proj"].rows(flat), self["up_proj"].rows(flat)
    if rows < flat.shape[0]:  # a row takes SwiGLU longer than these nodes
        gate, up = gate[:rows], up[:rows]
    return unpadded(self["down_proj"].rows(padded(swiglu(gate, up))), x)


def _is_step(x: mx.array) -> bool:
    return x.ndim == 3 and x.shape[1] == 1


class _FlatNorm(RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        weight: mx.array = self["weight"]
        if x.dtype != mx.float32 or weight.dtype != mx.float32:
            return mx.fast.rms_norm(x, weight, self.eps)
        ones = (*x.shape[:-1], 1)
        mean = mx.sum(mx.square(x), axis=-1, keepdims=True) * constant(1 / x.shape[-1], ones)
        return x * mx.rsqrt(mean + constant(self.eps, ones)) * weight


@cache
def _is_as_known(width: int, eps: float) -> bool:
    """Whether the operations of MLX's norm are those of ours, by its results."""
    own, (probe, weight) = _FlatNorm(width, eps), mx.random.normal((2, 5, width), key=mx.random.key(0))
    own.weight = weight[0]
    return bool(mx.array_equal(own(probe), mx.fast.rms_norm(probe, weight[0], eps)).item())
