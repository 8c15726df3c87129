"""y = x w^T for a few rows on a CUDA device, by a kernel that reads each matrix once, of 16 bits or packed in 4.

A general product picks its kernel by the number of rows, asks a library for it at every call, and sums in another order
for another number. Here a row's sums have one order, whatever its neighbours are, and matrices that take the same x
share a launch. On Hopper `wide_rows` takes 33 rows or more of a model for which a check found it right: their sums have
another order, one for these.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from inference_svc.kv.attention.fused import COMPILERS, compiled
from inference_svc.kv.attention.geometry import LANES
from inference_svc.kv.attention.kernels import Dialect, few_rows_source
from inference_svc.kv.model_hooks.wide_rows import can_serve, wide_rows

MAX_ROWS = 64
_LEAST_DEPTH = 128  # MLX 0.32's CUDA product of several rows with packed matrices of fewer inputs is wrong
# [width, depth], or as mx.quantize has it: codes [width, depth / 8], scales and biases [width, depth / group].
Matrix = tuple[mx.array, ...]
_TYPES = (mx.bfloat16, mx.float16)
_CHUNK = 64  # inputs, as in few_rows.h
_WARPS = 4  # they share a sum, so their number decides its order
# Of packed matrices, where shared memory has room for them: 32 bytes of an output are little for a warp to wait for. Of
# so many outputs, each of a GPU's multiprocessors has several blocks, and they are enough.
_PACKED_WARPS, _WIDE = 8, 16_384
# For so many rows: columns of 8 rows, outputs of a block in sixteens, chunks on their way. The fastest on an H200.
_SHAPES = {8: (1, 2, 4), 16: (2, 2, 4), 32: (4, 2, 3), 64: (8, 4, 3)}
_NARROW = (8, 2, 4)  # for matrices that would be too few blocks for a GPU's multiprocessors
_FEW_BLOCKS = 66
# The same of packed matrices.
_PACKED_SHAPES = {8: (1, 2, 4), 16: (2, 2, 4), 32: (4, 4, 2), 64: (8, 2, 2)}
_WIDE_SHAPES = {8: (1, 2, 4), 16: (2, 4, 3), 32: (4, 4, 3), 64: (8, 2, 3)}
_LEAST_STAGES = 2
# Of packed matrices and 9 to 16 rows, by warps: outputs of a block in sixteens, and how many such blocks are at once on
# each of an H200's multiprocessors.
_HEIGHTS, _MULTIPROCESSORS = {_WARPS: {4: 3, 7: 2}, _PACKED_WARPS: {2: 1, 3: 1}}, 132
# Shared memory that a block may take, by compute capability: three KiB less than there is on the largest GPUs.
_LARGE_BYTES, _MEDIUM_BYTES, _SMALL_BYTES = 224 << 10, 163 << 10, 99 << 10
_SHARED_BYTES: dict[tuple[object, object], int] = {
    **dict.fromkeys([(8, 0), (8, 7)], _MEDIUM_BYTES),
    **dict.fromkeys([(9, 0), (10, 0), (10, 3)], _LARGE_BYTES),
}
# What mlx-lm's models compute of one x.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def few_rows(
    x: mx.array,
    matrices: Sequence[Matrix],
    *,
    is_gated: bool = False,
    added: mx.array | None = None,
    heads: Sequence[int] = (),
    has_wide: bool = False,
) -> list[mx.array]:
    """x [..., depth] times each w [width, depth] transposed, all of one 16-bit type: [..., width], summed in fp32.

    `is_gated`: of two products p and q of one width alone silu(p) * q, p and q rounded. `added` [..., width]: rows that
    are added to the one product, after it was rounded. `heads`: into how many each product of x [slots, 1, depth] is
    cut, so that results are [slots, heads, 1, dim] as attention takes them. `has_wide`: `wide_rows` may serve.

    At most MAX_ROWS rows and three matrices, all packed in groups of one size or none. The depth is a multiple of 8, of
    packed ones of 64. A model's own shape, [slots, n, depth], is taken and given as it is: each change of shape would
    be one more node of a step's graph.
    """
    shape, widths, is_packed = x.shape[:-1], [each[0].shape[0] for each in matrices], len(matrices[0]) > 1
    x = x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1])
    rows, depth = x.shape[0] * x.shape[1], x.shape[2]
    results = widths[:1] if is_gated else widths
    shapes = [(*shape, width) for width in results] if not heads else _in_heads(shape[0], results, heads)
    groups = matrices[0][1].shape[1] if is_packed else 0
    if has_wide and can_serve(rows, depth, results, groups, is_gated=is_gated):
        return wide_rows(x, matrices, shapes, is_gated=is_gated, added=added)
    warps = _warps(groups, sum(widths))
    tiles, height, stages = _block_shape(rows, widths, groups, warps, least=2 if is_gated else 1)
    source = few_rows_source(len(matrices), is_packed=is_packed, is_gated=is_gated, adds=added is not None)
    return compiled(COMPILERS[Dialect.CUDA], source, _shared_bytes(tiles, height, stages, groups, warps))(
        inputs=[x, *(part for each in matrices for part in each), *(() if added is None else (added,))],
        template=[
            ("T", x.dtype),
            ("IS_BFLOAT", x.dtype == mx.bfloat16),
            ("COUNT", len(matrices)),
            ("BITS", 4 if is_packed else 16),
            ("GROUP", depth // groups if is_packed else _CHUNK),
            ("GROUPS", groups),  # MLX allows a program as much shared memory as its first launch takes
            ("HEIGHT", height),
            ("TILES", tiles),
            ("STAGES", stages),
            ("WARPS", warps),
        ],
        grid=(_blocks(results, height / 2 if is_gated else height) * warps * LANES, 1, 1),
        threadgroup=(warps * LANES, 1, 1),
        output_shapes=shapes,
        output_dtypes=[x.dtype] * len(shapes),
    )


def _in_heads(slots: int, widths: Sequence[int], heads: Sequence[int]) -> list[tuple[int, ...]]:
    return [(slots, count, 1, width // count) for width, count in zip(widths, heads, strict=True)]


def _block_shape(rows: int, widths: Sequence[int], groups: int, warps: int, least: int = 1) -> tuple[int, int, int]:
    """Columns of 8 rows, outputs in sixteens, `least` of these, and stages of a block."""
    tiles, height, stages = _usual_shape(rows, groups, warps)
    if groups and tiles == 2:
        height = _even_height(widths, _HEIGHTS[warps])
    if not groups and height > _NARROW[1] and _blocks(widths, height) <= _FEW_BLOCKS:
        tiles, height, stages = _NARROW
    most = most_shared_bytes()
    while height > least and (
        (groups and _blocks(widths, height) <= _FEW_BLOCKS)
        or _shared_bytes(tiles, height, stages, groups, warps) > most
    ):
        height //= 2
    return tiles, height, stages if _shared_bytes(tiles, height, stages, groups, warps) <= most else _LEAST_STAGES


def _even_height(widths: Sequence[int], rooms: Mapping[int, int]) -> int:
    """By which a multiprocessor that has the most work has least: what finds no room begins when others end."""

    def most_work(height: int) -> int:
        room = rooms[height]
        return -(-_blocks(widths, height) // (room * _MULTIPROCESSORS)) * room * height

    return min(rooms, key=most_work)


def _usual_shape(rows: int, groups: int, warps: int) -> tuple[int, int, int]:
    shapes = _SHAPES if not groups else _PACKED_SHAPES if warps == _PACKED_WARPS else _WIDE_SHAPES
    return next(shape for most, shape in shapes.items() if rows <= most)


def _warps(groups: int, outputs: int = 0) -> int:
    """The same for rows of any number: eight where the most rows leave them room."""
    has_room = _shared_bytes(MAX_ROWS // 8, 1, _LEAST_STAGES, groups, _PACKED_WARPS) <= most_shared_bytes()
    return _PACKED_WARPS if groups and outputs < _WIDE and has_room else _WARPS


@cache
def most_shared_bytes() -> int:
    """Of a block on this device; where kernels are emulated, as on the GPUs that they were measured on."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return _LARGE_BYTES
    facts = mx.device_info()
    capability = facts.get("compute_capability_major"), facts.get("compute_capability_minor")
    return _SHARED_BYTES.get(capability, _SMALL_BYTES)


def _shared_bytes(tiles: int, height: int, stages: int, groups: int, warps: int) -> int:
    outputs, rows = 16 * height, 8 * tiles
    ring_bytes = stages * (outputs * (_CHUNK // 2 if groups else 2 * _CHUNK) + rows * 2 * _CHUNK)
    scale_bytes = 2 * outputs * (groups + 8) * 2 if groups else 0
    return max(warps * ring_bytes + scale_bytes, warps * outputs * rows * 4)


def _blocks(widths: Sequence[int], height: float) -> int:
    return sum(-(-width // int(16 * height)) for width in widths)


class JointProducts:
    """Layers that a model calls with the same x, one after the other: the first call computes for all."""

    def __init__(self, members: Sequence[Module], *, has_wide: bool = False) -> None:
        self._members, self._form, self._has_wide = members, _form(members[0]), has_wide
        self._x: mx.array | None = None
        self._products: dict[int, mx.array] = {}
        self.keeps_last = False  # until `plus`
        self._last: tuple[mx.array, mx.array] | None = None

    def takes(self, x: mx.array, height: int = 1) -> bool:
        """Whether the kernel multiplies x [..., depth], a block making so many outputs, in sixteens, at least."""
        return _is_few(self._form, x, height)

    def heads(self, x: mx.array, counts: Sequence[int]) -> list[mx.array]:
        """All members' products of x [slots, 1, depth], cut into so many heads each: [slots, heads, 1, dim]."""
        return self._made(x, heads=counts)

    def gated(self, x: mx.array) -> mx.array:
        """silu(p) * q of the two members' products p and q."""
        return self._made(x, is_gated=True)[0]

    def plus(self, product: mx.array, added: mx.array) -> mx.array | None:
        """The sum, by a kernel that takes the place of the product's own; None unless this was the last product."""
        last, self._last = self._last, None
        if last is None or last[1] is not product or added.dtype != product.dtype or added.shape != product.shape:
            return None
        return self._made(last[0], added=added)[0]

    def product(self, member: Module, x: mx.array) -> mx.array:
        """x [..., depth] times the member's matrix."""
        if self._x is not x or id(member) not in self._products:
            found = self._made(x)
            self._x, self._products = x, {id(each): y for each, y in zip(self._members, found, strict=True)}
        y = self._products.pop(id(member))
        if not self._products:
            self._x = None
        if self.keeps_last:
            self._last = x, y
        return y

    def _made(self, x: mx.array, **how: Any) -> list[mx.array]:
        return few_rows(x, [_matrix(each) for each in self._members], has_wide=self._has_wide, **how)


class _FewRowsLinear(Linear):
    together: JointProducts

    def __call__(self, x: mx.array) -> mx.array:
        if not self.together.takes(x):
            return Linear.__call__(self, x)
        y = self.together.product(self, x)
        return y + self.bias if "bias" in self else y


class _FewRowsQuantized(QuantizedLinear):
    together: JointProducts

    def __call__(self, x: mx.array) -> mx.array:
        if not self.together.takes(x):
            own: Any = super().__call__
            return _by_mlx(self, own, x)
        y = self.together.product(self, x)
        return y + self.bias if "bias" in self else y


class _FewRowsEmbedding(Embedding):
    together: JointProducts

    def as_linear(self, x: mx.array) -> mx.array:
        own: Any = super().as_linear
        return self.together.product(self, x) if self.together.takes(x) else own(x)


class _FewRowsQuantizedEmbedding(QuantizedEmbedding):
    together: JointProducts

    def as_linear(self, x: mx.array) -> mx.array:
        own: Any = super().as_linear
        return self.together.product(self, x) if self.together.takes(x) else _by_mlx(self, own, x)


_TAKEN: dict[type[Module], type[Module]] = {
    Linear: _FewRowsLinear,
    QuantizedLinear: _FewRowsQuantized,
    Embedding: _FewRowsEmbedding,
    QuantizedEmbedding: _FewRowsQuantizedEmbedding,
}


def take_few_rows(model: Module, *, has_wide: bool = False) -> None:
    """Make the model's own projections compute a few rows by the kernel, and where `wide_rows` is right, more by that
    one. For a CUDA device.
    """
    modules: Any = model
    for parent in modules.modules():
        for names in _TOGETHER:
            members = [parent[name] for name in names if name in parent and type(parent[name]) in _TAKEN]
            if len({_form(member) for member in members}) == 1:
                _take(members, has_wide=has_wide)
    for module in modules.modules():
        if type(module) in _TAKEN:
            _take([module], has_wide=has_wide)


def _take(members: Sequence[Module], *, has_wide: bool) -> None:
    together = JointProducts(members, has_wide=has_wide)
    for member in members:
        member.__class__ = _TAKEN[type(member)]
        member.together = together


def _matrix(module: Any) -> Matrix:
    return (module.weight, module.scales, module.biases) if "scales" in module else (module.weight,)


def _form(module: Any) -> tuple[Any, ...]:
    """What must be alike in a launch: depth, type, and how it is packed."""
    if "scales" not in module:
        return module.weight.shape[1], module.weight.dtype, 16, 0, ""
    biases = module.get("biases")  # of another type than the scales in odd checkpoints, none in other modes
    mode = module.mode if biases is None or biases.dtype == module.scales.dtype else ""
    return module.weight.shape[1] * 32 // module.bits, module.scales.dtype, module.bits, module.group_size, mode


def _is_few(form: tuple[Any, ...], x: mx.array, height: int = 1) -> bool:
    depth, dtype, bits, group, mode = form
    is_taken = (bits == 16 and depth % 8 == 0) or (bits == 4 and mode == "affine" and depth % _CHUNK == 0)
    if not is_taken or (rows := x.size // depth) > MAX_ROWS or x.dtype != dtype or dtype not in _TYPES:
        return False
    groups = depth // group if group else 0  # a block has the scales of whole outputs
    warps = _warps(groups)  # of a wide matrix less
    tiles = _usual_shape(rows, groups, warps)[0]
    return _shared_bytes(tiles, height, _LEAST_STAGES, groups, warps) <= most_shared_bytes()


def _by_mlx(module: Any, product: Any, x: mx.array) -> mx.array:
    """By values of 16 bits that are made for one product, if there are more rows than the kernel takes: MLX's product
    with codes reads them for each of the first dimension's rows, and a first one of 65 rows or more compiles for 37 s.
    A layer of Llama 3.1 8B takes 0.69 ms by values for 65 to 192 rows, in launches of 64 rows 0.8 to 1.4 (an H200).
    """
    depth = x.shape[-1]
    if x.size // depth > MAX_ROWS or depth < _LEAST_DEPTH:
        how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        values = mx.dequantize(module.weight, module.scales, module.get("biases"), **how).astype(x.dtype)
        return x @ values.T + module.bias if "bias" in module else x @ values.T
    if x.ndim < 3 or x.shape[0] == 1:
        return product(x)  # type: ignore[no-any-return]
    return product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)  # type: ignore[no-any-return]
