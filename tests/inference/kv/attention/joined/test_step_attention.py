"""A step's attention as one kernel, emulated, beside the same step's kernels one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama, qwen3

from inference_svc.kv.attention import checks
from inference_svc.kv.attention.fused import COMPILERS
from inference_svc.kv.attention.in_place import append_rows
from inference_svc.kv.attention.kernels import Dialect, KernelSource, attend_source, results_source
from inference_svc.kv.attention.paged import paged_attention
from inference_svc.kv.attention.reference import Scoring, reference_attention
from inference_svc.kv.batch.fused_layer import StepPages
from inference_svc.kv.model_hooks import step_attention as steps
from inference_svc.kv.model_hooks.few_rows import MAX_ROWS
from inference_svc.kv.model_hooks.joined_steps import join_steps
from inference_svc.kv.model_hooks.step_attention import (
    NewTokens,
    Rotation,
    StepAttention,
    step_attention,
)
from inference_svc.kv.page import PAGE_TOKENS
from tests.emulation.emulator import cuda_emulator, early_cuda_emulator
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.kv.attention.joined.test_cut_heads import batch_over_pages, normed
from tests.inference.kv.attention.joined.test_joined_steps import QWEN3, small
from tests.inference.kv.attention.scenes import BF16, FP16, Scene, page_format

pytestmark = needs_compiler
IS_CPU = mx.default_device().type == mx.DeviceType.cpu
HEADS, KV_HEADS, DIM = 4, 2, 64
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
WHOLE = pytest.mark.parametrize("is_whole", [True, False], ids=["in one", "in three"])
COMPILED = (cuda_emulator, early_cuda_emulator) if IS_CPU else (None,)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_CPU:
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, cuda_emulator)


def step_of(
    lengths: Sequence[int], policy: str = "q4", dtype: mx.Dtype = mx.bfloat16, blocks: int = 0
) -> tuple[NewTokens, StepPages, Rotation, float]:
    """Behind so many tokens, the new one included; 0: an empty row."""
    mx.random.seed(3)
    scale_type = BF16 if dtype == mx.bfloat16 else FP16
    scene = Scene(page_format(policy, KV_HEADS, DIM, 64, scale_type), lengths, HEADS, dtype=dtype, blocks=blocks)
    table = mx.where(scene.block_table < 0, 0, scene.block_table)
    places = mx.array([length - 1 for length in lengths], mx.int32)
    keys, values = (mx.random.normal((len(lengths), KV_HEADS, 1, DIM)).astype(dtype) for _ in range(2))
    rotation = Rotation.of(1 / (1 + mx.arange(DIM // 2, dtype=mx.float32)))
    step = StepPages(scene.pages, scene.format, table, places)
    return NewTokens(scene.queries, keys, values), step, rotation, scene.scale


def turned(given: mx.array, step: StepPages, rotation: Rotation) -> mx.array:
    angles = step.places[:, None, None, None] * rotation.frequencies
    left, right = mx.split(given.astype(mx.float32), 2, axis=-1)
    parts = [left * mx.cos(angles) - right * mx.sin(angles), left * mx.sin(angles) + right * mx.cos(angles)]
    return mx.concatenate(parts, axis=-1).astype(given.dtype)


def apart(new: NewTokens, step: StepPages, rotation: Rotation, scale: float) -> mx.array:
    queries, keys = (turned(each, step, rotation) for each in (new.queries, new.keys))
    stored = append_rows(keys, new.values, step, step.places, Dialect.CUDA)
    return paged_attention(queries, step, stored, Scoring(scale), Dialect.CUDA, is_flat=True)


def copied(step: StepPages) -> StepPages:
    pages = mx.array(step.pages)
    mx.eval(pages)
    return replace(step, pages=pages)


def are_same(found: mx.array, right: mx.array) -> bool:
    """On this CPU to the bit; elsewhere angles may be rounded otherwise."""
    if IS_CPU:
        return bool(mx.array_equal(found, right).item())
    away = mx.linalg.norm(found.astype(mx.float32) - right.astype(mx.float32))
    return bool((away <= 0.01 * mx.linalg.norm(right.astype(mx.float32))).item())


def are_as_near(
    found: mx.array, right: mx.array, new: NewTokens, stored: StepPages, rotation: Rotation, scale: float
) -> bool:
    """Whether each row is as near to the same attention in fp32, over pages with the new rows, as that of kernels one
    by one: sums in another order are rounded to a number or the next, which takes or gives a twentieth of 0.2 %.
    """
    queries = turned(new.queries, stored, rotation).astype(mx.float32)
    exact = reference_attention(queries, stored, stored.places + 1, Scoring(scale)).reshape(right.shape)
    mine, others = (mx.linalg.norm(each.astype(mx.float32) - exact, axis=-1) for each in (found, right))
    return bool((mine <= 1.25 * others).all().item())


@pytest.mark.long(8)
@WHOLE
@pytest.mark.parametrize(
    ("lengths", "policy", "dtype"),
    [
        ((5, 300, 257), "q4", mx.bfloat16),
        ((1, 0, 256), "q8", mx.bfloat16),
        ((513,), "exact", mx.bfloat16),
        ((9, 600), "k8v4", mx.float16),
    ],
)
def test_results_and_pages_are_near_those_of_kernels_one_by_one(
    lengths: Sequence[int], policy: str, dtype: mx.Dtype, is_whole: bool
) -> None:
    new, step, rotation, scale = step_of(lengths, policy, dtype)
    other = copied(step)
    right = apart(new, other, rotation, scale)
    mx.eval(right)
    for compiler in COMPILED:
        mine = copied(step)
        for _ in range(2):  # counters are as at the beginning behind a launch
            found = step_attention(new, mine, rotation, scale, is_whole=is_whole, compiler=compiler)
            mx.eval(found)
        assert are_same(found, right)
        assert are_same(mine.pages, other.pages)


@pytest.mark.long(3)
def test_there_are_angles_for_the_last_position_that_a_step_has() -> None:
    new, step, rotation, scale = step_of((steps._MOST_BLOCKS * steps.PAGE_TOKENS,))
    right = apart(new, copied(step), rotation, scale)
    assert are_same(step_attention(new, step, rotation, scale, is_whole=True), right)


@pytest.mark.long(14)
@WHOLE
@pytest.mark.parametrize(("policy", "pages", "tile"), [("q4", 2, 64), ("q8", 16, 64), ("k8v4", 3, 32)])
def test_a_block_goes_through_several_pages(
    policy: str, pages: int, tile: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows are of one sequence, around a page's border."""
    for name, shape in (("LEAST_OF_SOME", "some"), ("LEAST_OF_PAGES", "many")):
        monkeypatch.setattr(steps, name, 1)
        monkeypatch.setitem(steps.SHAPES, shape, steps.BlockShape(pages, tile, 0))
    new, step, rotation, scale = step_of((5, 0, 1030, 257, 256), policy)
    table = mx.array(step.block_table)
    table[3:] = table[3]
    step = replace(step, block_table=table)
    other = copied(step)
    right = apart(new, other, rotation, scale)
    mx.eval(right)
    for compiler in COMPILED:
        mine = copied(step)
        found = step_attention(new, mine, rotation, scale, is_whole=is_whole, compiler=compiler)
        mx.eval(found)
        assert are_as_near(found, right, new, other, rotation, scale)
        assert are_same(mine.pages, other.pages)
    part = NewTokens(new.queries[2:3], new.keys[2:3], new.values[2:3])
    alone = replace(copied(step), block_table=step.block_table[2:3], places=step.places[2:3])
    assert mx.array_equal(step_attention(part, alone, rotation, scale, is_whole=is_whole), found[2:3])
    longer = replace(copied(step), block_table=mx.pad(step.block_table, ((0, 0), (0, pages))))
    assert mx.array_equal(step_attention(new, longer, rotation, scale, is_whole=is_whole), found)


@pytest.mark.long(5)
@WHOLE
def test_a_row_has_the_same_bits_beside_any_others(is_whole: bool) -> None:
    new, step, rotation, scale = step_of([1 + 97 * row for row in range(9)])
    whole = step_attention(new, copied(step), rotation, scale, is_whole=is_whole)
    mx.eval(whole)
    for rows in (slice(8, 9), slice(3, 6)):
        part = NewTokens(new.queries[rows], new.keys[rows], new.values[rows])
        few = replace(copied(step), block_table=step.block_table[rows], places=step.places[rows])
        assert mx.array_equal(step_attention(part, few, rotation, scale, is_whole=True), whole[rows])


@pytest.mark.long(4)
@pytest.mark.parametrize("shape", ["one", "some", "in three"])
@pytest.mark.parametrize("first", [0, 1])
def test_tokens_tried_ahead_see_those_before_them_in_the_same_step(
    shape: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences: of one three rows on both sides of a page's border, the last of them first in the step."""
    if shape == "one":
        monkeypatch.setattr(steps, "LEAST_OF_SOME", steps.LEAST_OF_PAGES)
    before = first * PAGE_TOKENS
    places = [before + 257, *[-1] * 12, before + 256, before + 7, before + 255]
    new, step, rotation, scale = step_of([before + 258] * len(places))
    table = mx.array([[4] * first + [5, 6]] * len(places), mx.int32)
    table[-2] = mx.array([4] * first + [7, 7], mx.int32)
    step = replace(step, block_table=table, places=mx.array(places, mx.int32))
    pages = mx.array(step.pages)
    pages[4:8] = pages[step.block_table.max().item()] * 0  # rows of numbers
    step = replace(step, pages=pages)
    mx.eval(step.pages)
    other, mine = copied(step), copied(step)
    right = apart(new, other, rotation, scale)
    mx.eval(right)
    found = step_attention(new, mine, rotation, scale, is_whole=shape != "in three")
    mx.eval(found)
    is_near = are_as_near(found, right, new, other, rotation, scale)
    assert is_near if shape == "some" else are_same(found, right)
    assert are_same(mine.pages, other.pages)


@pytest.mark.long(12)
@pytest.mark.parametrize(("kind", "changed"), [(llama, {}), (qwen3, QWEN3)], ids=["llama", "qwen3"])
def test_a_models_steps_take_it_and_their_logits_stay_near(
    kind: Any, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[float] = []

    def counted(new: NewTokens, step: StepPages, rotation: Rotation, scale: float, *, is_whole: bool) -> mx.array:
        launched.append(scale)
        return step_attention(new, step, rotation, scale, is_whole=is_whole)

    monkeypatch.setattr(steps, "step_attention", counted)
    found = []
    for attends in (True, False):
        model = normed(small(kind, 4, **{**SIZES, **changed}))
        join_steps(model, attends=attends)
        batch = batch_over_pages(model, 3, monkeypatch)
        for number in range(2):
            logits = batch.step([(7 * number + 5 * row) % 90 for row in range(3)])
            mx.eval(logits)  # in one graph of both steps a device orders no kernel behind another that writes its rows
        found.append(logits)
    assert len(launched) == 2 * len(model.layers) if IS_CPU else launched
    away = mx.linalg.norm((found[0] - found[1]).astype(mx.float32))
    assert (away <= 0.05 * mx.linalg.norm(found[1].astype(mx.float32))).item()  # a CPU rotates in 16 bits


@pytest.mark.long(6)
@pytest.mark.skipif(not IS_CPU, reason="a fault of order may show nothing on a GPU")
@pytest.mark.parametrize(
    ("what", "by"),
    [
        ("", ""),
        ("turns + at *", "turns + (at + 1) *"),
        ("turns + place *", "turns + (place + 1) *"),
        ("its_page >= 0 &&", "its_page >= 0 && kv_lane == row &&"),
        ("its_page == 0", "false"),
        ("last / PAGES + 1);", "last / PAGES + 2);"),
        ("block = split * PAGES", "block = 0"),
        ("mine + split * STRIDE", "mine"),
        ("split < 0", "split < 1"),
        ("kv_written();", "kv_written(); if (page == 2) ((kv_u16*)pages)[32 * (50 + kv_warp) + kv_lane] = 0xffff;"),
    ],
    ids=["right", "keys", "queries", "ahead", "first", "last", "pages", "mixes", "blocks", "other"],
)
def test_a_kernel_that_is_wrong_does_not_serve(what: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "its_page == 0" in what:  # of copies that arrive at once
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, early_cuda_emulator)
    source = attend_source(is_whole=True)
    assert what in source.source
    wrong = replace(
        source, name=f"{source.name}w", source=source.source.replace(what, by, 1) if what else source.source
    )
    monkeypatch.setattr(steps, "attend_source", lambda **how: wrong if how["is_whole"] else attend_source(**how))
    assert bool(checks.why_wrong_steps()) == bool(what)


@pytest.mark.long(9)
@pytest.mark.skipif(not IS_CPU, reason="the text is a CPU's")
@pytest.mark.parametrize("ends", [True, False])
def test_a_kernel_of_many_rows_that_mixes_a_wrong_page_does_not_serve(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(**how: bool) -> KernelSource:
        source = attend_source(**how)
        header = source.header.replace("step / IN_PAGE % 32", "0")
        assert header != source.header
        return replace(source, name=f"{source.name}w", header=header) if how.get("ends", False) == ends else source

    monkeypatch.setattr(steps, "attend_source", wrong)
    assert checks.why_wrong_steps()


@pytest.mark.long(9)
@pytest.mark.skipif(not IS_CPU, reason="the text is a CPU's")
@pytest.mark.parametrize(
    ("made", "what", "by"),
    [
        (attend_source, "block = split * PAGES", "block = PAGES > 1 ? 0 : split"),
        (attend_source, "mine + split * STRIDE", "mine + (PAGES > 1 ? 0 : split) * STRIDE"),
        (results_source, "* PAGES) + 1", "* PAGES) * (PAGES == 1) + 1"),
    ],
    ids=["pages", "mixes", "results"],
)
def test_many_rows_of_which_one_has_pages_for_two_blocks_are_checked(
    made: Callable[..., KernelSource], what: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(**how: bool) -> KernelSource:
        right = made(**how)
        assert what in right.source
        return replace(right, name=f"{right.name}w", source=right.source.replace(what, by))

    monkeypatch.setattr(steps, made.__name__, wrong)
    assert checks.why_wrong_steps()


def test_steps_that_it_does_not_know_are_left_to_kernels_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(steps, "step_attention", lambda *_, is_whole: taken.append(1 + is_whole))

    def is_taken(policy: str = "q4", rows: int = 2, blocks: int = 8, **changed: Any) -> bool:
        formed = page_format(policy, KV_HEADS, changed.pop("dim", DIM))
        queries = mx.zeros((rows, changed.pop("heads", HEADS), 1, formed.key.dim), changed.pop("dtype", mx.bfloat16))
        pages = StepPages(queries, formed, mx.zeros((rows, blocks), mx.int32), mx.zeros(rows, mx.int32))
        cache: Any = SimpleNamespace(step_pages=lambda: changed.get("pages", pages))
        taken.clear()
        rotation = Rotation(mx.zeros(changed.get("turned", formed.key.dim) // 2), mx.zeros(1), mx.zeros(1))
        StepAttention(1.0, rotation).result(queries, queries, queries, cache)
        return bool(taken)

    assert all(is_taken(policy, rows=MAX_ROWS, blocks=32) for policy in ("q4", "k8v4", "q8", "exact"))
    assert not is_taken(pages=None), "a window, or another pass in the graph"
    assert not is_taken(rows=MAX_ROWS + 1)
    assert not is_taken(blocks=64)
    assert not is_taken(dtype=mx.float32)
    assert not is_taken("q4-rotated")
    assert not is_taken(dim=96)
    assert not is_taken(heads=18 * KV_HEADS)
    assert not is_taken(turned=DIM // 2), "the rest of a head is not rotated"


def test_a_rotation_of_another_kind_is_left_to_the_model() -> None:
    model = small(llama, 4, rope_traditional=True, **SIZES)
    join_steps(model, attends=True)
    assert not any(hasattr(each.self_attn, "step") for each in model.layers)
