"""Outages, hangs and corruptions of the store while turns run: none changes a token or costs more than the budget.

Each trial is an agent of its own: an undisturbed turn, then one during which something happens between the engine and
its store, or has happened to the stored bytes. Its tokens are held against the same turn alone, with as many tokens
reused; its lost time is what the engine itself counts as time for restoring (`Timings.restore_s`), so that a busy
machine does not decide.
"""

import asyncio
import contextlib
import statistics
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from kvasir.clients import AioInferenceClient, Reply, StoreClient
from kvasir.errors import KvasirError
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.waits import SOON_S

from tests.campaigns.faults.faulty_link import Fault, FaultyLink
from tests.campaigns.hammer import canaries
from tests.campaigns.hammer.canaries import Canaries
from tests.campaigns.hammer.records import Alone, TurnRecord, difference
from tests.campaigns.hammer.reference import Reference
from tests.running.system_fixtures import House
from tools.kvasir_tiny.words import Dice

BUDGET_S = 0.25
_TIMES_OF_APPEND = SOON_S / BUDGET_S  # it is refused without its agent's memory
KINDS = ("outage", "blip", "hang", "delay", "slow", "truncate", "flip", "disk")
# Room for about two memories: what was not used last is read from the store.
_OPTIONS = ("--store-budget-ms", "250", "--commit-wait-s", "0.5", "--memory-gib", "0.0018")
_AHEAD = 3
_FIRST_TOKENS, _LATER_TOKENS = 12, 8
_GIVE_UP_S = 30.0

Message = dict[str, str]


@dataclass
class Trial:
    """One agent, and what is to happen to it."""

    name: str
    messages: list[Message]
    fault: Fault
    is_hot: bool
    record: TurnRecord
    undisturbed: "asyncio.Task[Alone]"
    is_append: bool = False


@dataclass
class Findings:
    """What the trials saw."""

    trials: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    usual_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    unlike_undisturbed: int = 0

    def summary(self) -> str:
        lost = sorted(self.lost_s)
        return (
            f"{self.trials} faults met; time lost: median {statistics.median(lost):.3f} s, 99 % "
            f"{lost[int(0.99 * (len(lost) - 1))]:.3f} s, most {lost[-1]:.3f} s (an undisturbed restore takes "
            f"{statistics.median(self.usual_s):.3f} s); replies other than undisturbed: {self.unlike_undisturbed}; "
            f"{dict(sorted(self.counts.items()))}"
        )


class Campaign:
    """Trials, one after another, against one house."""

    def __init__(self, house: House, link: FaultyLink, reference: Reference, seed: int) -> None:
        self._house = house
        self._link = link
        self._reference = reference
        self._dice = Dice(f"faults {seed}")
        self._canaries = Canaries(f"faults {seed}")
        self._client = AioInferenceClient.connect(house.engine.address)
        self._prepared: list[Trial] = []
        self._number = 0
        self.findings = Findings()

    async def run(self, trials: int) -> Findings:
        async with self._client:
            while self.findings.trials < trials:
                while len(self._prepared) < _AHEAD:
                    self._prepared.append(await self._prepare())
                trial = self._prepared.pop(-1 if self._dice.chance(0.2) else 0)
                await self._try(trial)
        return self.findings

    async def _prepare(self) -> Trial:
        """An agent with a memory in the store, made while all was well."""
        dice, self._number = self._dice, self._number + 1
        name = f"agent {self._number}"
        fact = self._canaries.new_fact(name, dice.below(canaries.FACTS_PER_AGENT))
        said = f"{fact.told} {canaries.filler(dice, dice.pick([1, 6, 22, 40]))}"
        messages = [{"role": "user", "content": f"{name}. {said}"}]
        record = TurnRecord(name, self._number, messages=messages, sampling={"max_tokens": _FIRST_TOKENS})
        reply = await self._client.reply(agent_id=name, messages=messages, sampling=record.sampling)
        note(record, reply)
        if problem := difference(record, await self._reference.alone(record)):
            self.findings.problems.append(f"{name}, undisturbed: {problem}")
        if reply.finished.snapshot.state != pb.SNAPSHOT_STATE_COMMITTED:
            await self._until_stored(name)
        later = [
            *messages,
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": fact.question},
        ]
        record = TurnRecord(name, self._number, messages=later, sampling={"max_tokens": _LATER_TOKENS})
        record.is_remembered = False
        # What the turn says when all of the memory is there.
        undisturbed = asyncio.ensure_future(self._reference.alone(record))
        return Trial(name, later, self._draw_fault(), dice.chance(0.2), record, undisturbed)  # type: ignore[arg-type]

    def _draw_fault(self) -> Fault:
        dice = self._dice
        kind = KINDS[self._number % len(KINDS)]
        most = dice.pick([1, 400, 4_000, 60_000, 600_000])
        # What is damaged on its way to the store is the transport's to notice; a store keeps what it is told to keep.
        is_answer = kind == "flip" or dice.chance(0.7)
        return Fault(kind, is_answer, dice.below(most if is_answer else most // 4 + 1), 0.05 + 0.4 * dice.random())

    async def _try(self, trial: Trial) -> None:
        fault = trial.fault
        if fault.kind == "disk":
            self._damage(trial.name)
        else:
            self._link.arm(fault)
        reply = await self._ask(trial)
        was_met = self._link.was_met or fault.kind == "disk"
        self._link.disarm()
        if reply is not None:
            await self._judge(trial, reply, was_met)
        self.findings.trials += was_met
        self.findings.counts[fault.kind if was_met else "not met"] += 1
        self._reference.forget(trial.name)
        await self._until_reachable()

    async def _ask(self, trial: Trial) -> Reply | None:
        """The disturbed turn. Only what is appended to a memory that cannot be read may be refused."""
        is_append = trial.is_append = self._dice.chance(0.15)
        given = {"append_messages": trial.messages[-1:]} if is_append else {"messages": trial.messages}
        try:
            return await self._client.reply(
                agent_id=trial.name,
                sampling=trial.record.sampling,
                timeout_s=_GIVE_UP_S,
                **given,  # type: ignore[arg-type]
            )
        except KvasirError as error:
            if not is_append or error.reason not in ("MEMORY_UNREADABLE", "MEMORY_DAMAGED"):
                self.findings.problems.append(f"{trial.name} {trial.fault}: {error.reason} {error.message}")
            self.findings.counts["append refused"] += 1
        return None

    async def _judge(self, trial: Trial, reply: Reply, was_met: bool) -> None:
        record, findings = trial.record, self.findings
        note(record, reply)
        alone = await self._reference.alone(record)
        if problem := difference(record, alone):
            findings.problems.append(f"{trial.name} {trial.fault} {record.source} {record.miss}: {problem}")
        findings.unlike_undisturbed += record.heard != (await trial.undisturbed).tokens
        if foreign := self._canaries.foreign(trial.name, record.text):
            findings.problems.append(f"{trial.name} {trial.fault}: words of others: {foreign}")
        restore_s = reply.finished.timings.restore.ToTimedelta().total_seconds()
        share_s = restore_s / _TIMES_OF_APPEND if trial.is_append and restore_s > BUDGET_S else restore_s
        (findings.lost_s if was_met else findings.usual_s).append(share_s)
        findings.counts[f"{record.source} {record.miss}".strip()] += 1

    def _damage(self, name: str) -> None:
        with StoreClient.connect(self._house.store.address) as store:
            _, data = store.get_snapshot(name)
        parsed = manifests.parse(data)
        blob = self._dice.pick([*parsed.blocks, parsed.tail]).hash
        paths = list(self._house.data_dir.rglob(blob))
        if not paths:
            return
        how, content = self._dice.pick(["missing", "truncated", "flipped"]), bytearray(paths[0].read_bytes())
        paths[0].chmod(0o600)
        content[self._dice.below(len(content))] ^= 1 << self._dice.below(8)
        if how == "missing":
            paths[0].unlink()
        else:
            paths[0].write_bytes(bytes(content[: len(content) // 2] if how == "truncated" else content))

    async def _until_stored(self, name: str) -> None:
        with StoreClient.connect(self._house.store.address) as store:
            for _ in range(400):
                if any(agent.agent_id == name for agent in store.list_agents(name_prefix=name).agents):
                    return
                await asyncio.sleep(0.05)
        raise AssertionError(f"{name} was never stored")

    async def _until_reachable(self) -> None:
        for _ in range(int(_GIVE_UP_S / 0.02)):
            if (await self._client.get_stats()).store_is_reachable:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the engine never found its store again")


def note(record: TurnRecord, reply: Reply) -> None:
    """What came of a turn."""
    started = reply.started
    record.heard, record.text = list(reply.token_ids), reply.text
    record.prompt_tokens, record.cached_tokens = started.prompt_tokens, started.cached_tokens
    record.source = pb.CacheSource.Name(started.source).removeprefix("CACHE_SOURCE_")
    record.miss = pb.MissReason.Name(started.miss).removeprefix("MISS_REASON_") if started.miss else ""


@contextlib.asynccontextmanager
async def open_campaign(directory: Path, seed: int) -> AsyncIterator[Campaign]:
    """A house whose engine reaches its store through a faulty link, and a reference."""
    house = House(directory / "house", engine_options=_OPTIONS)
    store_socket = Path(house.store.address.removeprefix("unix:"))
    link = FaultyLink(store_socket.with_name("f"), store_socket)
    house.engine.options += ["--store", link.address]
    reference = None
    try:
        starting = asyncio.create_task(asyncio.to_thread(house.start))
        reference = await Reference.start(directory / "reference.log")
        await starting
        yield Campaign(house, link, reference, seed)
    finally:
        link.close()
        house.close()
        if reference is not None:
            await reference.close()
