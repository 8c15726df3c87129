"""Which agents are woken ahead of their turns, which are let go, and how both are counted."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.errors import Cancelled, FailedPrecondition, KvasirError, NotFound

from inference_svc.engine.api import AgentKey
from inference_svc.memory.outcomes import Wake
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.answers import ListedAgent
from inference_svc.turns.asleep.allowance import Allowance
from inference_svc.turns.asleep.returns import SECONDS_OF_DAY, Returns
from inference_svc.turns.asleep.waking import ReturnsFile, WakingAhead, WakingParts
from inference_svc.turns.asleep.woken import WokenAgents
from inference_svc.turns.turn_data import Work

ADA = AgentKey("default", "ada")
NINE_S = 1_800_000_000.0 - 1_800_000_000.0 % SECONDS_OF_DAY + 9 * 3600


def listed(model: str = "ours", *, is_asleep: bool = True, request_id: str = "last") -> ListedAgent:
    return ListedAgent("ada", 7, 100, model, 0, is_asleep=is_asleep, is_free=True, request_id=request_id)


class Around:
    """A machine of one agent, who came at nine on ten days. It is a quarter of an hour before that on the eleventh."""

    def __init__(self, state_dir: Path, share: float = 0.1, memory_bytes: int = 10_000) -> None:
        self.now_s, self.clock_s, self.may_begin = NINE_S + 10 * SECONDS_OF_DAY - 1000, 0.0, True
        self.hot = dict[AgentKey, int]()
        self.listed: ListedAgent | KvasirError = listed()
        self.looked_up, self.refusals, self.made = 0, 0, list[Work]()
        self.failure: KvasirError | None = None
        self.woken, self.stats = WokenAgents(Returns(), lambda: self.now_s), ServiceStats(0.0)
        for day in range(10):
            self.woken.returns.came(ADA, NINE_S + day * SECONDS_OF_DAY + 60 * (day % 3))
        self.woken.returns.served(ADA, "last")
        model = SimpleNamespace(kv_identity_hash="ours")
        memories = SimpleNamespace(sizes=lambda: dict(self.hot))
        engine: Any = SimpleNamespace(model=model, memories=memories, needed_bytes=lambda tokens: 10 * tokens)
        self.connection = SimpleNamespace(features={"handed"})
        store: Any = SimpleNamespace(agents=SimpleNamespace(listed=self._listed), connection=self.connection)
        turns: Any = self
        self.stores = {"default": store}
        parts = WakingParts(turns, engine, self.stores, self.woken, self.stats, lambda: self.clock_s)
        self.waking = WakingAhead(parts, Allowance(share, memory_bytes, self.now_s), state_dir)

    async def _listed(self, _agent_id: str) -> ListedAgent:
        self.looked_up += 1
        if isinstance(self.listed, KvasirError):
            raise self.listed
        return self.listed

    async def refused(self, _agent_id: str) -> ListedAgent:
        self.refusals += 1
        raise FailedPrecondition("no key", reason="NAMESPACE_SEALED")

    async def make(self, key: AgentKey, work: Work) -> None:
        self.made.append(work)
        self.clock_s += 100.0
        if self.failure is not None:
            raise self.failure
        if work is Work.WAKE:
            self.hot[key], self.woken.ready[key] = 1000, self.clock_s
        else:
            del self.hot[key]

    def look(self, after_s: float = 0.0) -> list[Work]:
        self.now_s += after_s
        self.made.clear()
        asyncio.run(self.waking.look())
        return list(self.made)

    @property
    def wakes(self) -> dict[Wake, int]:
        return dict(self.stats.of("default").wakes)

    def comes(self, arrived_s: float, *, is_hot: bool = True, is_asleep: bool = False) -> Wake | None:
        return self.woken.came(ADA, arrived_s, is_hot=is_hot, is_asleep=is_asleep)


@pytest.fixture
def around(tmp_path: Path) -> Around:
    return Around(tmp_path)


def test_an_agent_asleep_is_woken_once_and_its_turn_finds_it(around: Around) -> None:
    assert around.look() == [Work.WAKE]
    assert around.look(60) == [], "it is awake"
    assert around.comes(around.clock_s + 1) is Wake.HIDDEN
    assert around.comes(around.clock_s + 2) is None, "the next turn finds what the first one left"


def test_a_turn_that_came_before_the_wake_was_over_waited_for_it(around: Around) -> None:
    around.look()
    assert around.comes(50.0) is Wake.WAITED
    assert around.comes(200.0, is_hot=False, is_asleep=True) is Wake.WAITED


def test_an_agent_that_does_not_come_sleeps_again(around: Around) -> None:
    around.look()
    assert around.look(60) == []
    assert around.look(4 * 3600) == [Work.SLEEP]
    assert (around.hot, around.wakes) == ({}, {Wake.UNUSED: 1})
    assert around.look(60) == []


def test_an_agent_that_its_owner_woke_stays_awake(around: Around) -> None:
    around.hot[ADA], around.woken.ready[ADA] = 1000, 0.0
    assert around.look(4 * 3600) == []
    assert around.comes(1.0) is Wake.HIDDEN


def test_a_woken_memory_that_lost_its_room_was_woken_in_vain(around: Around) -> None:
    around.look()
    around.hot.clear()
    assert around.look(60) == [], "who took its room would take it again"
    assert around.wakes == {Wake.UNUSED: 1}


def test_nothing_is_woken_beside_a_turn_and_a_wake_that_one_ended_is_made_again(around: Around) -> None:
    around.may_begin = False
    assert around.look() == []
    around.may_begin, around.failure = True, Cancelled("a turn came")
    assert around.look() == [Work.WAKE]
    around.failure = None
    assert around.look() == [Work.WAKE]


@pytest.mark.parametrize("why", ["awake", "another model's", "another engine's", "refused"])
def test_an_agent_that_cannot_be_woken_is_looked_at_again_after_a_while(around: Around, why: str) -> None:
    if why == "refused":
        around.failure = FailedPrecondition("it moved", reason="AGENT_MOVED")
    elif why == "another engine's":
        around.listed = listed(request_id="later")
    elif why == "awake":
        around.listed = listed(is_asleep=False)
    else:
        around.listed = listed(model="other")
    around.look()
    around.look(60)
    assert around.looked_up == 1
    around.look(1800)
    assert around.looked_up == 2


def test_an_agent_that_is_deleted_is_forgotten(around: Around) -> None:
    around.listed = NotFound("no such agent", reason="AGENT_NOT_FOUND")
    assert around.look() == []
    assert around.woken.returns.last_s(ADA) is None


def test_a_namespace_whose_store_refuses_keeps_no_others_agents_asleep(around: Around) -> None:
    eve = AgentKey("sealed", "eve")
    for day in range(10):
        around.woken.returns.came(eve, NINE_S + day * SECONDS_OF_DAY + day % 2)
    around.stores["sealed"] = SimpleNamespace(agents=SimpleNamespace(listed=around.refused))
    assert around.woken.returns.expected(around.now_s) == [eve, ADA]
    assert around.look() == [Work.WAKE]
    assert around.look(50) == []
    assert around.refusals == 1, "it is looked at again after a while"
    around.look(50)
    assert around.refusals == 2


@pytest.mark.parametrize(("share", "memory_bytes"), [(0.0, 10_000), (0.1, 2000)])
def test_no_share_of_the_time_or_too_little_memory_wakes_nobody(
    tmp_path: Path, share: float, memory_bytes: int
) -> None:
    around = Around(tmp_path, share, memory_bytes)
    around.listed = listed()  # 1,010 bytes of 1,000
    assert around.look() == []
    assert around.looked_up == (share > 0), "nobody is looked up without time"
    around.look(5)
    assert around.looked_up == (share > 0), "nor at each look for one that has no room"


def test_time_that_wakes_took_is_spent(tmp_path: Path) -> None:
    around = Around(tmp_path, share=0.02, memory_bytes=10_000)  # 72 s are saved
    around.failure = Cancelled("a turn came")
    assert around.look() == [Work.WAKE]  # takes 100 s
    assert around.look(60) == []
    assert around.look(1400) == [Work.WAKE]


def test_returns_outlive_the_engine_and_a_damaged_file_costs_no_more_than_them(tmp_path: Path) -> None:
    around = Around(tmp_path)
    path = tmp_path / "state" / "returns.json"
    ReturnsFile(path, Returns()).write(around.waking._kept())
    assert path.stat().st_mode & 0o777 == 0o600
    again = Returns()
    ReturnsFile(path, again).read()
    assert again.expected(around.now_s) == [ADA]
    assert again.is_last(ADA, "last")
    assert not again.is_last(ADA, "")
    path.write_text("{")
    damaged = Returns()
    ReturnsFile(path, damaged).read()
    assert damaged.expected(around.now_s) == []


async def test_an_engine_that_wakes_nobody_keeps_no_names(tmp_path: Path) -> None:
    around, path = Around(tmp_path, share=0.0), tmp_path / "returns.json"
    ReturnsFile(path, Returns()).write(Around(tmp_path).waking._kept())
    assert "ada" in path.read_text(), "an earlier start woke agents"
    async with asyncio.timeout(20):
        running = asyncio.create_task(around.waking.run())
        while path.exists():  # noqa: ASYNC110  a file sets no event
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not path.exists()


async def test_a_look_that_fails_is_not_the_last(around: Around, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.turns.asleep.waking.ANSWER_S", 0.01)
    looks = list[int]()

    async def fails() -> None:
        looks.append(1)
        raise RuntimeError("a defect")

    monkeypatch.setattr(around.waking, "look", fails)
    async with asyncio.timeout(20):
        running = asyncio.create_task(around.waking.run())
        while len(looks) < 2:
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()


def test_names_of_a_sealed_namespace_stay_off_the_disk(around: Around, tmp_path: Path) -> None:
    assert "ada" in around.waking._kept()
    around.connection.features = {"handed", "sealed"}
    assert around.waking._kept() == "{}"
    file = ReturnsFile(tmp_path / "returns.json", around.woken.returns)
    file.write("{}")
    (tmp_path / "returns.json").unlink()
    file.write("{}")
    assert not (tmp_path / "returns.json").exists(), "a file that would not change is not written again"
    around.connection.features = set()
    assert around.waking._kept() == "", "what is there stays until the store has answered"


def test_a_turn_that_found_its_memory_elsewhere_found_no_wake(around: Around) -> None:
    around.look()
    assert around.comes(around.clock_s + 1, is_hot=False) is None


def test_agents_that_were_woken_leave_less_room_for_others(tmp_path: Path) -> None:
    around = Around(tmp_path, memory_bytes=4000)
    eve = AgentKey("default", "eve")
    around.hot[eve], around.woken.ready[eve] = 1000, 0.0
    assert around.look() == []
    around.hot[eve] = 900
    assert around.look(61) == [Work.WAKE]
