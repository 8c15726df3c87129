"""Norms that add one to their weight at every call, made plain ones whose weight has it: the same bits, and a kernel
less for each. Gemma 3 has six in a layer, a quarter of a decoding step's kernels, and a GPU's step is as long as the
processor takes to enqueue them.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm

_CLASS = "RMSNorm"


def take_plain_norms(model: Module) -> None:
    """Change the model's own such norms. Evaluates their weights."""
    modules: Any = model
    for module in modules.modules():
        if _adds_one(module):
            module.weight = 1.0 + module.weight
            module.__class__ = RMSNorm


def _adds_one(module: Any) -> bool:
    """Whether the module is such a norm, by its results: mlx-lm has several classes of this name."""
    is_norm = type(module).__name__ == _CLASS and type(module) is not RMSNorm
    if not is_norm or set(module) != {"weight"} or not hasattr(module, "eps"):
        return False
    probe = mx.linspace(-2.0, 3.0, module.weight.size).astype(module.weight.dtype)[None]
    expected = mx.fast.rms_norm(probe, 1.0 + module.weight, module.eps)
    try:
        found = module(probe)
    except Exception:  # noqa: BLE001 - a norm of that name that takes other inputs
        return False
    return found.dtype == expected.dtype and bool(mx.array_equal(found, expected).item())
