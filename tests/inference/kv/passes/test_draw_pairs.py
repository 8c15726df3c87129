"""A step's draws in arrays of eight bytes: by the kernel, emulated and on a GPU, as by MLX's own operations."""

import math
from typing import cast

import mlx.core as mx
import pytest

from inference_svc.kv.attention import in_place
from inference_svc.kv.attention.choice import device_dialect
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.draw_pairs import NOT_SOUND, in_pairs
from tests.inference.kv.attention.emulators import EMULATORS, needs_compiler

LARGEST = 3.4e38  # of float32; bfloat16's nearest is infinite


def words(tokens: mx.array, greatest: mx.array, dialect: Dialect | None) -> list[int]:
    pairs = in_pairs(tokens, greatest, dialect)
    assert {pair.nbytes for pair in pairs} <= {4, 8}
    return [word for pair in pairs for word in cast("list[int]", pair.tolist())][: tokens.shape[0]]


@pytest.mark.parametrize("is_emulated", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("rows", [3, 16, 17, 64])
@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16, mx.float16])
def test_a_kernel_reads_draws_as_operations_do(
    rows: int, kind: mx.Dtype, is_emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_emulated:
        monkeypatch.setitem(in_place.COMPILERS, Dialect.CUDA, EMULATORS[Dialect.CUDA])
    elif device_dialect() is not Dialect.CUDA:
        pytest.skip("the kernel is CUDA's")
    tokens = mx.array([7 * row % 128_256 for row in range(rows - 1)] + [NOT_SOUND - 1], dtype=mx.uint32)
    values = [math.nan, 0.0, math.inf, -math.inf, LARGEST, -LARGEST, 5e-8, 17.25]
    greatest = mx.array([values[row % len(values)] for row in range(rows)]).astype(kind)
    assert words(tokens, greatest, Dialect.CUDA) == words(tokens, greatest, None)
