"""Compiles a model's programs in a process of its own, by many threads, while an engine opens the model: alone it would
compile each where it first needs it, one after the other. That process leaves files of code; where it is late or fails,
the engine compiles. It ends when the engine does.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from inference_svc.kv.attention.choice import device_dialect
from inference_svc.kv.attention.kept_checks import KeptChecks
from inference_svc.kv.attention.kept_kernel import device_target
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.kept_files import named_for

_OWN_PROCESSORS = 2  # of the engine
_FEWEST, _MOST = 2, 12  # threads
_TRIES = 3  # of which one that ends well is enough
_running: list["subprocess.Popen[bytes]"] = []


def begin_compiling(directory: Path, known: KeptChecks | None) -> None:
    """On CUDA, unless such a process ended well before under the same conditions (`known`), or some failed."""
    threads = min(_MOST, (os.cpu_count() or 1) - _OWN_PROCESSORS)
    if known is None or threads < _FEWEST or device_dialect() is not Dialect.CUDA:
        return
    config = (directory / "config.json").read_text(encoding="utf-8", errors="replace")
    tries = [f"programs for {named_for(config)}, {number}" for number in range(_TRIES)]
    left = [each for each in tries if not known.is_right(each)]
    if left and (target := device_target()) is not None:
        command = [sys.executable, "-Pm", "inference_svc.model.probing.played_start", str(directory), target]
        _begin([*command, str(threads)], lambda code: _keep(known, left[:1] if code else left))


def end_compiling() -> None:
    """Before a card's free memory is counted: the process holds half a gigabyte of it."""
    for process in [*_running]:
        process.kill()
        process.wait()


def _keep(known: KeptChecks, tries: list[str]) -> None:
    for each in tries:
        known.keep_right(each)


def _begin(command: list[str], keep: Callable[[int], None]) -> None:
    none = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=none, stderr=none)
        _running.append(process)
        Thread(target=_wait, args=(process, keep), name="compiling", daemon=True).start()


def _wait(process: "subprocess.Popen[bytes]", keep: Callable[[int], None]) -> None:
    with process:
        code = process.wait()
    _running.remove(process)
    keep(code)
