"""Attention over pages, by kernels of a dialect, or by the reference."""

import mlx.core as mx

from inference_svc.kv.attention.fused import TARGETS, TYPE_NAMES, fused_attention
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import LayerPages, Scoring, reference_attention
from inference_svc.kv.attention.tiles import most_queries


def paged_attention(
    queries: mx.array,
    rows: LayerPages,
    lengths: mx.array,
    scoring: Scoring,
    dialect: Dialect | None,
    *,
    is_flat: bool = False,
) -> mx.array:
    """Attention of the newest tokens' queries [B, Hq, L, Dk] to all stored rows: [B, Hq, L, Dv] in the queries' dtype.

    `lengths` [B], int32, counts stored tokens, the new ones included. Query i sees positions ≤ length - L + i and, with
    a window, only those > that - window. A query that sees nothing gets zeros. Nothing outside a sequence's rows
    changes a bit of its result, but for the table's width where many queries go over its tokens together.
    `dialect`: of kernels that were checked (`choice`). The reference serves without one, and more queries than
    `most_queries`. `is_flat`: of one token each, heads side by side, [B, 1, Hq * Dv].
    """
    if dialect is None or queries.shape[2] > most_queries(rows.format, TYPE_NAMES[queries.dtype]):
        found = reference_attention(queries, rows, lengths, scoring)
        return found.reshape(found.shape[0], 1, -1) if is_flat else found
    return fused_attention(queries, rows, lengths, scoring, TARGETS[dialect], is_flat=is_flat)
