"""Packs encoded rows (parts `[1, kv_heads, n, width]`) into pages (`[pages, units]`), and reads pages as rows."""

from collections.abc import Sequence

import mlx.core as mx

from inference_svc.kv.codec import SCALE_TYPES, EncodedRows
from inference_svc.kv.page import PAGE_TOKENS, PageFormat

UNIT = mx.uint16


def pages_of_rows(page_format: PageFormat, rows: EncodedRows) -> mx.array:
    """Pages [ceil(n / 256), units] of parts [1, kv_heads, n, width]; units behind the last row are zero."""
    count = rows[0].shape[2]
    blocks = -(-count // PAGE_TOKENS)
    packed = []
    for part, values in zip(page_format.parts, rows, strict=True):
        units = values.view(UNIT).squeeze(0)  # by an index MLX would gather it
        if spare := blocks * PAGE_TOKENS - count:
            units = mx.pad(units, [(0, 0), (0, spare), (0, 0)])
        shaped = units.reshape(part.kv_heads, blocks, PAGE_TOKENS, part.units)
        packed.append(shaped.transpose(1, 0, 2, 3).reshape(blocks, part.size))
    return mx.concatenate(packed, axis=1)


def rows_of_pages(page_format: PageFormat, pages: mx.array, start: int, stop: int) -> EncodedRows:
    """Rows [start, stop) of pages [n, units] that follow each other, as parts [1, kv_heads, stop - start, width]."""
    blocks = pages.shape[0]
    parts = []
    for part in page_format.parts:
        shaped = pages[:, part.offset : part.offset + part.size].reshape(blocks, part.kv_heads, PAGE_TOKENS, part.units)
        rows = shaped.transpose(1, 0, 2, 3).reshape(1, part.kv_heads, blocks * PAGE_TOKENS, part.units)
        if (start, stop) != (0, blocks * PAGE_TOKENS):
            rows = rows[:, :, start:stop]
        parts.append(rows.view(mx.uint32 if part.is_codes else SCALE_TYPES[page_format.scale_type]))
    return tuple(parts)


def row_columns(page_format: PageFormat, order: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Where a token's row lies in its page: by unit the column of row 0 and the step to the next row, in `order`."""
    columns, steps = [], []
    for number in order:
        part = page_format.parts[number]
        heads = mx.arange(part.kv_heads)[:, None] * (PAGE_TOKENS * part.units)
        columns.append((part.offset + heads + mx.arange(part.units)[None]).reshape(-1))
        steps.append(mx.full((part.kv_heads * part.units,), part.units, dtype=mx.int32))
    return mx.concatenate(columns).astype(mx.int32), mx.concatenate(steps)


def joined_rows(one: EncodedRows, other: EncodedRows) -> EncodedRows:
    return tuple(mx.concatenate(list(pair), axis=2) for pair in zip(one, other, strict=True))
