"""A decoding step's layers as one launch each, of up to eight rows and weights of 4 or 16 bits, on a CUDA device.

Launches cost the processor, and a GPU waits between them. Here each multiprocessor has one block, which goes through
the steps of a layer, brings weights of the next step while it waits for the others, and waits for them five times.
Of 9 to 16 rows with weights of 16 bits it does so behind attention, which is faster with more blocks.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any
from weakref import ref

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.rope_utils import Llama3RoPE

from inference_svc.kv.attention.fused import COMPILERS, Compiler, compiled, cuda_compiler, lone_cuda_compiler
from inference_svc.kv.attention.geometry import LANES, PARTIAL_EXTRA, SplitGeometry, format_template
from inference_svc.kv.attention.kernels import Dialect, behind_source, layer_source
from inference_svc.kv.batch.fused_layer import FusedLayer, StepPages
from inference_svc.kv.model_hooks.few_rows import most_shared_bytes
from inference_svc.kv.page import PageFormat

MAX_ROWS = 8  # a column of fragments; with two it is slower than kernels one by one
_SLICE, _SUM_STRIDE, _X_PADDING = 528, 36, 32  # as in layer.h and layer_body.h
_EACH = 64  # inputs of a warp in a stage
_WARPS = ((16, 8), (16, 4), (8, 8))  # of a block, and of its parts that attend; with values four have too few registers
_SHARED_BYTES, _ATTENTION_BYTES = 224 << 10, 96 << 10
_LEAST_STAGES, _MOST_STAGES = 4, 24
_GROUPS = (32, 64, 128)
_MOST_OF_VALUES = 4096  # hidden ones, of several rows
# Behind attention: warps, stages that are on their way at once, a stage's bytes of a warp, and values of a row that
# four warps norm.
MAX_ROWS_BEHIND = 16
_WARPS_BEHIND, _STAGES_BEHIND, _STAGE_BYTES, _MOST_NORMED = 16, 5, 2048, 8192
_BYTES_BEHIND = _WARPS_BEHIND * (_STAGES_BEHIND * _STAGE_BYTES + MAX_ROWS_BEHIND * _SUM_STRIDE * 4)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_OPENED = ("gate_proj", "up_proj", "down_proj")
_DRIVER = "libcuda.so.1"
_MULTIPROCESSORS, _MPS_ENABLED = 16, 133  # the driver's names for their number, and for a device that processes share
Matrix = tuple[mx.array, ...]
# Blocks of two launches at once could wait for each other's multiprocessors for ever: one model of a process has them.
_owner: list[ref[Module]] = []


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's numbers. `matrices`: of q, k, v, o, gate, up and down, values alone, or codes, scales and biases.
    `frequencies`: by pair of dimensions the factor of a position. `settings`: the scale of scores, the norms' epsilons.
    `counters`: with the word that blocks wait at.
    """

    norms: tuple[mx.array, mx.array]
    matrices: tuple[Matrix, ...]
    frequencies: mx.array
    settings: mx.array
    counters: mx.array
    heads: int


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The compile-time sizes of a layer; `group`: inputs that share a scale, 0 of 16 bits."""

    hidden: int
    inner: int
    heads: int
    group: int


def whole_layer(
    x: mx.array, weights: LayerWeights, step: StepPages, blocks: int, compiler: Compiler | None = None
) -> mx.array:
    """The layer's result for x [slots, 1, hidden] of new tokens; their rows of K and V are in pages then."""
    slots, _, hidden = x.shape
    matrices, page_format, heads = weights.matrices, step.format, weights.heads
    sizes = LayerSizes(hidden, matrices[4][0].shape[0], heads, group_of(matrices[0], hidden))
    template, warps, shared_bytes = _program(sizes, page_format)
    made_by = compiler or COMPILERS[Dialect.CUDA]
    made_by = lone_cuda_compiler if made_by is cuda_compiler else made_by
    out, _ = compiled(made_by, layer_source(is_packed=sizes.group > 0), shared_bytes)(
        inputs=[
            *(x, *weights.norms),
            *(part for each in matrices for part in each),
            *(weights.frequencies, step.pages, step.block_table, step.places, weights.settings, weights.counters),
        ],
        template=[("T", x.dtype), *template],
        grid=(blocks * warps * LANES, 1, 1),
        threadgroup=(warps * LANES, 1, 1),
        output_shapes=[x.shape, (slots * _scratch(sizes, page_format, step.block_table.shape[1]),)],
        output_dtypes=[x.dtype, mx.float32],
    )
    return out


def behind_attention(
    attended: mx.array, x: mx.array, weights: LayerWeights, blocks: int, compiler: Compiler | None = None
) -> mx.array:
    """The layer's result for its x [slots, 1, hidden] and attention's result [slots, 1, width]."""
    slots, _, hidden = x.shape
    matrices, made_by = [each[0] for each in weights.matrices[3:]], compiler or COMPILERS[Dialect.CUDA]
    made_by = lone_cuda_compiler if made_by is cuda_compiler else made_by
    inner, warps = matrices[1].shape[0], _WARPS_BEHIND
    shapes = [x.shape, x.shape, x.shape, (slots, 1, inner)]
    return compiled(made_by, behind_source(), _BYTES_BEHIND)(
        inputs=[attended, x, weights.norms[1], *matrices, weights.settings, weights.counters],
        template=[
            *(("T", x.dtype), ("IS_BFLOAT", x.dtype == mx.bfloat16), ("HIDDEN", hidden), ("INNER", inner)),
            *(("WIDTH", attended.shape[2]), ("TILES", MAX_ROWS_BEHIND // 8)),
            *(("WARPS", warps), ("STAGES", _STAGES_BEHIND)),
        ],
        grid=(blocks * warps * LANES, 1, 1),
        threadgroup=(warps * LANES, 1, 1),
        output_shapes=shapes,
        output_dtypes=[x.dtype] * len(shapes),
    )[0]


def group_of(matrix: Matrix, depth: int) -> int:
    return depth // matrix[1].shape[1] if len(matrix) > 1 else 0


def _scratch(sizes: LayerSizes, page_format: PageFormat, splits: int) -> int:
    """Words of a row that the layer's steps give to each other."""
    heads, dim, kv_heads = sizes.heads, page_format.key.dim, page_format.key.kv_heads
    return heads * splits * (dim + PARTIAL_EXTRA) + (2 * (heads + kv_heads) * dim + sizes.hidden + sizes.inner) // 2


@lru_cache(maxsize=64)
def _program(sizes: LayerSizes, page_format: PageFormat) -> tuple[list[tuple[str, int | bool | mx.Dtype]], int, int]:
    """The kernel's compile-time values, its warps, and bytes of shared memory."""
    shape = _block_shape(sizes, page_format)
    assert shape is not None, "blocks have no room for it"
    numbers = {
        "HEADS": sizes.heads,
        "HIDDEN": sizes.hidden,
        "INNER": sizes.inner,
        "W_GROUP": sizes.group,
        "WARPS": shape.warps,
        "TILES": MAX_ROWS // 8,
        "STAGES": shape.stages,
        "QUERIES": shape.split.queries,
        "TILE": shape.split.tile,
        "SPLIT_BYTES": shape.split.shared_bytes,
        "PARTS": shape.parts,
        "PART_WARPS": shape.split.warps,
    }
    return [*numbers.items(), *format_template(page_format).items()], shape.warps, shape.shared_bytes


@dataclass(frozen=True, slots=True)
class _BlockShape:
    """`stages` of weights are in shared memory at once; `parts` of some warps attend, by `split`."""

    warps: int
    stages: int
    parts: int
    split: SplitGeometry
    shared_bytes: int


def _block_shape(sizes: LayerSizes, page_format: PageFormat) -> _BlockShape | None:
    """Of the most warps with room for some stages, whose inputs, 64 for each, make up all depths; None: of none."""
    depths, key = (sizes.hidden, sizes.inner, sizes.heads * page_format.key.dim), page_format.key
    queries = 8 if sizes.heads // key.kv_heads <= 8 else 16
    for warps, each in _WARPS if sizes.group else _WARPS[::2]:
        parts = warps // each
        split = SplitGeometry(page_format, queries, True, warps=each, most_tile=64 if warps == 8 else 32)
        while parts > 1 and parts * split.shared_bytes > _ATTENTION_BYTES:
            parts //= 2
        stage, others = _ring_bytes(sizes, warps, key.dim, parts * split.shared_bytes)
        stages = min(_MOST_STAGES, (_SHARED_BYTES - others) // stage)
        if stages >= _LEAST_STAGES and not any(depth % (_EACH * warps) for depth in depths):
            return _BlockShape(warps, stages, parts, split, stages * stage + others)
    return None


def _ring_bytes(sizes: LayerSizes, warps: int, dim: int, attention_bytes: int) -> tuple[int, int]:
    """Of a stage of weights, and of all beside the ring."""
    own_x, sums = MAX_ROWS * (sizes.hidden + _X_PADDING) * 2, 4 * warps * MAX_ROWS * _SUM_STRIDE
    # A norm's weights, sums of squares, and cosines and sines.
    others = 2 * sizes.hidden + 4 * (16 * MAX_ROWS + 16) + 4 * MAX_ROWS * dim
    if not sizes.group:
        return 2 * warps * 16 * _EACH, others + max(sums + own_x, attention_bytes)
    stage = 2 * (warps * _SLICE + 2 * 32 * (_EACH * warps // sizes.group))
    return stage, others + sums + max(own_x, attention_bytes)


@lru_cache(maxsize=1024)
def why_not(sizes: LayerSizes, slots: int, page_format: PageFormat, dtype: mx.Dtype) -> str:
    """Why the kernel does not compute a layer of so many rows; empty if it does."""
    key, value = page_format.key, page_format.value
    is_bfloat = page_format.scale_type == identity_pb2.SCALE_TYPE_BFLOAT16
    if slots > MAX_ROWS:
        return "too many rows"
    if dtype != (mx.bfloat16 if is_bfloat else mx.float16):
        return "pages of another type"
    if key.dim != value.dim or key.dim % 32 or key.is_rotated:
        return "heads of a kind that it does not know"
    if sizes.heads // key.kv_heads > 16 or sizes.group not in (0, *_GROUPS):
        return "more heads, or groups of another size, than it knows"
    if not sizes.group and sizes.hidden > _MOST_OF_VALUES and slots > 1:
        return "rows of values that leave room for eight warps, which take longer than kernels one by one"
    return "" if _block_shape(sizes, page_format) else "sizes that its blocks have no room for"


class WholeLayer:
    """A model's block, as the kernel takes it."""

    def __init__(self, block: Any, frequencies: mx.array, counters: mx.array) -> None:
        attention, mlp = block.self_attn, block.mlp
        self._layers = _projections(block)
        self._norms = block.input_layernorm, block.post_attention_layernorm
        self._frequencies, self._counters = frequencies, counters
        self._settings = _evaluated(mx.array([attention.scale, *(norm.eps for norm in self._norms)], mx.float32))
        hidden, inner = self._norms[0].weight.size, mlp.gate_proj.weight.shape[0]
        matrix = _matrix(mlp.gate_proj)
        self.sizes = LayerSizes(hidden, inner, attention.n_heads, group_of(matrix, hidden))

    def result(self, x: mx.array, cache: FusedLayer) -> mx.array | None:
        """The block's result for x [slots, 1, hidden]; None where the kernel does not serve."""
        step = cache.step_pages()
        if step is None or x.dtype != self._norms[0].weight.dtype:
            return None
        if why_not(self.sizes, x.shape[0], step.format, x.dtype):
            return None
        return whole_layer(x, self._weights, step, multiprocessors())

    def has_result_behind(self, x: mx.array, cache: FusedLayer) -> bool:
        """Whether `result_behind` computes for x [slots, 1, hidden]. Where other passes are in the graph, their blocks
        and its own could wait for each other's multiprocessors for ever.
        """
        sizes, depths = self.sizes, (self.sizes.hidden, self.sizes.inner, self._layers[3].weight.shape[1])
        suits = sizes.hidden <= _MOST_NORMED and not any(depth % (_EACH * _WARPS_BEHIND) for depth in depths)
        is_few = MAX_ROWS < x.shape[0] <= MAX_ROWS_BEHIND
        suits = suits and not sizes.group and x.dtype == self._norms[0].weight.dtype
        return is_few and suits and cache.step_pages() is not None

    def result_behind(self, attended: mx.array, x: mx.array) -> mx.array:
        """The block's result for x and attention's [slots, 1, width]."""
        return behind_attention(attended, x, self._weights, multiprocessors())

    @property
    def _weights(self) -> LayerWeights:
        return LayerWeights(
            (self._norms[0].weight, self._norms[1].weight),
            tuple(map(_matrix, self._layers)),
            self._frequencies,
            self._settings,
            self._counters,
            self.sizes.heads,
        )


def kinds_of(model: Module) -> list[bool]:
    """Of a model's blocks that the kernel may take: whether weights are packed. Each kind is a program of its own."""
    modules: Any = model
    gates = [each.gate_proj for each in modules.modules() if "gate_proj" in each]
    has_packed = any(_is_packed(each) and each.bits == 4 for each in gates)
    return [True] * has_packed + [False] * any(map(_is_values, gates))


def may_have_whole_layers(model: Module) -> bool:
    """Whether weights of a model are such as the kernel takes, on a device whose blocks have room for it."""
    return bool(kinds_of(model)) and most_shared_bytes() >= _SHARED_BYTES and multiprocessors() > 0


def claim(model: Module) -> bool:
    """Whether a model may have whole layers: no other one that is alive has them."""
    if any(each() is not None for each in _owner):
        return False
    _owner[:] = [ref(model)]
    return True


def whole_layer_of(block: Any, shared: dict[Any, mx.array]) -> WholeLayer | None:
    """Of a block of mlx-lm's Llama; None where its weights, norms or rotation are others. `shared`: arrays that
    a model's blocks have together, with `frequencies_by_rotation`.
    """
    layers, rope = _projections(block), block.self_attn.rope
    if (dtype := _type_of(layers)) is None:
        return None
    norms = block.input_layernorm, block.post_attention_layernorm
    if any(type(norm) is not RMSNorm or norm.weight.dtype != dtype for norm in norms):
        return None
    if (found := shared.get(id(rope))) is None or rope.dims * block.self_attn.n_heads != layers[0].weight.shape[0]:
        return None
    frequencies = _kept(shared, repr(found.tolist()), lambda: found)
    return WholeLayer(block, frequencies, _kept(shared, "counters", new_counters))


def _projections(block: Any) -> list[Any]:
    return [*(block.self_attn[name] for name in _PROJECTIONS), *(block.mlp[name] for name in _OPENED)]


def _is_packed(layer: Any) -> bool:
    return isinstance(layer, QuantizedLinear) and "biases" in layer and "bias" not in layer


def _is_values(layer: Any) -> bool:
    return isinstance(layer, Linear) and "bias" not in layer and layer.weight.dtype in (mx.bfloat16, mx.float16)


def _type_of(layers: list[Any]) -> mx.Dtype | None:
    """Of matrices that are all of 16 bits, or all packed alike; None of others."""
    if all(map(_is_values, layers)):
        types = {each.weight.dtype for each in layers}
    else:
        kinds = {(each.bits, each.group_size, each.mode) for each in layers if _is_packed(each)}
        if not all(map(_is_packed, layers)) or len(kinds) > 1 or (layers[0].bits, layers[0].mode) != (4, "affine"):
            return None
        types = {each.scales.dtype for each in layers}
    return types.pop() if len(types) == 1 else None


def _matrix(layer: Any) -> Matrix:
    return (layer.weight, layer.scales, layer.biases) if _is_packed(layer) else (layer.weight,)


def frequencies_by_rotation(model: Module) -> dict[Any, mx.array]:
    """By the `id` of each rotation that the kernels do. Evaluates them together: each alone waits for the device."""
    modules: Any = model
    rotations = [module.rope for module in modules.modules() if "rope" in module]
    found = {id(rope): made for rope in rotations if (made := _frequencies_of(rope)) is not None}
    mx.eval(*found.values())
    return found


def _frequencies_of(rope: Any) -> mx.array | None:
    """None for a rotation that the kernel does not do."""
    if type(rope) is RoPE and not rope.traditional:
        half = rope.dims // 2
        return rope.scale * mx.power(mx.array(rope.base, mx.float32), -mx.arange(half, dtype=mx.float32) / half)
    if type(rope) is Llama3RoPE and not rope.traditional:
        return 1 / rope._freqs.astype(mx.float32)
    return None


def new_counters() -> mx.array:
    """The word that blocks meet at, the first of so many that they are not the host's memory."""
    return mx.zeros(4, mx.uint32)


def _kept(shared: dict[Any, mx.array], key: Any, make: Callable[[], mx.array]) -> mx.array:
    if key not in shared:
        shared[key] = _evaluated(make())
    return shared[key]


def _evaluated(made: mx.array) -> mx.array:
    mx.eval(made)
    return made


@cache
def multiprocessors() -> int:
    """Of the CUDA device that this thread uses; 0 where that is unknown, or where other processes' launches may run
    beside this one's (MPS).
    """
    device, count, is_shared = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL(_DRIVER)
        if driver.cuInit(0) or driver.cuCtxGetDevice(ctypes.byref(device)):
            return 0
        driver.cuDeviceGetAttribute(ctypes.byref(is_shared), _MPS_ENABLED, device)  # unknown to an old driver
        failed = driver.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSORS, device)
    except (OSError, AttributeError):
        return 0
    return 0 if failed or is_shared.value else count.value
