"""Agents of a size begin at once while the store is slow, stalled or killed; then both services are killed with -9.

Each agent's replies are held against those of an engine that has nobody else, no store and no faults: the one that
never left. A played model computes them in seconds.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.clients import AioInferenceClient, StoreClient
from kvasir.errors import KvasirError, NotFound
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.sizes.played_house import BYTES_PER_TOKEN, PlayedHouse
from tools.kvasir_tiny.words import Dice

REPLY_TOKENS = 24
_QUESTION = "And what was it that I said before?"
_TURN_S = 900.0
# How long a turn is asked again after a refusal that says to come back.
_PATIENCE_S = {"MEMORY_UNREADABLE": 60.0, "MEMORY_BUSY": _TURN_S}
_SPARE_TOKENS = 640


@dataclass(frozen=True)
class Round:
    """What is played. Faults come when the store has so much of all bytes: a share and what befalls it then."""

    name: str
    agents: int
    tokens: int
    memory_gib: float
    kills_at: Sequence[float] = ()
    stalls_at: Sequence[float] = ()
    stall_s: float = 20.0
    slow_bytes_per_s: float = 0.0  # 0: as fast as it is
    good_within_s: float = 300.0

    @property
    def all_bytes(self) -> int:
        return self.agents * self.tokens * BYTES_PER_TOKEN


@dataclass
class PlayedAgent:
    """One agent, and what it was told."""

    name: str
    text: str
    replies: list[list[int]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    acknowledged: int = 0  # the newest version that a turn reported as durable
    memory_tokens: int = 0


@dataclass
class SizeFindings:
    """What a round saw."""

    name: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)  # of turns' snapshots, as they were reported first
    reasons: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    not_made_good: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)  # of the turns after the kill
    computed_again: list[str] = field(default_factory=list)  # agents whose memory did not come from the store then
    faults: list[str] = field(default_factory=list)
    longest_lag_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        return [*self.errors, *self.not_made_good, *self.lost, *self.different, *self.computed_again]

    def summary(self) -> str:
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        return (
            f"{self.name}: reported at first {dict(self.outcomes)} {dict(self.reasons)}; not made good "
            f"{len(self.not_made_good)}, lost {len(self.lost)}, other replies {len(self.different)}, errors "
            f"{len(self.errors)}; after the kill {dict(self.sources)}; longest lag {self.longest_lag_s:.1f} s; "
            f"{', '.join(self.faults) or 'no faults'}; {times}"
        )


def play(played: Round, directory: Path) -> SizeFindings:
    """The round, in a house of its own below `directory`."""
    findings = SizeFindings(played.name)
    house = PlayedHouse(directory / "house", played.memory_gib)
    agents = [PlayedAgent(f"agent {number}", _text(played, number)) for number in range(played.agents)]
    try:
        house.start()
        asyncio.run(_live(played, house, agents, findings))
        _check_stored(house, agents, findings, time.monotonic() + played.good_within_s)
        with _timed(findings, "killed and back"):
            house.restart_dear()
        _check_kept(house, agents, findings)
        with _timed(findings, "asked again"):
            asyncio.run(_ask_again(house, agents, findings))
    finally:
        house.close()
    with _timed(findings, "reference"):
        _compare(directory, played, agents, findings)
    return findings


async def _live(played: Round, house: PlayedHouse, agents: Sequence[PlayedAgent], findings: SizeFindings) -> None:
    """All agents at once: a long turn, then two short ones."""
    slow = house.slow_store(played.slow_bytes_per_s) if played.slow_bytes_per_s else contextlib.nullcontext()
    with _timed(findings, "turns"), slow:
        async with _client(house) as client:
            befalling = asyncio.create_task(_befall(played, house, findings))
            await asyncio.gather(*(_speak(client, agent, findings) for agent in agents))
            await asyncio.wait_for(befalling, _TURN_S)


async def _speak(client: AioInferenceClient, agent: PlayedAgent, findings: SizeFindings) -> None:
    await _turn(client, agent, findings, messages=[{"role": "user", "content": agent.text}])
    for said in ("Go on.", "And then?"):
        await _turn(client, agent, findings, append_messages=[{"role": "user", "content": said}])


async def _ask_again(house: PlayedHouse, agents: Sequence[PlayedAgent], findings: SizeFindings) -> None:
    async with _client(house) as client:
        for agent in agents:
            started = await _turn(client, agent, findings, append_messages=[{"role": "user", "content": _QUESTION}])
            if started is not None:
                source = pb.CacheSource.Name(started.source).removeprefix("CACHE_SOURCE_")
                findings.sources[source] += 1
                if source != "WARM":
                    findings.computed_again.append(f"{agent.name}: after the kill it came {source}")


async def _turn(
    client: AioInferenceClient, agent: PlayedAgent, findings: SizeFindings, **given: Any
) -> pb.Started | None:
    """One turn, asked again while the engine says to. Another error, or one that stays, is a problem."""
    began_s = time.monotonic()
    while True:
        try:
            return await _asked(client, agent, findings, **given)
        except KvasirError as error:
            if time.monotonic() - began_s > _PATIENCE_S.get(error.reason, -1.0):
                findings.errors.append(f"{agent.name}: {error.reason} {error.message}")
                return None
            findings.outcomes["asked again"] += 1
            await asyncio.sleep(1.0)


async def _asked(client: AioInferenceClient, agent: PlayedAgent, findings: SizeFindings, **given: Any) -> pb.Started:
    last_token_s = ended_s = 0.0
    started, tokens = pb.Started(), []
    sampling = {"max_tokens": REPLY_TOKENS}
    async for event in client.generate(agent_id=agent.name, sampling=sampling, timeout_s=_TURN_S, **given):
        match event.WhichOneof("event"):
            case "started":
                started = event.started
            case "delta":
                tokens += event.delta.token_ids
                last_token_s = time.monotonic()
            case "finished":
                ended_s = time.monotonic()
                _note(agent, event.finished, findings)
    agent.replies.append(tokens)
    agent.prompt_tokens.append(started.prompt_tokens)
    findings.longest_lag_s = max(findings.longest_lag_s, ended_s - last_token_s)
    return started


def _note(agent: PlayedAgent, finished: pb.Finished, findings: SizeFindings) -> None:
    snapshot = finished.snapshot
    findings.outcomes[pb.SnapshotState.Name(snapshot.state).removeprefix("SNAPSHOT_STATE_")] += 1
    if snapshot.reason:
        findings.reasons[snapshot.reason] += 1
    if snapshot.state == pb.SNAPSHOT_STATE_COMMITTED:
        agent.acknowledged = snapshot.version
    agent.memory_tokens = finished.memory_tokens


async def _befall(played: Round, house: PlayedHouse, findings: SizeFindings) -> None:
    """Each fault when the store has its share of the bytes, or when no more come."""
    faults = sorted([(at, "killed") for at in played.kills_at] + [(at, "stalled") for at in played.stalls_at])
    for share, what in faults:
        await _until_stored(house, share * played.all_bytes)
        findings.faults.append(f"{what} at {house.stored_bytes() / played.all_bytes:.0%}")
        if what == "killed":
            await asyncio.to_thread(house.store.kill)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(house.store.start)
        else:
            house.store.freeze()
            await asyncio.sleep(played.stall_s)
            house.store.thaw()


async def _until_stored(house: PlayedHouse, size_bytes: float, quiet_s: float = 20.0) -> None:
    before, grown_s = 0, time.monotonic()
    while (size := await asyncio.to_thread(house.stored_bytes)) < size_bytes and time.monotonic() - grown_s < quiet_s:
        if size > before:
            before, grown_s = size, time.monotonic()
        await asyncio.sleep(0.1)


def _check_stored(house: PlayedHouse, agents: Sequence[PlayedAgent], findings: SizeFindings, give_up_s: float) -> None:
    """Each memory is in the store as its last turn left it: what failed was made good."""
    with _timed(findings, "until stored"), house.store_client() as store:
        missing = list(agents)
        while missing and time.monotonic() < give_up_s:
            missing = [agent for agent in missing if _stored(store, agent)[1] < agent.memory_tokens]
            time.sleep(0.2 if missing else 0.0)
        findings.not_made_good += [
            f"{agent.name}: {agent.memory_tokens} tokens, the store has {_stored(store, agent)}" for agent in missing
        ]


def _check_kept(house: PlayedHouse, agents: Sequence[PlayedAgent], findings: SizeFindings) -> None:
    """No version that a turn reported as durable is gone."""
    with house.store_client() as store:
        for agent in agents:
            if (found := _stored(store, agent))[0] < agent.acknowledged:
                findings.lost.append(f"{agent.name}: version {agent.acknowledged} was acknowledged, found {found}")


def _stored(store: StoreClient, agent: PlayedAgent) -> tuple[int, int]:
    """The newest version in the store, and its tokens."""
    try:
        snapshot, _ = store.get_snapshot(agent.name)
    except NotFound:
        return 0, 0
    return snapshot.version, snapshot.token_count


def _compare(directory: Path, played: Round, agents: Sequence[PlayedAgent], findings: SizeFindings) -> None:
    """The same turns, one agent after another, in an engine where nothing is stored and nothing befalls anyone."""
    alone = PlayedHouse(directory / "alone", 1.1 * (played.tokens + 1024) * BYTES_PER_TOKEN / 2**30, has_store=False)
    try:
        alone.engine.start()
        for agent in agents:
            other = PlayedAgent(agent.name, agent.text)
            asyncio.run(_whole_life(alone, other))
            if (agent.replies, agent.prompt_tokens) != (other.replies, other.prompt_tokens):
                findings.different.append(
                    f"{agent.name}: prompts {agent.prompt_tokens} and {other.prompt_tokens}; replies "
                    f"{[one == two for one, two in zip(agent.replies, other.replies, strict=False)]}"
                )
    finally:
        alone.close()


async def _whole_life(house: PlayedHouse, agent: PlayedAgent) -> None:
    findings = SizeFindings()
    async with _client(house) as client:
        await _speak(client, agent, findings)
    await _ask_again(house, [agent], findings)
    assert findings.errors == []


def _text(played: Round, number: int) -> str:
    """Of so many tokens, about; it differs from other agents' from its first word on."""
    dice = Dice(f"{played.name} {number}")
    words = (played.tokens - _SPARE_TOKENS) // 6
    return " ".join(str(10_000 + dice.below(90_000)) for _ in range(words))


@contextlib.asynccontextmanager
async def _client(house: PlayedHouse) -> AsyncIterator[AioInferenceClient]:
    async with AioInferenceClient.connect(house.engine.address) as client:
        yield client


@contextlib.contextmanager
def _timed(findings: SizeFindings, what: str) -> Iterator[None]:
    began_s = time.monotonic()
    try:
        yield
    finally:
        findings.seconds[what] = time.monotonic() - began_s
