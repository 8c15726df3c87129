"""Writes to a pool's pages where they lie, and reads of them as values: kernels for a GPU.

A scatter of MLX's own makes a new array, and has to copy the whole pool whenever something that was enqueued still
reads the old one: always, when a step is enqueued before the last one is over. So these kernels write into an array
that MLX believes they only read. What makes that sound: a page that is written has one holder; within one graph
kernels run behind what they take as input, so a write gives an array back, and whatever reads the rows in the same pass
takes that array as input; and a CUDA stream runs one graph after the other. Metal, where none of this has run, orders
only a kernel behind the outputs that it takes: there each write takes `KvPool.order`, a result of the pass before it.
"""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from inference_svc.kv.attention.fused import COMPILERS, compiled
from inference_svc.kv.attention.geometry import LANES, WARPS, format_template, groups
from inference_svc.kv.attention.kernels import Dialect, append_source, gather_source, store_source
from inference_svc.kv.attention.reference import LayerPages, rotated

_CHUNK_UNITS = 8  # 16 bytes


def append_rows(
    keys: mx.array,
    values: mx.array,
    rows: LayerPages,
    places: mx.array,
    dialect: Dialect,
    after: Sequence[mx.array] = (),
) -> mx.array:
    """Quantize rows [B, H, n, Dk] and [B, H, n, Dv], and write them at positions `places` [B, n] of their sequences. A
    negative position is written nowhere. Returns each position + 1, int32 in the shape of `places`: whatever reads
    these rows in the same pass must take it as input. `after`: `KvPool.order`.
    """
    page_format = rows.format
    batch, heads, count, _ = keys.shape
    if count > 1:  # in the order in which a projection has made them, so that nothing is copied
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    keys = rotated(keys) if page_format.key.is_rotated else keys
    items = batch * count * heads * (groups(page_format.key) + groups(page_format.value))
    (stored,) = compiled(COMPILERS[dialect], append_source(dialect), 16)(
        inputs=[keys, values, rows.pages, rows.block_table, places, *_ordering(dialect, after)],
        template=[
            ("Key", keys.dtype),
            ("Value", values.dtype),
            ("WARPS", WARPS),
            ("SHARED_BYTES", 16),
            *format_template(page_format).items(),
        ],
        grid=(-(-items // WARPS) * WARPS * LANES, 1, 1),
        threadgroup=(WARPS * LANES, 1, 1),
        output_shapes=[places.shape],
        output_dtypes=[mx.int32],
    )
    return stored


def gathered_values(
    rows: LayerPages, start: int, stop: int, stored: mx.array, dtype: mx.Dtype, dialect: Dialect
) -> tuple[mx.array, mx.array]:
    """Rows [start, stop) of one sequence as values: K [1, H, n, Dk] and V [1, H, n, Dv]. Rotated keys are turned back.
    `stored` is what `append_rows` gave back.
    """
    key, value, count = rows.format.key, rows.format.value, stop - start
    items = count * (key.dim + value.dim) // 8  # of each head
    keys, values = compiled(COMPILERS[dialect], gather_source(dialect), 16)(
        inputs=[rows.pages, rows.block_table, _span(start, count), stored],
        template=[
            ("Out", mx.float32 if key.is_rotated else dtype),
            ("WARPS", WARPS),
            ("SHARED_BYTES", 16),
            *format_template(rows.format).items(),
        ],
        grid=(-(-items // (WARPS * LANES)) * WARPS * LANES, key.kv_heads, 1),
        threadgroup=(WARPS * LANES, 1, 1),
        output_shapes=[(1, key.kv_heads, count, key.dim), (1, value.kv_heads, count, value.dim)],
        output_dtypes=[mx.float32 if key.is_rotated else dtype] * 2,
    )
    if key.is_rotated:
        return mx.hadamard_transform(keys).astype(dtype), values.astype(dtype)
    return keys, values


def store_pages(
    pages: mx.array,
    targets: mx.array,
    content: mx.array,
    sources: mx.array,
    units: range,
    dialect: Dialect,
    after: Sequence[mx.array] = (),
) -> mx.array:
    """Write these units of rows `sources` of `content` [rows, any] to the beginning of pages `targets`, both int32 [n].
    Units are multiples of 8. Returns an array to be evaluated. `after`: `KvPool.order`.
    """
    items = targets.shape[0] * len(units) // _CHUNK_UNITS
    counts = len(units), content.shape[1], units.start, pages.shape[1]
    sizes = _sizes(*(count // _CHUNK_UNITS for count in counts))
    (stored,) = compiled(COMPILERS[dialect], store_source(dialect), 16)(
        inputs=[pages, content, targets, sources, sizes, *_ordering(dialect, after)],
        template=[("WARPS", WARPS), ("SHARED_BYTES", 16)],
        grid=(-(-items // (WARPS * LANES)) * WARPS * LANES, 1, 1),
        threadgroup=(WARPS * LANES, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return stored


def _ordering(dialect: Dialect, after: Sequence[mx.array]) -> Sequence[mx.array]:
    return () if dialect is Dialect.CUDA else after or (_sizes(0),)


@lru_cache(maxsize=64)
def _span(start: int, count: int) -> mx.array:
    return _evaluated(mx.array([start, count], dtype=mx.int32))


@lru_cache(maxsize=64)
def _sizes(*sizes: int) -> mx.array:
    return _evaluated(mx.array(sizes, dtype=mx.int32))


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array
