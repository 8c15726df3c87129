"""Rows of sorted experts' products that lie one behind the other, as MLX's product on CUDA takes for granted (0.32.4;
Metal's does since 0.32.1): it takes their distance from the stride of the axis of one row, which may be any. A bias
that is added gets one of 1 there, and its layout is the sum's wherever its buffer can become the sum's and that of the
product can not: one that MLX's cache gave may be too large. Then all rows but an expert's first are read elsewhere.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchLinear


def lay_expert_rows(model: Module) -> None:
    """For the model's experts whose weights are no codes. No bit changes where rows lay right. Idempotent."""
    modules: Any = model
    for module in modules.modules():
        if type(module) is SwitchLinear:
            module.__class__ = _LaidSwitchLinear


class _LaidSwitchLinear(SwitchLinear):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if sorted_indices:  # a view of both shapes, not a copy: MLX gives each new shape its own strides
            x = mx.unflatten(mx.flatten(x, 0, -2), 0, x.shape[:-1])
        call: Any = super().__call__
        found: mx.array = call(x, indices, sorted_indices=sorted_indices)
        return found
