"""One Mac of the demo and the self-test: a store and an engine as real processes, in a home of their own."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvasir.cli.own_services.own_processes import OwnProcesses
from kvasir.cli.running.home import Endpoint, Home
from kvasir.cli.running.own_credentials import make_credentials
from kvasir.cli.running.plan import plan_of
from kvasir.cli.settings.asked import Asked
from kvasir.cli.talking.turn import TurnResult, follow_turn
from kvasir.clients import InferenceClient, StoreClient
from kvasir.common.v1 import message_pb2
from kvasir.credentials import write_private_text
from kvasir.inference.v1 import inference_pb2
from kvasir.options.up import UpTable
from kvasir.syncing import SHORT_ROOT, Scratch

# On a busy machine the demo must show memory, not time limits. The times are measured and shown.
_PATIENCE = {"store_budget_ms": 3000, "commit_wait_s": 20}


class Mac:
    """Starts, kills and stops its two services. Another Mac can pull from it when it `is_shared`, over loopback TCP."""

    def __init__(self, root: Path, *, model: str = "", is_shared: bool = False) -> None:
        self.home = Home(root)
        self.home.make()
        make_credentials(self.home)
        self._processes = OwnProcesses()
        # Until its store starts: two probes for a free port may find the same one.
        self._held_port = socket.create_server(("127.0.0.1", 0)) if is_shared else None
        listen = f"127.0.0.1:{self._held_port.getsockname()[1]}" if self._held_port is not None else ""
        plan = plan_of(Asked(self.home, UpTable(store_listen=listen)))
        self._store = plan.store
        self._engine = replace(plan.engine, options={**plan.engine.options, "model": model, **_PATIENCE})
        token_file = self.home.tokens / "client.token" if is_shared else None
        self.store = Endpoint(plan.store.endpoint.address, token_file)
        self.engine = plan.engine.endpoint

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
        self._let_port_go()
        for service in (self._store.service(), self._engine.service()):
            self._processes.start([service])
        return time.monotonic() - began

    def kill(self) -> list[int]:
        """`kill -9` both, now; returns the exit statuses."""
        return self._processes.kill(("store", "engine"))

    def stop(self) -> None:
        """End both in order."""
        self._let_port_go()
        self._processes.end()

    def _let_port_go(self) -> None:
        if self._held_port is not None:
            self._held_port.close()

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
        on_progress: Callable[[inference_pb2.PrefillProgress], None] = lambda _progress: None,
    ) -> TurnResult:
        """One greedy turn. `messages` follow the remembered ones, or are the whole conversation if `is_new`."""
        with InferenceClient.connect(self.engine.address) as engine:
            if is_new:
                turn = engine.generate(messages=messages, agent_id=agent, max_tokens=max_tokens)
            else:
                turn = engine.generate(append_messages=messages, agent_id=agent, max_tokens=max_tokens)
            with contextlib.closing(turn) as events:
                return follow_turn(events, on_started=on_started, on_progress=on_progress)

    def engine_facts(self) -> tuple[inference_pb2.GetCapabilitiesResponse, inference_pb2.Model]:
        with InferenceClient.connect(self.engine.address) as engine:
            return engine.get_capabilities(), engine.get_model()

    def stored_blob_bytes(self) -> int:
        """Bytes of the files below the store's namespaces, as the disk has them."""
        return sum(path.stat().st_size for path in self.home.store_data.glob("namespaces/*/blobs/*/*"))


@contextlib.contextmanager
def macs(root: Path | None = None) -> Iterator[Callable[..., Mac]]:
    """Makes Macs below `root`, or in a directory that is removed with the block; by its end all their processes have
    ended."""
    with contextlib.ExitStack() as made:
        if root is None:
            root = made.enter_context(Scratch("kvasir-macs-", SHORT_ROOT))

        def make(name: str, *, model: str = "", is_shared: bool = False) -> Mac:
            mac = Mac(root / name, model=model, is_shared=is_shared)
            made.callback(mac.stop)
            return mac

        yield make
