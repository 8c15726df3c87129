"""What the steps of a client over HTTP run against: a store and an engine with credentials, and their gateway."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvasir.clients import InferenceClient
from kvasir.credentials import write_private_text

from tests.gateway.conftest import Front, running_front


@dataclass(frozen=True)
class HttpWorld:
    """Live services, and two keys of different namespaces."""

    home: Path
    front: Front

    @property
    def url(self) -> str:
        return self.front.gateway.url

    @property
    def key(self) -> str:
        return self.front.keys["ada"]

    @property
    def key_of_other_namespace(self) -> str:
        return self.front.keys["eve"]

    @property
    def env(self) -> dict[str, str]:
        """Of an example."""
        return {"HOME": str(self.home), "KVASIR_URL": self.url}

    def kill(self) -> None:
        """Engine and store with kill -9; the gateway stays."""
        self.front.house.kill()

    def start(self) -> None:
        self.front.house.start()

    def client(self) -> InferenceClient:
        """The harness's own look at the engine."""
        return self.front.house.client(self.key)


@contextmanager
def http_world() -> Iterator[HttpWorld]:
    """Everything started, and at the end killed and removed."""
    with tempfile.TemporaryDirectory(prefix="kvc") as folder:
        home = Path(folder)
        with running_front(home / "house", engine_options=("--max-turns", "400")) as front:
            tokens = home / ".kvasir" / "tokens"
            tokens.mkdir(parents=True, mode=0o700)
            write_private_text(tokens / "client.token", f"{front.keys['ada']}\n")
            yield HttpWorld(home, front)
