"""Matrix products whose result for a row does not depend on how many rows there are.

An optimized BLAS takes other kernels for one, two or three rows than for more, and sums in another order. From four
rows on each row's result is the same to the bit. So few rows are given company: then a sequence decoded alone computes
what it computes in a batch, and a rounding can never flip a code of its quantized KV.
"""

from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

_LEAST_ROWS = 4


class _RowExactLinear(Linear):
    def __call__(self, x: mx.array) -> mx.array:
        rows = _rows(x)
        if rows >= _LEAST_ROWS:
            return Linear.__call__(self, x)
        few: mx.array = Linear.__call__(self, _in_company(x, rows))[:rows]
        return few.reshape(*x.shape[:-1], -1)


class _RowExactEmbedding(Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        rows = _rows(x)
        as_linear: Any = super().as_linear
        if rows >= _LEAST_ROWS:
            return cast("mx.array", as_linear(x))
        few: mx.array = as_linear(_in_company(x, rows))[:rows]
        return few.reshape(*x.shape[:-1], -1)


def make_row_exact(model: Module) -> None:
    """Have the model's own projections treat every row alike. For a CPU: elsewhere kernels differ by more than that."""
    modules: Any = model
    for module in modules.modules():
        if type(module) is Linear:
            module.__class__ = _RowExactLinear
        elif type(module) is Embedding:
            module.__class__ = _RowExactEmbedding


def _rows(x: mx.array) -> int:
    return int(x.size // x.shape[-1])


def _in_company(x: mx.array, rows: int) -> mx.array:
    flat = x.reshape(rows, -1)
    if rows == 1:
        return mx.broadcast_to(flat, (_LEAST_ROWS, flat.shape[1]))
    return mx.concatenate([flat, *[flat[:1]] * (_LEAST_ROWS - rows)])
