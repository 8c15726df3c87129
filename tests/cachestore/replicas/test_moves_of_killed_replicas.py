"""Agents move between a store and two replicas while these are killed: each has one owner, and all of its memory."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.credentials import PEER, Principal, write_private_text
from kvasir.errors import KvasirError, NotFound

from tests.cachestore.bucket.test_over_s3 import pytestmark  # noqa: F401
from tests.cachestore.replicas.processes import Replicas
from tests.cachestore.service.running import StoreHome, make_credentials, publish, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent

_SECONDS, _MOST_S, _SETTLED_S = 12.0, 90.0, 40.0
OTHER = {"fleet": "studio", "studio": "fleet"}


@contextlib.contextmanager
def balanced(homes: list[StoreHome]) -> Iterator[str]:
    """An address whose connections go to each of these in turn, where it runs."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        targets = cycle(homes)
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                for home in (next(targets), next(targets)):
                    far = socket.socket(socket.AF_UNIX)
                    with suppress(OSError):
                        far.connect(home.socket.removeprefix("unix:"))
                        for way in ((near, far), (far, near)):
                            threading.Thread(target=copy, args=way, daemon=True).start()
                        break
                else:
                    near.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@dataclass
class Life:
    """An agent that goes to and fro, a turn longer each time. By order of its owner alone: neither gives `move`."""

    name: str
    homes: dict[str, list[StoreHome]]
    agent: SyntheticAgent
    at: str = "fleet"
    moves: int = 0
    last: list[bytes] = field(default_factory=list)  # its memory; two where a commit's answer was lost

    def client(self, at: str) -> StoreClient:
        return StoreClient.connect(random.choice(self.homes[at]).socket, timeout_s=20)

    def run(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            self._turn()
            with self.client(self.at) as client:
                try:
                    client.move_agent(self.name, to_peer=OTHER[self.at])
                    self.moves += 1
                except KvasirError as error:
                    assert error.reason != "PEER_MAY_NOT"  # noqa: PT017  any other one is of a store that was killed
            self.at = self.owner()

    def owner(self) -> str:
        give_up, states = time.monotonic() + _SETTLED_S, dict[str, int]()
        while time.monotonic() < give_up:
            with suppress(KvasirError):
                states = {at: self._state(at) for at in OTHER}
                if sorted(states.values()) in ([0, pb.OWNER_STATE_OWNED], [pb.OWNER_STATE_OWNED, pb.OWNER_STATE_MOVED]):
                    return next(at for at, state in states.items() if state == pb.OWNER_STATE_OWNED)
            time.sleep(0.1)
        raise AssertionError(f"no owner, or two: {states}")

    def _state(self, at: str) -> int:
        with self.client(at) as client:
            try:
                return client.get_agent(self.name).ownership.state or pb.OWNER_STATE_OWNED
            except NotFound:
                return 0

    def _turn(self) -> None:
        turn = self.agent.turn(60)
        while True:
            with suppress(KvasirError), self.client(self.at) as client:
                version = 0
                if self.last:
                    head, manifest_bytes = client.get_snapshot(self.name)
                    version = head.version
                    assert manifest_bytes in self.last
                if not self.last or manifest_bytes != turn.manifest_bytes:
                    self.last = [*self.last[:1], turn.manifest_bytes]
                    publish(client, self.name, turn, version)
                self.last = [turn.manifest_bytes]
                return
            time.sleep(0.2)


def options_of(home: StoreHome, peer: str, token: str, address: str) -> list[str]:
    """Of a store that knows this peer: it gives it nothing but reads."""
    credentials, peers, token_file = (home.root / name for name in ("credentials.toml", "peers.toml", "token"))
    make_credentials(credentials, [Principal(peer, "default", frozenset({PEER}))])
    write_private_text(token_file, token)
    text = f'[[peer]]\nname = "{peer}"\naddress = "{address}"\ntoken_file = "{token_file}"\ntakes = ["default=move"]\n'
    write_private_text(peers, text)
    return ["--credentials-file", str(credentials), "--peers-file", str(peers), "--move-patience-s", "2"]


def test_agents_that_move_while_replicas_are_killed_have_one_owner_and_all_of_their_memory(
    replicas: Replicas, tmp_path: Path
) -> None:
    with ExitStack() as ends:
        studio = ends.enter_context(store_home(tmp_path / "studio"))
        homes = {"fleet": [replicas.home(name) for name in "ab"], "studio": [studio]}
        where = {at: ends.enter_context(balanced(some)) for at, some in homes.items()}
        for home in (*homes["fleet"], studio):
            home.root.mkdir(parents=True, exist_ok=True)
        token = f"token-0-{'x' * 32}"  # as `make_credentials` makes the first one
        studio.start(*options_of(studio, "fleet", token, where["fleet"]))
        fleet = {home.root.name: options_of(home, "studio", token, where["studio"]) for home in homes["fleet"]}
        running = {name: replicas.start(name, *options) for name, options in fleet.items()}
        lives = [Life(f"ada {number}", homes, SyntheticAgent(SMALL, number)) for number in (1, 2, 3)]
        for life in lives:
            life._turn()
        began = time.monotonic()

        def goes_on() -> bool:
            """On a busy machine longer, until each has moved."""
            seconds = time.monotonic() - began
            return seconds < _SECONDS or (seconds < _MOST_S and any(life.moves <= 2 for life in lives))

        with ThreadPoolExecutor(len(lives)) as threads:
            ended = [threads.submit(life.run, goes_on) for life in lives]
            while goes_on():
                time.sleep(random.uniform(0.2, 2))
                name = random.choice("ab")
                running[name].kill()
                running[name] = replicas.start(name, *fleet[name])
            for each in ended:
                each.result()
        for life in lives:
            life._turn()
            assert life.moves > 2
        logs = [started.log for home in (*homes["fleet"], studio) for started in home.started]
        assert "Traceback" not in "".join(logs)
