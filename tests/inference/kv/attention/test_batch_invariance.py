"""With `batch_invariant`, a row's tokens do not depend on its neighbours: to the bit, on whatever device this runs."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import FailedPrecondition
from mlx_lm.models import llama

from inference_svc.config import read_settings
from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.model_hooks.few_rows import take_few_rows
from inference_svc.kv.model_hooks.joined_steps import join_steps
from inference_svc.kv.model_hooks.row_exact import make_row_exact
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_runner import ModelRunner
from tests.inference.kv.sequences import full, identity_of, recurrent

IS_GPU = mx.default_device().type == mx.DeviceType.gpu
LENGTHS = [5 + 61 * row % 300 for row in range(18)]
STEPS = 6


def made_runner(dtype: mx.Dtype) -> ModelRunner:
    """A small model whose attention matters, as the engine loads it."""
    mx.random.seed(5)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=256,
        num_hidden_layers=2,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        vocab_size=512,
        tie_word_embeddings=False,
    )
    model = llama.Model(arguments)
    for layer in model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
            projection.weight = projection.weight * 4
    model.set_dtype(dtype)
    if not IS_GPU:
        make_row_exact(model)
    elif not mx.metal.is_available():
        take_few_rows(model)
        join_steps(model)
    mx.eval(model.parameters())
    return ModelRunner(model, batch_invariant=True)


def decoded(runner: ModelRunner, pool: KvPool, rows: list[int]) -> list[mx.array]:
    """By row, the logits of its steps [steps, vocabulary]: prompts of its own, then always the likeliest token."""
    batch = runner.new_batch(pool, 1 << 30)
    for row in rows:
        kv = SequenceKV(pool)
        runner.prefill(kv, [(7 * row + 3 * at) % 500 for at in range(LENGTHS[row])])
        batch.join(kv)
    tokens, steps = [row % 500 for row in rows], []
    for _ in range(STEPS):
        steps.append(batch.step(tokens))
        tokens = mx.argmax(steps[-1], axis=-1).tolist()
    found = mx.stack(steps, axis=1)
    mx.eval(found)
    for kv in list(batch.sequences):
        batch.leave(kv)
    return list(found)


@pytest.mark.long(2)
@pytest.mark.parametrize("dtype", [mx.float32, *([mx.bfloat16] if IS_GPU else [])], ids=str)
def test_a_row_alone_gives_the_bits_that_it_gives_among_others(dtype: mx.Dtype) -> None:
    runner = made_runner(dtype)
    policy = policy_of(Rung.Q4, "float32" if dtype == mx.float32 else "bfloat16")
    pool = runner.new_pool(policy, 96 << 20, is_allocated=IS_GPU)
    alone = {row: decoded(runner, pool, [row])[0] for row in (0, 4, 17)}
    for rows in ([4, 0], [1, 2, 0, 3, 4], list(range(8)), list(range(16)), list(range(18))):
        for row, logits in zip(rows, decoded(runner, pool, rows), strict=True):
            assert row not in alone or mx.array_equal(logits, alone[row]), (row, len(rows))


@pytest.mark.parametrize(
    ("layers", "dialect"),
    [([full()], None), ([full(), recurrent(8)], Dialect.CUDA)],
    ids=["kernels that failed their check", "recurrent layers"],
)
def test_rows_that_cannot_be_computed_in_fixed_numbers_are_refused(
    layers: list[identity_pb2.LayerLayout], dialect: Dialect | None
) -> None:
    runner = object.__new__(ModelRunner)
    runner.pass_rows = 16  # as on a GPU
    runner.layout = SimpleNamespace(kernels=KernelChoice(), kv_type=mx.float16)  # type: ignore[assignment]
    with pytest.raises(FailedPrecondition, match="batch_invariant"):
        runner.new_batch(KvPool(identity_of(layers), 1 << 20, dialect=dialect), 0)


def test_it_is_an_option_of_the_engine_and_off_unless_requested() -> None:
    assert not read_settings(["--listen", "unix:/engine"]).batch_invariant
    assert read_settings(["--listen", "unix:/engine", "--batch-invariant"]).batch_invariant
