"""Moves among three real stores that are cut, killed, parted, forced and set to other days; a model judges every write.

The model knows the last manifest that was acknowledged. A store that accepts a write on any other head would be a
second owner, or have lost a version; the model then names the seed and what had happened.

    python -m tests.campaigns.moves.campaign --moves 2000

Leases and a source's patience are counted on steady clocks, which nobody can set. The clock that people set dates
versions, and says which unnamed blobs have rested long enough to be removed: it jumps here while agents move.
"""

import argparse
import contextlib
import copy
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.errors import KvasirError, NotFound

from tests.cachestore.moving.two_stores import Mac, macs
from tests.cachestore.service.running import publish
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.programs import Program

PATIENCE_S = 1.0
_HEALED_WITHIN_S, _ANSWER_S = 180.0, 20.0  # on a machine that is busy with other things
_LARGEST_CUT = 300_000
_TOLD_EVERY = 50
_LOGS, _LOG_CHARACTERS = 2, 8_000
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2 << 30
_LONGEST_PARTING_S = 2.5
_DAY_S = 86_400.0
_AHEAD_S = (-20 * 365 * _DAY_S, -30 * _DAY_S, -3600.0, 0.0, 3600.0, 30 * _DAY_S, 50 * 365 * _DAY_S)
ACCIDENTS = (
    "none",
    "cut",
    "kill source",
    "kill destination",
    "kill both",
    "kill mover",
    "two movers",
    "leave",
    "partition",
    "clocks",
    "claim",
    "claim in a partition",
)


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
        self.arrived = 0  # of the moves that nothing disturbed
        self.name = ""
        self.line = Line(SyntheticAgent(SMALL, 0))
        self.owner = ""
        self.refusals: dict[str, str] = {}  # of each store's last write that it did not take

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
            with self.stores[name].client(timeout_s=_ANSWER_S) as client:
                try:
                    newest = client.get_agent(self.name).lines[0]
                    head, version = newest.manifest.hash, newest.version
                except NotFound:
                    if self.line.acknowledged:
                        return False  # it would begin another agent of that name
                publish(client, self.name, turn, version)
        except KvasirError as error:
            self.refusals[name] = f"{type(error).__name__} {error.reason}"
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
        if accident.startswith("claim") and self._knows(target):
            self.forced_claim(target, is_parted=accident == "claim in a partition")
            return
        movers = self._movers(accident, target)
        if accident == "cut":
            cable = self.stores[target].cables[self.owner]
            cable.cut_after_received = cable.received_bytes + self.random.randrange(1, _LARGEST_CUT)
        for mover in movers:
            mover.start()
        self._disturb(accident, target)
        while any(mover.is_alive() for mover in movers):
            self.probe()
        for mac in self.stores.values():
            for cable in mac.cables.values():
                cable.cut_after_received = None
        self.healed()
        self.arrived += accident == "none" and self.owner == target

    def _movers(self, accident: str, target: str) -> list[threading.Thread]:
        """Who is at work while stores are probed: those that order moves, and the network's parting."""
        orders = [(self._order_and_die if accident == "kill mover" else self._order, (target, accident == "leave"))]
        if accident == "two movers":
            [third] = set(self.stores) - {self.owner, target}
            orders.append((self._order, (third, False)))
        movers = [threading.Thread(target=order, args=given, daemon=True) for order, given in orders]
        if accident == "partition":
            movers.append(threading.Thread(target=self._part_for_a_while, args=(self.owner, target), daemon=True))
        return movers

    def _disturb(self, accident: str, target: str) -> None:
        if accident == "clocks":
            self.set_clocks()
            time.sleep(self.random.random() * 0.15)
            self.set_clocks()
        victims = {"kill source": [self.owner], "kill destination": [target], "kill both": [self.owner, target]}
        if accident in victims:
            time.sleep(self.random.random() * 0.15)
            for name in victims[accident]:
                self.stores[name].kill()
            for name in victims[accident]:
                self.stores[name].start()

    def _order(self, target: str, leaves: bool) -> None:
        try:
            with self.stores[target].client() as client:
                for step in client.moving_agent(self.name, from_peer=self.owner):
                    if leaves or step.HasField("done"):
                        return
        except KvasirError:
            pass  # what became of it is seen by who takes writes

    def _order_and_die(self, target: str, _: bool) -> None:
        socket, out = self.stores[target].home.socket, self.stores[target].home.root / "mover"
        words = ["--address", socket, "agents", "move", self.name, "--from", self.owner, "--json"]
        mover = Program("kvasir", words, out=out, err=out)
        with contextlib.suppress(subprocess.TimeoutExpired):
            mover.wait(0.3 + self.random.random())
        mover.kill()
        mover.wait()

    def _part_for_a_while(self, one: str, other: str) -> None:
        time.sleep(self.random.random() * 0.15)
        with self._parted(one, other):
            time.sleep(self.random.random() * _LONGEST_PARTING_S)

    @contextlib.contextmanager
    def _parted(self, one: str, *others: str) -> Iterator[None]:
        cables = [self.stores[a].cables[b] for other in others for a, b in ((one, other), (other, one))]
        for cable in cables:
            cable.part()
        try:
            yield
        finally:
            for cable in cables:
                cable.heal()

    def set_clocks(self) -> None:
        """Set some stores' clocks to other times, as far away as people and networks set them."""
        for name in self.random.sample(sorted(self.stores), self.random.randint(1, len(self.stores))):
            self.stores[name].set_clock(self.random.choice(_AHEAD_S) * self.random.random())

    def forced_claim(self, target: str, *, is_parted: bool) -> None:
        """The owner is gone; another that knows the agent claims it; the old owner comes back and is fenced.
        Parted, the old owner lives and goes on: what it acknowledges then it keeps, to be read."""
        old = self.owner
        with contextlib.ExitStack() as parting, self.stores[target].client() as client:
            head = client.get_agent(self.name).lines[0].manifest.hash
            if is_parted:
                parting.enter_context(self._parted(old, *(name for name in self.stores if name != old)))
            else:
                self.stores[old].kill()
            client.claim_agent(self.name, force=True)
            if is_parted and not self.write(old):
                raise ViolationError(f"{old} cannot know of the claim, and takes no write")
            self._go_on_from(head, target)
        if not is_parted:
            self.stores[old].start()
        self._until(lambda: self._state(old) == pb.OWNER_STATE_MOVED, f"{old} was not fenced")
        self.healed()
        self._nothing_lost(old)

    def _go_on_from(self, head: str, target: str) -> None:
        # What the old owner acknowledged since is not here: the line goes on from what is.
        self.line.acknowledged, self.line.possible = head, set()
        self.line.agent = SyntheticAgent(SMALL, self.random.randrange(1 << 30))
        if not self.write(target):
            raise ViolationError(f"{target} claimed the agent, and takes no write")

    # --- judging ---

    def healed(self) -> None:
        """Once all stores are up, and left alone, exactly one of them takes writes, with all that was acknowledged."""
        settled = (pb.OWNER_STATE_UNSPECIFIED, pb.OWNER_STATE_OWNED, pb.OWNER_STATE_MOVED)
        self._until(lambda: all(self._state(name) in settled for name in self.stores), "a move did not end")
        takers: list[str] = []
        self._until(lambda: bool(takers.extend(self.probe()) or takers), "no store takes writes")
        if len(takers) != 1:
            raise ViolationError(f"{takers} took the write")
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
            with self.stores[name].client(timeout_s=_ANSWER_S) as client:
                return int(client.get_agent(self.name).ownership.state)
        except NotFound:
            return pb.OWNER_STATE_MOVED
        except KvasirError:
            return -1

    def _until(self, holds: Callable[[], bool], otherwise: str) -> None:
        give_up = time.monotonic() + _HEALED_WITHIN_S
        while not holds():
            if time.monotonic() > give_up:
                raise ViolationError(f"{otherwise}: {self._facts()}")
            time.sleep(0.05)

    def _facts(self) -> dict[str, str]:
        """What each store says of the agent's owner, and why it took no write."""
        facts = {}
        for name in self.stores:
            try:
                with self.stores[name].client() as client:
                    known = client.get_agent(self.name).ownership
                facts[name] = f"{known.state} {known.generation:x} {known.peer} ({self.refusals.get(name, '')})"
            except KvasirError as error:
                facts[name] = f"{type(error).__name__} {error.reason}"
        return facts

    def tell_logs(self) -> None:
        """Print what the stores last logged; what they held is removed with this campaign."""
        for name, mac in self.stores.items():
            for number, started in list(enumerate(mac.home.started))[-_LOGS:]:
                print(f"--- {name}, start {number}\n{started.log[-_LOG_CHARACTERS:]}")


def run(root: Path, moves: int, seed: int, accidents: tuple[str, ...] = ACCIDENTS, per_agent: int = 8) -> Counter[str]:
    """So many moves; how many of each kind. Raises ViolationError with the seed and what had happened."""
    options = ("--move-patience-s", str(PATIENCE_S), "--retained-versions", "1000", "--gc-interval-s", "2")
    with macs(root, *options, count=3) as stores:
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
                world.tell_logs()
                raise ViolationError(f"seed {seed}, move {number}: {violation}; {world.events}") from None
            if (number + 1) % _TOLD_EVERY == 0:
                print(f"seed {seed}: {number + 1} moves", flush=True)
        # Of stores that never move an agent each has one owner, too.
        if 2 * world.arrived < world.counts["none"]:
            raise ViolationError(f"seed {seed}: {world.arrived} of {world.counts['none']} undisturbed moves arrived")
        return world.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    is_roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    with tempfile.TemporaryDirectory(prefix="kv", dir=_MEMORY if is_roomy else None) as root:
        counts = run(Path(root), given.moves, given.seed)
    print(
        f"{given.moves} moves in {time.monotonic() - began:.0f} s, one owner after each: {dict(sorted(counts.items()))}"
    )


if __name__ == "__main__":
    main()
