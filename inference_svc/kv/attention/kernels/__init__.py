"""The kernels' one source, in words that each dialect defines: CUDA, Metal, and C++ that emulates either."""

import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from hashlib import blake2b
from pathlib import Path

_HERE = Path(__file__).parent
CUDA_INSTRUCTIONS = "cuda_instructions.h"
PAIRS = 8  # results of `pairs_source`
HOPPER_INSTRUCTIONS = "hopper_instructions.h"

CUDA_SHARED = """
extern __shared__ float4 kv_shared_bytes[];
float* kv_shared = (float*)kv_shared_bytes;
"""
_CUDA_PROLOGUE = """
const int kv_warp = threadIdx.x / 32, kv_lane = threadIdx.x % 32, kv_blocks_x = gridDim.x;
const int kv_block_x = blockIdx.x, kv_block_y = blockIdx.y, kv_block_z = blockIdx.z;
"""
# Where blocks that differ in y begin one after the other.
_Y_FIRST = """
const int kv_warp = threadIdx.x / 32, kv_lane = threadIdx.x % 32, kv_blocks_x = gridDim.y;
const int kv_block_x = blockIdx.y, kv_block_y = blockIdx.x, kv_block_z = blockIdx.z;
"""
METAL_SHARED = """
threadgroup float4 kv_shared_bytes[SHARED_BYTES / 16];
threadgroup float* kv_shared = (threadgroup float*)kv_shared_bytes;
"""
# MLX declares the built-in names that it finds in this text.
_METAL_PROLOGUE = """
const int kv_warp = simdgroup_index_in_threadgroup, kv_lane = thread_index_in_simdgroup;
const int kv_block_x = threadgroup_position_in_grid.x, kv_block_y = threadgroup_position_in_grid.y;
const int kv_block_z = threadgroup_position_in_grid.z, kv_blocks_x = threadgroups_per_grid.x;
"""
_BY_LANES = """
#define KV_SPLIT kv_split_by_lanes<Query, K, V, IS_BFLOAT, QUERIES, WARPS, SPAN>
"""
_BY_MATRICES = """
#define KV_SPLIT kv_split_by_matrices<Query, K, V, IS_BFLOAT, QUERIES, WARPS, SPAN, TILE>
"""
_BY_TILES = """
#define KV_SPLIT kv_split_by_tiles<Query, K, V, IS_BFLOAT, WARPS, QUERIES / WARPS / (8 * KV_EIGHTS), TILE>
"""
_BY_WARPGROUPS = """
#define KV_SPLIT kv_split_by_warpgroups<Query, K, V, IS_BFLOAT, QUERIES, TILE, STORES, STAGES>
"""


class Dialect(Enum):
    """Whose words a source is given. The values name the headers."""

    CUDA = "cuda"
    METAL = "metal"


# An input that kernels that write pages wait for, and do not read: Metal orders a kernel only behind its inputs.
_ORDERING: dict[Dialect, tuple[str, ...]] = {Dialect.CUDA: (), Dialect.METAL: ("after",)}


@dataclass(frozen=True, slots=True)
class KernelSource:
    """What `mx.fast.cuda_kernel` and `mx.fast.metal_kernel` need; all inputs are row-contiguous. `name` changes with
    the text: MLX's cache of compiled kernels on disk goes by names alone.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    header: str
    source: str
    written_inputs: tuple[str, ...] = ()  # which the kernel writes where they lie
    blocks: int = 0  # for so many a multiprocessor has registers; 0: the compiler decides


_SPLIT_INPUTS = ("queries", "pages", "block_table", "lengths", "settings")
_INSTRUCTIONS = {Dialect.CUDA: [CUDA_INSTRUCTIONS], Dialect.METAL: []}


@cache
def split_source(dialect: Dialect, *, by_matrices: bool) -> KernelSource:
    """Scores and mixes the tokens of one split for some queries: partial [rows, splits, value dim + 4]."""
    assert dialect is Dialect.CUDA or not by_matrices, "its fragments are CUDA's own"
    parts = [CUDA_INSTRUCTIONS, "rows.h", "tile.h", "matrices.h"] if by_matrices else ["rows.h", "lanes.h"]
    header = _header(dialect, *parts) + (_BY_MATRICES if by_matrices else _BY_LANES)
    return _source(dialect, "split", header, _SPLIT_INPUTS, ("partial",))


@cache
def tiles_source(dialect: Dialect) -> KernelSource:
    """As `split_source`, for many queries."""
    parts = [*_INSTRUCTIONS[dialect], "rows.h", "tile.h", f"{dialect.value}_fragments.h", "values.h", "tiles.h"]
    return _source(dialect, "tiles", _header(dialect, *parts) + _BY_TILES, _SPLIT_INPUTS, ("partial",))


@cache
def warpgroups_source() -> KernelSource:
    """As `tiles_source`, by instructions that only Hopper has."""
    tools = CUDA_INSTRUCTIONS, HOPPER_INSTRUCTIONS, "rows.h", "tile.h", "cuda_fragments.h"
    header = _header(Dialect.CUDA, *tools, "values.h", "warpgroups.h") + _BY_WARPGROUPS
    made = _source(Dialect.CUDA, "tiles", header, _SPLIT_INPUTS, ("partial",))
    return replace(made, source=made.source.replace(_CUDA_PROLOGUE, _Y_FIRST))


@cache
def reduce_source(dialect: Dialect) -> KernelSource:
    """The splits of each query become its result."""
    inputs = ("queries", "partial", "lengths", "sinks", "settings")
    return _source(dialect, "reduce", _header(dialect, "rows.h", "reduce.h"), inputs, ("out",))


@cache
def window_source(dialect: Dialect) -> KernelSource:
    """Splits of rows in pages, and the rows of a pass, become the results of a window's rows."""
    inputs = ("queries", "keys", "values", "pages", "block_table", "stored", "partial", "lengths", "settings")
    return _source(dialect, "window", _header(dialect, "rows.h", "window.h"), inputs, ("out",))


@cache
def append_source(dialect: Dialect) -> KernelSource:
    """New rows of K and V are quantized and written to their places in pages."""
    inputs = ("keys", "values", "pages", "block_table", "places", *_ORDERING[dialect])
    header = _header(dialect, "rows.h", "quantize.h")
    return _source(dialect, "append", header, inputs, ("stored",), written_inputs=("pages",))


@cache
def gather_source(dialect: Dialect) -> KernelSource:
    """Stored rows of one sequence become values."""
    inputs = ("pages", "block_table", "span", "stored")
    return _source(dialect, "gather", _header(dialect, "rows.h", "gather.h"), inputs, ("keys", "values"))


@cache
def store_source(dialect: Dialect) -> KernelSource:
    """Whole pages are written from other bytes."""
    inputs = ("pages", "content", "targets", "sources", "sizes", *_ORDERING[dialect])
    return _source(dialect, "store", _header(dialect), inputs, ("stored",), written_inputs=("pages",))


@cache
def few_rows_source(count: int, *, is_packed: bool, is_gated: bool = False, adds: bool = False) -> KernelSource:
    """Products of a few rows with `count` matrices, each one array, or its codes, scales and biases; of CUDA alone.
    `is_gated`: the first of two opens for the second, one result. `adds`: the result of one gets rows added.
    """
    return _products_source("few_rows", (count, is_packed, is_gated, adds))


@cache
def wide_rows_source(count: int, *, is_packed: bool, is_gated: bool, adds: bool) -> KernelSource:
    """As `few_rows_source`, of more rows, by instructions that only Hopper has."""
    name, parts = "wide_codes" if is_packed else "wide_rows", (HOPPER_INSTRUCTIONS, "wide_rows.h")
    return _products_source(name, (count, is_packed, is_gated, adds), parts)


def _products_source(name: str, kind: tuple[int, bool, bool, bool], parts: tuple[str, ...] = ()) -> KernelSource:
    """`kind`: as `few_rows_source` has it."""
    count, is_packed, is_gated, adds = kind
    numbers, kinds = range(count), ("w", "scales", "biases") if is_packed else ("w",)
    outputs = ("y0",) if is_gated else tuple(f"y{i}" for i in numbers)

    def pointers(kind: str) -> str:
        return ", ".join(f"(const kv_u16*){kind}{i}" if kind in kinds else "nullptr" for i in numbers)

    lists = (
        f"const kv_u16* const matrices[] = {{{pointers('w')}}};\n"
        f"const kv_u16* const scales[] = {{{pointers('scales')}}};\n"
        f"const kv_u16* const biases[] = {{{pointers('biases')}}};\n"
        f"T* const results[] = {{{', '.join(outputs)}}};\n"
        f"const int widths[] = {{{', '.join(f'w{i}_shape[0]' for i in numbers)}}};\n"
        f"constexpr bool IS_GATED = {is_gated:d}, ADDS = {adds:d};\n"
    )
    lists += "" if adds else "const T* const added = nullptr;\n"
    inputs = ("x", *(f"{kind}{i}" for i in numbers for kind in kinds), *(("added",) if adds else ()))
    header = _header(Dialect.CUDA, CUDA_INSTRUCTIONS, "few_rows.h", *parts)
    written = ("counters",) if name == "wide_rows" else ()  # where its blocks meet, to give sums to each other
    outputs += ("scratch",) if written else ()
    return _source(Dialect.CUDA, name, header, inputs + written, outputs, written_inputs=written, lists=lists)


@cache
def attend_source(*, is_whole: bool, ends: bool = False) -> KernelSource:
    """Splits of pages are mixed for new tokens' queries, of CUDA alone. `is_whole`: queries and keys are rotated and
    new rows written before, and results made, for which blocks that mix splits of one query meet at `counters`. `ends`:
    results are made of one split each.
    """
    parts = CUDA_INSTRUCTIONS, "rows.h", "quantize.h", "reduce.h", "attend.h", "tile.h", "matrices.h"
    header, rows = _header(Dialect.CUDA, *parts), ("pages", "block_table", "places", "settings")
    if not is_whole:
        lists = (
            f"constexpr bool IS_WHOLE = false, ENDS = {ends:d};\nT *const keys = nullptr, *const values = nullptr;\n"
        )
        lists += "" if ends else "T* const out = nullptr;\n"
        lists += "const float* const turns = nullptr;\nconst kv_u32* const counters = nullptr;\n"
        outputs = ("out", "partial") if ends else ("partial",)
        return _source(Dialect.CUDA, "attend", header, ("queries", *rows), outputs, lists=lists)
    inputs, written = (*_NEW_INPUTS, "turns", *rows, "counters"), ("pages", "counters")
    lists = "constexpr bool IS_WHOLE = true, ENDS = true;\n"
    return _source(Dialect.CUDA, "attend", header, inputs, ("out", "partial"), written_inputs=written, lists=lists)


@cache
def turn_source() -> KernelSource:
    """New tokens' queries are rotated, and their rows, with keys rotated, written to pages; of CUDA alone."""
    inputs = (*_NEW_INPUTS, "frequencies", "pages", "block_table", "places")
    header = _header(Dialect.CUDA, CUDA_INSTRUCTIONS, "rows.h", "quantize.h", "attend.h")
    return _source(Dialect.CUDA, "turn", header, inputs, ("turned",), written_inputs=("pages",))


@cache
def results_source() -> KernelSource:
    """As `reduce_source`, of few splits of one new token's queries, by a warp each; of CUDA alone."""
    header = _header(Dialect.CUDA, CUDA_INSTRUCTIONS, "rows.h", "reduce.h")
    return _source(Dialect.CUDA, "results", header, ("partial", "places"), ("out",))


_NEW_INPUTS = ("queries", "keys", "values")


@cache
def turns_source() -> KernelSource:
    """Of so many positions, the cosines and sines by which `attend_source` turns queries and keys; of CUDA alone."""
    return _source(Dialect.CUDA, "turns", _header(Dialect.CUDA, CUDA_INSTRUCTIONS), ("frequencies",), ("turns",))


@cache
def pairs_source() -> KernelSource:
    """Drawn tokens become results of two rows each, of CUDA alone."""
    outputs = tuple(f"pair{number}" for number in range(PAIRS))
    lists = f"kv_u32* const results[] = {{{', '.join(outputs)}}};\n"
    return _source(Dialect.CUDA, "pairs", _header(Dialect.CUDA), ("tokens", "greatest"), outputs, lists=lists)


@cache
def layer_source(*, is_packed: bool) -> KernelSource:
    """A decoding layer whole, with weights of 4 or of 16 bits, of CUDA alone; by `scratch` its steps give results to
    each other.
    """
    before = _header(Dialect.CUDA, CUDA_INSTRUCTIONS, "few_rows.h", "rows.h", "quantize.h")
    parts = "".join(map(text, ("reduce.h", "tile.h", "matrices.h")))  # by some warps, which wait for themselves alone
    header = f"{before}#define kv_group_barrier kv_part_barrier<WARPS>\n{parts}#undef kv_group_barrier\n"
    header += text("layer.h") + text("codes_pass.h" if is_packed else "values_pass.h")
    kinds, written = "wsb" if is_packed else "w", ("pages", "counters")
    weights = (f"{kind}_{name}" for name in ("q", "k", "v", "o", "gate", "up", "down") for kind in kinds)
    inputs = ("x", "norm_in", "norm_after", *weights, *_LAYER_REST)
    lists = text("layer_room.h") + text("layer_codes.h" if is_packed else "layer_values.h")
    return _source(Dialect.CUDA, "layer", header, inputs, ("out", "scratch"), written_inputs=written, lists=lists)


@cache
def behind_source() -> KernelSource:
    """What a layer of 16-bit weights computes behind its attention, of CUDA alone."""
    parts = CUDA_INSTRUCTIONS, "few_rows.h", "rows.h", "quantize.h", "layer.h", "values_pass.h", "behind.h"
    inputs = ("attended", "x", "norm", "w_o", "w_gate", "w_up", "w_down", "settings", "counters")
    outputs, header = ("out", "h", "normed", "opened"), _header(Dialect.CUDA, *parts)
    return _source(Dialect.CUDA, "behind", header, inputs, outputs, written_inputs=("counters",))


_LAYER_REST = ("frequencies", "pages", "block_table", "places", "settings", "counters")


def _header(dialect: Dialect, *parts: str) -> str:
    return "".join(text(part) for part in (f"{dialect.value}.h", *parts))


def _source(
    dialect: Dialect,
    name: str,
    header: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    written_inputs: tuple[str, ...] = (),
    lists: str = "",
) -> KernelSource:
    prologue = CUDA_SHARED + _CUDA_PROLOGUE if dialect is Dialect.CUDA else METAL_SHARED + _METAL_PROLOGUE
    body = prologue + lists + text(f"{name}_body.h")
    digest = blake2b((header + body).encode(), digest_size=6).hexdigest()
    return KernelSource(f"kv_{name}_{digest}", inputs, outputs, header, body, written_inputs)


def text(name: str) -> str:
    """A source file without its comments: MLX rebuilds a kernel's text for each launch."""
    return re.sub(r"\s*//.*", "", (_HERE / name).read_text())
