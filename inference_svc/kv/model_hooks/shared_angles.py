"""Rotary angles of a decoding step on a CPU: their cosines and sines are computed once, not in each layer and for
queries and keys apart. What remains of a rotation are MLX's own operations, so no bit changes.
"""

import math
from collections.abc import Hashable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE

Pair = tuple[mx.array, mx.array]


def share_angles(model: Module) -> None:
    """Let the model's plain rotations in 32 bits share their angles. Idempotent."""
    angles: dict[Hashable, _StepAngles] = {}
    modules: Any = model
    for module in modules.modules():
        if type(module) is RoPE and not module.traditional:
            kind = module.dims, module.base, module.scale
            if kind not in angles:
                angles[kind] = _StepAngles(*kind)
            if angles[kind].are_exact:
                module.__class__ = _SharedRoPE
                module.angles = angles[kind]


class _StepAngles:
    """Those of the step that is computed: of one array of offsets, which all layers hand on. Each step has another
    array (`DecodeStep`), and nobody changes one in place, as mlx-lm's own batched caches do.
    """

    def __init__(self, dims: int, base: float, scale: float) -> None:
        self._dims, self._scale = dims, mx.array(scale, dtype=mx.float32)
        half = dims // 2
        exponent = float(np.float32(math.log(base)) / np.float32(half))
        self._frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * mx.array(exponent, dtype=mx.float32))
        mx.eval(self._frequencies)
        self._offsets: mx.array | None = None
        self._angles: Pair = (self._scale, self._scale)  # of these offsets
        self._pairs: dict[tuple[int, ...], Pair] = {}  # the same, by the shape that is rotated
        probe, offsets = mx.linspace(-2.0, 3.0, 3 * dims).reshape(3, 1, 1, dims), mx.array([1, 77, 70_001])
        expected = mx.fast.rope(probe, dims, traditional=False, base=base, scale=scale, offset=offsets)
        self.are_exact = dims % 2 == 0 and bool(mx.array_equal(self.rotated(probe, offsets), expected).item())

    def rotated(self, x: mx.array, offsets: mx.array) -> mx.array:
        """x [slots, heads, 1, dims or more] at positions [slots]."""
        half, shape = self._dims // 2, (*x.shape[:3], self._dims)
        if offsets is not self._offsets:
            self._offsets, self._angles, self._pairs = offsets, self._pair(offsets), {}
        if shape not in self._pairs:
            cosines, sines = self._angles
            self._pairs[shape] = mx.broadcast_to(cosines, shape), mx.broadcast_to(sines, shape)
        cosines, sines = self._pairs[shape]
        turned = x if self._dims == x.shape[-1] else x[..., : self._dims]
        other = mx.concatenate([x[..., half : self._dims], x[..., :half]], axis=-1)
        turned = turned * cosines + other * sines
        return turned if self._dims == x.shape[-1] else mx.concatenate([turned, x[..., self._dims :]], axis=-1)

    def _pair(self, offsets: mx.array) -> Pair:
        """Cosines, and sines, of which those of the left half are negative: to subtract is to add so."""
        positions = (mx.arange(1, dtype=mx.float32) + offsets[:, None, None]) * self._scale
        angles = positions[..., None] * self._frequencies
        cosines, sines = mx.cos(angles), mx.sin(angles)
        return mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)


class _SharedRoPE(RoPE):
    angles: _StepAngles

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        is_step = isinstance(offset, mx.array) and offset.ndim == 1 and x.ndim == 4 and x.shape[2] == 1
        if is_step and x.dtype == mx.float32:
            return self.angles.rotated(x, offset)
        found: mx.array = super().__call__(x, offset)
        return found
