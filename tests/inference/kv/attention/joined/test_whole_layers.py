"""A layer as one kernel, emulated with blocks that wait for each other, beside the same layer's kernels one by one."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn import quantize
from mlx_lm.models import llama, qwen3

from inference_svc.kv.attention import choice
from inference_svc.kv.attention.fused import COMPILERS
from inference_svc.kv.attention.kernels import Dialect, layer_source
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.fused_layer import StepPages
from inference_svc.kv.model_hooks import whole_layer_check, whole_layers
from inference_svc.kv.model_hooks.joined_steps import join_steps
from inference_svc.kv.model_hooks.whole_layers import MAX_ROWS, LayerSizes, claim, multiprocessors, whole_layer, why_not
from inference_svc.model import loading
from tests.emulation.emulator import cuda_emulator, cxx, early_cuda_emulator
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.kv.attention.joined.test_cut_heads import batch_over_pages, normed
from tests.inference.kv.attention.joined.test_joined_steps import QWEN3, small
from tests.inference.kv.attention.scenes import BF16, FP16, Scene, page_format

pytestmark = needs_compiler
IS_CPU = mx.default_device().type == mx.DeviceType.cpu
SIZES = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 128}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_CPU:
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, cuda_emulator)
        monkeypatch.setattr(whole_layers, "multiprocessors", lambda: 2)
        monkeypatch.setattr(whole_layer_check, "multiprocessors", lambda: 3)


def model_of(whole: bool, kind: Any = llama, bits: int = 4, **changed: Any) -> Any:
    model = normed(small(kind, bits, **{**SIZES, **changed}))
    join_steps(model, whole=whole)
    return model


def steps(
    whole: bool, sequences: int, monkeypatch: pytest.MonkeyPatch, tried: bool = False, bits: int = 4
) -> tuple[list[mx.array], list[mx.array], int]:
    """Logits of some steps, the pages behind them, and how many layers were one kernel."""
    launched: list[int] = []
    plain = whole_layer
    monkeypatch.setattr(whole_layers, "whole_layer", lambda *given: launched.append(1) or plain(*given))
    batch = batch_over_pages(model_of(whole, bits=bits), sequences, monkeypatch)
    logits = []
    for number in range(2):
        counts = [3, *[1] * (sequences - 1)] if tried else None
        rows = sum(counts) if counts else sequences
        logits.append(batch.step([(7 * number + 5 * row) % 90 for row in range(rows)], counts))
        mx.eval(logits)
    return logits, batch._pool.arrays, len(launched)


def are_near(found: mx.array, right: mx.array, most: float) -> bool:
    away = mx.linalg.norm(found.astype(mx.float32) - right.astype(mx.float32))
    return bool((away <= most * mx.linalg.norm(right.astype(mx.float32))).item())


@pytest.mark.long(19)
@pytest.mark.parametrize(("sequences", "tried", "bits"), [(1, False, 4), (3, False, 4), (2, True, 4), (2, True, 16)])
def test_a_models_layers_are_one_kernel_each_and_its_logits_and_pages_stay_near(
    sequences: int, tried: bool, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are tried ahead are several rows of one sequence: each sees those before it, of the same step."""
    found, pages, launched = steps(True, sequences, monkeypatch, tried, bits)
    right, right_pages, none = steps(False, sequences, monkeypatch, tried, bits)
    traced = 1 if mx.default_device() == mx.gpu else 2  # a GPU's second step replays the first one's graph
    assert (launched, none) == (2 * traced, 0)
    assert all(are_near(*pair, 0.02) for pair in zip(found, right, strict=True))
    other = sum(int((one != two).sum().item()) for one, two in zip(pages, right_pages, strict=True))
    assert other < 100, "units of rows that were rounded otherwise"


def layer(
    lengths: list[int], dtype: mx.Dtype = mx.bfloat16, group: int = 64, policy: str = "q4", hidden: int = 512
) -> Any:
    """x, weights and pages of a layer, whose blocks have eight warps, or of 1,024 hidden values 16."""
    mx.random.seed(4)
    heads, inner = hidden // 64, 1536 if hidden == 2048 else 1024
    scale_type = BF16 if dtype == mx.bfloat16 else FP16
    scene = Scene(page_format(policy, 2, 64, 64, scale_type), lengths, heads, dtype=dtype)
    table = mx.where(scene.block_table < 0, 0, scene.block_table)

    def matrix(width: int, depth: int) -> Any:
        values = (mx.random.normal((width, depth)) / depth**0.5).astype(dtype)
        return tuple(mx.quantize(values, group, 4)) if group else (values,)

    sizes = [
        (hidden, hidden),
        (128, hidden),
        (128, hidden),
        (hidden, hidden),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
    ]
    weights = whole_layers.LayerWeights(
        (mx.random.uniform(0.5, 1.5, (hidden,)).astype(dtype), mx.random.uniform(0.5, 1.5, (hidden,)).astype(dtype)),
        tuple(matrix(*size) for size in sizes),
        1 / (1 + mx.arange(32, dtype=mx.float32)),
        mx.array([scene.scale, 1e-5, 1e-6], mx.float32),
        whole_layers.new_counters(),
        heads,
    )
    places = mx.array([length - 1 for length in lengths], mx.int32)
    x = mx.random.normal((len(lengths), 1, hidden)).astype(dtype)
    return x, weights, StepPages(scene.pages, scene.format, table, places)


def by_steps(x: mx.array, weights: Any, step: StepPages, group: int, monkeypatch: pytest.MonkeyPatch) -> mx.array:
    """The layer as the check computes it, for any sizes."""
    for name, value in (
        ("_FORMAT", step.format),
        ("_ROWS", step.format.key),
        ("_GROUP", group),
        ("_EPSILON", 1e-5),
    ):
        monkeypatch.setattr(whole_layer_check, name, value)
    return whole_layer_check._layer_by_steps(x, weights, step)


@pytest.mark.long(25)
@pytest.mark.parametrize(
    ("lengths", "group", "policy", "hidden"),
    [
        ((5, 300, 257), 64, "q4", 512),
        ((1,), 32, "q8", 512),
        (range(1, 1 + MAX_ROWS), 128, "exact", 512),
        ((9, 600), 64, "k8v4", 1024),
        ((5, 300), 128, "k8v4", 2048),
        ((5, 300, 257), 0, "exact", 512),
        (range(1, 1 + MAX_ROWS), 0, "k8v4", 1024),
    ],
)
def test_a_layer_is_near_the_steps_alone_for_each_size_of_groups_and_format_of_pages(
    lengths: Any, group: int, policy: str, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights, step = layer(list(lengths), group=group, policy=policy, hidden=hidden)
    pages = mx.array(step.pages)
    mx.eval(pages)
    right = by_steps(x, weights, step, group, monkeypatch)
    mx.eval(right)
    for compiler in (cuda_emulator, early_cuda_emulator) if IS_CPU else (None,):
        copied = mx.array(pages)
        mx.eval(copied)
        found = whole_layer(x, weights, replace(step, pages=copied), whole_layers.multiprocessors(), compiler)
        assert are_near(found, right, 6e-3)
        assert mx.mean(copied != step.pages).item() < 1e-3


@pytest.mark.long(5)
@pytest.mark.parametrize(("group", "hidden"), [(64, 512), (0, 512), (0, 1024)])
def test_a_row_has_the_same_bits_beside_any_others_and_in_blocks_of_any_number(group: int, hidden: int) -> None:
    lengths = [1 + 37 * row for row in range(MAX_ROWS)]
    x, weights, step = layer(lengths, mx.float16, group, hidden=hidden)
    mx.eval(step.pages)
    all_rows = whole_layer(x, weights, step, whole_layers.multiprocessors())
    mx.eval(all_rows)
    for rows, blocks in ((1, 3), (5, 1)):
        part = replace(step, block_table=step.block_table[-rows:], places=step.places[-rows:])
        found = whole_layer(x[-rows:], weights, part, blocks if IS_CPU else whole_layers.multiprocessors())
        assert mx.array_equal(found, all_rows[-rows:])


@pytest.mark.long(3)
@pytest.mark.parametrize("group", [64, 0])
def test_a_row_has_the_same_bits_beside_one_of_many_pages(group: int) -> None:
    """A row without a token has no results."""
    x, weights, step = layer([600, 5, 1], group=group)
    step = replace(step, places=mx.array([599, 4, -1], mx.int32))
    wide = replace(step, block_table=mx.pad(step.block_table, [(0, 0), (0, 33 - step.block_table.shape[1])]))
    right, found = (whole_layer(x, weights, each, whole_layers.multiprocessors()) for each in (step, wide))
    assert mx.array_equal(found, right)


def refused(change: Callable[[Any], Any], bits: int = 4, **changed: Any) -> bool:
    """Whether no block of a changed model is computed whole."""
    model = small(changed.pop("kind", llama), bits, **{**SIZES, **changed})
    change(model)
    join_steps(model, whole=True)
    return not any(hasattr(each, "whole") for each in model.layers)


def test_blocks_of_another_kind_are_not_taken() -> None:
    assert not refused(lambda _: None)
    assert not refused(lambda _: None, bits=16)
    assert refused(lambda _: None, kind=qwen3, **QWEN3), "norms of heads"
    assert refused(lambda _: None, attention_bias=True)
    assert refused(lambda _: None, rope_traditional=True)

    def eight_bits(model: Any) -> None:
        for each in model.layers:
            each.mlp.down_proj.bits = 8

    assert refused(eight_bits)

    def some_packed(model: Any) -> None:
        for each in model.layers:
            each.mlp.down_proj = each.mlp.down_proj.to_quantized(64, 4)

    assert refused(some_packed, bits=16)
    assert refused(lambda model: model.set_dtype(mx.float32), bits=16)


def test_rows_sizes_and_pages_that_do_not_fit_are_refused() -> None:
    sizes, pages = LayerSizes(4096, 14336, 32, 64), page_format("q4", 8, 128)
    for group in (64, 0):
        assert not any(why_not(replace(sizes, group=group), slots, pages, mx.bfloat16) for slots in (1, MAX_ROWS))
    assert why_not(sizes, MAX_ROWS + 1, pages, mx.bfloat16) == "too many rows"
    assert why_not(sizes, 1, pages, mx.float16) == "pages of another type"
    assert why_not(sizes, 1, page_format("q4-rotated", 8, 128), mx.bfloat16)
    assert why_not(replace(sizes, group=16), 1, pages, mx.bfloat16)
    assert why_not(replace(sizes, hidden=4096 + 64), 1, pages, mx.bfloat16)
    assert why_not(replace(sizes, hidden=16_384), 8, pages, mx.bfloat16)
    wide = replace(sizes, hidden=5120, group=0)
    assert [bool(why_not(wide, slots, pages, mx.bfloat16)) for slots in (1, 2, 8)] == [False, True, True]


@pytest.mark.long(5)
def test_passes_that_share_a_graph_and_windows_are_not_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def pages_of(**how: Any) -> list[Any]:
        batch = batch_over_pages(model_of(True), 1, monkeypatch)
        other = DecodeBatch(batch._pool, batch._forward, 0, **how)
        other.join(batch.sequences[0])
        mx.eval(other.step([3]))
        return [each.step_pages() for each in other._fused.values()]

    assert all(each is not None for each in pages_of())
    assert not any(pages_of(pass_rows=2))


def test_one_model_alone_has_whole_layers() -> None:
    first, second = small(llama, 4), small(llama, 4)
    assert claim(first)
    assert not claim(second)
    del first
    assert claim(second)


def test_a_model_is_not_tried_for_whole_layers_while_another_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that never generates or has other blocks: it would keep the next one from them."""
    tried: list[int] = []
    monkeypatch.setattr(loading, "device", lambda: "cuda")
    monkeypatch.setattr(loading, "may_have_whole_layers", lambda _: True)
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    for name in ("why_wrong_products", "why_wrong_joined", "why_wrong_steps"):
        monkeypatch.setattr(choice, name, lambda: "")
    monkeypatch.setattr(choice, "why_wrong_layers", lambda **_: tried.append(1) or "")
    models = [small(qwen3, 4, **QWEN3), *(small(llama, 4) for _ in range(3))]
    for model, decodes, trials in zip(models, (True, False, True, True), (0, 0, 1, 1), strict=True):
        loading.take_own_operations(model, choice.KernelChoice(), decodes=decodes)
        assert len(tried) == trials


def test_a_model_of_two_kinds_of_blocks_has_whole_layers_where_both_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "device", lambda: "cuda")
    monkeypatch.setattr(loading, "may_have_whole_layers", lambda _: True)
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    for name in ("why_wrong_products", "why_wrong_joined", "why_wrong_steps"):
        monkeypatch.setattr(choice, name, lambda: "")
    for wrong, are_whole in ((None, True), (False, False), (True, False)):
        monkeypatch.setattr(choice, "why_wrong_layers", lambda *, is_packed, wrong=wrong: str(is_packed is wrong or ""))
        monkeypatch.setattr(whole_layers, "_owner", [])
        model = small(llama, 16, **SIZES)
        quantize(model.layers[-1], 64, 4)
        loading.take_own_operations(model, choice.KernelChoice())
        assert [hasattr(each, "whole") for each in model.layers] == [are_whole] * len(model.layers)


_DRIVER = """
extern "C" int cuInit(unsigned) { return 0; }
extern "C" int cuCtxGetDevice(int* device) { *device = 3; return 0; }
extern "C" int cuDeviceGetAttribute(int* found, int which, int device) {
  if (device != 3 || (which == 133 && MPS < 0)) return 1;
  *found = which == 16 ? 132 : which == 133 ? MPS : 0;
  return 0;
}
"""


@pytest.mark.parametrize(("mps", "found"), [(0, 132), (1, 0), (-1, 132)], ids=["alone", "shared", "an old driver"])
def test_a_device_that_processes_share_computes_no_whole_layers(
    mps: int, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MPS launches of two processes run at once, and blocks of both could wait for each other for ever."""
    library = tmp_path / f"libdriver{mps}.so"
    made = [cxx(), "-shared", "-fPIC", f"-DMPS={mps}", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(made, input=_DRIVER.encode(), check=True)
    monkeypatch.setattr(whole_layers, "_DRIVER", str(library))
    assert multiprocessors.__wrapped__() == found


@pytest.mark.long(40)
@pytest.mark.skipif(not IS_CPU, reason="one barrier less may show nothing on a GPU")
@pytest.mark.parametrize(
    ("what", "by"),
    [
        ("", ""),
        ("STAGES", "STAGES"),
        ("kv_copies_done<STAGES - 1>();", ""),
        ("sum[h][n][j];\n  kv_group_barrier();", "sum[h][n][j];"),
        ("lane % 4;\n  kv_group_barrier();", "lane % 4;"),
        ("  kv_grid_barrier(counters);\n  if (half == 0) {", "  if (half == 0) {"),
        ("float(places[i / (DIM / 2)])", "float(places[i / (DIM / 2)] + 1)"),
        ("bring(norm_after, 0);", "bring(norm_in, 0);"),
        (" + moved * SCALES", ""),
        ("second + row - half", "second + row"),
        ("kv_written();", "kv_written(); if (page == 0) ((kv_u16*)pages)[32 * (50 + warp) + kv_lane] = 0xffff;"),
    ],
)
def test_a_kernel_that_is_wrong_does_not_serve(what: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_packed = "STAGES" not in what and "sum[h]" not in what and "lane % 4" not in what
    source = layer_source(is_packed=is_packed)
    assert what in source.source + source.header
    body, header = source.source.replace(what, by, 1), source.header.replace(what, by, 1)
    wrong = replace(source, name=f"{source.name}w", source=body, header=header)
    monkeypatch.setattr(whole_layers, "layer_source", lambda **_: wrong)
    assert bool(next(whole_layer_check.differences(is_packed=is_packed), "")) == (what != by)
