"""Numbers of a step's operations, each as an array of its operand's shape: MLX makes two nodes of a number, and one of
another shape, in every layer and step.
"""

from functools import lru_cache

import mlx.core as mx


@lru_cache(maxsize=64)
def constant(value: float, shape: tuple[int, ...]) -> mx.array:
    """In 32 bits, one value in memory."""
    made = mx.broadcast_to(mx.array(value, dtype=mx.float32), shape)
    mx.eval(made)  # engines of one process share it, and a lazy array belongs to the thread that made it
    return made
