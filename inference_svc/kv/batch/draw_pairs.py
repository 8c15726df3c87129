"""A step's draws for the host, in arrays of eight bytes: the tokens of two rows each.

MLX's CUDA back end moves an array of more than eight bytes to memory of both sides when the processor first reads it,
and to free where it lay waits for all that the device has to compute (`allocator.cpp`, `copy_to_managed`): beside a
cell for 50 ms. A page of that memory moves whole, so that a kernel of the step at hand which reads a block table there
waits for 0.1 to 0.25 ms.
"""

import mlx.core as mx

from inference_svc.kv.attention.fused import COMPILERS, compiled
from inference_svc.kv.attention.geometry import LANES
from inference_svc.kv.attention.kernels import PAIRS, Dialect, pairs_source

NOT_SOUND = 1 << 31  # beside a token, whose number is less
_PAIR = 2
_SHARED_BYTES = 16


def in_pairs(tokens: mx.array, greatest: mx.array, dialect: Dialect | None) -> list[mx.array]:
    """Tokens, uint32 [rows], with `NOT_SOUND` for a row whose greatest logit is not finite. The last array of an odd
    number has a word too many, or one.
    """
    if dialect is not Dialect.CUDA:
        marked = mx.where(mx.abs(greatest) < mx.inf, tokens, tokens | mx.array(NOT_SOUND, mx.uint32))
        return [marked[place : place + _PAIR] + mx.array(0, mx.uint32) for place in range(0, marked.shape[0], _PAIR)]
    # Each operation of its own would cost the processor 5 to 10 us of a step.
    kernel, made = compiled(COMPILERS[dialect], pairs_source(), _SHARED_BYTES), list[mx.array]()
    for place in range(0, tokens.shape[0], PAIRS * _PAIR):
        rows = slice(place, place + PAIRS * _PAIR)
        made += kernel(
            inputs=[tokens[rows], greatest[rows]],
            template=[("SHARED_BYTES", _SHARED_BYTES)],
            grid=(LANES, 1, 1),
            threadgroup=(LANES, 1, 1),
            output_shapes=[(_PAIR,)] * PAIRS,
            output_dtypes=[mx.uint32] * PAIRS,
        )
    return made[: -(-tokens.shape[0] // _PAIR)]
