"""Attention over pages by two kernels: one mixes fixed splits of the tokens, one makes a result of the splits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Protocol, cast

import mlx.core as mx

from inference_svc.kv.attention import tiles
from inference_svc.kv.attention.geometry import (
    LANES,
    PARTIAL_EXTRA,
    REDUCE_WARPS,
    Queries,
    SplitGeometry,
    format_template,
    split_geometry,
)
from inference_svc.kv.attention.hopper import TARGET, hopper_compiler, is_hopper
from inference_svc.kv.attention.kept_kernel import KeptKernel, device_target, is_launched
from inference_svc.kv.attention.kernels import (
    Dialect,
    KernelSource,
    reduce_source,
    split_source,
    tiles_source,
    warpgroups_source,
    window_source,
)
from inference_svc.kv.attention.nvrtc import CompileError
from inference_svc.kv.attention.reference import LayerPages, Scoring, rotated
from inference_svc.kv.page import PAGE_TOKENS

Template = list[tuple[str, int | bool | mx.Dtype]]
TYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


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
    """As finished code that is kept on disk where this device takes that, else by MLX."""
    if (target := device_target()) is None:
        return mlx_cuda_compiler(source, shared_bytes)
    return KeptKernel(
        source, shared_bytes, target, otherwise=lambda **how: compiled(mlx_cuda_compiler, source, shared_bytes)(**how)
    )


def lone_cuda_compiler(source: KernelSource, shared_bytes: int) -> Kernel:
    """As `cuda_compiler`, of blocks that have a multiprocessor each. Raises CompileError where code is MLX's alone."""
    if (target := device_target()) is None:
        raise CompileError("this device takes no finished code")
    return KeptKernel(replace(source, blocks=1), shared_bytes, target)


def mlx_cuda_compiler(source: KernelSource, shared_bytes: int) -> Kernel:
    """By MLX's CUDA back end, once in each process."""
    return cast("Kernel", mx.fast.cuda_kernel(**_about(source), shared_memory=shared_bytes))


def metal_compiler(source: KernelSource, shared_bytes: int) -> Kernel:  # noqa: ARG001 - a Compiler's
    """By MLX's Metal back end; the source itself declares its shared memory."""
    return cast("Kernel", mx.fast.metal_kernel(**_about(source)))


def _about(source: KernelSource) -> dict[str, Any]:
    return {
        "name": source.name,
        "input_names": list(source.input_names),
        "output_names": list(source.output_names),
        "source": source.source,
        "header": source.header,
        "ensure_row_contiguous": True,
    }


COMPILERS: dict[Dialect, Compiler] = {Dialect.CUDA: cuda_compiler, Dialect.METAL: metal_compiler}


@dataclass(frozen=True, slots=True)
class KernelTarget:
    """The device that kernels are written for, and their compiler."""

    dialect: Dialect
    compiler: Compiler | None = None  # None: the dialect's own
    has_warpgroups: bool | None = None  # whether Hopper's own instructions are used; None asks the device

    @property
    def made_by(self) -> Compiler:
        return self.compiler or COMPILERS[self.dialect]


TARGETS = {dialect: KernelTarget(dialect) for dialect in Dialect}


def fused_attention(
    queries: mx.array,
    rows: LayerPages,
    lengths: mx.array,
    scoring: Scoring,
    target: KernelTarget,
    *,
    is_flat: bool = False,
) -> mx.array:
    """As `paged_attention`, of page formats for which `geometry.why_not` is empty."""
    scale, window, sinks = scoring
    key, blocks, count = rows.format.key, rows.block_table.shape[1], queries.shape[2]
    seen_tokens = window + count - 1 if window else 0
    widest = min(seen_tokens or blocks * PAGE_TOKENS, blocks * PAGE_TOKENS) if count > 1 else 0
    has_warpgroups, dialect = target.has_warpgroups, target.dialect
    if has_warpgroups is None:
        has_warpgroups = dialect is Dialect.CUDA and target.compiler is None and is_hopper()
    batch, query_type = queries.shape[0] if count > 1 else 1, TYPE_NAMES[queries.dtype]
    takes_tiles = not tiles.are_refused(rows.format, query_type)
    shape = rows.format, Queries(query_type, queries.shape[1] // key.kv_heads * count, widest, batch), dialect
    geometry = _geometry(*shape, takes_tiles=takes_tiles, has_warpgroups=has_warpgroups)
    if geometry.by_warpgroups and target.compiler is None and not _is_launched(geometry, queries.dtype):
        geometry = _geometry(*shape, takes_tiles=takes_tiles)
    asked = rotated(queries) if key.is_rotated else queries
    settings = settings_of(scale, window, geometry.split)
    sink_type = None if sinks is None else sinks.dtype
    plan = plan_of(geometry, dialect, target.made_by, asked.dtype, queries.dtype, sink_type)
    partial = plan.mixed_splits(asked, rows, lengths, settings, geometry.splits(blocks, seen_tokens))
    return plan.reduced(queries, partial, lengths, sinks, settings, is_flat=is_flat)


def attention_and_weight(
    queries: mx.array, rows: LayerPages, lengths: mx.array, scale: float, target: KernelTarget
) -> tuple[mx.array, mx.array]:
    """As `fused_attention`, of queries [B, Hq, 1, Dk] that see all rows; and the logarithm of the rows' weight
    together, fp32 [B, Hq], by which the result is mixed with that over other rows. -inf, and zeros, where there are
    none.
    """
    _, plan, settings, partial = _mixed(queries, rows, lengths, scale, target)
    splits, dim = partial.shape[1], rows.format.value.dim
    summed = partial[:, :, dim : dim + 2].reshape(*queries.shape[:2], splits, 2)
    is_written = (mx.arange(splits) * plan.geometry.split)[None, None] < lengths[:, None, None]
    highest = mx.where(is_written, summed[..., 0] * math.log(2), -mx.inf)
    weight = mx.where(is_written, mx.log(summed[..., 1]) + highest, -mx.inf)
    return plan.reduced(queries, partial, lengths, None, settings), mx.logsumexp(weight, axis=-1)


def window_attention(
    queries: mx.array,
    new: tuple[mx.array, mx.array],
    stored: mx.array,
    rows: LayerPages,
    before: mx.array,
    scale: float,
    target: KernelTarget,
) -> mx.array:
    """Attention of windows' queries [slots * n, Hq, 1, Dk], in their dtype; a row's heads lie side by side, [slots * n,
    1, Hq * Dv]. Each sees the first `before` [slots] rows of its sequence's pages, and the rows in front of it in its
    slot: of K and V `new` [slots * n, kv_heads, 1, dim] those that `stored` [slots, n], the result of `append_rows`,
    names, as they are in pages.
    """
    dtype, (slots, count), heads = queries.dtype, stored.shape, queries.shape[1]
    kv_heads, value_dim = rows.format.key.kv_heads, rows.format.value.dim
    # To a slot's pages its rows are further heads of queries: each sees all of them.
    by_head = queries.reshape(slots, count, kv_heads, heads // kv_heads, -1).swapaxes(1, 2)
    asked, (keys, values) = by_head.reshape(slots, heads * count, 1, -1), new
    asked, _, settings, partial = _mixed(asked, rows, before, scale, target)
    keys = rotated(keys) if rows.format.key.is_rotated else keys
    shared_bytes = REDUCE_WARPS * (value_dim + PARTIAL_EXTRA) * 4
    types = zip(("Query", "Key", "Value", "Out"), (asked.dtype, keys.dtype, values.dtype, dtype), strict=True)
    return compiled(target.made_by, window_source(target.dialect), shared_bytes)(
        inputs=[asked, keys, values, rows.pages, rows.block_table, stored, partial, before, settings],
        template=[
            *types,
            ("WARPS", REDUCE_WARPS),
            ("SHARED_BYTES", shared_bytes),
            *format_template(rows.format).items(),
        ],
        grid=(slots * count * heads * REDUCE_WARPS * LANES, 1, 1),
        threadgroup=(REDUCE_WARPS * LANES, 1, 1),
        output_shapes=[(slots * count, 1, heads * value_dim)],
        output_dtypes=[dtype],
    )[0]


def _mixed(
    queries: mx.array, rows: LayerPages, lengths: mx.array, scale: float, target: KernelTarget
) -> tuple[mx.array, "Plan", mx.array, mx.array]:
    """Of queries [B, Hq, 1, Dk] that see all rows: these in the basis of keys, the plan, its settings, the mixes."""
    dtype, page_format = queries.dtype, rows.format
    shape = Queries(TYPE_NAMES[dtype], queries.shape[1] // page_format.key.kv_heads, 0)
    takes_tiles = not tiles.are_refused(page_format, shape.type)
    geometry = _geometry(page_format, shape, target.dialect, takes_tiles=takes_tiles)
    asked = rotated(queries) if page_format.key.is_rotated else queries
    settings = settings_of(scale, None, geometry.split)
    plan = plan_of(geometry, target.dialect, target.made_by, asked.dtype, dtype, None)
    splits = geometry.splits(rows.block_table.shape[1], 0)
    return asked, plan, settings, plan.mixed_splits(asked, rows, lengths, settings, splits)


@dataclass(frozen=True, slots=True)
class Plan:
    """Two kernels and their compile-time values. Made once: a layer's launch costs as little Python as it can."""

    geometry: SplitGeometry
    split: Kernel
    split_template: Template
    reduce: Kernel
    reduce_template: Template
    out_type: mx.Dtype

    def mixed_splits(
        self,
        queries: mx.array,
        rows: LayerPages,
        lengths: mx.array,
        settings: mx.array,
        splits: int,
    ) -> mx.array:
        """Mixes of each split from the first that a sequence's queries see on: fp32 [B * Hq * L, splits, Dv + 4]; what
        no query sees stays unwritten.
        """
        batch, heads, count, _ = queries.shape
        geometry = self.geometry
        width = geometry.format.value.dim + PARTIAL_EXTRA
        return self.split(
            inputs=[queries, rows.pages, rows.block_table, lengths, settings],
            template=self.split_template,
            grid=geometry.grid(batch, splits, heads // geometry.format.key.kv_heads * count),
            threadgroup=(geometry.warps * LANES, 1, 1),
            output_shapes=[(batch * heads * count, splits, width)],
            output_dtypes=[mx.float32],
        )[0]

    def reduced(
        self,
        queries: mx.array,
        partial: mx.array,
        lengths: mx.array,
        sinks: mx.array | None,
        settings: mx.array,
        *,
        is_flat: bool = False,
    ) -> mx.array:
        """The results [B, Hq, L, Dv] of mixed splits; `is_flat`: as `paged_attention` has it."""
        batch, heads, count, _ = queries.shape
        dim = self.geometry.format.value.dim
        return self.reduce(
            inputs=[queries, partial, lengths, settings if sinks is None else sinks, settings],
            template=self.reduce_template,
            grid=(batch * heads * count * REDUCE_WARPS * LANES, 1, 1),
            threadgroup=(REDUCE_WARPS * LANES, 1, 1),
            output_shapes=[(batch, 1, heads * dim) if is_flat else (batch, heads, count, dim)],
            output_dtypes=[self.out_type],
        )[0]


@lru_cache(maxsize=256)
def plan_of(
    geometry: SplitGeometry,
    dialect: Dialect,
    compiler: Compiler,
    query_type: mx.Dtype,
    out_type: mx.Dtype,
    sink_type: mx.Dtype | None,
) -> Plan:
    """The kernels for queries of a type; they are compiled at their first launch."""
    value_dim = geometry.format.value.dim
    reduce_bytes = REDUCE_WARPS * (value_dim + PARTIAL_EXTRA) * 4
    reduce_template: Template = [
        ("Query", out_type),
        ("Out", out_type),
        ("Sink", sink_type or mx.float32),
        ("HAS_SINKS", sink_type is not None),
        ("VALUE_DIM", value_dim),
        ("WARPS", REDUCE_WARPS),
        ("SHARED_BYTES", reduce_bytes),
    ]
    return Plan(
        geometry,
        _split_kernel(geometry, dialect, compiler),
        _split_template(geometry, query_type),
        compiled(compiler, reduce_source(dialect), reduce_bytes),
        reduce_template,
        out_type,
    )


def _split_kernel(geometry: SplitGeometry, dialect: Dialect, compiler: Compiler) -> Kernel:
    if geometry.by_warpgroups:
        made_by = hopper_compiler if compiler is cuda_compiler else compiler
        return compiled(made_by, warpgroups_source(), geometry.shared_bytes)
    source = tiles_source(dialect) if geometry.by_tiles else split_source(dialect, by_matrices=geometry.by_matrices)
    return compiled(compiler, source, geometry.shared_bytes)


def _split_template(geometry: SplitGeometry, query_type: mx.Dtype) -> Template:
    return [("Query", query_type), *geometry.template.items()]


_geometry = lru_cache(maxsize=256)(split_geometry)


@lru_cache(maxsize=256)
def _is_launched(geometry: SplitGeometry, dtype: mx.Dtype) -> bool:
    """Whether warpgroups can serve a geometry here. Splits of all lengths are one kernel's."""
    return _is_program_launched(replace(geometry, split=geometry.tile), dtype)


@lru_cache(maxsize=256)
def _is_program_launched(geometry: SplitGeometry, dtype: mx.Dtype) -> bool:
    """Launches a kernel for a sequence without tokens, which its blocks leave at once."""
    key = geometry.format.key
    asked = mx.float32 if key.is_rotated else dtype
    kernel = compiled(hopper_compiler, warpgroups_source(), geometry.shared_bytes)
    queries, pages = mx.zeros((1, key.kv_heads, 1, key.dim), asked), mx.zeros((1, 1), mx.uint16)
    table, lengths = mx.zeros((1, 1), mx.int32), mx.zeros(1, mx.int32)
    return is_launched(
        TARGET,
        lambda: kernel(
            inputs=[queries, pages, table, lengths, settings_of(1.0, None, geometry.split)],
            template=_split_template(geometry, asked),
            grid=geometry.grid(1, 1, 1),
            threadgroup=(geometry.warps * LANES, 1, 1),
            output_shapes=[(key.kv_heads, 1, geometry.format.value.dim + PARTIAL_EXTRA)],
            output_dtypes=[mx.float32],
        ),
    )


@lru_cache(maxsize=256)
def settings_of(scale: float, window: int | None, split: int) -> mx.array:
    """The numbers of a launch, made once: a new array for every layer and step would cost a copy each."""
    made = mx.array([scale, float(window or 0), float(split)], mx.float32)
    mx.eval(made)
    return made


@cache
def compiled(compiler: Compiler, source: KernelSource, shared_bytes: int = 0) -> Kernel:
    """A kernel, compiled once for each source and amount of shared memory."""
    return compiler(source, shared_bytes)
