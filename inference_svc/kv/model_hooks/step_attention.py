"""Attention of a decoding step in one launch on a CUDA device, or of many rows in two or three: new tokens' queries
and keys are rotated, their rows written to pages; splits of pages are mixed; these are made results. By kernels one by
one these are five launches a layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from inference_svc.kv.attention.fused import COMPILERS, TYPE_NAMES, Compiler, Kernel, compiled, settings_of
from inference_svc.kv.attention.geometry import (
    LANES,
    PARTIAL_EXTRA,
    WARPS,
    Queries,
    SplitGeometry,
    groups,
    split_geometry,
)
from inference_svc.kv.attention.kernels import Dialect, attend_source, results_source, turn_source, turns_source
from inference_svc.kv.batch.fused_layer import FusedLayer, StepPages
from inference_svc.kv.model_hooks.few_rows import MAX_ROWS
from inference_svc.kv.page import EXACT_BITS, PAGE_TOKENS, PageFormat

Template = Mapping[str, int | bool | mx.Dtype]
_WHOLE_ROWS = 16  # with more, each block's own rotations and waits cost more than two launches
_FEW = 4  # queries of a kv head, of which a lane has half as many scores (matrices.h)
_MOST_HEADS = 64  # of K and V


class BlockShape(NamedTuple):
    """A block mixes so many `pages`, by tiles of so many tokens; a multiprocessor has registers for so many `blocks`.
    0: the compiler decides.
    """

    pages: int
    tile: int
    blocks: int


# A block's begin and end take a third of a page's instructions. Of 12 rows and more in one launch, blocks of 3 pages
# are all there at once; of fewer rows some multiprocessors would have less to do. With many rows a multiprocessor has
# registers for four blocks by tiles of 32 tokens.
LEAST_OF_SOME, LEAST_OF_PAGES = 12, 33
SHAPES = {"one": BlockShape(1, 64, 0), "some": BlockShape(3, 64, 3), "many": BlockShape(16, 32, 4)}
_MOST_BLOCKS = 32  # of a sequence: a warp makes a query's result of them, and of more a kernel of its own is faster


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One of each sequence, not rotated: queries [slots, heads, 1, dim], and rows of K and V."""

    queries: mx.array
    keys: mx.array
    values: mx.array


@dataclass(frozen=True, slots=True)
class Rotation:
    """`frequencies`: by pair of dimensions the factor of a position. `turns`: of each position the cosines and then the
    sines of all pairs. `counters`: words that blocks meet at.
    """

    frequencies: mx.array
    turns: mx.array
    counters: mx.array

    @classmethod
    def of(cls, frequencies: mx.array) -> "Rotation":
        return cls(frequencies, turns_of(frequencies), new_counters())


def step_attention(
    new: NewTokens,
    step: StepPages,
    rotation: Rotation,
    scale: float,
    *,
    is_whole: bool,
    compiler: Compiler | None = None,
) -> mx.array:
    """The results [slots, 1, heads * dim], in the queries' type; rows of K and V are in their pages then. `is_whole`:
    in one launch.
    """
    (slots, heads, _, _), dtype, value = new.queries.shape, new.queries.dtype, step.format.value
    geometry, made_by = _geometry(step.format, TYPE_NAMES[dtype], heads), compiler or COMPILERS[Dialect.CUDA]
    assert geometry is not None, "a kernel that does not serve"
    blocks = step.block_table.shape[1]
    pages, settings = (step.pages, step.block_table, step.places), settings_of(scale, None, PAGE_TOKENS)
    mixes = (slots * heads, blocks, value.dim + PARTIAL_EXTRA), mx.float32
    shape = _shape(slots, step.format, is_whole=is_whole)
    many, mixing = shape.pages, replace(geometry, most_tile=shape.tile)
    if shape is SHAPES["some"] and heads <= _FEW * value.kv_heads:
        mixing = replace(mixing, queries=_FEW)
    made, grid = ((slots, 1, heads * value.dim), dtype), (value.kv_heads, slots, -(-blocks // many))
    kinds: Template = {"T": dtype, "HEADS": heads, "PAGES": many}
    ends = many > 1 and not is_whole and blocks <= many
    source = attend_source(is_whole=is_whole, ends=ends)
    mix = compiled(made_by, replace(source, blocks=shape.blocks), mixing.shared_bytes)
    given = new.queries, new.keys, new.values
    if is_whole:
        return _launched(
            mix,
            (*given, rotation.turns, *pages, settings, rotation.counters),
            {**kinds, **mixing.template},
            grid,
            [made, mixes],
        )[0]
    items = slots * (heads + value.kv_heads * (groups(step.format.key) + groups(value)))
    turn_bytes = WARPS * new.queries.shape[3] * dtype.size
    numbers: Template = {**kinds, **geometry.template, "SHARED_BYTES": turn_bytes}
    turn = compiled(made_by, turn_source(), turn_bytes)
    (turned,) = _launched(
        turn, (*given, rotation.frequencies, *pages), numbers, (-(-items // WARPS), 1, 1), [(new.queries.shape, dtype)]
    )
    outputs = [made, mixes] if ends else [mixes]
    mixed = _launched(mix, (turned, *pages, settings), {**kinds, **mixing.template}, grid, outputs)
    if ends:
        return mixed[0]
    results = compiled(made_by, results_source(), LANES)
    numbers = {**kinds, "VALUE_DIM": value.dim, "WARPS": WARPS, "SHARED_BYTES": LANES}
    return _launched(results, (mixed[0], step.places), numbers, (-(-slots * heads // WARPS), 1, 1), [made])[0]


def _shape(slots: int, page_format: PageFormat, *, is_whole: bool) -> BlockShape:
    if page_format.key.bits == EXACT_BITS or slots < (LEAST_OF_SOME if is_whole else LEAST_OF_PAGES):
        return SHAPES["one"]
    return SHAPES["some" if is_whole else "many"]


def _launched(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    template: Template,
    blocks: tuple[int, int, int],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    return kernel(
        inputs=inputs,
        template=[*template.items()],
        grid=(blocks[0] * WARPS * LANES, blocks[1], blocks[2]),
        threadgroup=(WARPS * LANES, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


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
        new, is_whole = NewTokens(queries, keys, values), queries.shape[0] <= _WHOLE_ROWS
        return step_attention(new, step, self._rotation, self._scale, is_whole=is_whole)


def step_attention_of(attention: Any, shared: dict[Any, mx.array]) -> StepAttention | None:
    """Of mlx-lm's attention; None where its rotation is another. `shared`: as `whole_layer_of`'s."""
    if (found := shared.get(id(attention.rope))) is None:
        return None
    name = repr(found.tolist())
    frequencies = shared.setdefault(("angles", name), found)
    if ("turns", name) not in shared:
        shared["turns", name] = turns_of(found)
    counters = shared.setdefault("attention's counters", new_counters())
    rotation = Rotation(frequencies, shared["turns", name], counters)
    mx.eval(frequencies, rotation.turns, counters)
    return StepAttention(attention.scale, rotation)


def turns_of(frequencies: mx.array) -> mx.array:
    """Cosines and sines [positions, dim] of all positions that a step has, as the kernel of many rows makes them."""
    positions, numbers = _MOST_BLOCKS * PAGE_TOKENS, {"WARPS": WARPS, "SHARED_BYTES": LANES}
    blocks = -(-positions * frequencies.size // (WARPS * LANES)), 1, 1
    made = (positions, 2 * frequencies.size), mx.float32
    kernel = compiled(COMPILERS[Dialect.CUDA], turns_source(), LANES)
    return _launched(kernel, [frequencies], {**numbers, "POSITIONS": positions}, blocks, [made])[0]


def new_counters() -> mx.array:
    """Words that blocks which attend to a row's head meet at."""
    return mx.zeros(_WHOLE_ROWS * _MOST_HEADS, mx.uint32)
