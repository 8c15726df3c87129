"""Checks the kernel of whole layers by its results, beside operations in 32 bits and the kernels of single steps."""

from collections.abc import Iterator

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention.in_place import append_rows
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import Scoring, reference_attention
from inference_svc.kv.batch.fused_layer import StepPages
from inference_svc.kv.model_hooks.whole_layers import (
    MAX_ROWS,
    MAX_ROWS_BEHIND,
    LayerWeights,
    Matrix,
    behind_attention,
    multiprocessors,
    new_counters,
    whole_layer,
)
from inference_svc.kv.page import PAGE_TOKENS, PageFormat, RowFormat

_ROWS = RowFormat(2, 128, 4, 64)
_FORMAT = PageFormat(_ROWS, _ROWS, identity_pb2.SCALE_TYPE_BFLOAT16)
# Of which a block has 16 warps, as of most models' sizes, and products several steps.
_HIDDEN, _INNER, _HEADS, _GROUP, _EPSILON = 2048, 1024, 8, 64, 1e-5
_BLOCKS = (2, 0)  # the pages of all rows: each sees those before it, on both sides of a block's border
_PLACES = (PAGE_TOKENS - 3, PAGE_TOKENS - 1, PAGE_TOKENS + 1)
_TOLERANCE = 0.03
_OTHER_UNITS = 6e-4  # of all of the pages': new rows whose sums were rounded otherwise, 8 to 32 units, and 66 here


def differences(*, is_packed: bool = True) -> Iterator[str]:
    """The faults that are found, with weights of 4 or of 16 bits."""
    pages = _pages()
    expected = mx.array(pages)
    mx.eval(expected)  # a copy of them as they are before the kernel writes
    places = mx.array([*_PLACES, *[-1] * (MAX_ROWS - len(_PLACES))], mx.int32)
    step = StepPages(pages, _FORMAT, mx.array([_BLOCKS] * MAX_ROWS, mx.int32), places)
    weights, x = _weights(is_packed=is_packed), _random(MAX_ROWS, 1, _HIDDEN, seed=9)
    found = whole_layer(x, weights, step, multiprocessors())
    mx.eval(found)
    right = _layer_by_steps(x, weights, StepPages(expected, _FORMAT, step.block_table, places))
    if not (mx.abs(found - right).max() <= _TOLERANCE * mx.abs(right).max()).item():
        yield "layers differ from the reference"
    if not (mx.mean(pages != expected) <= _OTHER_UNITS).item():
        yield "layers write other rows than the reference"
    if is_packed:
        return
    x, attended = (
        _random(MAX_ROWS_BEHIND, 1, _HIDDEN, seed=10),
        _random(MAX_ROWS_BEHIND, 1, _HEADS * _ROWS.dim, seed=11),
    )
    found = behind_attention(attended, x, weights, multiprocessors())
    right = _behind_attention(attended, x, weights)
    if not (mx.abs(found - right).max() <= _TOLERANCE * mx.abs(right).max()).item():
        yield "what is behind attention differs from the reference"


def _layer_by_steps(x: mx.array, weights: LayerWeights, step: StepPages) -> mx.array:
    def turned(given: mx.array) -> mx.array:
        cut, freqs = given.reshape(x.shape[0], -1, 1, _ROWS.dim), 1 / weights.frequencies
        turning = {"traditional": False, "base": None, "scale": 1.0, "offset": step.places, "freqs": freqs}
        made: mx.array = mx.fast.rope(cut, _ROWS.dim, **turning)  # type: ignore[arg-type]
        return made

    normed = mx.fast.rms_norm(x, weights.norms[0], _EPSILON)
    queries, keys, new = (_product(normed, each) for each in weights.matrices[:3])
    queries, keys = turned(queries), turned(keys)
    stored = append_rows(keys, new.reshape(keys.shape), step, step.places, Dialect.CUDA)
    attended = reference_attention(queries, step, stored, Scoring(_ROWS.dim**-0.5))
    return _behind_attention(attended.reshape(x.shape[0], 1, -1), x, weights)


def _behind_attention(attended: mx.array, x: mx.array, weights: LayerWeights) -> mx.array:
    o, gate, up, down = weights.matrices[3:]
    h = x + _product(attended, o)
    normed = mx.fast.rms_norm(h, weights.norms[1], _EPSILON)
    opening = _product(normed, gate).astype(mx.float32)
    opened = opening * mx.sigmoid(opening) * _product(normed, up)
    return h + _product(opened.astype(mx.bfloat16), down)


def _product(given: mx.array, matrix: Matrix) -> mx.array:
    return (given.astype(mx.float32) @ _values(matrix).T).astype(mx.bfloat16)


def _values(matrix: Matrix) -> mx.array:
    if len(matrix) == 1:
        return matrix[0].astype(mx.float32)
    codes, scales, biases = matrix
    return mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), _GROUP, 4)


def _weights(*, is_packed: bool) -> LayerWeights:
    width, kv_width = _HEADS * _ROWS.dim, _ROWS.kv_heads * _ROWS.dim
    sizes = [
        (width, _HIDDEN),
        *[(kv_width, _HIDDEN)] * 2,
        (_HIDDEN, width),
        *[(_INNER, _HIDDEN)] * 2,
        (_HIDDEN, _INNER),
    ]
    values = [_random(*size, seed=seed) / size[1] ** 0.5 for seed, size in enumerate(sizes)]
    matrices = tuple(_packed(each) if is_packed else (each,) for each in values)
    frequencies = 1 / (1 + mx.arange(_ROWS.dim // 2, dtype=mx.float32))
    settings = mx.array([_ROWS.dim**-0.5, _EPSILON, _EPSILON], mx.float32)
    norms = _random(_HIDDEN, seed=7), _random(_HIDDEN, seed=8)
    return LayerWeights(norms, matrices, frequencies, settings, new_counters(), _HEADS)


def _packed(values: mx.array) -> Matrix:
    codes, scales, biases = mx.quantize(values, _GROUP, 4)
    return codes, scales, biases


def _pages() -> mx.array:
    """Of scales and biases below two, which random bits are not."""
    made = mx.random.randint(0, 0x4000, (max(_BLOCKS) + 1, _FORMAT.units), key=mx.random.key(6)).astype(mx.uint16)
    mx.eval(made)
    return made


def _random(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)
