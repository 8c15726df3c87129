"""Attention of a decoding step in one launch on a CUDA device: new tokens' queries and keys are rotated, their rows
written to pages, splits of pages mixed and made results; by kernels one by one these are five launches a layer.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from inference_svc.kv.attention.fused import COMPILERS, TYPE_NAMES, Compiler, compiled, settings_of
from inference_svc.kv.attention.geometry import LANES, PARTIAL_EXTRA, Queries, SplitGeometry, split_geometry
from inference_svc.kv.attention.kernels import Dialect, attend_source
from inference_svc.kv.batch.fused_layer import FusedLayer, StepPages
from inference_svc.kv.model_hooks.whole_layers import _frequencies
from inference_svc.kv.page import PAGE_TOKENS, PageFormat

MAX_ROWS = 16  # with more, each block's own rotations and waits cost more than the launches
_MOST_HEADS = 64  # of K and V
_MOST_BLOCKS = 32  # of a sequence: a warp makes a query's result of them, and of more a kernel of its own is faster


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One of each sequence, not rotated: queries [slots, heads, 1, dim], and rows of K and V."""

    queries: mx.array
    keys: mx.array
    values: mx.array


@dataclass(frozen=True, slots=True)
class Rotation:
    """`frequencies`: by pair of dimensions the factor of a position. `counters`: words that blocks meet at."""

    frequencies: mx.array
    counters: mx.array


def step_attention(
    new: NewTokens, step: StepPages, rotation: Rotation, scale: float, compiler: Compiler | None = None
) -> mx.array:
    """The results [slots, 1, heads * dim], in the queries' type; rows of K and V are in their pages then."""
    slots, heads, _, _ = new.queries.shape
    dtype, dim, blocks = new.queries.dtype, step.format.value.dim, step.block_table.shape[1]
    geometry = _geometry(step.format, TYPE_NAMES[dtype], heads)
    assert geometry is not None, "a kernel that does not serve"
    settings, kernel = settings_of(scale, None, PAGE_TOKENS), (compiler or COMPILERS[Dialect.CUDA], attend_source())
    pages = step.pages, step.block_table, step.places
    out, _ = compiled(*kernel, geometry.shared_bytes)(
        inputs=[new.queries, new.keys, new.values, rotation.frequencies, *pages, settings, rotation.counters],
        template=[("T", dtype), ("HEADS", heads), *geometry.template.items()],
        grid=geometry.grid(slots, blocks, 1),
        threadgroup=(geometry.warps * LANES, 1, 1),
        output_shapes=[(slots, 1, heads * dim), (slots * heads, blocks, dim + PARTIAL_EXTRA)],
        output_dtypes=[dtype, mx.float32],
    )
    return out


@lru_cache(maxsize=64)
def _geometry(page_format: PageFormat, query_type: str, heads: int) -> SplitGeometry | None:
    """None where the kernel does not serve."""
    key, value = page_format.key, page_format.value
    share = heads // key.kv_heads
    if key.dim % 64 or value.dim % LANES or key.is_rotated or key.kv_heads > _MOST_HEADS:
        return None
    usual = split_geometry(page_format, Queries(query_type, share, 0), Dialect.CUDA, takes_tiles=False)
    return usual if usual.by_matrices and usual.split == PAGE_TOKENS and share <= usual.queries else None


class StepAttention:
    """Of a model's attention, whose rotation the kernel does."""

    def __init__(self, scale: float, rotation: Rotation) -> None:
        self._scale, self._rotation = scale, rotation

    def result(self, queries: mx.array, keys: mx.array, values: mx.array, cache: FusedLayer) -> mx.array | None:
        """The results [slots, 1, heads * dim] of a step, not rotated yet; None where the kernel does not serve."""
        step, dtype = cache.step_pages(), queries.dtype
        if step is None or queries.shape[0] > MAX_ROWS or step.block_table.shape[1] > _MOST_BLOCKS:
            return None
        if dtype not in (mx.bfloat16, mx.float16) or 2 * self._rotation.frequencies.size != queries.shape[-1]:
            return None
        if _geometry(step.format, TYPE_NAMES[dtype], queries.shape[1]) is None:
            return None
        return step_attention(NewTokens(queries, keys, values), step, self._rotation, self._scale)


def step_attention_of(attention: Any, shared: dict[Any, mx.array]) -> StepAttention | None:
    """Of mlx-lm's attention; None where its rotation is another. `shared`: arrays that layers have together."""
    rope: Any = attention.rope
    if (found := _frequencies(rope)) is None:
        return None
    frequencies = shared.setdefault(("angles", repr(found.tolist())), found)
    counters = shared.setdefault("attention's counters", new_counters())
    mx.eval(frequencies, counters)
    return StepAttention(attention.scale, Rotation(frequencies, counters))


def new_counters() -> mx.array:
    """Words that blocks which attend to a row's head meet at."""
    return mx.zeros(MAX_ROWS * _MOST_HEADS, mx.uint32)
