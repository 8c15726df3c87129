"""The check of kernels at a start sees one wrong number of any of them, and takes right ones."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.cachestore.v1 import identity_pb2
from structlog.testing import capture_logs

from inference_svc.kv.attention import checks, choice, fused, tiles
from inference_svc.kv.attention.checks import why_wrong, why_wrong_products, why_wrong_tiles, why_wrong_windows
from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.kv.attention.fused import Compiler, Kernel
from inference_svc.kv.attention.geometry import MAX_QUERIES
from inference_svc.kv.attention.kept_checks import KeptChecks
from inference_svc.kv.attention.kernels import Dialect, KernelSource
from inference_svc.kv.attention.paged import paged_attention
from inference_svc.kv.model_hooks.few_rows import Matrix
from tests.inference.kv.attention.emulators import EMULATORS, needs_compiler
from tests.inference.kv.attention.scenes import FP16, Scene, page_format
from tests.made_models.sampling import first_and_in_turn

pytestmark = needs_compiler

# Those of the tiny models, so that most are compiled already.
FORMATS = {name: page_format(name, 2, 64, scale_type=FP16) for name in ("q4", "q8", "k8v4", "exact", "q4-rotated")}


def spoiled(dialect: Dialect, kernel: str, spoil: Callable[[dict[str, Any], Any], None] | None) -> Compiler:
    """The emulator; after each launch of a kernel, `spoil` changes what it was given and made."""

    def compiler(source: KernelSource, shared_bytes: int) -> Kernel:
        emulated = EMULATORS[dialect](source, shared_bytes)

        def launch(**given: Any) -> list[mx.array]:
            made = emulated(**given)
            if spoil is not None and f"kv_{kernel}_" in source.name:
                spoil(given, made)
            return made

        return launch

    return compiler


def checked(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str = "",
    spoil: Callable[[dict[str, Any], Any], None] | None = None,
) -> str:
    """What the check of a format finds."""
    monkeypatch.setitem(fused.COMPILERS, Dialect.CUDA, spoiled(Dialect.CUDA, kernel, spoil))
    return why_wrong(FORMATS[name], mx.float32, Dialect.CUDA)


@pytest.mark.parametrize("name", first_and_in_turn(list(FORMATS), seconds=4, first=1))
def test_right_kernels_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(name, monkeypatch) == ""


def changed_unit(column: int) -> Callable[[dict[str, Any], Any], None]:
    def spoil(given: dict[str, Any], made: Any) -> None:
        np.asarray(given["inputs"][0 if len(given["inputs"][0].shape) == 2 else 2])[1, column] ^= 1

    return spoil


def changed_result(given: dict[str, Any], made: Any) -> None:
    """One number of the first output, by a tenth of the largest."""
    flat = np.asarray(made[0]).reshape(-1)
    flat[flat.size // 2] += np.abs(flat).max() / 10


def first_sequence_twice(given: dict[str, Any], made: Any) -> None:
    flat = np.asarray(made[0])
    flat[1:] = flat[:1]


BITS = {"q4": 4, "q4-rotated": 4, "k8v4": 8, "q8": 8, "fp": 16}
CODES = FORMATS["q4"].parts[0]
FAULTS = {
    "a code": ("append", changed_unit(255 * CODES.units + 3), "written"),
    "a scale": ("append", changed_unit(FORMATS["q4"].parts[1].offset + 254), "written"),
    "a value's bias": ("append", changed_unit(FORMATS["q4"].parts[5].offset + 255), "written"),
    "a row of another page": ("append", changed_unit(7), "written"),
    "a value": ("gather", changed_result, "read"),
    "a copied unit": ("store", changed_unit(0), "copied"),
    "a mix": ("reduce", changed_result, "attention"),
    "another sequence": ("reduce", first_sequence_twice, "attention of 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_number_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, spoil, word = FAULTS[fault]
    assert word in checked("q4", monkeypatch, kernel, spoil)


def test_right_tiles_are_taken_and_a_wrong_mix_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_TILED", checks._TILED[:1])
    found = []
    for spoil in (None, changed_result):
        monkeypatch.setitem(fused.COMPILERS, Dialect.METAL, spoiled(Dialect.METAL, "tiles", spoil))
        found.append(why_wrong_tiles(FORMATS["q4"], mx.float16, Dialect.METAL))
    assert found == ["", "attention of 12 queries differs from the reference"]


@pytest.mark.parametrize("name", first_and_in_turn(list(FORMATS), seconds=4, first=1))
def test_a_right_kernel_of_windows_is_taken_and_a_wrong_one_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_slot(given: dict[str, Any], made: Any) -> None:
        flat = np.asarray(made[0])
        flat[: len(flat) // 2] = flat[len(flat) // 2 :]

    found = []
    for dialect, spoil in ((Dialect.CUDA, changed_result), (Dialect.METAL, another_slot)):
        for each in (None, spoil):
            monkeypatch.setitem(fused.COMPILERS, dialect, spoiled(dialect, "window", each))
            found.append(why_wrong_windows(FORMATS[name], mx.float32, dialect))
    assert found == ["", "attention over a window differs from the reference"] * 2


def test_where_tiles_fail_their_check_the_kernels_of_lanes_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal. The other kernels' check is not made here."""
    launched: list[str] = []

    def compiler(source: KernelSource, shared_bytes: int) -> Kernel:
        if "tiles" in source.name:
            raise RuntimeError("[metal::Device] Unable to build metal library from source")

        def launch(**given: Any) -> list[mx.array]:
            launched.append(source.name.split("_")[1])
            return [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(given["output_shapes"], given["output_dtypes"], strict=True)
            ]

        return launch

    monkeypatch.setitem(fused.COMPILERS, Dialect.METAL, compiler)
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.METAL)
    monkeypatch.setattr(choice, "why_wrong", lambda *_: "")
    monkeypatch.setattr(tiles, "_refused", {})
    form, kernels = FORMATS["q4"], KernelChoice()
    assert tiles.most_queries(form, "float16") > MAX_QUERIES
    with capture_logs() as logs:
        assert kernels.dialect_of({form}, mx.float16) is Dialect.METAL
    assert kernels.has_failed
    [failed] = [line for line in logs if line["event"] == "kernels.check_failed"]
    assert (failed["checked"].split(" of ")[0], failed["serves"]) == ("tiles", "fused (Metal), without tiles")
    assert tiles.most_queries(form, "float16") == MAX_QUERIES
    of_next_model = KernelChoice()
    assert of_next_model.dialect_of({form}, mx.float16) is Dialect.METAL
    assert of_next_model.has_failed
    scene = Scene(form, (300,), 4, 12, mx.float16)
    paged_attention(*scene.arguments(), Dialect.METAL)
    assert launched == ["split", "reduce"]


def test_a_window_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = checks.fused_attention
    monkeypatch.setattr(
        checks, "fused_attention", lambda *given: made(*given[:3], given[3]._replace(window=None), given[4])
    )
    assert "attention of 1" in checked("q4", monkeypatch)


@pytest.mark.parametrize("wrong", [1, 3], ids=["16 bits", "packed"])
def test_a_wrong_product_is_noticed(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def products(x: mx.array, matrices: Sequence[Matrix], wrong: int = 0) -> list[mx.array]:
        (matrix,) = matrices
        weights, *packing = matrix
        if packing:
            weights = mx.dequantize(weights, *packing, group_size=64, bits=4)
        made = x @ weights.T
        made[0, 1, 5] += len(matrix) == wrong
        return [made]

    monkeypatch.setattr(checks, "few_rows", products)
    assert why_wrong_products() == ""
    monkeypatch.setattr(checks, "few_rows", partial(products, wrong=wrong))
    assert why_wrong_products() == "products differ from the reference"


def test_all_policies_of_a_layout_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 48 values have no groups of 64: they are stored exactly, or not at all."""
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(choice, "why_wrong", lambda form, dtype, dialect: f"{form.key.bits} {dtype} {dialect.value}")
    layers = [identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=1, key_dim=64, value_dim=64)]
    found = choice.checked_policies(layers, "bfloat16")
    assert found == {name: f"{bits} {mx.bfloat16} cuda" for name, bits in zip(BITS, BITS.values(), strict=True)}
    layers[0].key_dim = 48
    assert set(choice.checked_policies(layers, "bfloat16")) == {"fp"}


def test_a_choice_of_the_reference_takes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    assert KernelChoice("reference").dialect_of({FORMATS["q4"]}, mx.float32) is None
    assert not KernelChoice("reference").takes_few_rows()


def test_whole_layers_are_taken_where_their_check_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(choice, "why_wrong_layers", lambda **_: "")
    assert KernelChoice().takes_layers(is_packed=True)
    monkeypatch.setattr(choice, "why_wrong_layers", lambda *, is_packed: "" if is_packed else "a sum differs")
    kernels = KernelChoice()
    assert kernels.takes_layers(is_packed=True)
    assert not kernels.takes_layers(is_packed=False)
    assert kernels.has_failed


def kept_checks(tmp_path: Path, *conditions: str) -> KeptChecks:
    return KeptChecks(tmp_path / "checks", conditions)


def test_a_check_that_found_nothing_is_not_repeated_under_its_conditions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[object] = []
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(choice, "why_wrong", lambda *given: made.append(given[:2]) or "")
    monkeypatch.setattr(choice, "why_wrong_layers", lambda **how: made.append(how) or "")

    def start(*conditions: str) -> list[object]:
        made.clear()
        kernels = KernelChoice(kept=kept_checks(tmp_path, *conditions))
        for form in (FORMATS["q4"], FORMATS["exact"]):
            assert kernels.dialect_of({form}, mx.float16) is Dialect.CUDA
        assert kernels.takes_layers(is_packed=True)
        return list(made)

    whole = [(FORMATS["q4"], mx.float16), (FORMATS["exact"], mx.float16), {"is_packed": True}]
    assert start("a driver") == whole
    assert start("a driver") == []
    assert start("another") == whole
    kernels = KernelChoice(kept=kept_checks(tmp_path, "a driver"))
    assert kernels.dialect_of({FORMATS["q4"]}, mx.float32) is Dialect.CUDA
    assert kernels.takes_layers(is_packed=False)
    assert made == [*whole, (FORMATS["q4"], mx.float32), {"is_packed": False}]
    for path in (tmp_path / "checks").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert start("a driver") == whole


def test_a_check_that_failed_is_repeated_at_each_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(choice, "why_wrong", lambda *_: "a value differs")
    for _ in range(2):
        kernels = KernelChoice(kept=kept_checks(tmp_path))
        assert kernels.dialect_of({FORMATS["q4"]}, mx.float16) is None
        assert kernels.has_failed
    assert not (tmp_path / "checks").exists()
