"""Real services for system tests: a cache store and an engine as processes on Unix sockets, started, killed and frozen.

Anything that wants the whole house (recovery, hostile input, the command line) begins with `House`.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvasir.address import accepts
from kvasir.clients import InferenceClient, StoreClient

from inference_svc.model import kvasir_tiny
from tests.running.programs import Program
from tests.running.waiting import eventually

ROOT = Path(__file__).parents[2]
STORE_SERVICE = "kvasir.cachestore.v1.CacheStoreService"
ENGINE_SERVICE = "kvasir.inference.v1.InferenceService"


class Service:
    """One service as a process. A start waits until its health says that it serves."""

    def __init__(self, name: str, module: str, health_name: str, socket: Path, log_file: Path) -> None:
        self.name = name
        self.socket = socket
        self.address = f"unix:{socket}"
        self.log_file = log_file
        self.options: list[str] = []
        self.program = module
        self._health_name = health_name
        self._process: Program | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def start(self, within_s: float = 60.0) -> None:
        arguments = ["serve", "--listen", self.address, *self.options]
        self._process = Program(self.program, arguments, out=self.log_file, err=self.log_file)
        give_up = time.monotonic() + within_s
        while not self._is_ready():
            assert self._process.poll() is None, f"{self.name} ended with {self._process.returncode}:\n{self.log}"
            assert time.monotonic() < give_up, f"{self.name} is not ready after {within_s} s:\n{self.log}"
            time.sleep(0.03)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self, within_s: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(within_s)
        self._process = None
        return code

    def freeze(self) -> None:
        """The process lives and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _is_ready(self) -> bool:
        if not accepts(self.address):  # a channel for each look would cost a hundred times as much
            return False
        with grpc.insecure_channel(self.address) as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=self._health_name)
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class House:
    """A store and its engine in one directory, and clients of both."""

    def __init__(self, root: Path, model: Path | None = None, *, engine_options: Sequence[str] = ()) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root = root
        self.model = model or kvasir_tiny.path()
        # Sockets lie in a directory of their own: pytest's are too deep for a socket's path.
        self._sockets = tempfile.TemporaryDirectory(prefix="kv")
        sockets = Path(self._sockets.name)
        self.data_dir = root / "data"
        self.store = Service("store", "cachestore_svc", STORE_SERVICE, sockets / "s", root / "store.log")
        engines = f"unix:{sockets / 'i'}"  # as `kvasir up` has it
        self.store.options = ["--data-dir", str(self.data_dir), "--engine-listen", engines]
        self.engine = Service("engine", "inference_svc", ENGINE_SERVICE, sockets / "e", root / "engine.log")
        self.engine.options = [
            *("--store", engines, "--model", str(self.model), "--state-dir", str(root / "state")),
            # A machine that runs other tests besides is slow, not wrong: who tests the budget gives its own.
            *("--store-budget-ms", "5000", "--commit-wait-s", "10"),
            *engine_options,
        ]

    def start(self) -> None:
        self.store.start()
        self.engine.start()

    def restart(self) -> None:
        """Both killed with -9, and both back."""
        self.kill()
        self.start()

    def kill(self) -> None:
        self.engine.kill()
        self.store.kill()

    def repair(self) -> None:
        """Start what does not run, and wait until the engine has found its store."""
        for service in (self.store, self.engine):
            if not service.is_running:
                service.start()
        with self.client() as client:
            eventually(lambda: client.get_stats().store_is_reachable, 20)

    def client(self, token: str | None = None) -> InferenceClient:
        return InferenceClient.connect(self.engine.address, token=token)

    def store_client(self, token: str | None = None) -> StoreClient:
        return StoreClient.connect(self.store.address, token=token)

    def close(self) -> None:
        for service in (self.engine, self.store):
            with contextlib.suppress(AssertionError, ProcessLookupError):
                service.thaw()
        self.kill()
        self._sockets.cleanup()


@contextlib.contextmanager
def running_house(root: Path, model: Path | None = None, *, engine_options: Sequence[str] = ()) -> Iterator[House]:
    """A house that is up, and gone afterwards whatever happens."""
    house = House(root, model, engine_options=engine_options)
    try:
        house.start()
        yield house
    finally:
        house.close()
