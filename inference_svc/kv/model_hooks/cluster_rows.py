"""Products of more rows with matrices of 16 bits by Hopper's own products, with the bits of few_rows' kernel.

A matrix is read as fast for 64 rows as for eight, if x is not read as often: each block of a cluster has a quarter of
the depth, keeps its part of x for all its outputs, and copies on from tile to tile.
"""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from inference_svc.kv.attention.fused import COMPILERS, compiled, cuda_compiler
from inference_svc.kv.attention.geometry import LANES
from inference_svc.kv.attention.hopper import hopper_compiler, most_clusters
from inference_svc.kv.attention.kernels import BLOCKS_OF_A_CLUSTER, Dialect, cluster_rows_source

_LEAST_ROWS, _MOST_ROWS = 33, 64  # an H200 multiplies up to 32 as fast by few_rows
_THREADS = 12 * LANES
_CHUNK = 64  # inputs; and outputs are counted in as many
_CHUNK_BYTES = 64 * 128  # of 64 rows
_MOST_BYTES, _LEAST_STAGES = 227 << 10, 4
_HEIGHTS = (1, 2, 3, 4)
_serving = [False]


def allow(*, is_right: bool) -> None:
    """From here on, in this process: where a check found it right."""
    _serving[0] = is_right and has_room()


def has_room() -> bool:
    """Whether the device is known to run clusters of such blocks."""
    return most_clusters(_MOST_BYTES) > 0


def serve(rows: int) -> bool:
    return _serving[0] and _LEAST_ROWS <= rows <= _MOST_ROWS


def cluster_rows(
    x: mx.array,
    matrices: Sequence[mx.array],
    output_shapes: Sequence[tuple[int, ...]],
    *,
    is_gated: bool = False,
    added: mx.array | None = None,
) -> list[mx.array]:
    """As `few_rows`, of x [slots, n, depth] and matrices [width, depth]."""
    widths = tuple(each.shape[0] for each in matrices)
    clusters, shared_bytes, constants = _block_shape((2 * widths[0],) if is_gated else widths, x.shape[2])
    source = cluster_rows_source(len(matrices), is_gated=is_gated, adds=added is not None)
    own = COMPILERS[Dialect.CUDA]
    return compiled(hopper_compiler if own is cuda_compiler else own, source, shared_bytes)(
        inputs=[x, *matrices, *(() if added is None else (added,))],
        template=[
            ("T", x.dtype),
            ("IS_BFLOAT", x.dtype == mx.bfloat16),
            ("COUNT", len(matrices)),
            *constants.items(),
        ],
        grid=(clusters * BLOCKS_OF_A_CLUSTER * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=output_shapes,
        output_dtypes=[x.dtype] * len(output_shapes),
    )


@lru_cache(maxsize=256)
def _block_shape(widths: tuple[int, ...], depth: int) -> tuple[int, int, dict[str, int]]:
    """Clusters, shared memory and constants: where a block reads the least, and x once where it is kept."""
    chunks = -(-depth // (_CHUNK * BLOCKS_OF_A_CLUSTER))
    most, found = max(1, most_clusters(_MOST_BYTES)), list[tuple[int, int, int, int, dict[str, int]]]()
    for kept in (chunks, 0):
        for height in _HEIGHTS:
            tiles = sum(-(-width // (_CHUNK * height)) for width in widths)
            turns = -(-tiles // most)
            fixed = 1024 + (kept + 2 * height) * _CHUNK_BYTES + 16
            each = (height + (not kept)) * _CHUNK_BYTES + 16
            if (stages := (_MOST_BYTES - fixed) // each) >= _LEAST_STAGES:
                read = turns * height + (1 if kept else turns)
                constants = {"HEIGHT": height, "STAGES": stages, "X_CHUNKS": kept, "SUMS": 1}
                found.append((read, len(found), -(-tiles // turns), fixed + stages * each, constants))
    return min(found)[2:]
