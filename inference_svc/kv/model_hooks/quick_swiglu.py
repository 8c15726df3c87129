"""SwiGLU on a CPU by powers of 2: MLX computes those of e, and so its sigmoid, three times as slowly there, a tenth of
a small model's prompt.
"""

import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import activations

from inference_svc.kv.model_hooks.joined_steps import is_swiglu, with_call


def take_quick_swiglu(model: Module) -> None:
    """Change the model's own SwiGLUs. Their results differ from MLX's by rounding. Idempotent."""
    modules: Any = model
    for module in modules.modules():
        kind: Any = type(module)
        if is_swiglu(kind):
            module.__class__ = with_call(kind, _call)


def is_quick(kind: Any) -> bool:
    return kind.__call__ is _call


def _call(self: Any, x: mx.array) -> mx.array:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def swiglu(x: mx.array, up: mx.array) -> mx.array:
    """Of x and up: x * sigmoid(x) * up; in other types than 32 bits as mlx-lm has it."""
    if x.dtype != mx.float32:
        found: mx.array = activations.swiglu(x, up)
        return found
    one, two, share = (constant(value, x.shape) for value in (1.0, 2.0, -math.log2(math.e)))
    return x * (up / (one + mx.power(two, x * share)))


@lru_cache(maxsize=64)
def constant(value: float, shape: tuple[int, ...]) -> mx.array:
    """A number of a step's operations, of its operand's shape: MLX makes two nodes of a number, and one of another
    shape, in every layer and step. In 32 bits, one value in memory.
    """
    made = mx.broadcast_to(mx.array(value, dtype=mx.float32), shape)
    mx.eval(made)  # engines of one process share it, and a lazy array belongs to the thread that made it
    return made
