"""Codecs: what is stored comes back within its bits' error, row by row, whatever other rows are stored with it."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir.formats.block_hash import chain_hashes, kv_identity_hash
from kvasir.formats.token_files import file_identities

from inference_svc.kv.codec import Codec, ExactCodec, QuantizedCodec, RotatedCodec
from inference_svc.kv.policy import LADDER, PolicyRequest, Rung
from inference_svc.kv.sequence_files import files_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import check_files
from tests.inference.kv.greedy import tokens_of
from tests.inference.kv.sequences import fed, from_files, full, identity_of, pool_of, same, values

CODECS: dict[str, Codec] = {
    f"{name} {scale}": codec
    for scale, dtype in (("float16", mx.float16), ("bfloat16", mx.bfloat16))
    for name, codec in (
        ("q4", QuantizedCodec(4, 64, dtype)),
        ("q4 rotated", RotatedCodec(QuantizedCodec(4, 64, dtype))),
        ("q4 rotated, groups of 32", RotatedCodec(QuantizedCodec(4, 32, dtype))),
        ("q8", QuantizedCodec(8, 64, dtype)),
        ("q8 rotated", RotatedCodec(QuantizedCodec(8, 64, dtype))),
        ("fp", ExactCodec(dtype)),
    )
}
_FINEST = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}  # what a value beside 1 may differ by
ROTATED = RotatedCodec(QuantizedCodec(4, 64, mx.float16))


def normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def arrays(parts: tuple[mx.array, ...]) -> list[np.ndarray]:
    return [np.array(part.astype(mx.float32) if part.dtype == mx.bfloat16 else part) for part in parts]


def equal(one: tuple[mx.array, ...], two: tuple[mx.array, ...]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(arrays(one), arrays(two), strict=True))


@pytest.mark.parametrize("name", CODECS)
def test_a_row_is_stored_alike_alone_and_among_others(name: str) -> None:
    """Rows join and leave batches, and are cut and moved: none may depend on another."""
    codec = CODECS[name]

    rows = normal((3, 2, 70, 128), 1)
    whole = codec.encode(rows)
    decoded = codec.decode(whole, mx.float32)
    for batch in range(3):
        for start, stop in ((0, 1), (1, 5), (5, 69), (69, 70)):
            alone = codec.encode(mx.contiguous(rows[batch : batch + 1, :, start:stop]))
            cut = tuple(part[batch : batch + 1, :, start:stop] for part in whole)
            assert equal(alone, cut)
            assert equal((codec.decode(alone, mx.float32),), (decoded[batch : batch + 1, :, start:stop],))
            assert equal(codec.encode(rows[batch : batch + 1, :, start:stop]), cut), "of a view"


@pytest.mark.parametrize("exact_layers", ["", "last"])
@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.value)
def test_under_every_rung_a_restored_sequence_holds_and_shows_the_same_bits(rung: Rung, exact_layers: str) -> None:
    """Through real tensor files, checked as a stranger's; then both go on, and still agree."""
    request = PolicyRequest.parse("auto", exact_layers)
    policy = request.policy(rung, "float32", 2)
    identity, tokens = identity_of([full()] * 2, policy), tokens_of(307, 1)
    name = kv_identity_hash(identity)
    kv = fed(SequenceKV(pool_of([full()] * 2, policy)), [256, 43, 1])
    named = file_identities(name, tokens[:300], chain_hashes(name, tokens[:300]))
    files = check_files(identity, name, files_of(kv, named), tokens[:300])
    back = from_files(pool_of([full()] * 2, policy), files, 300)
    assert same(values(back), values(kv))
    for one in (kv, back):
        fed(one, [7], seed=9)
    assert same(values(back), values(kv))
    named = file_identities(name, tokens, chain_hashes(name, tokens))
    assert files_of(back, named) == files_of(kv, named)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    heads=st.integers(1, 3),
    rows=st.integers(1, 9),
    dim=st.sampled_from([64, 128, 256]),
    size=st.sampled_from([0.05, 1.0, 300.0]),
    offset=st.sampled_from([0.0, 5.0]),
)
def test_what_comes_back_is_within_one_step(
    seed: int, heads: int, rows: int, dim: int, size: float, offset: float
) -> None:
    """A step is the group's range over its codes; MLX moves a scale until the largest value has a code of its own,
    which may cost the other end up to a step. Scales and biases in 16 bits add their rounding."""

    given_rows = size * (normal((1, heads, rows, dim), seed) + offset)
    for codec in (QuantizedCodec(4, 64, mx.float16), QuantizedCodec(8, 64, mx.float16), ROTATED):
        quantized = codec if isinstance(codec, QuantizedCodec) else codec.inner
        stored = given_rows if codec is quantized else mx.hadamard_transform(given_rows)
        groups = np.array(stored).reshape(-1, quantized.group_size)
        step = (groups.max(-1) - groups.min(-1)) / (2**quantized.bits - 1)
        rounding = np.abs(groups).max(-1) * 2**-9 + 1e-6
        back = codec.decode(codec.encode(given_rows), mx.float32)
        error = np.abs(np.array(back) - np.array(given_rows))
        if codec is quantized:
            assert (error.reshape(groups.shape).max(-1) <= step + rounding).all()
        else:  # a rotation keeps lengths, not the largest of its values
            length = np.linalg.norm(error.reshape(-1, dim), axis=-1)
            bound = np.sqrt(((step + rounding) ** 2 * 64).reshape(-1, dim // 64).sum(-1))
            assert (length <= bound).all()


@pytest.mark.parametrize("dim", [2, 64, 128, 256, 512])
def test_the_rotation_keeps_lengths_and_angles_and_is_its_own_inverse(dim: int) -> None:
    matrix = np.array(mx.hadamard_transform(mx.eye(dim)))
    assert np.abs(matrix @ matrix.T - np.eye(dim)).max() < 1e-5
    assert np.array_equal(matrix, matrix.T)


def test_keys_with_outlier_channels_survive_four_bits_only_when_rotated() -> None:
    """What rotation is for: two channels take a group's whole range, and the others are lost."""

    keys = np.array(normal((1, 2, 500, 64), 3))
    keys[..., (5, 37)] *= 40
    others = [channel for channel in range(64) if channel not in (5, 37)]

    def lost(codec: Codec) -> float:
        back = np.array(codec.decode(codec.encode(mx.array(keys)), mx.float32))
        wrong, right = (back - keys)[..., others], keys[..., others]
        return float(np.square(wrong).mean() / np.square(right).mean())

    assert lost(ROTATED.inner) > 0.5
    assert lost(ROTATED) < 0.3


@pytest.mark.parametrize(
    ("codec", "dim", "why"),
    [
        (ROTATED, 192, "192 is no power of two"),
        (ROTATED, 576, "576 is no power of two"),
        (ROTATED, 1, "1 is no power of two"),
        (ROTATED, 32, "32 is no multiple of the group size 64"),
        (QuantizedCodec(4, 64, mx.float16), 48, "48 is no multiple of the group size 64"),
    ],
    ids=str,
)
def test_a_head_dimension_that_cannot_be_stored_is_named(codec: Codec, dim: int, why: str) -> None:
    assert why in codec.problem(dim)


def test_a_head_dimension_that_can_be_stored_is_no_problem() -> None:
    assert [codec.problem(dim) for codec in CODECS.values() for dim in (64, 128, 256)] == [""] * 3 * len(CODECS)
    assert ExactCodec(mx.float16).problem(33) == ""


@pytest.mark.parametrize("stored", [mx.float16, mx.bfloat16])
def test_an_exact_row_keeps_every_value_that_its_type_has(stored: mx.Dtype) -> None:
    rows = 1 + mx.arange(64, dtype=mx.float32).reshape(1, 1, 1, 64) * _FINEST[stored]
    codec = ExactCodec(stored)
    assert mx.array_equal(codec.decode(codec.encode(rows), mx.float32), rows)
