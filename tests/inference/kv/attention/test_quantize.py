"""New rows are quantized by the emulated kernel as MLX quantizes them, and lie as a page's parts want them."""

import mlx.core as mx
import numpy as np
import pytest

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.quantize import fused_quantized, reference_quantized
from inference_svc.kv.codec import QuantizedCodec
from inference_svc.kv.page import PageFormat
from tests.inference.kv.attention.emulators import EMULATORS, both_dialects, needs_compiler
from tests.inference.kv.attention.scenes import BF16, FP16, page_format

FORMATS = {
    "q4": page_format("q4", 2, 128),
    "q4-rotated in groups of 32": page_format("q4-rotated", 2, 64, 32, FP16),
    "k8v4": page_format("k8v4", 1, 96, 32, BF16),
    "exact": page_format("exact", 2, 80),
}


def rows_of(form: PageFormat, count: int = 5) -> tuple[mx.array, mx.array]:
    """As a model makes them: [B, H, n, D] that lies in memory as [B, n, H, D]."""
    random = np.random.default_rng(3)
    shape = (3, count, form.key.kv_heads, form.key.dim)
    keys, values = (mx.array(random.standard_normal(shape).astype(np.float32)) for _ in range(2))
    return keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)


@needs_compiler
@both_dialects
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_makes_the_bits_that_mlx_makes(name: str, dialect: Dialect) -> None:
    form = FORMATS[name]
    keys, values = rows_of(form)
    got = fused_quantized(keys, values, form, dialect, EMULATORS[dialect])
    assert got.shape == (3, 5, form.units // 256)
    assert mx.array_equal(got, reference_quantized(keys, values, form))


@needs_compiler
@both_dialects
def test_a_group_below_zero_is_quantized_as_mlx_does_on_a_gpu(dialect: Dialect) -> None:
    """There the range of a group always holds zero: it is [low, 0], not [low, high]."""
    form = page_format("q4", 1, 64)
    rows = mx.array(-2 - np.random.default_rng(0).random((1, 1, 1, 64)), mx.float32)
    units = np.array(fused_quantized(rows, rows, form, dialect, EMULATORS[dialect]))[0, 0]
    scale, bias = (float(mx.array(units[i : i + 1]).view(mx.bfloat16).item()) for i in (16, 17))
    assert bias == pytest.approx(float(rows.min().item()), rel=1e-2)
    assert scale == pytest.approx(-bias / 15, rel=1e-2)


def test_units_lie_in_the_order_of_a_pages_parts() -> None:
    form = FORMATS["q4"]
    keys, values = rows_of(form)
    units = reference_quantized(keys, values, form)
    codes, scales, biases = QuantizedCodec(4, 64, mx.bfloat16).encode(values)
    start = sum(part.size for part in form.parts[:3]) // 256
    found = units[1, 2, start : start + form.parts[3].size // 256].reshape(2, -1)
    assert mx.array_equal(found, mx.contiguous(codes[1, :, 2]).view(mx.uint16))
    assert mx.array_equal(units[1, 2, -4:].reshape(2, 2), biases[1, :, 2].view(mx.uint16))
    assert mx.array_equal(units[1, 2, -8:-4].reshape(2, 2), scales[1, :, 2].view(mx.uint16))
