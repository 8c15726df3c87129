"""Attention over pages, by kernels of a dialect, or by the reference."""

import mlx.core as mx

from inference_svc.kv.attention.fused import TYPE_NAMES, fused_attention
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import reference_attention
from inference_svc.kv.attention.tiles import most_queries
from inference_svc.kv.page import PageFormat


def paged_attention(
    queries: mx.array,
    pages: mx.array,
    page_format: PageFormat,
    block_table: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    dialect: Dialect | None,
    is_flat: bool = False,
) -> mx.array:
    """Attention of the newest tokens' queries [B, Hq, L, Dk] to all stored rows: [B, Hq, L, Dv] in the queries' dtype.

    `pages` is a layer's pool, uint16 [pages, page_format.units]; entry i of a row of `block_table` [B, blocks] is the
    page of its tokens from 256 * i on; `lengths` [B] (both int32) counts stored tokens, the new ones included. Query i
    sees positions ≤ length - L + i and, with a `window`, only those > that - window. A query that sees nothing gets
    zeros. Nothing outside a sequence's rows changes a bit of its result, but for the table's width where many queries
    go over its tokens together. `sinks` [Hq] are in natural units, as are scores that were multiplied by `scale`.
    `dialect`: of kernels that were checked (`choice`). The reference serves without one, and more queries than
    `most_queries`. `is_flat`: of one token each, heads side by side, [B, 1, Hq * Dv].
    """
    options = {"scale": scale, "window": window, "sinks": sinks}
    if dialect is None or queries.shape[2] > most_queries(page_format, TYPE_NAMES[queries.dtype]):
        found = reference_attention(queries, pages, page_format, block_table, lengths, **options)  # type: ignore[arg-type]
        return found.reshape(found.shape[0], 1, -1) if is_flat else found
    given = queries, pages, page_format, block_table, lengths
    return fused_attention(*given, dialect=dialect, is_flat=is_flat, **options)  # type: ignore[arg-type]
