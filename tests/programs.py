"""The services as processes that are forked from one that has imported them: a start costs no three seconds of imports.

Each is a process like any other, with a memory, descriptors and a death of its own. What an interpreter does besides,
as `atexit`, is seen by the tests of the command line, which start them with `python -m`.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Two threads of BLAS beside another service's on two cores cost more than they bring.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Apple's frameworks do not bear a fork: there each program is begun anew.
_FORKS = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_FORKS.set_forkserver_preload(["inference_svc.__main__", "cachestore_svc.__main__"])


class Program:
    """`python -m module arguments`, forked. What it prints goes to files; the rest is as with `subprocess.Popen`."""

    def __init__(
        self, module: str, arguments: Sequence[str], *, out: Path, err: Path, env: Mapping[str, str] | None = None
    ) -> None:
        own = {**os.environ, **ONE_THREAD, **(env or {})}
        self._process = _FORKS.Process(target=_become, args=(module, list(arguments), out, err, own), daemon=True)
        with _environment(ONE_THREAD):  # which the process that forks reads once, when the first program starts
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self._process.name), timeout or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended between the two
            if self.poll() is None:
                os.kill(self.pid, number)


def run(module: str, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run it to its end. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        program = Program(module, arguments, out=out, err=err)
        try:
            code = program.wait(timeout_s)
        finally:
            program.kill()
        return subprocess.CompletedProcess([module, *arguments], code, out.read_text(), err.read_text())


def _become(module: str, arguments: list[str], out: Path, err: Path, env: dict[str, str]) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(f"{module}.__main__").main())


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
