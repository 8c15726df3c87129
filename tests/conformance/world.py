"""What the steps run against: a store with TLS and credentials, its engine on a Unix socket, and a peer's store."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvasir.clients import InferenceClient, StoreClient
from kvasir.credentials import write_private_text

from tests.cachestore.service.access.test_listening import certificate, tls_options
from tests.cachestore.service.running import RunningStore, StoreHome, make_credentials, store_home
from tests.running.system_fixtures import ENGINE_SERVICE, Service

PEER = "mac"


@dataclass
class World:
    """Live services, and what a client needs to reach them."""

    # A home directory in which the engine is where `kvasir up` has it.
    home: Path
    # Files that steps write.
    files: Path
    token: str
    ca_file: Path
    engine: Service
    peer: RunningStore
    _store_home: StoreHome
    _store_options: tuple[str, ...]
    _store: RunningStore

    @property
    def env(self) -> dict[str, str]:
        """Of an example."""
        return {"HOME": str(self.home)}

    @property
    def store_address(self) -> str:
        """Of the store, over TLS: another port after each start."""
        return self._store.address

    def kill(self) -> None:
        """Both with kill -9."""
        self.engine.kill()
        self._store.kill()

    def start(self) -> None:
        self._store = self._store_home.start(*self._store_options, listen="127.0.0.1:0")
        self.engine.start()

    def client(self) -> InferenceClient:
        """The harness's own look at the engine."""
        return InferenceClient.connect(self.engine.address, timeout_s=30.0)

    def peer_client(self) -> StoreClient:
        return self.peer.client()


@contextmanager
def world() -> Iterator[World]:
    """Everything started, and at the end killed and removed."""
    with tempfile.TemporaryDirectory(prefix="kvc") as folder:
        root = Path(folder)
        run, files = root / ".kvasir" / "run", root / "files"
        run.mkdir(parents=True, mode=0o700)
        run.chmod(0o700)
        files.mkdir()
        with store_home(root / "peer") as peer_home, store_home(root / "store") as own_home:
            peer = peer_home.start()
            tokens = make_credentials(root / "credentials.toml")
            cert, key = certificate(root, "store")
            write_private_text(root / "peers.toml", f'[[peer]]\nname = "{PEER}"\naddress = "{peer.address}"\n')
            engines = f"unix:{run / 'engines.sock'}"
            options = (
                *("--engine-listen", engines, "--peers-file", str(root / "peers.toml")),
                *("--credentials-file", str(root / "credentials.toml"), *tls_options(cert, key)),
            )
            engine = Service("engine", "inference_svc", ENGINE_SERVICE, run / "engine.sock", root / "engine.log")
            engine.options = [
                *("--store", engines, "--state-dir", str(root / "state")),
                *("--store-budget-ms", "20000", "--commit-wait-s", "30"),
                *("--max-turns", "400"),  # two hundred at once are one caller's
            ]
            store = own_home.start(*options, listen="127.0.0.1:0")
            try:
                engine.start()
                yield World(root, files, tokens["all"], cert, engine, peer, own_home, options, store)
            finally:
                engine.kill()
