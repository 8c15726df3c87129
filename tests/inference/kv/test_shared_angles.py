"""Rotary angles that the layers of a decoding step share: the same bits, and each is computed once."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import Llama3RoPE

from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.model_hooks.shared_angles import share_angles
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.inference.kv.greedy import ROOMY, forward, prefilled, tokens_of
from tests.inference.kv.sequences import full, pool_of

pytestmark = pytest.mark.cpu_only("a GPU rotates by one kernel")
LENGTHS = (5, 61, 300)


def stepped(model: Any, graph: Path) -> tuple[list[mx.array], int]:
    """Logits of two steps, and how often the second one computes sines."""
    pool = pool_of([full()] * len(model.layers))
    batch = DecodeBatch(pool, forward(model), ROOMY)
    for length in LENGTHS:
        batch.join(prefilled(model, SequenceKV(pool), tokens_of(length, length)))
    first = batch.step([9, 10, 11])
    mx.eval(first)
    second = batch.step([12, 13, 14])
    mx.export_to_dot(str(graph), second)
    mx.eval(second)
    return [first, second], graph.read_text().count('"Sin"') + graph.read_text().count("=Sin,")


def test_a_step_computes_its_angles_once_and_changes_no_bit(tmp_path: Path) -> None:
    model: Any = load(write_model(tmp_path, LLAMA), "float32").model
    before, sines = stepped(model, tmp_path / "before")
    share_angles(model)
    share_angles(model)
    after, shared_sines = stepped(model, tmp_path / "after")
    assert (sines, shared_sines) == (2 * len(model.layers), 1)
    assert all(mx.array_equal(*pair).item() for pair in zip(before, after, strict=True))


@pytest.mark.parametrize(("dims", "base", "scale"), [(64, 1e4, 1.0), (128, 5e5, 0.125), (96, 1e6, 1.0), (32, 8e6, 2.0)])
def test_a_rotation_has_the_bits_of_mlx_at_any_position(dims: int, base: float, scale: float) -> None:
    usual, shared = RoPE(dims, base=base, scale=scale), RoPE(dims, base=base, scale=scale)
    share_angles(shared)
    assert type(shared) is not RoPE
    for number, offsets in enumerate(([0], [3, 3], [131_071, 0, 4_095, 17])):
        x = mx.random.normal((len(offsets), 3, 1, 128), key=mx.random.key(number))
        for each in (x, x.astype(mx.bfloat16), mx.concatenate([x, x], axis=2)):
            assert mx.array_equal(shared(each, offset=mx.array(offsets)), usual(each, offset=mx.array(offsets))).item()
        assert mx.array_equal(shared(x, offset=7), usual(x, offset=7)).item()


def test_other_rotations_stay_what_they_are() -> None:
    traditional = RoPE(64, traditional=True)
    share_angles(traditional)
    assert type(traditional) is RoPE
    scaled = Llama3RoPE(64, scaling_config={"factor": 8.0, "original_max_position_embeddings": 64})
    share_angles(scaled)
    assert type(scaled) is Llama3RoPE
