"""Attention over pages by two kernels: one mixes fixed splits of the tokens, one makes a result of the splits."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Protocol, cast

import mlx.core as mx

from inference_svc.kv.attention.geometry import (
    LANES,
    PARTIAL_EXTRA,
    REDUCE_WARPS,
    SplitGeometry,
    split_geometry,
)
from inference_svc.kv.attention.kernels import Dialect, KernelSource, reduce_source, split_source
from inference_svc.kv.attention.reference import rotated
from inference_svc.kv.page import PageFormat

Template = list[tuple[str, int | bool | mx.Dtype]]
_TYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


class Kernel(Protocol):
    """What MLX makes of a source."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]: ...


# Compiles a source that may use so many bytes of shared memory, for a dialect's device.
Compiler = Callable[[KernelSource, int], Kernel]


def cuda_compiler(source: KernelSource, shared_bytes: int) -> Kernel:
    """By MLX's CUDA back end."""
    made: Any = mx.fast.cuda_kernel(
        name=source.name,
        input_names=list(source.input_names),
        output_names=list(source.output_names),
        source=source.source,
        header=source.header,
        ensure_row_contiguous=source.is_row_contiguous,
        shared_memory=shared_bytes,
    )
    return cast("Kernel", made)


def metal_compiler(source: KernelSource, shared_bytes: int) -> Kernel:  # noqa: ARG001 - a Compiler's
    """By MLX's Metal back end; the source itself says its shared memory."""
    made: Any = mx.fast.metal_kernel(
        name=source.name,
        input_names=list(source.input_names),
        output_names=list(source.output_names),
        source=source.source,
        header=source.header,
        ensure_row_contiguous=source.is_row_contiguous,
    )
    return cast("Kernel", made)


COMPILERS: dict[Dialect, Compiler] = {Dialect.CUDA: cuda_compiler, Dialect.METAL: metal_compiler}


def fused_attention(
    queries: mx.array,
    pages: mx.array,
    page_format: PageFormat,
    block_table: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    soft_cap: float | None = None,
    dialect: Dialect,
    compiler: Compiler | None = None,
) -> mx.array:
    """As `paged_attention` says, of page formats for which `geometry.why_not` says nothing."""
    rows = queries.shape[1] // page_format.key.kv_heads * queries.shape[2]
    geometry = split_geometry(
        page_format,
        rows,
        has_matrices=dialect is Dialect.CUDA,
        query_type=_TYPE_NAMES[queries.dtype],
        is_capped=soft_cap is not None,
    )
    settings = _settings(scale, soft_cap or 0.0, window or 0)
    asked = rotated(queries) if page_format.key.is_rotated else queries
    compiler = compiler or COMPILERS[dialect]
    partial = mixed_splits(geometry, asked, pages, block_table, lengths, settings, dialect, compiler)
    return _reduced(geometry, queries, partial, lengths, sinks, settings, dialect, compiler)


def mixed_splits(
    geometry: SplitGeometry,
    queries: mx.array,
    pages: mx.array,
    block_table: mx.array,
    lengths: mx.array,
    settings: mx.array,
    dialect: Dialect,
    compiler: Compiler,
) -> mx.array:
    """Mixes of each split: fp32 [B * Hq * L, splits, Dv + 4]; what no query sees stays unwritten."""
    batch, heads, count, _ = queries.shape
    blocks = block_table.shape[1]
    kernel = compiled(compiler, split_source(dialect, by_matrices=geometry.by_matrices), geometry.shared_bytes)
    shape = (batch * heads * count, geometry.splits(blocks), geometry.format.value.dim + PARTIAL_EXTRA)
    (partial,) = kernel(
        inputs=[queries, pages, block_table, lengths, settings],
        template=[("Query", queries.dtype), *geometry.template.items()],
        grid=geometry.grid(batch, blocks, heads // geometry.format.key.kv_heads * count),
        threadgroup=(geometry.warps * LANES, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.float32],
    )
    return partial


def _reduced(
    geometry: SplitGeometry,
    queries: mx.array,
    partial: mx.array,
    lengths: mx.array,
    sinks: mx.array | None,
    settings: mx.array,
    dialect: Dialect,
    compiler: Compiler,
) -> mx.array:
    batch, heads, count, _ = queries.shape
    value_dim = geometry.format.value.dim
    shared_bytes = REDUCE_WARPS * (value_dim + PARTIAL_EXTRA) * 4
    kernel = compiled(compiler, reduce_source(dialect), shared_bytes)
    given = settings if sinks is None else sinks
    template: Template = [
        ("Query", queries.dtype),
        ("Out", queries.dtype),
        ("Sink", given.dtype),
        ("HAS_SINKS", sinks is not None),
        ("VALUE_DIM", value_dim),
        ("SPLIT", geometry.split),
        ("WARPS", REDUCE_WARPS),
        ("SHARED_BYTES", shared_bytes),
    ]
    (out,) = kernel(
        inputs=[queries, partial, lengths, given, settings],
        template=template,
        grid=(batch * heads * count * REDUCE_WARPS * LANES, 1, 1),
        threadgroup=(REDUCE_WARPS * LANES, 1, 1),
        output_shapes=[(batch, heads, count, value_dim)],
        output_dtypes=[queries.dtype],
    )
    return out


@cache
def compiled(compiler: Compiler, source: KernelSource, shared_bytes: int = 0) -> Kernel:
    """A kernel, compiled once for each source and amount of shared memory."""
    return compiler(source, shared_bytes)


@lru_cache(maxsize=256)
def _settings(scale: float, soft_cap: float, window: int) -> mx.array:
    """What a launch is told in numbers, made once: a new array for every layer and step would cost a copy each."""
    made = mx.array([scale, soft_cap, float(window), 0.0], mx.float32)
    mx.eval(made)
    return made
