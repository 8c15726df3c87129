"""Two stores as real processes that know each other as peers, for tests of moves; cables between them may be cut."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.credentials import PEER, Principal, write_private_text
from kvasir.errors import KvasirError

from tests.cachestore.service.proxy import Proxy, proxy_to
from tests.cachestore.service.running import RunningStore, StoreHome, make_credentials, store_home
from tests.cli.running import in_process
from tests.made_models.synthetic import SyntheticAgent
from tests.running.set_clock import VARIABLE, set_ahead

NAMES = ("laptop", "studio", "attic")


@dataclass
class Mac:
    """One store, and the cables by which it reaches the others."""

    name: str
    home: StoreHome
    options: tuple[str, ...]
    cables: dict[str, Proxy] = field(default_factory=dict)
    running: RunningStore | None = None

    def start(self) -> RunningStore:
        self.running = self.home.start(*self.options, env={VARIABLE: str(self.clock)})
        return self.running

    def set_clock(self, ahead_s: float) -> None:
        """Set the clock that people set."""
        set_ahead(self.clock, ahead_s)

    @property
    def clock(self) -> Path:
        return self.home.root / "clock"

    def kill(self) -> None:
        assert self.running is not None
        self.running.kill()

    def client(self, timeout_s: float = 30.0) -> StoreClient:
        return StoreClient.connect(self.home.socket, timeout_s=timeout_s, retry_reads=False)


@contextmanager
def macs(root: Path, *options: str, count: int = 2) -> Iterator[list[Mac]]:
    """So many stores, each the peer of every other with all rights, over a proxy for each direction."""
    names = NAMES[:count]
    with ExitStack() as exits:
        homes = {name: exits.enter_context(store_home(root / name)) for name in names}
        made = []
        for name in names:
            homes[name].root.mkdir(parents=True, exist_ok=True)
            others = [other for other in names if other != name]
            credentials = homes[name].root / "credentials.toml"
            tokens = make_credentials(credentials, [Principal(o, "default", frozenset({PEER})) for o in others])
            for other, token in tokens.items():
                write_private_text(root / f"token-of-{other}-at-{name}", token)
            cables = {other: exits.enter_context(proxy_to(homes[other].socket)) for other in others}
            lines = [
                f'[[peer]]\nname = "{other}"\naddress = "{cables[other].address}"\n'
                f'token_file = "{root / f"token-of-{name}-at-{other}"}"\n'
                'gives = ["default=claim"]\ntakes = ["default=move"]\n'
                for other in others
            ]
            write_private_text(homes[name].root / "peers.toml", "".join(lines))
            given = ("--credentials-file", str(credentials), "--peers-file", str(homes[name].root / "peers.toml"))
            made.append(Mac(name, homes[name], (*given, *options), cables))
        yield made


def refused(call: Callable[[], object], reason: str, owner: str | None = None) -> KvasirError:
    with pytest.raises(KvasirError) as caught:
        call()
    assert caught.value.reason == reason, caught.value
    if owner is not None:
        assert caught.value.metadata["owner"] == owner
    return caught.value


def state(client: StoreClient, name: str) -> tuple[int, str]:
    known = client.get_agent(name).ownership
    return known.state, known.peer


def as_peer(mac: Mac, other: str) -> StoreClient:
    token = (mac.home.root.parent / f"token-of-{other}-at-{mac.name}").read_text().strip()
    return StoreClient.connect(mac.home.socket, token=token)


def run(mac: Mac, *words: str, code: int = 0) -> Any:
    done = in_process("--address", mac.home.socket, "agents", *words, "--json")
    assert done.code == code, (done.out, done.err)
    return json.loads(done.out or done.err)


def publish_under(client: StoreClient, name: str, agent: SyntheticAgent, lease: pb.LeaseToken) -> None:
    turn = agent.turn(300)
    client.put_blobs(turn.new_blobs)
    client.put_manifest(turn.manifest_bytes)
    client.commit(name, turn.manifest_digest, 1, lease=lease)
