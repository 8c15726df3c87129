"""One Mac of the demo and the self-test: a store and an engine as real processes, in a home of their own."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvasir.cli.running.home import Endpoint, Home
from kvasir.cli.running.logs import last_lines
from kvasir.cli.running.plan import make_credentials
from kvasir.cli.running.processes import EngineProcess, StoreProcess
from kvasir.cli.running.supervisor import Service, ending
from kvasir.cli.talking.turn import TurnResult, follow_turn
from kvasir.clients import InferenceClient, StoreClient
from kvasir.common.v1 import message_pb2
from kvasir.credentials import write_private_text
from kvasir.errors import Unavailable
from kvasir.inference.v1 import inference_pb2

_POLL_S = 0.05
_GRACE_S = 20.0
# On a busy machine the demo must show memory, not time limits. The times are measured and shown.
_PATIENCE = ("--store-budget-ms", "3000", "--commit-wait-s", "20")


class Mac:
    """Starts, kills and stops its two services. Another Mac can pull from it when it `is_shared`, over loopback TCP."""

    def __init__(self, root: Path, *, model: str = "", is_shared: bool = False) -> None:
        self.home = Home(root)
        self.home.make()
        make_credentials(self.home)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        tokens = self.home.tokens
        address = f"127.0.0.1:{_free_port()}" if is_shared else self.home.socket_address("store")
        self._store = StoreProcess(
            data_dir=self.home.store_data,
            listen=address,
            endpoint=Endpoint(address, tokens / "engine.token" if is_shared else None),
            log_file=self.home.logs / "store.log",
            credentials_file=self.home.credentials_file if is_shared else None,
            peers_file=self.home.peers_file,
        )
        self._engine = EngineProcess(
            listen=self.home.socket_address("engine"),
            endpoint=Endpoint(self.home.socket_address("engine")),
            store=self._store.endpoint,
            log_file=self.home.logs / "engine.log",
            state_dir=self.home.engine_state,
            model=model,
            options=_PATIENCE,
        )
        self.store = Endpoint(address, tokens / "client.token" if is_shared else None)
        self.engine = self._engine.endpoint

    def knows_peer(self, name: str, peer: "Mac") -> None:
        """Write a peer into this store's configuration, with the token that the peer gave for it. Before start()."""
        token_file = self.home.tokens / f"{name}.token"
        write_private_text(token_file, (peer.home.tokens / "peer.token").read_text())
        write_private_text(
            self.home.peers_file,
            f'[[peer]]\nname = "{name}"\naddress = "{peer.store.address}"\ntoken_file = "{token_file}"\n',
        )

    def start(self) -> float:
        """Start the store, then the engine; seconds until both were ready. Raises Unavailable with last log lines."""
        began = time.monotonic()
        for service in (self._store.service(), self._engine.service()):
            self._start(service)
        return time.monotonic() - began

    def kill(self) -> list[int]:
        """`kill -9` both, now; returns the exit statuses."""
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
        return [process.wait() for process in self._processes.values()]

    def stop(self) -> None:
        """End both in order, whatever comes between: the engine may still have something to store."""
        with contextlib.ExitStack() as stack:
            for name in ("store", "engine"):
                if (process := self._processes.get(name)) is not None:
                    stack.callback(_end, process)

    def store_client(self) -> StoreClient:
        return StoreClient.connect(self.store.address, token=self.store.token())

    def say(
        self,
        agent: str,
        messages: Sequence[message_pb2.Message],
        *,
        is_new: bool = False,
        max_tokens: int = 60,
        on_started: Callable[[inference_pb2.Started], None] = lambda _started: None,
    ) -> TurnResult:
        """One greedy turn. `messages` follow the remembered ones, or are the whole conversation if `is_new`."""
        with InferenceClient.connect(self.engine.address) as engine:
            if is_new:
                turn = engine.generate(messages=messages, agent_id=agent, max_tokens=max_tokens)
            else:
                turn = engine.generate(append_messages=messages, agent_id=agent, max_tokens=max_tokens)
            with contextlib.closing(turn) as events:
                return follow_turn(events, on_started=on_started)

    def engine_facts(self) -> tuple[inference_pb2.GetCapabilitiesResponse, inference_pb2.Model]:
        with InferenceClient.connect(self.engine.address) as engine:
            return engine.get_capabilities(), engine.get_model()

    def stored_blob_bytes(self) -> int:
        """Bytes of the files below the store's namespaces, as the disk has them."""
        return sum(path.stat().st_size for path in self.home.store_data.glob("namespaces/*/blobs/*/*"))

    def _start(self, service: Service) -> None:
        with service.log_file.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                service.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, umask=0o077
            )
        self._processes[service.name] = process
        end = time.monotonic() + service.ready_within_s
        while not asyncio.run(_is_ready(service)):
            if process.poll() is not None or time.monotonic() > end:
                what = "is not ready" if process.poll() is None else f"ended with {ending(process.returncode)}"
                words = " | ".join(last_lines(service.log_file, since=log_start))
                raise Unavailable(f"{service.name} {what}: {words}", reason="SERVICE_DID_NOT_START")
            time.sleep(_POLL_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:
        process.kill()
        process.wait()


async def _is_ready(service: Service) -> bool:
    return await service.is_ready()


@contextlib.contextmanager
def macs(root: Path) -> Iterator[Callable[..., Mac]]:
    """Makes Macs below `root`; all their processes have ended when the block is left."""
    with contextlib.ExitStack() as made:

        def make(name: str, *, model: str = "", is_shared: bool = False) -> Mac:
            mac = Mac(root / name, model=model, is_shared=is_shared)
            made.callback(mac.stop)
            return mac

        yield make


def _free_port() -> int:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
