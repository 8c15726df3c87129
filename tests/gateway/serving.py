"""A gateway before real services, as a process of its own."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
from kvasir.credentials import ADMIN, CLIENT, ENGINE, PEER, Principal, write_credentials

from tests.running.programs import Program
from tests.running.system_fixtures import House

OPERATOR = "olga"  # of a gateway that is given a home
CALLERS = (
    *(Principal(name, "first", frozenset({CLIENT})) for name in ("ada", "bob")),
    Principal("eve", "second", frozenset({CLIENT})),
    Principal("hot", "third", frozenset({CLIENT})),  # a namespace without a store
    Principal("laptop", "first", frozenset({PEER})),  # another Mac's store
    *(Principal(f"engine-{namespace}", namespace, frozenset({ENGINE})) for namespace in ("first", "second")),
    Principal(OPERATOR, "first", frozenset({CLIENT, ADMIN})),
)
MODEL = "kvasir-tiny"


class GatewayProcess:
    """`python -m kvasir_gateway` on a port of its own."""

    def __init__(self, house: House, *options: str, name: str = "gateway") -> None:
        self.port = _free_port()
        self.log_file = house.root / f"{name}.log"
        self._arguments = [
            *("--listen", f"127.0.0.1:{self.port}", "--engine", house.engine.address),
            *("--state-dir", str(house.root / name), *options),
        ]
        self._program: Program | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def pid(self) -> int:
        assert self._program is not None
        return self._program.pid

    def start(self, within_s: float = 60.0, files: int = 0) -> None:
        """`files`: how many it may open, at most; 0: as this process may."""
        log = self.log_file
        self._program = Program("kvasir_gateway", self._arguments, out=log, err=log, open_files=files)
        give_up = time.monotonic() + within_s
        while True:
            assert self._program.poll() is None, self.log
            assert time.monotonic() < give_up, self.log
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{self.url}/healthz")
                return
            time.sleep(0.05)

    def kill(self) -> None:
        if self._program is not None:
            self._program.kill()
            self._program.wait()
            self._program = None

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        assert self._program is not None
        self._program.terminate()
        self._program.wait(30)
        self._program = None


def write_keys(path: Path) -> dict[str, str]:
    """Credentials of two namespaces, and each one's key."""
    numbers = iter(range(100))
    return write_credentials(path, CALLERS, lambda: f"kvasir-test-key-{next(numbers):020d}")


@contextlib.contextmanager
def running_gateway(house: House, *options: str, name: str = "gateway") -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(house, *options, name=name)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
