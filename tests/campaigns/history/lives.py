"""Random lives of agents over real engines and one real store; each turn is judged.

Which memory a turn extended is read from its prompt's tokens, and what was stored from the manifest: by the words of
users in both.
"""

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2 as store_pb
from kvasir.clients import AioInferenceClient, AioStoreClient, Reply
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb
from tokenizers import Tokenizer

from inference_svc.model import kvasir_tiny
from tests.campaigns.faults.faulty_link import Fault, FaultyLink
from tests.campaigns.history.ledger import Ledger
from tests.campaigns.history.oracle import History, Said
from tests.campaigns.history.record import AnyStore, Record
from tools.kvasir_tiny.words import Dice

WORD = "door"
_STEPS = 12
_GIVE_UP_S = 12.0
# After a refusal, and twice as long after the next: where all is away or busy, callers must not take the processors
# from what starts, nor hold all places of a store with tries that come to nothing.
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
# Longer than a lease, and shorter: both must be safe.
_FAULTS_S = (0.2, 0.6, 1.5, 3.0, 7.0)
_KINDS = ("hang", "outage", "blip", "delay", "slow")


@dataclass
class Findings:
    lives: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def summary(self) -> str:
        return f"{self.lives} lives; {dict(sorted(self.counts.items()))}; {len(self.problems)} problems"


class Life:
    """One agent, from its first turn to its last."""

    def __init__(self, world: "Lives", name: str) -> None:
        self.world = world
        self.name = name
        self.dice = Dice(f"life {world.seed} {name}")
        self.history = History()
        self.number = 0
        self.engine = self.dice.below(len(world.clients))
        self.trace: list[str] = []
        self.deletes = False  # its act that began last
        self.pause_s = _PAUSE_S

    async def live(self) -> None:
        for _ in range(_STEPS):
            act = self.dice.pick(
                [self.turn] * 9
                + [self.roll_back] * 4
                + [self.delete, self.fork_back, self.import_back]
                + [self.cancelled_turn] * 2
                + [self.two_at_once] * 2
            )
            noted = len(self.trace)
            self.deletes = act in (self.delete, self.fork_back, self.import_back)
            await act()
            if any(" refused " in each and "NOT_FOUND" not in each for each in self.trace[noted:]):
                await asyncio.sleep(self.pause_s * self.dice.random())
                self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)
            else:
                self.pause_s = _PAUSE_S
            if self.history.problems or self.world.is_over():
                return

    # --- turns ---

    async def turn(self) -> None:
        acknowledged, gone = self.history.acknowledged, set(self.history.taken_back)
        said, reply = await self._say(acknowledged)
        if said is None:
            return
        self.history.judge(said, acknowledged, gone)
        if said.version is not None:
            await self._note_stored(said, reply)

    async def _say(self, acknowledged: int | None) -> tuple[Said | None, Reply]:
        """One turn with one more message; None when it was refused."""
        number, message = self._next_message()
        is_whole = acknowledged is None and self.dice.chance(0.7)
        given = {"messages": message} if is_whole else {"append_messages": message}
        reply = Reply()
        # Until its caller hears of it, a turn may have been stored behind what was acknowledged.
        self.history.begun(Said(number, None if is_whole else acknowledged, None, is_whole))
        client, began, stored = self._client(), time.monotonic(), None
        try:
            sampling = {"max_tokens": 1, "temperature": 0}
            asked = {"sampling": sampling, "return_prompt_token_ids": True, "timeout_s": self.world.give_up_s}
            reply = await client.reply(agent_id=self.name, **asked, **given)  # type: ignore[arg-type]
            if reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED:
                stored = reply.finished.snapshot
        except errors.KvasirError as error:
            self._note(f"turn {number} refused {error.reason}")
            if error.reason == "NO_MESSAGES":
                self.history.judge_empty(acknowledged)
            elif error.reason not in _MAY_BE_REFUSED and not (client in self.world.doors and _BROKEN in error.message):
                self.history.problems.append(f"turn {number}: {type(error).__name__} {error.reason}: {error.message}")
            return None, reply
        finally:  # what was not said to be stored may be stored at any time
            self.world.record.wrote(self.name, began, "engine", stored)
        self.history.unheard.pop(number, None)
        parent = self._parent(number, _turns_of(reply.started.prompt_token_ids))
        snapshot = reply.finished.snapshot
        is_stored = snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
        if snapshot.state == pb.SNAPSHOT_STATE_NONE:
            self.history.taken_back.add(number)
        said = Said(number, parent, snapshot.version if is_stored else None, is_whole)
        source = pb.CacheSource.Name(reply.started.source).removeprefix("CACHE_SOURCE_")
        state = pb.SnapshotState.Name(snapshot.state).removeprefix("SNAPSHOT_STATE_")
        self._note(f"turn {number} {source} after {parent} {state} {snapshot.version}")
        return said, reply

    def _next_message(self) -> tuple[int, list[dict[str, str]]]:
        self.number += 1
        words = [f"m{self.number}.", *[WORD] * (3 + self.dice.below(60))]
        return self.number, [{"role": "user", "content": " ".join(words)}]

    def _client(self) -> AioInferenceClient:
        """Mostly of the engine that has the agent's memory hot."""
        if self.dice.chance(0.15):
            self.engine = (self.engine + 1 + self.dice.below(len(self.world.clients) - 1)) % len(self.world.clients)
        return self.world.clients[self.engine]

    def _parent(self, number: int, turns: set[int]) -> int | None:
        """The turn whose memory this one extends, by the turns whose words its prompt has."""
        if number not in turns:
            self.history.problems.append(f"turn {number}: its prompt has the words of {turns}")
        parent = self._newest_of(turns - {number})
        if (known := self.history.knowledge(parent)) != turns - {number}:
            self.history.problems.append(f"turn {number}: its prompt has the words of {turns}, {parent} knew {known}")
        return parent

    async def cancelled_turn(self) -> None:
        number, message = self._next_message()
        client = self._client()
        self.history.begun(Said(number, self.history.acknowledged))
        self.world.record.wrote(self.name, time.monotonic(), "engine")  # it may be stored
        turn = client.generate(
            agent_id=self.name, append_messages=message, sampling={"max_tokens": 40}, timeout_s=self.world.give_up_s
        )
        with contextlib.suppress(errors.KvasirError):
            async with contextlib.aclosing(turn) as events:
                async for event in events:
                    if event.HasField("delta"):
                        break
        self._note(f"turn {number} cancelled")

    async def two_at_once(self) -> None:
        """A turn, and while it runs a rollback: which came first is told by their versions."""
        if self.history.acknowledged is None:
            return
        acknowledged, gone = self.history.acknowledged, set(self.history.taken_back)
        saying = asyncio.create_task(self._say(acknowledged))
        await asyncio.sleep(self.dice.random() * 0.1)
        try:
            rolled = await self._rolled_back()
        except (_UnclearError, errors.KvasirError):
            with contextlib.suppress(_UnclearError):
                await saying  # what is wrong with the turn counts all the same
            raise
        said, reply = await saying
        if rolled is None:
            if said is not None:
                self.history.judge(said, acknowledged, gone)
                if said.version is not None:
                    await self._note_stored(said, reply)
            return
        version, to = rolled
        if said is None:
            self.history.went_back(to, but=self.number)  # nobody heard which of the two came first
            return
        self.history.judge_beside(said, acknowledged, gone, to)
        # It was served after the rollback if what it extends is no older, and is then not among what was taken back.
        is_after = reply.started.parent_version >= version
        self.history.went_back(to, but=said.number if is_after else None)
        if said.version is not None and said.version > version:
            await self._note_stored(said, reply)

    async def _note_stored(self, said: Said, reply: Reply) -> None:
        """What its caller was told is there, and is what the turn knew."""
        assert said.version is not None
        self.history.stored(said.number)
        told = reply.finished.snapshot.manifest.hash
        self.history.problems += self.world.ledger.acknowledged(self.name, said.version, told)
        with contextlib.suppress(errors.NotFound, *_AWAY):
            snapshot, data = await self.world.store.get_snapshot(self.name, version=said.version)
            stored = _markers(data)
            if snapshot.manifest.hash != told:
                self.history.problems.append(f"turn {said.number}: version {said.version} is another memory")
            elif not said.is_whole and stored != self.history.knowledge(said.number):
                self.history.problems.append(
                    f"turn {said.number}: stored {stored}, expected {self.history.knowledge(said.number)}"
                )

    # --- what takes back ---

    async def roll_back(self) -> None:
        if (rolled := await self._rolled_back()) is not None:
            self.history.went_back(rolled[1])

    async def _rolled_back(self) -> tuple[int, int | None] | None:
        """The new version, and the turn that it is the memory of."""
        if (old := await self._some_version()) is None:
            return None
        try:
            made = await self.world.store.rollback_agent(self.name, old.version)
        except errors.KvasirError as error:
            self._refused("rollback", error, deletes=False)
            return None
        if made.manifest.hash != old.manifest.hash:
            self.history.problems.append(f"a rollback to version {old.version} brought back another memory")
        self._acknowledged(made)
        to = await self._turn_of(made.version)
        self._note(f"rollback to {old.version} made {made.version}, turn {to}")
        return made.version, to

    def _acknowledged(self, made: store_pb.SnapshotVersion) -> None:
        self.history.problems += self.world.ledger.acknowledged(self.name, made.version, made.manifest.hash)

    async def _some_version(self) -> store_pb.SnapshotVersion | None:
        """One that the agent has; None if it has none, or the store is away."""
        try:
            page = await self.world.store.list_snapshots(self.name)
        except errors.KvasirError as error:
            self._note(f"list refused {error.reason}")
            self._alarm(error)
            return None
        return self.dice.pick(list(page.snapshots))

    async def delete(self) -> None:
        try:
            await self.world.store.delete_agent(self.name)
        except errors.KvasirError as error:
            self._refused("delete", error)
            return
        self._note("deleted")
        self.world.ledger.gone(self.name)
        self.history.went_back(None)

    async def fork_back(self) -> None:
        """Fork aside, delete, and fork back: the same name, the same number, the same memory."""
        aside = f"{self.name} aside {self.number}"
        try:
            await self.world.store.fork_agent(self.name, aside)
            await self.world.store.delete_agent(self.name)
        except errors.KvasirError as error:
            self._refused("fork aside", error)
            return
        self.world.ledger.gone(self.name)
        self.history.went_back(None)
        try:
            await self.world.store.fork_agent(aside, self.name)
        except errors.KvasirError as error:
            self._refused("fork back", error)
            return
        to = await self._turn_of(1)
        self._note(f"forked back, turn {to}")
        self.history.went_back(to)

    async def import_back(self) -> None:
        if (old := await self._some_version()) is None:
            return
        try:
            pieces = [piece async for piece in self.world.store.export_agent(self.name, version=old.version)]
            made = await self.world.store.import_agent(self.name, pieces, replace=True)
        except errors.KvasirError as error:
            self._refused("import", error)
            return
        self._acknowledged(made)
        to = await self._turn_of(made.version)
        self._note(f"imported {old.version} as {made.version}, turn {to}")
        self.history.went_back(to)

    async def _turn_of(self, version: int) -> int | None:
        """The last turn whose words a version holds."""
        try:
            _, data = await self.world.store.get_snapshot(self.name, version=version)
        except _AWAY:
            raise _UnclearError("what was brought back cannot be read") from None
        return self._newest_of(_markers(data))

    def _newest_of(self, turns: Iterable[int]) -> int | None:
        """The last of a memory's turns; whoever heard nothing of those before learns what they extend."""
        in_order = sorted(turns)
        for parent, turn in pairwise([None, *in_order]):
            self.history.found(turn, parent)
        return in_order[-1] if in_order else None

    def _refused(self, what: str, error: errors.KvasirError, *, deletes: bool = True) -> None:
        self._note(f"{what} refused {error.reason}")
        self._alarm(error)
        if isinstance(error, _AWAY):
            if deletes:
                self.world.ledger.gone(self.name)
            raise _UnclearError(f"nobody knows whether the {what} took effect")

    def _alarm(self, error: errors.KvasirError) -> None:
        if error.reason in _ALARMS:
            self.history.problems.append(f"{error.reason}: {error.message}")

    def _note(self, what: str) -> None:
        self.trace.append(what)
        self.world.findings.counts[" ".join(word for word in what.split() if not word.isdigit())] += 1


_USERS = re.compile(r"<\|im_start\|>user\s+m(\d+)\.")
_BROKEN = "Stream removed"  # gRPC's words where the proxy before an engine ended a call
# The store itself sees that it lost something.
_ALARMS = {"INDEX_BEHIND", "INDEX_MISSING", "INDEX_DAMAGED", "DATA_LOSS", "BLOB_DAMAGED"}
# A call that ended so may have taken effect, or may yet.
_AWAY = (errors.DeadlineExceeded, errors.Unavailable)
# Refusals that an outage or another's hold on the agent may bring; the caller tries again.
_MAY_BE_REFUSED = {
    *("MEMORY_UNREADABLE", "AGENT_HELD_ELSEWHERE", "UNAVAILABLE", "HEAD_MOVED", "CONFLICT", "DEADLINE_EXCEEDED"),
    *("MEMORY_DAMAGED", "CANCELLED"),
}


class _UnclearError(Exception):
    """Nobody knows whether an act took effect: the life says no more."""


def _markers(manifest: bytes) -> set[int]:
    """Numbers of the turns whose words a stored memory holds."""
    users = [message for message in manifests.parse(manifest).messages if message.role == "user"]
    return {int(message.content.split(".")[0].removeprefix("m")) for message in users}


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(kvasir_tiny.path() / "tokenizer.json"))


def _turns_of(prompt: Sequence[int]) -> set[int]:
    """The same of a prompt's tokens."""
    return {int(number) for number in _USERS.findall(_tokenizer().decode(prompt, skip_special_tokens=False))}


class Lives:
    """Lives, many at a time, while links fail."""

    def __init__(
        self,
        clients: Sequence[AioInferenceClient],
        stores: Sequence[AioStoreClient],
        seed: int,
        links: Sequence[FaultyLink] = (),
        doors: Sequence[AioInferenceClient] = (),
        give_up_s: float = _GIVE_UP_S,
    ) -> None:
        """`stores`: of one memory. `links` fail at random; a caller that breaks other things passes none. `doors`:
        clients of a proxy.
        `give_up_s`: how long an agent waits for a turn and its commit.
        """
        self.clients, self.seed, self.doors, self.give_up_s = clients, seed, doors, give_up_s
        self.findings, self.ledger, self.record = Findings(), Ledger(), Record()
        self.store = AnyStore(stores, self.record, seed)
        self.is_over: Callable[[], bool] = lambda: False
        self._links = links
        self._dice = Dice(f"lives {seed}")

    async def run(
        self, lives: int, at_once: int, within_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> Findings:
        """So many lives, or until the time is over; or something else, which ends lives too."""
        self.is_over = is_over
        give_up = time.monotonic() + within_s
        failing = [asyncio.create_task(self._fail(link)) for link in self._links]
        numbers = iter(range(lives))

        async def worker() -> None:
            for number in numbers:
                if time.monotonic() > give_up or is_over():
                    return
                await self._live(f"agent {number}")

        await asyncio.gather(*(worker() for _ in range(at_once)))
        for task in failing:
            task.cancel()
        await asyncio.gather(*failing, return_exceptions=True)
        return self.findings

    async def look_for_all(self) -> None:
        """Note what was acknowledged and is not there, and what has no order. Nothing fails meanwhile."""
        self.findings.problems += await self.ledger.lost(self.store)
        self.judge_order()

    def judge_order(self) -> None:
        self.findings.problems += self.record.problems()
        self.findings.counts["histories not judged"] = self.record.undecided

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.store.close()

    async def _live(self, name: str) -> None:
        life = Life(self, name)
        try:
            await life.live()
            self.findings.lives += 1
        except (_UnclearError, *_AWAY):
            self.findings.counts["lives that ended unclear"] += 1
            await asyncio.sleep(life.pause_s * life.dice.random())
        except asyncio.CancelledError:
            if life.deletes:  # perhaps
                self.ledger.gone(name)
            raise
        except errors.KvasirError as error:  # it asks only for what was acknowledged
            life.history.problems.append(f"{error.reason}: {error.message}")
        finally:
            trace = "; ".join(life.trace)
            self.findings.problems += [f"{name}: {problem} [{trace}]" for problem in life.history.problems]

    async def _fail(self, link: FaultyLink) -> None:
        """Fault after fault, with peace in between."""
        while True:
            await asyncio.sleep(0.3 + 3 * self._dice.random())
            kind = self._dice.pick(list(_KINDS))
            link.arm(Fault(kind, self._dice.chance(0.7), self._dice.below(4000), self._dice.random()))
            await asyncio.sleep(self._dice.pick(list(_FAULTS_S)))
            link.disarm()
            self.findings.counts[f"link: {kind}"] += 1
