"""Products of more rows with matrices of 16 bits by Hopper's own products.

A matrix is read nearly as fast for 64 rows as for eight, if x is not read as often: each block makes as many outputs as
leave one block to a multiprocessor. A sum's order is another than few_rows' kernel has, and one for all rows.
"""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from inference_svc.kv.attention.fused import COMPILERS, compiled, cuda_compiler
from inference_svc.kv.attention.geometry import LANES
from inference_svc.kv.attention.hopper import hopper_compiler
from inference_svc.kv.attention.kernels import Dialect, wide_rows_source

_LEAST_ROWS, _MOST_ROWS = 33, 64
_BLOCKS = 132  # multiprocessors of an H100 or an H200
# Outputs of a block in sixteens. With fewer a block reads more of x than of a matrix, and few_rows is as fast.
_LEAST_HEIGHT, _MOST_HEIGHT = 3, 16
_CHUNK, _CHUNK_ROW_BYTES = 64, 128  # inputs
_MOST_BYTES, _MOST_STAGES = 227 << 10, 16
_serving = [False]


def allow(*, is_right: bool) -> None:
    """From here on, in this process: where a check found it right."""
    _serving[0] = is_right


def serve(rows: int, depth: int, widths: Sequence[int], *, is_gated: bool) -> bool:
    """Whether it takes few_rows' place for results of these widths."""
    if not _serving[0] or not _LEAST_ROWS <= rows <= _MOST_ROWS or depth % _CHUNK:
        return False
    return _shape(tuple(widths), 8 if is_gated else 16)[1] >= _LEAST_HEIGHT


def wide_rows(
    x: mx.array,
    matrices: Sequence[mx.array],
    output_shapes: Sequence[tuple[int, ...]],
    *,
    is_gated: bool = False,
    added: mx.array | None = None,
) -> list[mx.array]:
    """As `few_rows`, of x [slots, n, depth] and matrices [width, depth]."""
    widths = tuple(each.shape[0] for each in matrices)
    blocks, height = _shape(widths[:1] if is_gated else widths, 8 if is_gated else 16)
    stage_bytes, threads = (16 * height + _MOST_ROWS) * _CHUNK_ROW_BYTES, -(-height // 4) * 4 * LANES
    stages = min(_MOST_STAGES, (_MOST_BYTES - 1024) // stage_bytes)
    source, own = wide_rows_source(len(matrices), is_gated=is_gated, adds=added is not None), COMPILERS[Dialect.CUDA]
    return compiled(hopper_compiler if own is cuda_compiler else own, source, 1024 + stages * stage_bytes)(
        inputs=[x, *matrices, *(() if added is None else (added,))],
        template=[
            ("T", x.dtype),
            ("IS_BFLOAT", x.dtype == mx.bfloat16),
            ("COUNT", len(matrices)),
            ("HEIGHT", height),
            ("STAGES", stages),
        ],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=output_shapes,
        output_dtypes=[x.dtype] * len(output_shapes),
    )


@lru_cache(maxsize=256)
def _shape(widths: tuple[int, ...], outputs: int) -> tuple[int, int]:
    """Blocks, and `outputs` of a block in as many: the fewest by which all multiprocessors have the same work."""

    def blocks(height: int) -> int:
        return sum(-(-width // (outputs * height)) for width in widths)

    turns = -(-blocks(_MOST_HEIGHT) // _BLOCKS)
    height = next(each for each in range(1, _MOST_HEIGHT + 1) if blocks(each) <= turns * _BLOCKS)
    return blocks(height), height
