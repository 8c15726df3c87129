"""Sums whose rounding depends neither on how many rows a batch has nor on how long the longest is: fewer rows than four
are padded to four, below which a BLAS uses other kernels, and widths are whole blocks of its long sums, or less than
the first one, which no kernel cuts. So a sequence decoded alone computes what it computes in a batch, and rounding
changes no code of its KV.
"""

import functools
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

_MIN_ROWS = 4
_KEPT = "_turned"  # no parameter, as MLX knows by the underscore
# Block sizes seen in kernels, 1 for none; and pairs (length of one sum, length of the longest) that tell them apart.
_STEPS = (1, 192, 256, 320, 384, 512, 768)
_TRIALS = ((190, 1500), (280, 1500), (390, 3000), (430, 900), (500, 2300), (570, 1100), (690, 1400), (1200, 2900))
# MKL halves a sum of less than two blocks, so one of a few steps may have other parts than longer ones.
_FEW_STEPS, _LONGEST = (1, 2, 3), 3000
_SHORT_BY = 5  # a length that fills all of a width's parts and is not the width
# Within the first block: whole vectors of any machine, so that a softmax adds in the same order.
_FINE = 32
_SHARES = (1, 2, 8)  # heads of queries for each of keys


class RowExactLinear(Linear):
    def __call__(self, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] >= _MIN_ROWS:
            return self.rows(x)
        return unpadded(self.rows(padded(x)), x)

    def rows(self, x: mx.array) -> mx.array:
        """The product of x [..., depth], of four rows or more."""
        return mx.addmm(self["bias"], x, _turned(self)) if "bias" in self else x @ _turned(self)


class _RowExactEmbedding(Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] >= _MIN_ROWS:
            return x @ _turned(self)
        return unpadded(padded(x) @ _turned(self), x)


def make_row_exact(model: Module) -> None:
    """Make the model's own projections treat every row alike. For a CPU: elsewhere kernels differ in more than this."""
    modules: Any = model
    for module in modules.modules():
        if type(module) is Linear:
            module.__class__ = RowExactLinear
        elif type(module) is Embedding:
            module.__class__ = _RowExactEmbedding


def padded(x: mx.array) -> mx.array:
    """The rows of x [..., depth] as a matrix of four or more: of fewer, the first one comes again."""
    rows = x.size // x.shape[-1]
    flat = x.reshape(rows, -1)
    if rows >= _MIN_ROWS:
        return flat
    if rows == 1:
        return mx.broadcast_to(flat, (_MIN_ROWS, flat.shape[1]))
    return mx.concatenate([flat, *[flat[:1]] * (_MIN_ROWS - rows)])


def unpadded(product: mx.array, x: mx.array) -> mx.array:
    """A product of `padded(x)`, with the dimensions of x."""
    rows = x.size // x.shape[-1]
    return (product if rows >= _MIN_ROWS else product[:rows]).reshape(*x.shape[:-1], -1)


def _turned(module: Any) -> mx.array:
    """The module's weight, transposed: the same bytes, kept, because each product would have a node for it."""
    weight, kept = module["weight"], module.get(_KEPT)
    if kept is None or kept[0] is not weight:
        kept = module[_KEPT] = weight, weight.T
        mx.eval(kept[1])
    turned: mx.array = kept[1]
    return turned


def attention_width(rows: int) -> int:
    """How many positions attention sums over, so that those behind a sequence's end change no bit of its result."""
    step = _attention_step()
    if rows < step and _is_fine_within(step):
        return min(step, -(-rows // _FINE) * _FINE)
    return -(-rows // step) * step


@functools.cache
def _is_fine_within(step: int) -> bool:
    """Whether attention of less than `step` positions has this machine's same bits at each multiple of `_FINE`."""
    if step % _FINE:
        return False
    keys = mx.random.split(mx.random.key(1), 3)
    queries = mx.random.normal((2, 8, 1, 64), key=keys[0])
    rows = [mx.random.normal((2, 8, 2 * step, 64), key=key) for key in keys[1:]]

    def attended(length: int, each: int, width: int) -> mx.array:
        stored = (array[:, : 8 // each, :width] for array in rows)
        return mx.fast.scaled_dot_product_attention(queries, *stored, scale=0.125, mask=mx.arange(width) < length)

    return all(
        mx.array_equal(attended(width - _SHORT_BY, each, width), attended(width - _SHORT_BY, each, wide)).item()
        for width in range(_FINE, step + 1, _FINE)
        for each in _SHARES
        for wide in (step, 2 * step)
    )


@functools.cache
def _attention_step() -> int:
    """The smallest step at whose multiples sums do not depend on the width; 1 if none helps, and but for a CPU."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return 1
    keys = mx.random.split(mx.random.key(0), 2)
    weights, values = mx.random.uniform(shape=(1, 4096), key=keys[0]), mx.random.normal((4096, 64), key=keys[1])

    def is_right(step: int) -> bool:
        trials = [(count * step - _SHORT_BY, _LONGEST) for count in _FEW_STEPS] if step > 1 else []
        return all(_is_same(weights, values, step, *trial) for trial in (*_TRIALS, *trials))

    return next(filter(is_right, _STEPS), 1)


def _is_same(weights: mx.array, values: mx.array, step: int, rows: int, longest: int) -> bool:
    def summed(width: int) -> mx.array:
        return mx.where(mx.arange(width) < rows, weights[:, :width], 0.0) @ values[:width]

    narrow, wide = (summed(-(-length // step) * step) for length in (rows, longest))
    return bool(mx.array_equal(narrow, wide).item())
