"""Services and commands as processes that are forked from one that has imported them: a start costs no imports.

Each is a process like any other, with a memory, descriptors and a death of its own; so is what `kvasir` starts
(`forked_children`). What an interpreter does besides, as `atexit`, is seen by the tests that begin programs for real:
one `kvasir up`, the Macs of `test_seed_form`, stores with an environment of their own.
"""

import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from inference_svc.machine import pressure
from tests.running import own_notes, set_clock  # noqa: F401
from tests.running.forked_children import start_helper, tell_stacks

# Two threads of BLAS beside another service's on two cores cost more than they bring.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Apple's frameworks and CUDA do not bear a fork: there each program is begun anew.
_BEARS_FORKS = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
_FORKS = multiprocessing.get_context("forkserver" if _BEARS_FORKS else "spawn")
_MAINS = {
    "inference_svc": "inference_svc.__main__",
    "cachestore_svc": "cachestore_svc.__main__",
    "kvasir": "kvasir.cli.main",
    "kvasir_gateway": "kvasir_gateway.__main__",
    "played_engine": "kvasir_bench.played.__main__",
    "scripted_engine": "tests.gateway.agents.scripted_engine",
    "failing_device": "tests.inference.service.failing_device",
    "powerless_store": "tests.cachestore.service.powerless_store",
}
# What `kvasir` starts with `python -m`, beside the services.
_STARTED = (
    "inference_svc.describe",
    "kvasir_bench.engine.__main__",
    "kvasir_bench.synthetic.__main__",
    "kvasir_bench.engine.memory_probe",
    "kvasir_bench.quality.__main__",
)
MEMINFO = "KVASIR_TEST_MEMINFO"  # names what programs read instead of the kernel's /proc/meminfo
_FORKS.set_forkserver_preload([*_MAINS.values(), *_STARTED, "tests.command_tree", "tests.running.settled"])


class Program:
    """A service or `kvasir`, forked. It reads and prints files; the rest is as with `subprocess.Popen`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        out: Path,
        err: Path,
        given: Path | None = None,
        env: Mapping[str, str] | None = None,
        open_files: int = 0,
    ) -> None:
        """`open_files`: how many it may have at once; 0: as many as this process."""
        own = {**os.environ, **ONE_THREAD, **(env or {})}
        files = (given or Path(os.devnull), out, err)
        self._process = _FORKS.Process(
            target=_become, args=(name, list(arguments), files, own, open_files), daemon=True
        )
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


def run(
    name: str, *arguments: str, given: str = "", timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        out, err, read = Path(folder, "out"), Path(folder, "err"), Path(folder, "in")
        read.write_text(given)
        program = Program(name, arguments, out=out, err=err, given=read, env=env)
        try:
            code = program.wait(timeout_s)
        finally:
            program.kill()
        return subprocess.CompletedProcess([name, *arguments], code, out.read_text(), err.read_text())


def _become(
    name: str, arguments: list[str], files: tuple[Path, Path, Path], env: dict[str, str], open_files: int
) -> None:
    if open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    for descriptor, path in enumerate(files):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [name, *arguments]
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing gives each process one that is empty
    if name == "kvasir" and sys.platform == "linux":
        start_helper()
    tell_stacks()
    program = importlib.import_module(_MAINS[name])
    if clock := env.get(set_clock.VARIABLE):
        set_clock.follow(program, Path(clock))
    if meminfo := env.get(MEMINFO):
        pressure._MEMINFO = Path(meminfo)
    sys.exit(program.main())


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
