"""Products of more rows by Hopper's own products, emulated, beside few_rows' kernel."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from structlog.testing import capture_logs

from inference_svc.kv.attention import checks, choice, hopper
from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.kv.attention.fused import COMPILERS
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.model_hooks import few_rows as few
from inference_svc.kv.model_hooks import wide_rows as module
from inference_svc.kv.model_hooks.few_rows import few_rows
from inference_svc.kv.model_hooks.wide_rows import can_serve, wide_rows
from inference_svc.model import loading
from inference_svc.model.model_runner import _INVARIANT_ROWS
from tests.emulation.emulator import cuda_emulator
from tests.inference.kv.attention.emulators import needs_compiler


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_here", module._MeetingWords())
    if not hopper.is_hopper():
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, cuda_emulator)


@needs_compiler
@pytest.mark.long(8)
@pytest.mark.parametrize(
    ("bits", "blocks", "widths", "depth", "rows", "dtype", "kind"),
    [
        (16, 5, (150, 64, 7), 192, 40, mx.bfloat16, ""),
        (16, 4, (90, 90), 320, 64, mx.bfloat16, "gated"),
        (16, 3, (100,), 64, 33, mx.float16, "added"),
        (16, 24, (150, 64, 7), 192, 40, mx.bfloat16, ""),
        (16, 16, (90, 90), 320, 64, mx.bfloat16, "gated"),
        (16, 12, (100,), 128, 33, mx.float16, "added"),
        (4, 6, (150, 64, 7), 1024, 40, mx.bfloat16, ""),
        (4, 1, (90, 90), 512, 64, mx.float16, "gated"),
        (4, 4, (100,), 512, 33, mx.bfloat16, "added"),
    ],
)
def test_products_are_near_and_a_row_has_the_same_bits_beside_any_others(
    bits: int,
    blocks: int,
    widths: Sequence[int],
    depth: int,
    rows: int,
    dtype: mx.Dtype,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks make 16 to 112 outputs, the last one of each matrix fewer; two may share a depth, one without a chunk."""
    monkeypatch.setattr(module, "_BLOCKS", blocks)
    module._shape.cache_clear()
    mx.random.seed(3)
    values = [mx.random.normal((width, depth)).astype(dtype) for width in widths]
    matrices = [(each,) if bits == 16 else tuple(mx.quantize(each, 64, 4)) for each in values]
    x = mx.random.normal((1, rows, depth)).astype(dtype)
    added = mx.random.normal((1, rows, widths[0])).astype(dtype) if kind == "added" else None
    is_gated = kind == "gated"

    def made(first: int) -> list[mx.array]:
        shapes = [(1, rows - first, width) for width in widths[: 1 if is_gated else None]]
        more = None if added is None else added[:, first:]
        return wide_rows(x[:, first:], matrices, shapes, is_gated=is_gated, added=more)

    right = few_rows(x, matrices, is_gated=is_gated, added=added)
    for one, fewer, other in zip(made(0), made(rows // 2), right, strict=True):
        assert mx.allclose(one.astype(mx.float32), other.astype(mx.float32), rtol=0.02, atol=0.01)
        assert mx.array_equal(one[:, rows // 2 :], fewer)
    assert not any(mx.any(each).item() for each in module._here.counters)
    module._shape.cache_clear()


@pytest.mark.parametrize(
    ("widths", "outputs", "groups", "blocks", "height", "threads"),
    [
        ((14_336,), 8, 0, 128, 14, 512),
        ((4096, 1024, 1024), 16, 0, 130, 6, 256),
        ((4096,), 16, 0, 128, 4, 128),
        ((5120,), 16, 0, 128, 5, 256),
        ((8192,), 16, 0, 128, 4, 128),
        ((128_256,), 16, 0, 501, 16, 512),
        ((100,), 16, 0, 14, 1, 128),
        ((14_336,), 8, 64, 128, 14, 512),
        ((4096, 1024, 1024), 16, 64, 130, 3, 128),
    ],
)
def test_multiprocessors_have_the_same_work(
    widths: tuple[int, ...], outputs: int, groups: int, blocks: int, height: int, threads: int
) -> None:
    found = module._shape(widths, outputs, groups)
    assert (found.blocks, found.constants["HEIGHT"], found.threads) == (blocks, height, threads)
    assert found.shared_bytes <= 227 << 10


def noted(launched: list[str]) -> Any:
    def compiled(_compiler: object, source: Any, shared_bytes: int) -> Any:
        assert shared_bytes <= 227 << 10

        def launch(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            launched.append(source.name.split("_")[1])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    return compiled


def test_it_serves_from_33_to_64_rows_of_a_model_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[str]()
    for each in (module, few):
        monkeypatch.setattr(each, "compiled", noted(launched))

    def launches(rows: int, depth: int = 512, width: int = 2880, group: int = 0, *, has_wide: bool = True) -> str:
        launched.clear()
        w = mx.zeros((width, depth), mx.bfloat16)
        matrix: few.Matrix = tuple(mx.quantize(w, group, 4)) if group else (w,)
        made = few_rows(mx.zeros((rows, 1, depth), mx.bfloat16), [matrix] * 2, heads=(2, 4), has_wide=has_wide)
        assert [each.shape for each in made] == [(rows, 2, 1, width // 2), (rows, 4, 1, width // 4)]
        few_rows(mx.zeros((rows, 1, depth), mx.bfloat16), [matrix] * 2, is_gated=True, has_wide=has_wide)
        return " ".join(launched)

    assert launches(64, has_wide=False) == "few few"
    assert [launches(rows) for rows in (32, 33, 64)] == ["few few", "wide wide", "wide wide"]
    assert [launches(rows, width=8192, group=64) for rows in (32, 33, 64)] == ["few few", "wide wide", "wide wide"]
    assert [launches(64, 264), launches(64, 256, 8192, 64), launches(64, width=8192, group=32)] == ["few few"] * 3
    # Blocks of 48 outputs, and of 32.
    assert [launches(64, width=1440), launches(64, width=1024), launches(64, group=64)] == ["wide wide"] + [
        "few few"
    ] * 2


def test_rows_of_a_fixed_number_are_too_few_for_it() -> None:
    """Passes of these lie side by side in one graph: of more than `_LAUNCHES` launches some would meet at one word."""
    assert not any(can_serve(rows, 4096, [14_336], 0, is_gated=True) for rows in range(_INVARIANT_ROWS + 1))
    assert can_serve(33, 4096, [14_336], 0, is_gated=True)


def test_launches_of_two_threads_meet_at_words_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their streams run side by side: an engine's, and that of an embedding model beside it."""
    met_at = dict[int, list[mx.array]]()

    def compiled(*_: object) -> Any:
        def launch(*, inputs: list[mx.array], output_shapes: Any, **_: Any) -> list[None]:
            met_at.setdefault(threading.get_ident(), []).append(inputs[-1])
            return [None for _ in output_shapes]

        return launch

    monkeypatch.setattr(module, "compiled", compiled)
    x, w = mx.zeros((1, 40, 64), mx.bfloat16), mx.zeros((1440, 64), mx.bfloat16)

    def launches() -> None:
        for _ in range(module._LAUNCHES):
            wide_rows(x, [(w,)], [(1, 40, 1440)])
        mx.synchronize()

    with ThreadPoolExecutor(1) as other:
        launches()
        other.submit(launches).result()
        other.submit(mx.clear_streams).result()  # as the engine's threads do at their end
    mine, others = ({id(each) for each in words} for words in met_at.values())
    assert len(mine) == len(others) == module._LAUNCHES
    assert not mine & others


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("wrong", ["", "gate", "sum", "beside"])
def test_one_wrong_value_and_a_row_that_depends_on_others_are_noticed(
    wrong: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def products(x: mx.array, matrices: Any, *, is_gated: bool, added: Any) -> list[mx.array]:
        how: Any = {"group_size": 64, "bits": 4}
        values = [mx.dequantize(each[0], each[1], each[2], **how) if len(each) > 1 else each[0] for each in matrices]
        sums = [x.astype(mx.float32) @ each.astype(mx.float32).T for each in values]
        return [(sums[0] * sums[1] if is_gated else sums[0] + added).astype(x.dtype)]

    def wide(x: mx.array, matrices: Any, _shapes: object, **how: Any) -> list[mx.array]:
        (made,) = products(x, matrices, **how)
        is_its = len(matrices[0]) > 1 if bits == 4 else len(matrices[0]) == 1
        if is_its and wrong == ("gate" if how["is_gated"] else "sum"):
            made[0, 20, -1] += 0.1
        if is_its and wrong == "beside" and x.shape[1] == 40:
            made[0, 20, -1] *= 1 + 2**-7
        return [made]

    monkeypatch.setattr(checks, "_WIDE_CASES", ((96, 256, True), (96, 256, False)))
    monkeypatch.setattr(checks, "few_rows", products)
    monkeypatch.setattr(checks, "wide_rows", wide)
    kind = "packed" if bits == 4 else "16 bits"
    reasons = {"": "", "beside": f"a row's wide products of {kind} depend on the rows beside it"}
    assert checks.why_wrong_wide() == reasons.get(wrong, f"wide products of {kind} differ from the others")


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o_proj, self.embed_tokens = nn.Linear(512, 2880, bias=False), nn.Embedding(2880, 512)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(512, 2880, bias=False) for _ in range(3))
        self.set_dtype(mx.bfloat16)

    def __call__(self, x: mx.array) -> list[mx.array]:
        return [self.o_proj(x), self.embed_tokens.as_linear(x), self.q_proj(x), self.k_proj(x), self.v_proj(x)]


@pytest.mark.parametrize("bits", [16, 4])
def test_a_model_takes_it_on_hopper_where_its_own_check_finds_nothing(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was found of models before and behind it: a check may fail once, for want of memory."""
    launched, found = list[str](), [(True, ""), (True, "wrong"), (False, ""), (True, "")]
    monkeypatch.setattr(loading, "device", lambda: "cuda")
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(choice, "why_wrong_products", lambda: "")
    monkeypatch.setattr(choice, "why_wrong_joined", lambda: "")
    for each in (module, few):
        monkeypatch.setattr(each, "compiled", noted(launched))
    monkeypatch.setattr(module, "_LEAST_PACKED_HEIGHT", 1)
    models, failed = list[Projections](), list[bool]()
    with capture_logs() as logs:
        for is_hopper, why in found:
            monkeypatch.setattr(choice, "is_hopper", lambda is_hopper=is_hopper: is_hopper)
            monkeypatch.setattr(choice, "why_wrong_wide", lambda why=why: why)
            models.append(Projections())
            if bits < 16:
                nn.quantize(models[-1], 64, bits)
            kernels = KernelChoice()
            loading.take_own_operations(models[-1], kernels, decodes=False)
            failed.append(kernels.has_failed)
    for model, name in zip(models, ("wide", "few", "few", "wide"), strict=True):
        launched.clear()
        model(mx.zeros((64, 1, 512), mx.bfloat16))
        assert launched == [name] * 3
    assert failed == [bool(why) for _, why in found]
    assert [line["serves"] for line in logs] == ["few rows (CUDA)"]
