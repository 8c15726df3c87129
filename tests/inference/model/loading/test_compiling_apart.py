"""A process of its own compiles a model's programs; an engine needs neither its end nor its success."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_svc.engine.engine import Engine
from inference_svc.kv.attention.kept_checks import KeptChecks
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.model import kvasir_tiny
from inference_svc.model.probing import compiling_apart
from inference_svc.model.probing.compiling_apart import begin_compiling
from tests.emulation.emulator import cxx
from tests.inference.kv.attention.device.test_nvrtc import LIBRARY
from tests.inference.kv.attention.emulators import needs_compiler

_PLAYED = (sys.executable, "-Pm", "inference_svc.model.probing.played_start", str(kvasir_tiny.path()), "sm_90", "1")


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The commands that were begun on a device with CUDA. Instead, the first is killed, two fail, others end well."""
    found = list[list[str]]()
    begin = compiling_apart._begin

    def of_another(command: list[str], keep: object) -> None:
        found.append(command)
        end = ("os.kill(os.getpid(), 9)", "os._exit(1)", "os._exit(1)", "")[min(len(found), 4) - 1]
        begin([sys.executable, "-c", f"import os; {end}"], keep)  # type: ignore[arg-type]

    monkeypatch.setattr(compiling_apart, "_begin", of_another)
    monkeypatch.setattr(compiling_apart, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(compiling_apart, "device_target", lambda: "sm_90")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    yield found
    _join()


def _begin(known: KeptChecks | None) -> None:
    begin_compiling(kvasir_tiny.path(), known)
    _join()


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name == "compiling":
            thread.join()


def test_programs_are_compiled_until_a_process_ends_well_or_three_fail(begun: list[list[str]], tmp_path: Path) -> None:
    failing, another = KeptChecks(tmp_path, ("an H200",)), KeptChecks(tmp_path, ("another driver",))
    for _ in range(4):
        _begin(failing)
    assert begun == [[*_PLAYED[:-1], "2"]] * 3
    for _ in range(2):
        _begin(another)
    assert len(begun) == 4
    _begin(None)
    assert len(begun) == 4, "an engine that keeps nothing"


def test_it_holds_no_memory_of_a_card_when_that_is_counted(tmp_path: Path) -> None:
    ended = list[int]()
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    compiling_apart._begin(command, ended.append)
    (process,) = compiling_apart._running
    Engine.open(kvasir_tiny.path(), cache_dir=tmp_path, memory_budget_bytes=1 << 24).close()
    _join()
    assert ended == [process.returncode] == [-9]


@pytest.mark.parametrize("lacks", ["processors", "CUDA", "its target"])
def test_no_process_begins_where_it_could_not_help(
    lacks: str, begun: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {"processors": (os, "cpu_count", 3), "CUDA": (compiling_apart, "device_dialect", None)}
    owner, name, given = absent.get(lacks, (compiling_apart, "device_target", None))
    monkeypatch.setattr(owner, name, lambda: given)
    _begin(KeptChecks(tmp_path, ()))
    assert begun == []


def _process(home: Path) -> "subprocess.Popen[bytes]":
    libraries = f"{home}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    environment = {**os.environ, "HOME": str(home), "LD_LIBRARY_PATH": libraries}
    return subprocess.Popen(_PLAYED, stdin=subprocess.PIPE, env=environment)


@needs_compiler
@pytest.mark.cpu_only("CUDA's MLX has NVRTC itself, of which this test's library takes the place")
def test_the_process_leaves_code_of_checks_steps_and_passes(tmp_path: Path) -> None:
    library = tmp_path / "libnvrtc.so.13"
    subprocess.run([cxx(), "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=LIBRARY.encode(), check=True)
    with _process(tmp_path) as process:
        assert process.wait(120) == 0
    files = [*(tmp_path / ".cache" / "kvasir" / "kernels").iterdir()]
    texts = "".join(path.read_bytes().decode(errors="replace") for path in files)
    assert {path.suffix for path in files} == {".cubin"}
    names = set(re.findall(r"\bkv_(\w+)_[0-9a-f]{12}_[0-9a-f]{12}\(", texts))
    kinds = {"append", "attend", "few_rows", "gather", "layer", "reduce", "results", "split", "store", "tiles", "turn"}
    assert kinds | {"wide_rows"} <= names


def test_the_process_ends_when_its_engine_does(tmp_path: Path) -> None:
    with _process(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 1
