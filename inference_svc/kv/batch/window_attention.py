"""Attention of a window's rows over the copies that a CPU reads, and whether it sums each row as if it were alone."""

import functools
import math
from collections.abc import Sequence

import mlx.core as mx

# Positions that a product of a window sums over: few enough that no BLAS cuts them.
_BLOCK = 128
_LEAST_ROWS = 4  # below it a BLAS uses other kernels
_MOST_ROWS = 64  # of a turn in a pass


def attend_window(queries: mx.array, keys: mx.array, values: mx.array, scale: float, hidden: mx.array) -> mx.array:
    """Attention of one slot's queries [rows, heads, 1, dim] in 32 bits, over its K and V [kv_heads, n, dim] of whole
    blocks, as one product for each block of a head of K. `hidden` [blocks, rows, 1, n / blocks]: 0, or -inf for
    positions that a row does not see. Weights are powers of 2: on a CPU, MLX takes three times as long for those of e.
    """
    rows, heads, _, dim = queries.shape
    kv_heads, blocks, shared = keys.shape[0], hidden.shape[0], heads // keys.shape[0]
    if (spare := -(-_LEAST_ROWS // shared) - rows) > 0:
        more = (mx.concatenate([array, *[array[:1]] * spare]) for array in (queries, hidden.swapaxes(0, 1)))
        more_queries, more_hidden = more
        return attend_window(more_queries, keys, values, scale, more_hidden.swapaxes(0, 1))[:rows]
    by_head = (queries * (scale * math.log2(math.e))).reshape(rows, kv_heads, shared, dim).swapaxes(0, 1)
    scores = by_head.reshape(kv_heads, 1, rows * shared, dim) @ _in_blocks(keys).swapaxes(-1, -2)
    scores = scores.reshape(kv_heads, blocks, rows, shared, _BLOCK) + hidden
    weights = mx.power(2.0, scores - scores.max(axis=-1, keepdims=True).max(axis=1, keepdims=True))
    mixed = weights.reshape(kv_heads, blocks, rows * shared, _BLOCK) @ _in_blocks(values)
    mixed = mixed.sum(axis=1).reshape(kv_heads, rows, shared, -1) / weights.sum(axis=-1, keepdims=True).sum(axis=1)
    return mixed.swapaxes(0, 1).reshape(rows, heads, 1, -1)


def hidden_of(seen: Sequence[int]) -> mx.array:
    """For `attend_window`, of rows before which so many rows stand, ascending."""
    blocks = seen[-1] // _BLOCK + 1
    hidden = mx.where(mx.arange(blocks * _BLOCK) <= mx.array(list(seen))[:, None], 0.0, -mx.inf)
    return hidden.reshape(len(seen), blocks, 1, _BLOCK).swapaxes(0, 1)


def seen_rows(array: mx.array, hidden: mx.array) -> mx.array:
    """Of K or V [kv_heads, capacity, dim] the positions that `hidden` is about."""
    return array[:, : hidden.shape[0] * _BLOCK]


def _in_blocks(array: mx.array) -> mx.array:
    return array.reshape(array.shape[0], -1, _BLOCK, array.shape[-1])


@functools.cache
def sums_windows_alike(shared: int, key_dim: int, value_dim: int) -> bool:
    """Whether `attend_window` gives a row the same bits beside any others on this CPU, and over any number of blocks,
    where `shared` heads of queries have one of K: a turn that was preempted computes its rows again beside others. Of
    the model's dimensions and as many rows as a turn may have: by the size of a product a BLAS chooses how it sums.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return False
    keys = mx.random.split(mx.random.key(2), 3)
    queries = mx.random.normal((_MOST_ROWS, 2 * shared, 1, key_dim), key=keys[0])
    stored = [
        mx.random.normal((2, 1024, dim), key=key) for dim, key in zip((key_dim, value_dim), keys[1:], strict=True)
    ]

    def attended(first: int, last: int, start: int, most: int) -> mx.array:
        hidden = hidden_of([*range(start + first, start + last), most])[:, :-1]
        seen_keys, seen_values = (seen_rows(each, hidden) for each in stored)
        return attend_window(queries[first:last], seen_keys, seen_values, 0.125, hidden)

    return all(
        bool(
            mx.array_equal(
                attended(first, last, start, start + last), attended(0, _MOST_ROWS, start, 1000)[first:last]
            ).item()
        )
        for start in (3, 120, 380, 700)
        for first, last in ((0, 1), (1, 4), (7, 20), (0, 33))
    )
