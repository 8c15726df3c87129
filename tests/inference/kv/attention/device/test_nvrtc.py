"""Programs by NVRTC, here a library of its words: what it made is kept, and what it refuses is no kernel."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import structlog

from inference_svc.kv.attention import fused, kept_kernel, nvrtc
from inference_svc.kv.attention.fused import KernelTarget, fused_attention
from inference_svc.kv.attention.geometry import Queries, split_geometry
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.nvrtc import CompileError, compiled_program
from inference_svc.kv.kept_files import kept_folder
from tests.emulation.emulator import cuda_emulator, cxx
from tests.inference.kv.attention.emulators import attention, needs_compiler
from tests.inference.kv.attention.scenes import Scene, page_format

pytestmark = needs_compiler

HOPPER = KernelTarget(Dialect.CUDA, has_warpgroups=True)
# Its code is the program and the options, and a count of what was compiled. It refuses a program with an error in it.
LIBRARY = """
#include <cstring>
#include <string>
static std::string text, made;
static int number;
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
int nvrtcCreateProgram(void** program, const char* given, const char*, int, const char**, const char**) {
  text = given;
  *program = &text;
  return 0;
}
int nvrtcCompileProgram(void*, int count, const char** options) {
  made = "#" + std::to_string(++number) + " " + text;
  for (int i = 0; i < count; ++i) made += std::string(" ") + options[i];
  return text.find("error") == std::string::npos ? 0 : 6;
}
int nvrtcGetProgramLogSize(void*, size_t* size) { *size = 12; return 0; }
int nvrtcGetProgramLog(void*, char* log) { std::memcpy(log, "line 1: oops", 12); return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { *size = made.size(); return 0; }
int nvrtcGetCUBIN(void*, char* code) { std::memcpy(code, made.data(), made.size()); return 0; }
int nvrtcDestroyProgram(void**) { return 0; }
}
"""
_NUMBERS = count()  # the loader keeps what it has loaded, by name


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvrtc") / "lib.so"
    subprocess.run([cxx(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)], input=LIBRARY.encode(), check=True)
    return path


@pytest.fixture
def library(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """A copy for each test: another file is another library, whose count begins anew."""
    path = tmp_path / f"libnvrtc{next(_NUMBERS)}.so"  # folders may have the name of an earlier test's
    shutil.copy(compiled, path)
    monkeypatch.setattr(nvrtc, "_LIBRARIES", (str(tmp_path / "absent.so"), str(path)))
    nvrtc._library.cache_clear()
    yield ctypes.CDLL(str(path))
    nvrtc._library.cache_clear()


@pytest.mark.usefixtures("library")
def test_a_program_is_compiled_once_and_its_file_is_this_users_alone(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "kernels"
    first = compiled_program("int x;", ("--std=c++17",), kept)
    assert first == b"#1 int x; --std=c++17"
    assert compiled_program("int x;", ("--std=c++17",), kept) == first
    assert compiled_program("int x;", ("--std=c++20",), kept) != first
    files = list(kept.iterdir())
    assert len(files) == 2, "one for each program and its options, and no temporary file"
    assert {path.suffix for path in files} == {".cubin"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert kept.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("library")
def test_a_disk_that_takes_no_file_costs_a_compilation_each_time(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder would be")
    made = [compiled_program("int x;", (), tmp_path / "taken" / "kernels") for _ in range(2)]
    assert made == [b"#1 int x;", b"#2 int x;"]


@pytest.mark.usefixtures("library")
def test_what_is_refused_reports_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="line 1: oops"):
        compiled_program("error", (), tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("damage", ["truncated", "a bit", "garbage", "nothing"])
def test_a_damaged_file_is_compiled_again_and_repaired(tmp_path: Path, damage: str) -> None:
    compiled_program("int x;", (), tmp_path / "kernels")
    (path,) = (tmp_path / "kernels").iterdir()
    whole = path.read_bytes()
    bad = {"truncated": whole[:-1], "a bit": whole[:-1] + b"\0", "garbage": b"ELF" * 20, "nothing": b""}
    path.write_bytes(bad[damage])
    made = [compiled_program("int x;", (), tmp_path / "kernels") for _ in range(2)]
    assert made == [b"#2 int x;"] * 2


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, mode: int) -> None:
    kept = tmp_path / "kernels"
    compiled_program("int x;", (), kept)
    kept.chmod(mode)
    assert compiled_program("int x;", (), kept) == b"#2 int x;", "nothing of it is read"
    assert compiled_program("int y;", (), kept) == b"#3 int y;"
    assert len(list(kept.iterdir())) == 1, "nothing is kept there"


@pytest.mark.usefixtures("library")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kernels"
    compiled_program("int x;", (), kept)
    monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    assert compiled_program("int x;", (), kept) == b"#2 int x;"


@pytest.mark.long(2)
@pytest.mark.usefixtures("library")
def test_a_user_without_a_home_keeps_nothing_and_compiles_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    made = [compiled_program("int x;", (), kept_folder("kernels")) for _ in range(2)]
    assert made == [b"#1 int x;", b"#2 int x;"]


def test_the_library_that_is_loaded_already_goes_before_another(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "libother.so"
    shutil.copy(library._name, other)
    monkeypatch.setattr(nvrtc, "_LIBRARIES", (str(other), library._name))
    assert nvrtc._library()._name == library._name


@pytest.fixture
def not_asked_yet(library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has launched nothing, whose tiles are emulated."""
    monkeypatch.setitem(fused.COMPILERS, Dialect.CUDA, cuda_emulator)
    monkeypatch.setattr(kept_kernel, "_refused", set())
    monkeypatch.setattr(kept_kernel, "_finds_by_hash", lambda: False)  # its first kernel is refused, and logged, too
    monkeypatch.setattr(kept_kernel, "kept_folder", tmp_path.joinpath)
    caches = kept_kernel.program_of, fused._is_launched, fused._is_program_launched
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_LIBRARIES", ("libabsent.so",))


def without_what_the_driver_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is loaded when the launch is evaluated, not when it is made."""

    made, evaluate = mx.array(0), mx.eval

    def evaluate_or_refuse(given: object) -> None:
        if isinstance(given, list) and given[0] is made:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        evaluate(given)

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **_: [made])
    monkeypatch.setattr(mx, "eval", evaluate_or_refuse)


@pytest.mark.long(5)
@pytest.mark.usefixtures("not_asked_yet")
@pytest.mark.parametrize("take_away", [without_the_library, without_what_the_driver_takes])
def test_where_products_of_warpgroups_cannot_be_launched_tiles_serve(
    take_away: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch)
    scenes = [Scene(page_format("q4", 1, 64), (600, 40), 4, queries, dtype=mx.bfloat16) for queries in (17, 40)]
    with structlog.testing.capture_logs() as logs:
        for scene in scenes * 2:
            found = fused_attention(*scene.arguments(), HOPPER)
            assert mx.array_equal(found, attention(scene, Dialect.CUDA))
    assert [line["event"] for line in logs] == ["kernel.not_launched"], "said once, of two programs"


@pytest.mark.usefixtures("not_asked_yet")
def test_a_program_is_launched_once_for_no_tokens_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[dict[str, Any]] = []

    def launch(**how: Any) -> list[mx.array]:
        launched.append(how)
        return [mx.array(0)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    form = page_format("q4", 2, 128)
    queries_of = [Queries("bfloat16", 192, tokens) for tokens in (1024, 32768, 131072)]
    shapes = [split_geometry(form, each, Dialect.CUDA, has_warpgroups=True) for each in queries_of]
    assert all(fused._is_launched(shape, mx.bfloat16) for shape in shapes)
    assert len({shape.split for shape in shapes}) > 1
    (only,) = launched
    queries, _, table, lengths, settings = only["inputs"]
    assert lengths.tolist() == [0]
    assert settings[2].item() > 0, "it is divided by"
    assert only["scalars"] == [table.shape[1], 1, queries.shape[1], queries.shape[2]]
