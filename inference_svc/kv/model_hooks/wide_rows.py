"""Products of more rows by Hopper's own products, with matrices of 16 bits or packed in 4.

A matrix is read nearly as fast for 64 rows as for eight, if x is not read as often: each block makes as many outputs as
leave one block to a multiprocessor, or two blocks share the depth of twice as many. A sum's order is another than
few_rows' kernel has, and one for all rows.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from inference_svc.kv.attention.fused import COMPILERS, compiled, cuda_compiler
from inference_svc.kv.attention.geometry import LANES
from inference_svc.kv.attention.hopper import hopper_compiler
from inference_svc.kv.attention.kernels import Dialect, wide_rows_source

_LEAST_ROWS, _MOST_ROWS = 33, 64
_BLOCKS = 132  # multiprocessors of an H100 or an H200
# Outputs of a block in sixteens. With fewer a block reads more of x than of a matrix, and few_rows is as fast.
_LEAST_HEIGHT, _LEAST_PACKED_HEIGHT, _MOST_HEIGHT = 3, 8, 16
# Blocks of so many would read more of x, and so share a depth by two: with four, writing and reading sums takes longer.
_MOST_SHARED, _SPLITS = 3, 2
_CHUNK = 64  # inputs
_X_BYTES = 2 * _MOST_ROWS * _CHUNK  # of a chunk
_SPAN = 2  # chunks of a step, of packed matrices
_MOST_BYTES, _MOST_STAGES, _LEAST_STAGES = 227 << 10, 16, 3
_SUMS = 32  # of a thread
_LAUNCHES = 64


class _MeetingWords(threading.local):
    """Words that blocks of a launch meet at, which are zeros behind it. Launches that a graph has side by side have
    others, and so have those of another thread, whose stream runs beside: an embedding model's.
    """

    def __init__(self) -> None:
        self.counters: list[mx.array] = []


_here = _MeetingWords()


class _Shape(NamedTuple):
    blocks: int
    threads: int
    shared_bytes: int
    scratch: int  # floats by which blocks give sums to each other
    constants: dict[str, int]


def can_serve(rows: int, depth: int, widths: Sequence[int], groups: int, *, is_gated: bool) -> bool:
    """Whether it is faster than few_rows for results of these widths, of matrices in so many groups, 0: of 16 bits."""
    if not _LEAST_ROWS <= rows <= _MOST_ROWS or depth % _CHUNK:
        return False
    if groups and (depth != groups * _CHUNK or groups % 8):  # a row's scales are whole pieces of 16 bytes
        return False
    constants = _shape(tuple(widths), 8 if is_gated else 16, groups).constants
    least = _LEAST_PACKED_HEIGHT if groups else _LEAST_HEIGHT
    return constants["HEIGHT"] >= least and constants["STAGES"] >= _LEAST_STAGES


def wide_rows(
    x: mx.array,
    matrices: Sequence[tuple[mx.array, ...]],
    output_shapes: Sequence[tuple[int, ...]],
    *,
    is_gated: bool = False,
    added: mx.array | None = None,
) -> list[mx.array]:
    """As `few_rows`, of x [slots, n, depth]."""
    widths, is_packed = tuple(each[0].shape[0] for each in matrices), len(matrices[0]) > 1
    groups = matrices[0][1].shape[1] if is_packed else 0
    shape = _shape(widths[:1] if is_gated else widths, 8 if is_gated else 16, groups)
    source = wide_rows_source(len(matrices), is_packed=is_packed, is_gated=is_gated, adds=added is not None)
    own = COMPILERS[Dialect.CUDA]
    met_at = () if is_packed else (_next_counters(),)
    made = compiled(hopper_compiler if own is cuda_compiler else own, source, shape.shared_bytes)(
        inputs=[x, *(part for each in matrices for part in each), *(() if added is None else (added,)), *met_at],
        template=[
            ("T", x.dtype),
            ("IS_BFLOAT", x.dtype == mx.bfloat16),
            ("COUNT", len(matrices)),
            *shape.constants.items(),
        ],
        grid=(shape.blocks * shape.threads, 1, 1),
        threadgroup=(shape.threads, 1, 1),
        output_shapes=[*output_shapes, *((shape.scratch,) for _ in met_at)],
        output_dtypes=[x.dtype] * len(output_shapes) + [mx.float32] * len(met_at),
    )
    return made[: len(output_shapes)]


def _next_counters() -> mx.array:
    counters = _here.counters
    if not counters:
        counters.extend(mx.zeros(_BLOCKS, mx.uint32) for _ in range(_LAUNCHES))
        mx.eval(counters)
    counters.append(counters.pop(0))
    return counters[-1]


@lru_cache(maxsize=256)
def _shape(widths: tuple[int, ...], outputs: int, groups: int) -> _Shape:
    """Blocks of so many times `outputs`: the fewest by which all multiprocessors have the same work. Where these would
    have few outputs, two blocks share the depth of more: x is read half as often.
    """

    def blocks(height: int) -> int:
        return sum(-(-width // (outputs * height)) for width in widths)

    def height_of(splits: int, most: int) -> int:
        return next(each for each in range(1, _MOST_HEIGHT + 1) if splits * blocks(each) <= most)

    splits, height = 1, height_of(1, -(-blocks(_MOST_HEIGHT) // _BLOCKS) * _BLOCKS)
    if height <= _MOST_SHARED and not groups:
        splits, height = _SPLITS, height_of(_SPLITS, _BLOCKS)
    warps, constants = -(-height // 4) * 4, {"HEIGHT": height}
    fixed, stage_bytes = 1024, 16 * height * 2 * _CHUNK + _X_BYTES
    if groups:
        fixed += 2 * _SPAN * (_X_BYTES + _MOST_ROWS * 4) + 16 * height * (groups + 8) * 4
        stage_bytes = _SPAN * 16 * height * _CHUNK // 2
        constants |= {"GROUPS": groups, "SPAN": _SPAN}
    else:
        constants["SPLITS"] = splits
    stages = min(_MOST_STAGES, (_MOST_BYTES - fixed) // stage_bytes)
    count, threads = splits * blocks(height), warps * LANES
    scratch = count * threads * _SUMS if splits > 1 else 1
    return _Shape(count, threads, fixed + stages * stage_bytes, scratch, {**constants, "STAGES": stages})
