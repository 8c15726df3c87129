"""Moves among three real stores that are cut at random bytes, killed and forced, with a model that judges every write.

The model knows the last manifest that was acknowledged. A store that accepts a write on any other head would be a
second owner, or have lost a version; the model then names the seed and what had happened.

    python -m tests.moves.campaign --moves 2000
"""

import argparse
import copy
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.errors import KvasirError, NotFound

from tests.cachestore.moving.two_stores import Mac, macs
from tests.cachestore.service.running import publish
from tests.synthetic import SMALL, SyntheticAgent

PATIENCE_S = 1.0
_HEALED_WITHIN_S = 60.0
_LARGEST_CUT = 300_000
ACCIDENTS = ("none", "cut", "kill source", "kill destination", "kill both", "two movers", "leave", "claim")


class ViolationError(AssertionError):
    """Two owners, no owner, or a lost version."""


@dataclass
class Line:
    """The model: what is acknowledged, and by whom it may be extended."""

    agent: SyntheticAgent
    acknowledged: str = ""  # manifest of the last acknowledged version
    possible: set[str] = field(default_factory=set)  # of writes without an answer since then
    kept: dict[str, set[str]] = field(default_factory=dict)  # by store: what it acknowledged and must still show

    def accepted(self, store: str, head: str, new: str, agent: SyntheticAgent) -> None:
        if self.acknowledged and head not in {self.acknowledged, *self.possible}:
            raise ViolationError(f"{store} accepted a write on {head[:8]}, and not on {self.acknowledged[:8]}")
        self.agent, self.acknowledged, self.possible = agent, new, set()
        self.kept.setdefault(store, set()).add(new)


class World:
    """Three stores and one agent at a time."""

    def __init__(self, stores: list[Mac], seed: int) -> None:
        self.stores = {mac.name: mac for mac in stores}
        self.random = random.Random(seed)
        self.events: list[str] = []
        self.counts: Counter[str] = Counter()
        self.name = ""
        self.line = Line(SyntheticAgent(SMALL, 0))
        self.owner = ""
        self._guard = threading.Lock()

    def new_agent(self, number: int) -> None:
        self.name, self.events = f"ada{number}", []
        self.line = Line(SyntheticAgent(SMALL, number))
        self.owner = self.random.choice(sorted(self.stores))
        if not self.write(self.owner):
            raise ViolationError(f"{self.owner} does not take a new agent")

    # --- writes ---

    def write(self, name: str) -> bool:
        """One turn at a store; whether it was acknowledged."""
        turn_of = copy.deepcopy(self.line.agent)
        turn = turn_of.turn(self.random.choice((40, 300)))
        head, version = "", 0
        try:
            with self.stores[name].client(timeout_s=5.0) as client:
                try:
                    newest = client.get_agent(self.name).lines[0]
                    head, version = newest.manifest.hash, newest.version
                except NotFound:
                    if self.line.acknowledged:
                        return False  # it would begin another agent of that name
                publish(client, self.name, turn, version)
        except KvasirError as error:
            if error.reason not in ("AGENT_MOVED", "AGENT_MOVING", "HEAD_MOVED", "BLOB_MISSING"):
                self.line.possible.add(turn.manifest_digest.hash)
            return False
        self.line.accepted(name, head, turn.manifest_digest.hash, turn_of)
        return True

    def probe(self) -> list[str]:
        """Try a turn at every store; who took it."""
        names = sorted(self.stores)
        self.random.shuffle(names)
        return [name for name in names if self.write(name)]

    # --- moves ---

    def move(self, accident: str) -> None:
        target = self.random.choice(sorted(set(self.stores) - {self.owner}))
        self.events.append(f"{accident}: {self.owner} to {target}")
        self.counts[accident] += 1
        if accident == "claim" and self._knows(target):
            self.forced_claim(target)
            return
        movers = [threading.Thread(target=self._order, args=(target, accident == "leave"), daemon=True)]
        if accident == "two movers":
            [third] = set(self.stores) - {self.owner, target}
            movers.append(threading.Thread(target=self._order, args=(third, False), daemon=True))
        if accident == "cut":
            cable = self.stores[target].cables[self.owner]
            cable.cut_after_received = cable.received_bytes + self.random.randrange(1, _LARGEST_CUT)
        for mover in movers:
            mover.start()
        victims = {"kill source": [self.owner], "kill destination": [target], "kill both": [self.owner, target]}
        if accident in victims:
            time.sleep(self.random.random() * 0.15)
            for name in victims[accident]:
                self.stores[name].kill()
            for name in victims[accident]:
                self.stores[name].start()
        while any(mover.is_alive() for mover in movers):
            self.probe()
        for mac in self.stores.values():
            for cable in mac.cables.values():
                cable.cut_after_received = None
        self.healed()

    def _order(self, target: str, leaves: bool) -> None:
        try:
            with self.stores[target].client() as client:
                for step in client.moving_agent(self.name, from_peer=self.owner):
                    if leaves or step.HasField("done"):
                        return
        except KvasirError:
            pass  # what became of it is seen by who takes writes

    def forced_claim(self, target: str) -> None:
        """The owner is gone; another that knows the agent claims it; the old owner comes back and is fenced."""
        old = self.owner
        with self.stores[target].client() as client:
            head = client.get_agent(self.name).lines[0].manifest.hash
            self.stores[old].kill()
            client.claim_agent(self.name, force=True)
        # What the old owner acknowledged since is not here: the line goes on from what is.
        self.line.acknowledged, self.line.possible = head, set()
        self.line.agent = SyntheticAgent(SMALL, self.random.randrange(1 << 30))
        if not self.write(target):
            raise ViolationError(f"{target} claimed the agent, and takes no write")
        self.stores[old].start()
        self._until(lambda: self._state(old) == pb.OWNER_STATE_MOVED, f"{old} was not fenced")
        self.healed()
        self._nothing_lost(old)

    # --- judging ---

    def healed(self) -> None:
        """Once all stores are up, and left alone, exactly one of them takes writes, with all that was acknowledged."""
        settled = (pb.OWNER_STATE_UNSPECIFIED, pb.OWNER_STATE_OWNED, pb.OWNER_STATE_MOVED)
        self._until(lambda: all(self._state(name) in settled for name in self.stores), "a move did not end")
        takers = self.probe()
        if len(takers) != 1:
            raise ViolationError(f"{takers or 'no store'} took the write")
        [self.owner] = takers

    def _nothing_lost(self, name: str) -> None:
        with self.stores[name].client() as client:
            shown = {each.manifest.hash for each in client.list_snapshots(self.name, page_size=1000).snapshots}
        if lost := self.line.kept.get(name, set()) - shown:
            raise ViolationError(f"{name} has lost {len(lost)} versions that it acknowledged")

    def _knows(self, name: str) -> bool:
        try:
            with self.stores[name].client() as client:
                return bool(client.get_agent(self.name).lines)
        except NotFound:
            return False

    def _state(self, name: str) -> int:
        try:
            with self.stores[name].client(timeout_s=5.0) as client:
                return int(client.get_agent(self.name).ownership.state)
        except NotFound:
            return pb.OWNER_STATE_MOVED
        except KvasirError:
            return -1

    def _until(self, holds: Callable[[], bool], otherwise: str) -> None:
        give_up = time.monotonic() + _HEALED_WITHIN_S
        while not holds():
            if time.monotonic() > give_up:
                raise ViolationError(otherwise)
            time.sleep(0.05)


def run(root: Path, moves: int, seed: int, accidents: tuple[str, ...] = ACCIDENTS, per_agent: int = 8) -> Counter[str]:
    """So many moves; how many of each kind. Raises ViolationError with the seed and what had happened."""
    with macs(root, "--move-patience-s", str(PATIENCE_S), "--retained-versions", "1000", count=3) as stores:
        for mac in stores:
            mac.start()
        world = World(stores, seed)
        for number in range(moves):
            if number % per_agent == 0:
                world.new_agent(number)
            accident = accidents[number] if moves == len(accidents) else world.random.choice(accidents)
            try:
                world.move(accident)
            except ViolationError as violation:
                raise ViolationError(f"seed {seed}, move {number}: {violation}; {world.events}") from None
        return world.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kv", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        counts = run(Path(root), given.moves, given.seed)
    print(
        f"{given.moves} moves in {time.monotonic() - began:.0f} s, one owner after each: {dict(sorted(counts.items()))}"
    )


if __name__ == "__main__":
    main()
