"""New rows of K and V as the units that a page's parts hold, quantized by one kernel where there is one."""

import mlx.core as mx

from inference_svc.kv.attention.fused import COMPILERS, Compiler, compiled
from inference_svc.kv.attention.geometry import LANES, WARPS, format_template, groups
from inference_svc.kv.attention.kernels import Dialect, quantize_source
from inference_svc.kv.attention.reference import rotated
from inference_svc.kv.codec import SCALE_TYPES, ExactCodec, QuantizedCodec
from inference_svc.kv.page import PAGE_TOKENS, PageFormat, RowFormat


def reference_quantized(keys: mx.array, values: mx.array, page_format: PageFormat) -> mx.array:
    """As `quantize_rows` says, by MLX's own operations."""
    keys = rotated(keys) if page_format.key.is_rotated else keys
    parts = (*_encoded(keys, page_format.key, page_format), *_encoded(values, page_format.value, page_format))
    batch, _, count, _ = keys.shape
    units = [part.view(mx.uint16).transpose(0, 2, 1, 3).reshape(batch, count, -1) for part in parts]
    return mx.concatenate(units, axis=-1)


def _encoded(rows: mx.array, row_format: RowFormat, page_format: PageFormat) -> tuple[mx.array, ...]:
    scale_type = SCALE_TYPES[page_format.scale_type]
    if not row_format.is_quantized:
        return ExactCodec(scale_type).encode(mx.contiguous(rows))
    return QuantizedCodec(row_format.bits, row_format.group_size, scale_type).encode(rows)


def fused_quantized(
    keys: mx.array, values: mx.array, page_format: PageFormat, dialect: Dialect, compiler: Compiler | None = None
) -> mx.array:
    """As `quantize_rows` says, in one launch; rotated keys are turned by MLX's own transform before it."""
    keys = rotated(keys) if page_format.key.is_rotated else keys
    batch, heads, count, _ = keys.shape
    units = page_format.units // PAGE_TOKENS
    items = batch * count * heads * (groups(page_format.key) + groups(page_format.value))
    (out,) = compiled(compiler or COMPILERS[dialect], quantize_source(dialect))(
        inputs=[keys, values],
        template=[
            ("Key", keys.dtype),
            ("Value", values.dtype),
            ("WARPS", WARPS),
            ("SHARED_BYTES", 16),
            *format_template(page_format).items(),
        ],
        grid=(-(-items // WARPS) * WARPS * LANES, 1, 1),
        threadgroup=(WARPS * LANES, 1, 1),
        output_shapes=[(batch, count, units)],
        output_dtypes=[mx.uint16],
    )
    return out
