"""y = x w^T for a few rows on a CUDA device, by a kernel that reads each matrix once and sums a row in one order,
whatever its neighbours are. Matrices that take the same x share a launch.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from inference_svc.kv.attention.fused import COMPILERS, compiled
from inference_svc.kv.attention.geometry import LANES
from inference_svc.kv.attention.kernels import Dialect, few_rows_source

MAX_ROWS = 64
_TYPES = (mx.bfloat16, mx.float16)
_CHUNK_BYTES = 128  # of a row, as in few_rows.h
_WARPS = 4  # they share a sum, so their number decides its order
# For so many rows: columns of 8 rows, outputs of a block in sixteens, chunks on their way. What was fastest on an H200.
_SHAPES = {8: (1, 2, 4), 16: (2, 2, 4), 32: (4, 2, 3), 64: (8, 4, 3)}
_NARROW = (8, 2, 4)  # for matrices that would be too few blocks for a GPU's multiprocessors
_FEW_BLOCKS = 66
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # what mlx-lm's models compute of one x


def few_rows(x: mx.array, matrices: Sequence[mx.array]) -> list[mx.array]:
    """x [..., depth] times each w [width, depth] transposed, all of one 16-bit type: [..., width], summed in fp32.

    At most MAX_ROWS rows and three matrices; the depth is a multiple of 8. A model's own shape, [slots, n, depth], is
    taken and given as it is: each change of shape would be one more node of a step's graph.
    """
    shape, widths = x.shape[:-1], [w.shape[0] for w in matrices]
    x = x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1])
    rows = x.shape[0] * x.shape[1]
    tiles, height, stages = next(shape for most, shape in _SHAPES.items() if rows <= most)
    if height > _NARROW[1] and _blocks(widths, height) <= _FEW_BLOCKS:
        tiles, height, stages = _NARROW
    ring_bytes = stages * (16 * height + 8 * tiles) * _CHUNK_BYTES
    shared_bytes = _WARPS * max(ring_bytes, 16 * height * 8 * tiles * 4)
    return compiled(COMPILERS[Dialect.CUDA], few_rows_source(len(matrices)), shared_bytes)(
        inputs=[x, *matrices],
        template=[
            ("T", x.dtype),
            ("IS_BFLOAT", x.dtype == mx.bfloat16),
            ("COUNT", len(matrices)),
            ("HEIGHT", height),
            ("TILES", tiles),
            ("STAGES", stages),
            ("WARPS", _WARPS),
        ],
        grid=(_blocks(widths, height) * _WARPS * LANES, 1, 1),
        threadgroup=(_WARPS * LANES, 1, 1),
        output_shapes=[(*shape, width) for width in widths],
        output_dtypes=[x.dtype] * len(matrices),
    )


def _blocks(widths: Sequence[int], height: int) -> int:
    return sum(-(-width // (16 * height)) for width in widths)


class JointProducts:
    """Layers that a model calls with the same x, one after the other: the first call computes for all."""

    def __init__(self, members: Sequence[Linear]) -> None:
        self._members = members
        self._x: mx.array | None = None
        self._products: dict[int, mx.array] = {}

    def product(self, member: Linear, x: mx.array) -> mx.array:
        if self._x is not x or id(member) not in self._products:
            found = few_rows(x, [each.weight for each in self._members])
            self._x, self._products = x, {id(each): y for each, y in zip(self._members, found, strict=True)}
        y = self._products.pop(id(member))
        if not self._products:
            self._x = None
        return y


class _FewRowsLinear(Linear):
    together: JointProducts

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_few(x, self.weight):
            return Linear.__call__(self, x)
        y = self.together.product(self, x)
        return y + self.bias if "bias" in self else y


class _FewRowsEmbedding(Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        if not _is_few(x, self.weight):
            as_linear: Any = super().as_linear
            return cast("mx.array", as_linear(x))
        return few_rows(x, [self.weight])[0]


def take_few_rows(model: Module) -> None:
    """Make the model's own projections compute a few rows by the kernel. For a CUDA device."""
    modules: Any = model
    for parent in modules.modules():
        groups = [[parent[name] for name in names if name in parent] for names in _TOGETHER]
        for group in groups:
            members = [member for member in group if type(member) is Linear]
            if len({member.weight.shape[1] for member in members}) == 1:
                _take(members)
    for module in modules.modules():
        if type(module) is Linear:
            _take([module])
        elif type(module) is Embedding:
            module.__class__ = _FewRowsEmbedding


def _take(members: Sequence[Linear]) -> None:
    together = JointProducts(members)
    for member in members:
        member.__class__ = _FewRowsLinear
        member.together = together


def _is_few(x: mx.array, w: mx.array) -> bool:
    rows = x.size // x.shape[-1]
    return rows <= MAX_ROWS and x.dtype == w.dtype and x.dtype in _TYPES and w.shape[1] % 8 == 0
