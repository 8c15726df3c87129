"""Products of more rows by Hopper's own products, emulated: they have the bits of few_rows' kernel."""

import ctypes
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from inference_svc.kv.attention import checks, choice, hopper
from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.kv.attention.fused import COMPILERS
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.nvrtc import CompileError
from inference_svc.kv.model_hooks import cluster_rows as module
from inference_svc.kv.model_hooks import few_rows as few
from inference_svc.kv.model_hooks.cluster_rows import cluster_rows
from inference_svc.kv.model_hooks.few_rows import few_rows
from tests.emulation.emulator import cuda_emulator
from tests.inference.kv.attention.emulators import needs_compiler

SHAPES = {
    "x kept": {"HEIGHT": 1, "STAGES": 3, "X_CHUNKS": 5, "SUMS": 2},
    "x comes again": {"HEIGHT": 3, "STAGES": 3, "X_CHUNKS": 0, "SUMS": 1},
}
BYTES = 160 << 10


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_serving", [False])
    if not hopper.is_hopper():
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, cuda_emulator)


@needs_compiler
@pytest.mark.long(12)
@pytest.mark.parametrize(
    ("shape", "widths", "depth", "rows", "dtype", "kind"),
    [
        ("x kept", (150, 64, 7), 400, 17, mx.bfloat16, ""),
        ("x comes again", (200, 200), 1160, 33, mx.bfloat16, "gated"),
        ("x comes again", (260,), 40, 64, mx.float16, "added"),
    ],
)
def test_a_row_has_the_bits_that_it_has_beside_few_others(
    shape: str,
    widths: Sequence[int],
    depth: int,
    rows: int,
    dtype: mx.Dtype,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two clusters go over one to five tiles."""
    monkeypatch.setattr(module, "_block_shape", lambda _widths, _depth: (2, BYTES, SHAPES[shape]))
    mx.random.seed(3)
    matrices = [mx.random.normal((width, depth)).astype(dtype) for width in widths]
    x = mx.random.normal((1, rows, depth)).astype(dtype)
    added = mx.random.normal((1, rows, widths[0])).astype(dtype) if kind == "added" else None
    is_gated = kind == "gated"
    shapes = [(1, rows, width) for width in widths[: 1 if is_gated else None]]
    found = cluster_rows(x, matrices, shapes, is_gated=is_gated, added=added)
    right = few_rows(x, [(each,) for each in matrices], is_gated=is_gated, added=added)
    for one, other in zip(found, right, strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize(
    ("widths", "depth", "clusters", "height", "x_chunks"),
    [
        ((28_672,), 4096, 30, 1, 16),
        ((4096, 1024, 1024), 4096, 24, 1, 16),
        ((4096,), 14_336, 22, 3, 0),
        ((30_720,), 3840, 30, 1, 15),
        ((100,), 8, 2, 1, 1),
    ],
)
def test_blocks_read_as_little_as_they_can_and_have_room(
    widths: tuple[int, ...], depth: int, clusters: int, height: int, x_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "most_clusters", lambda _bytes: 30)
    found, shared_bytes, constants = module._block_shape.__wrapped__(widths, depth)
    assert (found, constants["HEIGHT"], constants["X_CHUNKS"]) == (clusters, height, x_chunks)
    assert shared_bytes <= 227 << 10
    assert constants["STAGES"] >= 4


def noted(launched: list[str]) -> Any:
    def compiled(_compiler: object, source: Any, _shared_bytes: int) -> Any:
        def launch(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            launched.append(source.name.split("_")[1])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    return compiled


def test_it_serves_from_33_to_64_rows_of_16_bits_where_a_check_found_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[str]()
    monkeypatch.setattr(module, "most_clusters", lambda _bytes: 30)
    for each in (module, few):
        monkeypatch.setattr(each, "compiled", noted(launched))

    def launches(rows: int, *, is_packed: bool = False) -> str:
        launched.clear()
        w = mx.zeros((32, 256), mx.bfloat16)
        matrix: few.Matrix = tuple(mx.quantize(w, 64, 4)) if is_packed else (w,)
        made = few_rows(mx.zeros((rows, 1, 256), mx.bfloat16), [matrix] * 2, heads=(2, 4))
        assert [each.shape for each in made] == [(rows, 2, 1, 16), (rows, 4, 1, 8)]
        return "".join(launched)

    assert launches(64) == "few"
    module.allow(is_right=True)
    assert [launches(rows) for rows in (32, 33, 64)] == ["few", "cluster", "cluster"]
    assert launches(64, is_packed=True) == "few"
    module.allow(is_right=False)
    assert launches(64) == "few"


@pytest.mark.parametrize("wrong", ["", "gate", "sum"])
def test_one_wrong_bit_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def products(x: mx.array, matrices: Any, *, is_gated: bool, added: mx.array | None) -> list[mx.array]:
        sums = [
            x.astype(mx.float32) @ (each[0] if isinstance(each, tuple) else each).astype(mx.float32).T
            for each in matrices
        ]
        return [(sums[0] * sums[1] if is_gated else sums[0] + added).astype(x.dtype)]

    def by_clusters(x: mx.array, matrices: Any, _shapes: object, **how: Any) -> list[mx.array]:
        (made,) = products(x, matrices, **how)
        if wrong == ("gate" if how["is_gated"] else "sum"):
            made[0, 20, -1] *= 1 + 2**-7
        return [made]

    monkeypatch.setattr(checks, "_CLUSTER_CASES", ((96, 256, True), (96, 256, False)))
    monkeypatch.setattr(checks, "few_rows", products)
    monkeypatch.setattr(checks, "cluster_rows", by_clusters)
    assert checks.why_wrong_clusters() == ("products by clusters have other bits" if wrong else "")


@pytest.mark.parametrize(
    ("is_hopper", "room", "why", "serves"),
    [(True, 30, "", True), (True, 30, "other bits", False), (True, 0, "not asked", False), (False, 30, "", False)],
)
def test_it_is_chosen_on_hopper_where_its_check_finds_nothing(
    is_hopper: bool, room: int, why: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(choice, "is_hopper", lambda: is_hopper)
    monkeypatch.setattr(module, "most_clusters", lambda _bytes: room)
    monkeypatch.setattr(choice, "why_wrong_products", lambda: "")
    monkeypatch.setattr(choice, "why_wrong_clusters", lambda: why)
    kernels = KernelChoice()
    with capture_logs() as logs:
        assert kernels.takes_few_rows()
    assert module.serve(64) == serves
    assert kernels.has_failed == (why == "other bits")
    assert [line["serves"] for line in logs] == ["few rows (CUDA)"] * (why == "other bits")


class Driver:
    """A driver that has room for 30 clusters of four blocks of one warp and so much shared memory."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.unloaded = failing, 0

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.call(name, *given)

    def call(self, name: str, *given: Any) -> int:
        if name == self.failing:
            return 1
        self.unloaded += name == "cuModuleUnload"
        if name == "cuOccupancyMaxActiveClusters":
            launch, attribute = given[2]._obj, given[2]._obj.attributes.contents
            assert (list(launch.sizes), launch.shared_bytes, launch.count) == ([4, 1, 1, 32, 1, 1], 7, 1)
            assert (attribute.name[0], list(attribute.value)[:3]) == (4, [4, 1, 1])
            given[0]._obj.value = 30
        return 0


@pytest.mark.parametrize("failing", ["", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "compiler"])
def test_room_for_clusters_is_the_drivers_number_and_none_where_it_fails(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(failing)

    def compiled_program(text: str, options: tuple[str, ...], _kept: object) -> bytes:
        assert "__cluster_dims__(4, 1, 1)" in text
        assert options[0].endswith("sm_90a")
        if failing == "compiler":
            raise CompileError("no")
        return b"code"

    monkeypatch.setattr(hopper, "compiled_program", compiled_program)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
    assert hopper.most_clusters.__wrapped__(7) == (0 if failing else 30)
    assert driver.unloaded == (failing not in ("cuModuleLoadData", "compiler"))
