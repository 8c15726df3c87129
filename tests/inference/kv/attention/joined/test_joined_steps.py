"""What the kernel of few rows does between a model's products, emulated, beside the steps that it replaces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import gemma2, llama, qwen3
from mlx_lm.models.activations import swiglu

from inference_svc.kv.attention import checks, choice
from inference_svc.kv.attention.checks import why_wrong_joined
from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.kv.attention.fused import COMPILERS
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.model_hooks import few_rows as module
from inference_svc.kv.model_hooks.few_rows import Matrix, few_rows, take_few_rows
from inference_svc.kv.model_hooks.joined_steps import join_steps
from tests.emulation.emulator import cuda_emulator
from tests.inference.kv.attention.emulators import needs_compiler

pytestmark = needs_compiler
BITS = pytest.mark.parametrize("bits", [16, 4])


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if mx.default_device().type == mx.DeviceType.cpu:
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, cuda_emulator)


def matrices_of(count: int, width: int, depth: int, dtype: mx.Dtype, bits: int) -> list[Matrix]:
    made = [mx.random.normal((width, depth)).astype(dtype) / 8 for _ in range(count)]
    return [mx.quantize(w, 64, 4) if bits == 4 else (w,) for w in made]


@pytest.mark.long(7)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 48, 320), (9, 33, 64), (64, 4300, 64)])
@BITS
def test_rows_that_are_added_give_the_bits_of_a_sum_after_the_product(
    rows: int, width: int, depth: int, dtype: mx.Dtype, bits: int
) -> None:
    mx.random.seed(8)
    matrices = matrices_of(1, width, depth, dtype, bits)
    x, added = (mx.random.normal((rows, 1, size)).astype(dtype) for size in (depth, width))
    (found,), (product,) = few_rows(x, matrices, added=added), few_rows(x, matrices)
    assert mx.array_equal(found, added + product)


@pytest.mark.long(11)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 48, 320), (9, 33, 64), (64, 2150, 64)])
@BITS
def test_gated_products_are_as_near_as_the_steps_alone_and_a_row_has_the_same_bits_beside_any_others(
    rows: int, width: int, depth: int, dtype: mx.Dtype, bits: int
) -> None:
    mx.random.seed(9)
    matrices = matrices_of(2, width, depth, dtype, bits)
    x = mx.random.normal((rows, 1, depth)).astype(dtype)
    (found,), (gate, up) = few_rows(x, matrices, is_gated=True), few_rows(x, matrices)
    right = nn.silu(gate.astype(mx.float32)) * up.astype(mx.float32)

    def error(made: mx.array) -> float:
        return float(mx.linalg.norm(made.astype(mx.float32) - right))  # type: ignore[arg-type]

    assert found.shape == gate.shape
    assert error(found) <= error(swiglu(gate, up)) * 1.001
    assert mx.array_equal(few_rows(x[-1:], matrices, is_gated=True)[0], found[-1:])


def small(kind: Any, bits: int, **changed: Any) -> Any:
    mx.random.seed(10)
    given = {
        "model_type": "any",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 96,
        **changed,
    }
    model = kind.Model(kind.ModelArgs(**given))
    model.set_dtype(mx.bfloat16)
    if bits < 16:
        nn.quantize(model, 64, bits)
    take_few_rows(model)
    return model


def launches_of(model: Any, tokens: mx.array, monkeypatch: pytest.MonkeyPatch) -> tuple[mx.array, list[str]]:
    """The logits, and what each product did that took part in them."""
    done: dict[int, str] = {}
    used: list[str] = []

    def noted(x: mx.array, matrices: Any, **how: Any) -> list[mx.array]:
        made = few_rows(x, matrices, **how)
        done[id(made[0])] = "gated" if how.get("is_gated") else "added" if how.get("added") is not None else "plain"
        used.append(done[id(made[0])])
        return made

    with monkeypatch.context() as patch:
        patch.setattr(module, "few_rows", noted)
        return model(tokens), used


QWEN3 = {"rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": False}


@pytest.mark.parametrize(("kind", "changed"), [(llama, {}), (qwen3, QWEN3)], ids=["llama", "qwen3"])
@BITS
def test_a_models_blocks_take_fewer_kernels_and_its_logits_stay(
    kind: Any, changed: dict[str, Any], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = small(kind, bits, **changed), mx.array([[3], [50], [7]])
    right, used = launches_of(model, tokens, monkeypatch)
    assert set(used) == {"plain"}
    join_steps(model)
    found, used = launches_of(model, tokens, monkeypatch)
    # A product that was computed before its sum has no reader then: MLX never launches it.
    assert (used.count("added"), used.count("gated")) == (4, 2)
    assert mx.allclose(found, right, rtol=3e-2, atol=3e-2)
    many = mx.arange(65)[None] % 90  # more rows than the kernel takes
    found, right = model(many), small(kind, bits, **changed)(many)
    assert mx.array_equal(found, right) if bits == 16 else mx.allclose(found, right, rtol=3e-2, atol=3e-2)


def test_a_projection_with_a_bias_is_added_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(llama, 16, attention_bias=True, mlp_bias=True)
    for name, layer in model.leaf_modules()["model"]["layers"][0].items():
        for projection in layer.values() if name in ("self_attn", "mlp") else ():
            if "bias" in projection:
                projection.bias = mx.random.normal(projection.bias.shape).astype(mx.bfloat16)
    right = model(mx.array([[3], [50]]))
    join_steps(model)
    found, used = launches_of(model, mx.array([[3], [50]]), monkeypatch)
    assert set(used) == {"plain"}
    assert mx.array_equal(found, right)


def test_a_block_of_another_source_is_the_models_own() -> None:
    gemma = small(gemma2, 16, query_pre_attn_scalar=32.0)
    before = [type(module) for module in gemma.modules()]
    join_steps(gemma)
    assert [type(module) for module in gemma.modules()] == before
    other = small(llama, 16)
    block = type(other.layers[0])
    other.layers[0].__class__ = type("Own", (block,), {"__call__": lambda self, x, *_: x})
    join_steps(other)
    assert type(other.layers[0]).__name__ == "Own"
    assert type(other.layers[1]) is not block


def test_an_attention_of_a_class_that_is_made_of_a_joined_one_is_computed() -> None:
    model, tokens = small(llama, 16), mx.array([[3, 50]])
    join_steps(model)
    right = model(tokens)
    attention = model.layers[1].self_attn
    attention.__class__ = type("Own", (type(attention),), {})
    assert mx.array_equal(model(tokens), right)


def nothing_added(x: mx.array, matrices: Any, **how: Any) -> list[mx.array]:
    return few_rows(x, matrices, **{**how, "added": None})


def others_gate(x: mx.array, matrices: Any, **how: Any) -> list[mx.array]:
    return few_rows(x, matrices[::-1] if how.get("is_gated") else matrices, **how)


@pytest.mark.parametrize(
    ("made", "why"),
    [(few_rows, ""), (nothing_added, "sums of products"), (others_gate, "gated products")],
    ids=["right", "sums", "gates"],
)
def test_the_check_at_the_start_notices_a_wrong_kernel_and_the_plain_one_serves(
    made: Callable[..., list[mx.array]], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(checks, "few_rows", partial(made))
    assert why_wrong_joined().startswith(why)
    assert bool(why_wrong_joined()) == bool(why)
    kernels = KernelChoice()
    assert kernels.takes_few_rows()
    assert kernels.joins_steps() == (not why)
    assert kernels.has_failed == bool(why)
