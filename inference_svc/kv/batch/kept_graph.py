"""A pass over a pool's pages as a graph that MLX keeps for each shape of its arguments."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx


class KeptGraph:
    """A graph over a pool's arrays, forgotten when the pool changes their size."""

    def __init__(self, trace: Callable[..., mx.array]) -> None:
        self._trace = trace
        self._compiled: Any = None
        self._sizes: list[int] | None = None

    def __call__(self, pages: list[mx.array], *given: Any) -> mx.array:
        """The result of `trace`, not evaluated. `pages`: the pool's arrays."""
        if (sizes := [array.shape[0] for array in pages]) != self._sizes:
            self._compiled, self._sizes = mx.compile(self._trace), sizes
        made: mx.array = self._compiled(pages, *given)
        return made
