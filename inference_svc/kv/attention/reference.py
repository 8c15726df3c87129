"""Attention over pages in plain MLX operations: the implementation of any device, and the kernels' standard.

Pages are gathered by the block table, de-quantized as `kv/codec.py` does, and given to MLX's own attention.
"""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from inference_svc.kv.codec import SCALE_TYPES, ExactCodec, QuantizedCodec
from inference_svc.kv.page import PAGE_TOKENS, PageFormat, Part, RowFormat


@dataclass(frozen=True, slots=True)
class LayerPages:
    """A layer's pages, uint16 [pages, format.units], of which entry i of a row of the table [B, blocks] (int32) has a
    sequence's tokens from 256 * i on.
    """

    pages: mx.array
    format: PageFormat
    block_table: mx.array


class Scoring(NamedTuple):
    """How a layer's queries weigh the rows that they see."""

    scale: float
    window: int | None = None  # a query sees no position ≤ its own - window
    sinks: mx.array | None = None  # [Hq], in natural units, as scores times `scale`


def reference_attention(queries: mx.array, rows: LayerPages, lengths: mx.array, scoring: Scoring) -> mx.array:
    """Attention of `queries` [B, Hq, L, Dk] to rows in pages, as `paged_attention`; any L."""
    scale, window, sinks = scoring
    token_count = rows.block_table.shape[1] * PAGE_TOKENS
    seen = _seen(lengths, queries.shape[2], token_count, window)
    first = mx.zeros_like(lengths) if window is None else mx.maximum(lengths - queries.shape[2] - window + 1, 0)
    keys, values = gathered(rows, first, lengths, queries.dtype)
    if rows.format.key.is_rotated:
        queries = rotated(queries).astype(queries.dtype)
    typed_sinks = None if sinks is None else sinks.astype(queries.dtype)
    mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen, sinks=typed_sinks)
    # A softmax over nothing is no number: rows that see nothing are zeros.
    return mx.where(mx.any(seen, axis=-1, keepdims=True), mixed, mx.zeros_like(mixed))


def rotated(queries: mx.array) -> mx.array:
    """Queries in the basis of rotated keys, in fp32: a rotation keeps products, so no key is turned back."""
    return mx.hadamard_transform(queries.astype(mx.float32))


def gathered(rows: LayerPages, first: mx.array, lengths: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Keys and values [B, kv_heads, blocks * 256, dim] of each row of a block table, as stored: rotated keys stay so.

    Rows before a sequence's `first` [B] and from its length on are zeros, whatever their pages hold or whether they
    have any: what is masked still counts as 0 times its value, and 0 times NaN is NaN.
    """
    page_format, blocks = rows.format, rows.block_table.shape[1]
    starts = mx.arange(blocks)[None] * PAGE_TOKENS
    is_used = (starts < lengths[:, None]) & (starts + PAGE_TOKENS > first[:, None])
    # Taken as an embedding's rows: CUDA compiles 22 kernels for each other pair of types.
    used = mx.where(is_used, rows.block_table, 0).astype(mx.uint32)
    found = rows.pages.view(mx.bfloat16)[used].view(rows.pages.dtype)
    tokens = mx.arange(blocks * PAGE_TOKENS)[None]
    is_stored = (tokens >= first[:, None]) & (tokens < lengths[:, None])
    parts = [_part(found, part) for part in page_format.parts]
    key_parts = len(page_format.key.part_units)
    return (
        _decoded(parts[:key_parts], page_format.key, page_format, is_stored, dtype),
        _decoded(parts[key_parts:], page_format.value, page_format, is_stored, dtype),
    )


def _part(found: mx.array, part: Part) -> mx.array:
    """One part of gathered pages [B, blocks, units] as rows [B, kv_heads, blocks * 256, …]."""
    batch, blocks, _ = found.shape
    rows = found[..., part.offset : part.offset + part.size].reshape(batch, blocks, part.kv_heads, PAGE_TOKENS, -1)
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, part.kv_heads, blocks * PAGE_TOKENS, part.units)
    return rows.view(mx.uint32) if part.is_codes else rows


def _decoded(
    parts: list[mx.array], rows: RowFormat, page_format: PageFormat, is_stored: mx.array, dtype: mx.Dtype
) -> mx.array:
    scale_type = SCALE_TYPES[page_format.scale_type]
    typed = [part if part.dtype == mx.uint32 else part.view(scale_type) for part in parts]
    is_stored = is_stored[:, None, :, None]
    # Codes are numbers whatever they are; a scale, a bias or a value that nobody wrote may be none.
    clean = [part if part.dtype == mx.uint32 else mx.where(is_stored, part, mx.zeros_like(part)) for part in typed]
    if not rows.is_quantized:
        return ExactCodec(scale_type).decode(tuple(clean), dtype)
    return QuantizedCodec(rows.bits, rows.group_size, scale_type).decode(tuple(clean), dtype)


def _seen(lengths: mx.array, query_count: int, token_count: int, window: int | None) -> mx.array:
    """Which positions each query sees: bool [B, 1, L, tokens]."""
    tokens = mx.arange(token_count)[None, None, None]
    last = (lengths[:, None] - query_count + mx.arange(query_count)[None])[:, None, :, None]
    seen = tokens <= last
    return seen if window is None else seen & (tokens > last - window)
