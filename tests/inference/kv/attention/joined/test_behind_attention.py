"""What a layer computes behind its attention as one kernel, emulated, beside the same steps' kernels one by one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from inference_svc.kv.attention.fused import COMPILERS
from inference_svc.kv.attention.kernels import Dialect, behind_source
from inference_svc.kv.model_hooks import whole_layer_check, whole_layers
from inference_svc.kv.model_hooks.few_rows import few_rows
from inference_svc.kv.model_hooks.joined_steps import join_steps
from inference_svc.kv.model_hooks.whole_layers import MAX_ROWS_BEHIND, LayerWeights, behind_attention
from tests.emulation.emulator import cuda_emulator, early_cuda_emulator
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.kv.attention.joined.test_cut_heads import batch_over_pages, normed
from tests.inference.kv.attention.joined.test_joined_steps import small

pytestmark = needs_compiler
IS_CPU = mx.default_device().type == mx.DeviceType.cpu
HIDDEN, INNER, WIDTH, EPSILON = 1024, 2048, 1024, 1e-5
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
SIZES["num_key_value_heads"] = 1  # nine sequences' pages have room then


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_CPU:
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, cuda_emulator)
        monkeypatch.setattr(whole_layers, "multiprocessors", lambda: 3)
        monkeypatch.setattr(whole_layer_check, "multiprocessors", lambda: 5)


def given(rows: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, LayerWeights]:
    """What was attended to, x, and weights, of which those before attention are missing."""
    mx.random.seed(rows)

    def random(*shape: int) -> mx.array:
        return (mx.random.normal(shape) / shape[-1] ** 0.25).astype(dtype)

    shapes = (HIDDEN, WIDTH), (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    settings, counters, none = mx.array([1.0, 1.0, EPSILON], mx.float32), whole_layers.new_counters(), mx.zeros(1)
    mx.eval(settings, counters)
    matrices = [(none,)] * 3 + [(random(*each),) for each in shapes]
    weights = LayerWeights((none, random(HIDDEN)), tuple(matrices), none, settings, counters, 8)
    return random(rows, 1, WIDTH), random(rows, 1, HIDDEN), weights


def one_by_one(attended: mx.array, x: mx.array, weights: LayerWeights) -> mx.array:
    o, gate, up, down = weights.matrices[3:]
    (h,) = few_rows(attended, [o], added=x)
    (opened,) = few_rows(mx.fast.rms_norm(h, weights.norms[1], EPSILON), [gate, up], is_gated=True)
    return few_rows(opened, [down], added=h)[0]


def away(found: mx.array, right: mx.array) -> float:
    found, right = found.astype(mx.float32), right.astype(mx.float32)
    return float(mx.linalg.norm(found - right) / mx.linalg.norm(right))  # type: ignore[arg-type]


@pytest.mark.long(8)
@pytest.mark.parametrize(("rows", "dtype"), [(16, mx.bfloat16), (9, mx.float16)], ids=str)
def test_results_are_near_those_of_kernels_one_by_one(rows: int, dtype: mx.Dtype) -> None:
    numbers = given(rows, dtype)
    right = one_by_one(*numbers)
    for compiler in (cuda_emulator, early_cuda_emulator) if IS_CPU else (None,):
        for _ in range(2):  # the word that blocks wait at serves behind a launch as before
            found = behind_attention(*numbers, whole_layers.multiprocessors(), compiler)
            mx.eval(found)
        assert found.shape == right.shape
        assert away(found, right) < 4e-3


@pytest.mark.long(5)
def test_a_row_has_the_same_bits_beside_any_others_and_in_blocks_of_any_number() -> None:
    attended, x, weights = given(MAX_ROWS_BEHIND, mx.bfloat16)
    whole = behind_attention(attended, x, weights, whole_layers.multiprocessors())
    mx.eval(whole)
    part = behind_attention(attended[-9:], x[-9:], weights, 20 if IS_CPU else whole_layers.multiprocessors())
    assert mx.array_equal(part, whole[-9:])


@pytest.mark.long(15)
def test_a_models_steps_take_it_and_their_logits_stay_near(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(whole_layers, "behind_attention", lambda *given: launched.append(1) or behind_attention(*given))
    found = []
    for whole in (True, False):
        model = normed(small(llama, 16, **SIZES))
        join_steps(model, whole=whole, attends=True)
        batch = batch_over_pages(model, 9, monkeypatch)
        for number in range(2):
            logits = batch.step([(7 * number + 5 * row) % 90 for row in range(9)])
            mx.eval(logits)
        found.append(logits)
    assert len(launched) == 2 * (2 if IS_CPU else 1)  # a GPU's second step replays the first one's graph
    assert away(*found) < 0.02


@pytest.mark.parametrize("pass_rows", [0, 16])
def test_a_pass_with_others_in_its_graph_is_left_to_kernels_one_by_one(
    pass_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their blocks wait for each other's multiprocessors for ever, as of more than 16 rows of fixed numbers."""
    launched: list[mx.array] = []
    monkeypatch.setattr(whole_layers, "behind_attention", lambda _, x, *__: launched.append(x) or x)
    model = normed(small(llama, 16, **SIZES))
    join_steps(model, whole=True, attends=True)
    batch = batch_over_pages(model, 9, monkeypatch, pass_rows=pass_rows)
    mx.eval(batch.step([*range(9)]))
    assert bool(launched) == (not pass_rows)


def test_packed_weights_other_sizes_and_rows_are_left_to_kernels_one_by_one() -> None:
    def served(rows: int, bits: int = 16, **changed: int) -> bool:
        model: Any = small(llama, bits, **{**SIZES, **changed})
        join_steps(model, whole=True, attends=True)
        cache: Any = SimpleNamespace(step_pages=lambda: "a step's alone")
        made: bool = model.layers[0].whole.has_result_behind(mx.zeros((rows, 1, HIDDEN), mx.bfloat16), cache)
        return made

    assert [served(rows) for rows in (8, 9, 16, 17)] == [False, True, True, False]
    assert not served(9, bits=4)
    assert not served(9, hidden_size=512)
    assert not served(9, intermediate_size=1536)


@pytest.mark.long(20)
@pytest.mark.skipif(not IS_CPU, reason="one barrier less may show nothing on a GPU")
@pytest.mark.parametrize(
    ("what", "by"),
    [
        ("", ""),
        ("        kv_copies_done<STAGES - 1>();", ""),
        ("sum[h][n][j];\n    kv_group_barrier();", "sum[h][n][j];"),
        ("kv_grid_barrier(counters);\nkv_multiply_all", "kv_multiply_all"),
        ("kv_grid_barrier(counters);\nKV_ROLLED", "KV_ROLLED"),
        ("at.turn_steps = at.left_steps - begun;", "at.turn_steps = at.left_steps;"),
        ("(h + row * HIDDEN, norm", "(x + row * HIDDEN, norm"),
        ("add(h, out)", "add(x, out)"),
    ],
)
def test_a_kernel_that_is_wrong_does_not_serve(what: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = behind_source()
    assert what in source.source + source.header
    body, header = source.source.replace(what, by, 1), source.header.replace(what, by, 1)
    wrong = replace(source, name=f"{source.name}w", source=body, header=header)
    monkeypatch.setattr(whole_layers, "behind_source", lambda: wrong)
    assert bool(next(whole_layer_check.differences(is_packed=False), "")) == (what != by)
