"""Stored codes are read by our own arithmetic on a CPU: it must give MLX's bits, or stored memories would shift."""

import itertools

import mlx.core as mx
import pytest

from inference_svc.kv.codec import QuantizedCodec

TYPES = (mx.float32, mx.float16, mx.bfloat16)


@pytest.mark.parametrize(("bits", "group_size"), list(itertools.product((4, 8), (32, 64, 128))))
def test_decoding_gives_the_bits_that_mlx_gives(bits: int, group_size: int) -> None:
    for seed, (compute_type, scale_type) in enumerate(itertools.product(TYPES, (mx.float16, mx.bfloat16))):
        key = mx.random.key(seed)
        # Rows of very different sizes, read from the middle of a buffer as a live sequence's are.
        rows = (mx.random.normal((2, 3, 37, 256), key=key) * 2.0 ** mx.arange(-18, 19)[:, None]).astype(compute_type)
        codec = QuantizedCodec(bits, group_size, scale_type)
        codes, scales, biases = (part[:, :, 3:30] for part in codec.encode(rows))
        expected = mx.dequantize(
            codes, scales.astype(compute_type), biases.astype(compute_type), group_size=group_size, bits=bits
        )
        found = codec.decode((codes, scales, biases), compute_type)
        assert found.dtype == compute_type
        assert found.shape == expected.shape
        assert mx.array_equal(found.view(mx.uint16), expected.view(mx.uint16)).item()


def test_no_rows_decode_to_no_rows() -> None:
    codec = QuantizedCodec(4, 64, mx.float16)
    parts = tuple(part[:, :, :0] for part in codec.encode(mx.ones((1, 2, 5, 128))))
    assert codec.decode(parts, mx.float32).shape == (1, 2, 0, 128)
