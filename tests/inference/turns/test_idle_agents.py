"""Which agents are put to sleep because nobody uses them, and that no caller waits for one that falls asleep."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.errors import Cancelled, FailedPrecondition, KvasirError
from kvasir.waits import never_ahead

from inference_svc.engine.api import AgentKey
from inference_svc.memory.store.answers import ListedAgent, listed_agent
from inference_svc.turns.asleep import idle_agents as module
from inference_svc.turns.asleep.idle_agents import IdleAgents, may_sleep
from inference_svc.turns.asleep.own_turns import OwnTurns
from inference_svc.turns.turn_data import Work
from tests.inference.turns.test_replanning import SETTINGS, Surroundings, request, service

NOW_MS = 1_800_000_000_000
DAY_S = 86_400.0


def agent(**changes: Any) -> pb.Agent:
    """One of two versions' lines, that nobody used for two days."""
    manifest = pb.SnapshotVersion(version=3).manifest
    manifest.size_bytes = 100
    newest = pb.SnapshotVersion(version=3, kv_identity_hash="ours", total_bytes=5000, manifest=manifest)
    older = pb.SnapshotVersion(version=2, kv_identity_hash="another", total_bytes=5000, manifest=manifest)
    used = Timestamp()
    used.FromMilliseconds(NOW_MS - round(2000 * DAY_S))
    made = pb.Agent(agent_id="ada", used_at=used, lines=[older, newest])
    for name, value in changes.items():
        setattr(made.lines[1] if name in ("version", "total_bytes", "kv_identity_hash") else made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "after_s", "expected"),
    [
        ({}, DAY_S, True),
        ({}, 3 * DAY_S, False),
        ({"is_pinned": True}, DAY_S, False),
        ({"kv_identity_hash": "another"}, DAY_S, False),
        ({"version": 1}, DAY_S, False),  # another model's version is the newest
        ({"total_bytes": 100}, DAY_S, False),  # asleep
    ],
)
def test_an_agent_may_sleep_if_its_newest_version_is_ours_awake_and_long_unused(
    changes: dict[str, Any], after_s: float, expected: bool
) -> None:
    assert may_sleep(listed_agent(agent(**changes)), "ours", NOW_MS, after_s) is expected


def test_an_agent_that_moved_stays_as_it_is() -> None:
    moved = agent()
    moved.ownership.state = pb.OWNER_STATE_MOVED
    for each in (moved, pb.Agent(agent_id="new")):
        assert not may_sleep(listed_agent(each), "ours", NOW_MS, DAY_S)


class Turns:
    """Turns that fall asleep until they are cancelled, or are refused."""

    def __init__(self, refusal: KvasirError | None = None, caller: str = "somebody") -> None:
        self.begun: list[str] = []
        self.callers = 0
        self._refusal = refusal
        self._caller = caller

    @property
    def is_idle(self) -> bool:
        return not self.callers

    def under_way(self) -> list[list[Any]]:
        names = [*self.begun[-1:], *[self._caller] * self.callers]
        return [[SimpleNamespace(request=SimpleNamespace(key=AgentKey("default", name)))] for name in names]

    def begin(self, request: Any, *, is_own: bool) -> Any:
        assert is_own
        self.begun.append(request.agent_id)
        over = asyncio.Event()
        return SimpleNamespace(events=lambda: self._events(over), cancel=over.set)

    async def _events(self, over: asyncio.Event) -> AsyncIterator[object]:
        if self._refusal is not None:
            raise self._refusal
        self.callers = 1  # one comes
        await over.wait()
        raise Cancelled("the turn was cancelled")
        yield


def idle_agents(turns: Turns, now_ms: Callable[[], int] = lambda: NOW_MS) -> tuple[IdleAgents, Any]:
    async def page(_token: str) -> tuple[list[ListedAgent], str]:
        return [listed_agent(agent())], ""

    store = SimpleNamespace(agents=SimpleNamespace(page=page))
    made: Any = turns
    return IdleAgents(OwnTurns(made, lambda _: False), {}, "ours", DAY_S, now_ms), store


@pytest.mark.parametrize("caller", ["somebody", "ada"])
def test_a_turn_that_comes_ends_the_sleep_that_it_would_wait_for(caller: str) -> None:
    turns = Turns(caller=caller)
    idle, store = idle_agents(turns)
    asyncio.run(asyncio.wait_for(idle._look("default", store), 20))
    asyncio.run(idle._look("default", store))
    assert turns.begun == ["ada"], "while a turn runs, none falls asleep"
    turns.callers = 0
    asyncio.run(asyncio.wait_for(idle._look("default", store), 20))
    assert turns.begun == ["ada", "ada"], "it may sleep later"


def test_a_version_that_cannot_sleep_is_tried_once() -> None:
    turns = Turns(FailedPrecondition("it cannot", reason="CANNOT_SLEEP"))
    idle, store = idle_agents(turns)
    for _ in range(3):
        asyncio.run(idle._look("default", store))
    assert turns.begun == ["ada"]


def test_a_clock_that_is_set_ahead_puts_nobody_to_sleep_before_the_time_has_passed() -> None:
    """Older versions would go for good."""
    began_ms = NOW_MS - round(2000 * DAY_S)  # as the agent was used
    clocks = {"unix_ms": began_ms, "uptime_s": 0.0}
    turns = Turns(FailedPrecondition("it cannot", reason="CANNOT_SLEEP"))
    idle, store = idle_agents(turns, never_ahead(lambda: int(clocks["unix_ms"]), lambda: clocks["uptime_s"]))
    clocks.update(unix_ms=began_ms + round(365_000 * DAY_S), uptime_s=60.0)
    asyncio.run(idle._look("default", store))
    assert turns.begun == []
    clocks.update(uptime_s=DAY_S + 1)
    asyncio.run(idle._look("default", store))
    assert turns.begun == ["ada"]


@pytest.mark.parametrize(("caller", "is_ended"), [("somebody", True), ("ada", False)])
async def test_a_wake_goes_on_only_beside_turns_that_wait_for_it(caller: str, is_ended: bool) -> None:
    turns: Any = Turns(caller=caller)
    with pytest.raises(Cancelled if is_ended else TimeoutError):
        async with asyncio.timeout(0.5):
            await OwnTurns(turns, lambda _: False).make(AgentKey("default", "ada"), Work.WAKE)


@pytest.mark.parametrize("work", [Work.WAKE, Work.SLEEP])
@pytest.mark.parametrize("embeds", [False, True])
async def test_an_own_turn_ends_where_another_engine_waits_for_the_agent_or_texts_are_embedded(
    work: Work, embeds: bool
) -> None:
    turns: Any = Turns(caller="ada")
    ada = AgentKey("default", "ada")
    with pytest.raises(Cancelled):
        async with asyncio.timeout(20):
            await OwnTurns(turns, lambda key: key == ada and not embeds, lambda: embeds).make(ada, work)


async def test_agents_fall_asleep_after_an_error_that_nobody_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(FailedPrecondition("it cannot", reason="CANNOT_SLEEP"))
    idle, store = idle_agents(turns)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(idle, "_after_s", 0.01)

    async def fails(_token: str) -> None:
        raise RuntimeError("a defect")

    idle._stores = {"broken": SimpleNamespace(agents=SimpleNamespace(page=fails)), "default": store}  # type: ignore[dict-item]
    async with asyncio.timeout(20):
        running = asyncio.create_task(idle.run())
        while not turns.begun:
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()


async def test_the_engines_own_turns_take_no_callers_place() -> None:
    turns = service(Surroundings([], losses=0))
    own = asyncio.create_task(OwnTurns(turns, lambda _: False).make(AgentKey("default", "ada"), Work.SLEEP))
    await asyncio.sleep(0)
    assert not turns.is_idle
    for number in range(SETTINGS.admission.max_turns_per_caller):
        turns.begin(replace(request(None), agent_id=f"{number}"))
    own.cancel()
