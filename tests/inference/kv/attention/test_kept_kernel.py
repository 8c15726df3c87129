"""Every CUDA kernel as finished code: NVRTC compiles its program without MLX's headers, or MLX compiles the kernel."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import structlog

from inference_svc.kv.attention import fused, kept_kernel, kernels, nvrtc
from inference_svc.kv.attention.fused import KernelTarget, cuda_compiler, fused_attention, mlx_cuda_compiler
from inference_svc.kv.attention.in_place import append_rows, gathered_values, store_pages
from inference_svc.kv.attention.kept_kernel import device_target
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.nvrtc import CompileError
from inference_svc.kv.attention.reference import LayerPages
from inference_svc.kv.host_copies import host_copy
from inference_svc.kv.model_hooks.few_rows import few_rows
from inference_svc.kv.model_hooks.wide_rows import wide_rows
from tests.inference.kv.attention.scenes import BF16, FP16, Scene, page_format

FORMATS = {
    "q4": page_format("q4", 2, 128),
    "q4, narrow heads": page_format("q4", 2, 64, 32, FP16),
    "q4-rotated": page_format("q4-rotated", 2, 128, 64, FP16),
    "k8v4": page_format("k8v4", 2, 128),
    "q8, wide heads": page_format("q8", 2, 256),
    "16 bits": page_format("exact", 2, 80),
    "16 bits of halves, wider values": page_format("exact", 2, 64, scale_type=FP16, value_dim=128),
}
QUERY_TYPES = mx.float32, mx.float16, mx.bfloat16
ZERO, UNITS = mx.zeros(1, mx.int32), mx.zeros((1, 8), mx.uint16)
PAGES = LayerPages(UNITS, FORMATS["q4"], ZERO[None])
KINDS = {
    "trial",
    "split",
    "tiles",
    "reduce",
    "gather",
    "store",
    "few_rows",
    "address",
    "warpgroups",
    "wide_rows",
    "wide_codes",
}
BOUNDS = "__launch_bounds__"
needs_libstdcxx = pytest.mark.skipif(kept_kernel._std_hash() is None, reason="a Mac has another C++ library")
KIND = re.compile(r"\bkv_([a-z_]+?)(?:_[0-9a-f]{12})+")
TARGETS = "sm_80", "sm_90"


class Device:
    """MLX's calls of a Hopper GPU's launches, which are noted and compute nothing but the first kernel's number. As
    MLX 0.32.4 it loads a program once, and finds it by its name and a hash of the given code.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.launched: list[dict[str, Any]] = []
        self.loaded_alone: list[dict[str, Any]] = []
        self.code: dict[tuple[str, int], bytes] = {}
        self.not_evaluated: dict[tuple[str, int], bytes] = {}
        self.has_hash = True
        self.refuses_to_load: Callable[[str], bool] = lambda _: False
        self.by_mlx: list[str] = []
        self.refuses: Callable[[str], bool] = lambda _: False
        self.first = 8

    def compiled(self, text: str, options: tuple[str, ...], _kept: object) -> bytes:
        self.texts.append(text)
        if self.refuses(text):
            raise CompileError("line 1: oops")
        return " ".join(options).encode()

    def launch(self, *, output_shapes: Any, output_dtypes: Any, **how: Any) -> list[mx.array]:
        name, given = how["name"], how["compiled_source"]
        key = name, std_hash(given) if self.has_hash else hash(given)
        if given.startswith(b"--gpu"):
            if self.refuses_to_load(name):
                raise RuntimeError(f"Failed to load compiled {name} kernel")
            loads_alone = how["threadgroup"] == (1, 1, 2)
            (self.not_evaluated if loads_alone else self.code)[key] = given
            if loads_alone:
                self.loaded_alone.append({**how, "outputs": len(output_shapes)})
                return [mx.zeros(1)] * len(output_shapes)
        if key not in self.code:
            raise RuntimeError(f"Failed to load compiled {name} kernel: no image")
        if given == self.code[key] or "trial" not in name:
            self.launched.append({**how, "code": self.code[key]})
        return [mx.full(shape, self.first, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    def mlx_kernel(self, *, name: str, **_: Any) -> Any:
        def kernel(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            self.by_mlx.append(name.rsplit("_", 1)[0])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return kernel


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """In a process that has launched nothing. What it compiled, no other test gets."""
    played = Device()
    facts = {"compute_capability_major": 9, "compute_capability_minor": 0}
    monkeypatch.setattr(mx, "device_info", lambda: facts)
    monkeypatch.setattr(mx.fast, "cuda_kernel", played.mlx_kernel)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", played.launch)
    monkeypatch.setattr(mx, "async_eval", lambda _: played.code.update(played.not_evaluated))
    monkeypatch.setattr(kept_kernel, "compiled_program", played.compiled)
    monkeypatch.setattr(kept_kernel, "_refused", set())
    monkeypatch.setitem(fused.COMPILERS, Dialect.CUDA, cuda_compiler)
    asked = fused._is_launched, fused._is_program_launched, kept_kernel.device_target, kept_kernel._finds_by_hash
    caches = *asked, fused.compiled, fused.plan_of, kept_kernel.program_of, kept_kernel._short_code
    for each in caches:
        each.cache_clear()
    yield played
    for each in caches:
        each.cache_clear()


def std_hash(code: bytes) -> int:
    hashed = kept_kernel._std_hash()
    found: int = hash(code) if hashed is None else hashed(code, len(code), 0xC70F6907)
    return found


def kind_of(launch: dict[str, Any]) -> str:
    return str(KIND.findall(launch["name"])[0])


def store_and_gather() -> None:
    pages, places = mx.zeros((5, 16), mx.uint16), mx.zeros(3, mx.int32)
    store_pages(pages, places, UNITS, places, range(8), Dialect.CUDA)
    gathered_values(PAGES, 0, 3, ZERO, mx.bfloat16, Dialect.CUDA)


def test_finished_code_is_for_this_device_and_gets_the_sizes_that_it_reads(device: Device) -> None:
    store_and_gather()
    store_and_gather()
    first, store, gather, *again = device.launched
    assert [kind_of(each) for each in device.launched] == ["trial", "store", "gather", "store", "gather"]
    assert [each["name"] for each in again] == [store["name"], gather["name"]]
    assert len(device.texts) == 3, "each was compiled once"
    assert {each["code"] for each in device.launched} == {b"--gpu-architecture=sm_90 --std=c++17"}
    assert (first["scalars"], store["scalars"], gather["scalars"]) == ([3], [3], [8])
    assert (store["shared_memory"], store["ensure_row_contiguous"]) == (16, True)
    assert "void kv_store" in device.texts[1], "no bounds: registers as by MLX"
    assert device.by_mlx == []


@needs_libstdcxx
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 30_001])
def test_eight_bytes_have_the_hash_of_any_code(size: int) -> None:
    code = random.Random(size).randbytes(size)
    short = kept_kernel.same_hash(code)
    assert short is not None
    assert (len(short), std_hash(short)) == (8, std_hash(code))


@needs_libstdcxx
def test_a_program_is_loaded_by_a_launch_of_its_own_and_then_found_by_eight_bytes(device: Device) -> None:
    for _ in range(2):
        store_and_gather()
        few_rows(mx.zeros((1, 8, 64), mx.float16), [(mx.zeros((16, 64), mx.float16),)] * 3)
    assert [kind_of(each) for each in device.loaded_alone] == ["store", "gather", "few_rows"]
    first, *launched = device.launched
    assert first["compiled_source"] == first["code"]
    assert {len(each["compiled_source"]) for each in launched} == {8}
    for load, launch, text in zip(device.loaded_alone, launched, device.texts[1:], strict=False):
        assert (load["name"], load["shared_memory"]) == (launch["name"], launch["shared_memory"])
        parameters, body = text[text.index(f"{load['name']}(") :].split(") {\n", 1)
        given = len(load["inputs"]), load["outputs"], len(load["scalars"])
        assert given == (parameters.count("const ") - len(launch["scalars"]), load["outputs"], len(launch["scalars"]))
        assert sum(given) == parameters.count(",") + 1
        assert body.startswith("if (blockDim.z == 2) return;\n"), "nothing is read or written"
    assert all(each["threadgroup"][2] == 1 for each in launched)


@needs_libstdcxx
@pytest.mark.parametrize("case", ["MLX finds it otherwise", "another C++ library", "a program is not loaded"])
def test_code_itself_is_launched(device: Device, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "MLX finds it otherwise":
        device.has_hash = False
    elif case == "another C++ library":
        monkeypatch.setattr(kept_kernel, "same_hash", lambda _: None)
    else:
        device.refuses_to_load = lambda name: "store" in name
    with structlog.testing.capture_logs() as logs:
        if case == "a program is not loaded":
            with pytest.raises(RuntimeError, match="kv_store"):
                store_and_gather()
            device.refuses_to_load = lambda _: False
        store_and_gather()
    sizes = [len(each["compiled_source"]) for each in device.launched if kind_of(each) != "trial"]
    assert sizes[0] > 8
    assert (sizes[-1] > 8) == (case != "a program is not loaded")
    assert [line["event"] for line in logs] == ["kernel.code_is_hashed"] * (case == "MLX finds it otherwise")


@pytest.mark.parametrize("count", [1, 3])
def test_new_rows_are_written_by_kept_code(device: Device, count: int) -> None:
    rows = mx.zeros((2, 2, count, 128), mx.bfloat16)
    append_rows(rows, rows, PAGES, ZERO[None], Dialect.CUDA)
    assert [kind_of(each) for each in device.launched] == ["trial", "append"]
    assert device.launched[1]["scalars"][1:] == ([2, 2, 1, 8] if count == 1 else [2, count, 2, 8])
    assert device.by_mlx == []


@pytest.mark.parametrize("refusal", ["the compiler", "the driver", "a wrong number"])
def test_where_a_first_kernel_fails_mlx_compiles_all(
    device: Device, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> list[mx.array]:
        raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")

    if refusal == "the compiler":
        device.refuses = lambda _: True
    elif refusal == "the driver":
        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", refuse)
    else:
        device.first = 7
    with structlog.testing.capture_logs() as logs:
        store_and_gather()
        store_and_gather()
    assert device.by_mlx == ["kv_store", "kv_gather"] * 2
    assert len(device.texts) == 1, "asked once"
    assert [(line["event"], line["target"]) for line in logs] == [("kernel.not_launched", "sm_90")]


def test_a_program_that_is_refused_is_mlxs_and_others_are_kept(device: Device) -> None:
    device.refuses = lambda text: "kv_gather" in text or "kv_store" in text
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            store_and_gather()
            few_rows(mx.zeros((1, 8, 64), mx.float16), [(mx.zeros((16, 64), mx.float16),)])
    assert device.by_mlx == ["kv_store", "kv_gather"] * 2
    assert [kind_of(each) for each in device.launched] == ["trial", "few_rows", "few_rows"]
    assert len(device.texts) == 4, "each was tried once"
    assert [line["event"] for line in logs] == ["kernel.not_launched"], "said once, of two programs"


def test_only_a_kernel_that_has_a_multiprocessor_for_itself_is_bounded(device: Device) -> None:
    scene = Scene(FORMATS["q4"], (600,), 8, 45, dtype=mx.bfloat16)
    fused_attention(*scene.arguments(), KernelTarget(Dialect.CUDA, has_warpgroups=True))
    bounded = {name.split("(")[0] for text in device.texts for name in text.split(BOUNDS)[1:]}
    assert len(bounded) == 1
    targets = {kind_of(each): each["code"].split()[0] for each in device.launched}
    assert targets == {
        "trial": b"--gpu-architecture=sm_90",
        "tiles": b"--gpu-architecture=sm_90a",
        "reduce": b"--gpu-architecture=sm_90",
    }


def launch_all() -> None:
    """Every kernel that is kept, for formats, queries and shapes of all kinds."""
    for form, dtype, count in product(FORMATS.values(), QUERY_TYPES, (1, 45)):
        scene = Scene(form, (10,), 8, count, dtype=dtype, has_sinks=form.scale_type == BF16)
        for has_warpgroups in (False, True):
            fused_attention(*scene.arguments(), KernelTarget(Dialect.CUDA, has_warpgroups=has_warpgroups))
        gathered_values(replace(PAGES, format=form), 0, 3, ZERO, dtype, Dialect.CUDA)
    for rows, count, dtype in product((8, 16, 32, 64), (1, 2, 3), (mx.float16, mx.bfloat16)):
        few_rows(mx.zeros((1, rows, 64), dtype), [(mx.zeros((4300, 64), dtype),)] * count)
    for bits, count, dtype in product((4, 16), (1, 2, 3), (mx.float16, mx.bfloat16)):
        x, added = mx.zeros((1, 33, 512), dtype), mx.zeros((1, 33, 4300), dtype) if count == 1 else None
        shapes, w = [(1, 33, 4300)] * (3 if count == 3 else 1), mx.zeros((4300, 512), dtype)
        matrix = (w,) if bits == 16 else tuple(mx.quantize(w, 64, bits))
        wide_rows(x, [matrix] * count, shapes, is_gated=count == 2, added=added)
    store_pages(UNITS, ZERO, UNITS, ZERO, range(8), Dialect.CUDA)
    host_copy.device_address(UNITS)


def test_every_program_is_whole_in_itself_and_nvrtc_compiles_it(device: Device) -> None:
    """Each text is read; NVRTC, where it is found, compiles the first of each kind and one of twenty others."""
    launch_all()
    kinds = [KIND.findall(text)[-1] for text in device.texts]
    kinds = [
        "warpgroups" if kind == "tiles" and BOUNDS in text else kind
        for kind, text in zip(kinds, device.texts, strict=True)
    ]
    assert set(kinds) == KINDS
    for text in device.texts:
        for word in ("#include", "cg::", "std::", "_shape[", "_strides", "_ndim"):
            assert word not in text
    if nvrtc._library() is None:
        return
    for number in {kinds.index(kind) for kind in KINDS} | set(range(0, len(kinds), 20)):
        for target in ("sm_90a",) if BOUNDS in device.texts[number] else TARGETS:
            options = f"--gpu-architecture={target}", "--std=c++17"
            assert nvrtc.compiled_program(device.texts[number], options, None).startswith(b"\x7fELF")


def test_a_cuda_device_launches_finished_code_with_the_bits_of_mlxs_and_no_other_device_does() -> None:
    is_cuda = mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu
    device_target.cache_clear()
    assert (device_target() is not None) == is_cuda
    kept_kernel._finds_by_hash.cache_clear()
    assert kept_kernel._finds_by_hash() == is_cuda, "else launches cost three times as much of the processor"
    # By lanes, fragments and tiles. MLX takes seconds for each.
    cases = (("q4-rotated", 1, mx.float32), ("k8v4", 1, mx.bfloat16), ("q4", 45, mx.bfloat16))
    for name, count, dtype in cases if is_cuda else ():
        scene = Scene(FORMATS[name], (700, 40), 8, count, dtype=dtype)
        kept, by_mlx = (
            fused_attention(*scene.arguments(), KernelTarget(Dialect.CUDA, compiler, has_warpgroups=False))
            for compiler in (cuda_compiler, mlx_cuda_compiler)
        )
        assert mx.array_equal(kept, by_mlx)


def test_no_kernel_has_clusters_of_blocks() -> None:
    """MLX updates graphs that it keeps, and an update leaves a node the cluster of the kernel before: on an H200 what
    ran after a kernel with clusters had wrong results.
    """
    sources = [*Path(kernels.__file__).parent.iterdir(), Path(kept_kernel.__file__)]
    assert [path.name for path in sources if path.is_file() and "__cluster_dims__" in path.read_text()] == []
