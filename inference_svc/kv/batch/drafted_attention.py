"""Attention of rows of which one sequence has several: each is summed as if it were alone, and none copies K and V."""

from collections.abc import Sequence
from itertools import groupby

import mlx.core as mx


def attend_by_slot(
    queries: mx.array, keys: mx.array, values: mx.array, counts: Sequence[int], scale: float, mask: mx.array
) -> mx.array:
    """Attention of queries [rows, heads, 1, dim], `counts` of each slot one behind another, over K and V [slots,
    kv_heads, n, dim] of the slots. `mask`: bool [rows, 1, 1, n]. To a slot's K and V its rows are further heads of
    queries, so each row has a product of its own, as rows of different sequences have.
    """
    attended, row, slot = [], 0, 0
    for count, equal in groupby(counts):
        slots = len(list(equal))
        rows = slice(row, row + slots * count)
        at = slice(slot, slot + slots)
        if count:
            attended.append(_attend(queries[rows], keys[at], values[at], count, scale, mask[rows]))
        row, slot = rows.stop, at.stop
    return mx.concatenate(attended) if len(attended) > 1 else attended[0]


def _attend(queries: mx.array, keys: mx.array, values: mx.array, count: int, scale: float, mask: mx.array) -> mx.array:
    """As above, of slots that have `count` rows each."""
    slots, kv_heads, width = keys.shape[:3]
    heads, dim = queries.shape[1], queries.shape[-1]
    shape = (slots, count, kv_heads, heads // kv_heads)
    by_head = queries.reshape(*shape, dim).swapaxes(1, 2).reshape(slots, count * heads, 1, dim)
    seen = mx.broadcast_to(mask.reshape(slots, 1, count, 1, width), (slots, kv_heads, *shape[1::2], width))
    seen = seen.reshape(slots, count * heads, 1, width)
    found = mx.fast.scaled_dot_product_attention(by_head, keys, values, scale=scale, mask=seen)
    by_row = found.reshape(slots, kv_heads, *shape[1::2], -1).swapaxes(1, 2)
    return by_row.reshape(slots * count, heads, 1, -1)
