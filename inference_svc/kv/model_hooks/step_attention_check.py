"""Checks the kernel of a step's attention by its results, beside operations and the kernels of single steps."""

from collections.abc import Iterator

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention.in_place import append_rows
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import Scoring, reference_attention
from inference_svc.kv.batch.fused_layer import StepPages
from inference_svc.kv.model_hooks.step_attention import (
    LEAST_OF_PAGES,
    LEAST_OF_SOME,
    SHAPES,
    NewTokens,
    Rotation,
    step_attention,
)
from inference_svc.kv.page import PAGE_TOKENS, PageFormat, RowFormat

_ROWS = RowFormat(2, 128, 4, 64)
_FORMAT = PageFormat(_ROWS, _ROWS, identity_pb2.SCALE_TYPE_BFLOAT16)
_HEADS = 4
_BLOCKS = (2, 0)  # the pages of all rows: each sees those before it, on both sides of a block's border
# The first sees the second's row, of the same page; the last one sees as much of a page as of the one before.
_PLACES = (PAGE_TOKENS - 1, PAGE_TOKENS - 3, PAGE_TOKENS + 1, -1, 2 * PAGE_TOKENS - 9)
# The last one's, where a block does not mix all. Of many rows the same ones again and again, and then one of its own;
# in one launch none again, as a block waits for new rows of its own places alone.
_FAR_BLOCKS = (*_BLOCKS * (SHAPES["many"].pages // len(_BLOCKS)), 1)
_NEXT_BLOCKS = (*_BLOCKS, 1, 3)
# Whether it is in one launch, rows with empty ones, and the last one's pages.
_LAUNCHES = (
    (True, len(_PLACES), _BLOCKS),
    (True, LEAST_OF_SOME, _BLOCKS),
    (True, LEAST_OF_SOME, _NEXT_BLOCKS),
    (False, len(_PLACES), _BLOCKS),
    (False, LEAST_OF_PAGES, _BLOCKS),
    (False, LEAST_OF_PAGES, _FAR_BLOCKS),
)
_SEED = 110  # by which faults show
_TOLERANCE = 0.03
_OTHER_UNITS = 2e-4  # of all of the pages': new rows whose sums were rounded otherwise


def differences() -> Iterator[str]:
    """The faults that are found."""
    new = NewTokens(*(_random(len(_PLACES), heads, _SEED + heads + seed) for seed, heads in enumerate((_HEADS, 2, 2))))
    rotation = Rotation.of(1 / (1 + mx.arange(_ROWS.dim // 2, dtype=mx.float32) ** 2))
    for is_whole, rows, blocks in _LAUNCHES:
        table, places = _table(blocks)
        expected = _pages()
        right = _by_steps(new, StepPages(expected, _FORMAT, table, places), rotation)
        mx.eval(right)
        step = StepPages(_pages(), _FORMAT, _padded(table, rows), _padded(places, rows, value=-1))
        given = NewTokens(*(_padded(each, rows) for each in (new.queries, new.keys, new.values)))
        found = step_attention(given, step, rotation, _ROWS.dim**-0.5, is_whole=is_whole)[: len(_PLACES)]
        mx.eval(found)
        if not (mx.abs(found - right).max() <= _TOLERANCE * mx.abs(right).max()).item():
            yield "attention of a step differs from the reference"
        if not (mx.mean(step.pages != expected) <= _OTHER_UNITS).item():
            yield "a step's rows are written differently from the reference"


def _table(last_blocks: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """The block table, and the places of rows, of which the last one is in its last block."""
    more = len(last_blocks) - len(_BLOCKS)
    places = (*_PLACES[:-1], _PLACES[-1] + more * PAGE_TOKENS)
    return mx.array([*[(*_BLOCKS, *[0] * more)] * (len(_PLACES) - 1), last_blocks], mx.int32), mx.array(
        places, mx.int32
    )


def _padded(given: mx.array, rows: int, value: int = 0) -> mx.array:
    return mx.pad(given, [(0, rows - len(given)), *[(0, 0)] * (given.ndim - 1)], constant_values=value)


def _by_steps(new: NewTokens, step: StepPages, rotation: Rotation) -> mx.array:
    queries, keys = (_turned(each, step.places, rotation) for each in (new.queries, new.keys))
    stored = append_rows(keys, new.values, step, step.places, Dialect.CUDA)
    attended = reference_attention(queries, step, stored, Scoring(_ROWS.dim**-0.5))
    return attended.reshape(len(_PLACES), 1, -1)


def _turned(given: mx.array, places: mx.array, rotation: Rotation) -> mx.array:
    angles = places[:, None, None, None] * rotation.frequencies
    cosine, sine = mx.cos(angles), mx.sin(angles)
    left, right = mx.split(given.astype(mx.float32), 2, axis=-1)
    turned = mx.concatenate([left * cosine - right * sine, left * sine + right * cosine], axis=-1)
    return turned.astype(given.dtype)


def _pages() -> mx.array:
    """Of scales and biases below two, which random bits are not."""
    made = mx.random.randint(0, 0x4000, (max(_NEXT_BLOCKS) + 1, _FORMAT.units), key=mx.random.key(6)).astype(mx.uint16)
    mx.eval(made)
    return made


def _random(rows: int, heads: int, seed: int) -> mx.array:
    return mx.random.normal((rows, heads, 1, _ROWS.dim), key=mx.random.key(seed)).astype(mx.bfloat16)
