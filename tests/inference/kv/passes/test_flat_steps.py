"""A decoding step on a CPU whose rows are one matrix: the bits of the model's own calls, in fewer nodes of a graph."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.normalization import RMSNorm

from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.model_hooks import attention_hook, flat_steps
from inference_svc.kv.model_hooks.flat_steps import flatten_steps
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from tests.inference.engine.tiny_models import LLAMA, QWEN2, QWEN3, write_model
from tests.inference.kv.greedy import ROOMY, forward, prefilled, tokens_of
from tests.inference.kv.sequences import full, pool_of

pytestmark = pytest.mark.cpu_only("a GPU's steps have other nodes")
LENGTHS = (5, 61, 300, 17, 1)


def stepped(model: Any, rows: int, graph: Path) -> tuple[list[mx.array], int]:
    """Logits of two steps, and the nodes of the second."""
    pool = pool_of([full()] * len(model.layers))
    batch = DecodeBatch(pool, forward(model), ROOMY)
    for length in LENGTHS[:rows]:
        batch.join(prefilled(model, SequenceKV(pool), tokens_of(length, length)))
    first = batch.step([*range(9, 9 + rows)])
    mx.eval(first)
    second = batch.step([*range(19, 19 + rows)])
    mx.export_to_dot(str(graph), second)
    mx.eval(second)
    return [first, second], graph.read_text().count("shape=rectangle")


@pytest.mark.parametrize("shape", [LLAMA, QWEN2, QWEN3], ids=["llama", "with biases", "with norms of heads"])
def test_a_flat_step_has_the_bits_of_the_models_own_calls_in_fewer_nodes(tmp_path: Path, shape: dict[str, Any]) -> None:
    attention_hook.install()
    written = write_model(tmp_path, shape)
    usual: Any
    flat: Any
    usual, flat = (load(written, "float32").model for _ in range(2))
    flatten_steps(flat)
    for name in ("self_attn", "mlp", "input_layernorm"):
        assert type(flat.layers[0][name]) is not type(usual.layers[0][name])
    for rows in (1, 2, 4, 5):
        before, nodes = stepped(usual, rows, tmp_path / "usual")
        after, flat_nodes = stepped(flat, rows, tmp_path / "flat")
        assert all(mx.array_equal(*pair).item() for pair in zip(before, after, strict=True))
        assert nodes - flat_nodes >= 15 * len(flat.layers)


def test_a_norm_has_the_bits_of_mlx_for_any_rows() -> None:
    usual, flat = RMSNorm(192, eps=1e-6), RMSNorm(192, eps=1e-6)
    usual.weight = flat.weight = mx.random.normal((192,), key=mx.random.key(0))
    flatten_steps(flat)
    assert type(flat) is not RMSNorm
    for shape in ((1, 1, 192), (3, 2, 1, 192), (1, 64, 192), (7, 192)):
        x = mx.random.normal(shape, key=mx.random.key(1)) * 30
        for each in (x, x.astype(mx.bfloat16)):
            assert mx.array_equal(flat(each), usual(each)).item()


def test_a_norm_stays_what_it_is_where_mlx_computes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RMSNorm(160)
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, weight, _eps: x * weight)
    flat_steps._is_as_known.cache_clear()
    flatten_steps(norm)
    assert type(norm) is RMSNorm
    flat_steps._is_as_known.cache_clear()


@pytest.mark.parametrize("rows", [1, 5])
def test_a_product_takes_weights_that_were_changed(tmp_path: Path, rows: int) -> None:
    model: Any = load(write_model(tmp_path, LLAMA), "float32").model
    product, x = model.layers[0].mlp.up_proj, mx.random.normal((rows, 1, 128), key=mx.random.key(2))
    before = product(x)
    product.weight = 2 * product.weight
    assert mx.array_equal(product(x), 2 * before).item()
    assert not any("turned" in name for name in product.parameters())


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_each_of_few_rows_has_a_product_of_its_own(tmp_path: Path, rows: int) -> None:
    model: Any = load(write_model(tmp_path, LLAMA), "float32").model
    product, x = model.layers[0].mlp.up_proj, mx.random.normal((4, 1, 128), key=mx.random.key(3))
    assert mx.array_equal(product(x[:rows]), product(x)[:rows]).item()
    assert mx.allclose(product(x), x @ product.weight.T, rtol=1e-4, atol=1e-4).item()
