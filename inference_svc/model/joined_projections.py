"""Projections of the same input computed as one product: q, k and v; gate and up.

On a GPU a decoding step is as fast as its number of operations lets it be: three small products cost more than one. The
first projection of a set computes all of them and the others take their parts, so a model's code stays as it is. The
joined weights take the place of the single ones: no memory is held twice.
"""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

_SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Joined(Module):
    """The joined product, and the input that it was computed for."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.concatenate([linear.weight for linear in linears], axis=0)
        biases = [linear.bias for linear in linears if "bias" in linear]
        if biases:
            self.bias = mx.concatenate(biases)
        sizes = [linear.weight.shape[0] for linear in linears]
        self._edges: list[int] = [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)]
        self._input: mx.array | None = None
        self._parts: list[mx.array] = []

    def part(self, index: int, x: mx.array) -> mx.array:
        if self._input is not x:
            whole = mx.addmm(self.bias, x, self.weight.T) if "bias" in self else x @ self.weight.T
            self._input, self._parts = x, list(mx.split(whole, self._edges, axis=-1))
        part = self._parts[index]
        if index == len(self._parts) - 1:  # the last one asks last: nothing is held until the next step
            self._input, self._parts = None, []
        return part


class _Part(Module):
    """One projection of a joined set. The set's weights are among the parameters of its first."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if index == 0:
            self.joined = joined
        self._part = functools.partial(joined.part, index)

    def __call__(self, x: mx.array) -> mx.array:
        return self._part(x)


def join_projections(model: Module) -> int:
    """Join what can be joined: plain linear layers of these names in one module. Returns how many sets."""
    count = 0
    modules: Any = model
    for module in modules.modules():
        for names in _SETS:
            linears = [getattr(module, name, None) for name in names]
            if not all(type(linear) is Linear for linear in linears) or _differ(linears):
                continue
            joined = _Joined(linears)  # type: ignore[arg-type]
            mx.eval(joined.weight)
            for index, name in enumerate(names):
                setattr(module, name, _Part(joined, index))
            count += 1
    return count


def _differ(linears: Sequence[Any]) -> bool:
    """Whether the layers have other inputs, types or biases."""
    kinds = {(linear.weight.shape[1], linear.weight.dtype, "bias" in linear) for linear in linears}
    return len(kinds) > 1
