"""A whole fleet under kills, cuts, freezes and set clocks loses nothing that it acknowledged, and mixes up nothing."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.fleet import campaign, nemesis
from tests.campaigns.fleet.campaign import Size, play
from tests.campaigns.fleet.kept import Round
from tests.campaigns.fleet.nemesis import Nemesis, Weather
from tests.campaigns.fleet.targets import Peace, Target, slowed
from tests.campaigns.history.ledger import Ledger
from tests.campaigns.history.linear import Span
from tests.campaigns.history.lives import Lives
from tests.running.waiting import eventually
from tools.fleet import servers
from tools.kvasir_tiny.words import Dice


@pytest.mark.long(40)
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(servers.missing("nginx")), reason=servers.missing("nginx"))
def test_a_few_faults_of_a_fleet_lose_no_commit_and_no_turn_knows_what_was_taken_back() -> None:
    done = asyncio.run(play(Size(faults=20, agents=6, engines=2, within_s=60), seed=2))
    print(done)
    assert done.problems == []
    assert done.fault_count > 6
    assert done.commits > 10
    assert done.leases > 3
    assert done.acts > 50


def test_a_resumed_campaign_adds_rounds_of_new_seeds_until_its_faults_are_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def played(size: Size, seed: int, keep: Callable[[Round], None], _: Path) -> None:
        keep(Round(seed, {"kill": size.faults}, 7, 3, 2, 60.0, ["lost"] if seed == 3 else []))

    monkeypatch.setattr(campaign, "play", played)
    kept = tmp_path / "new" / "kept.json"
    words = ["--round", "4", "--kept", str(kept)]
    assert campaign.main([*words, "--faults", "6", "--resume"]) == 0
    assert campaign.main([*words, "--faults", "11", "--resume"]) == 1
    rounds = json.loads(kept.read_text())["rounds"]
    assert [(each["seed"], each["faults"]["kill"]) for each in rounds] == [(1, 4), (2, 2), (3, 4), (4, 1)]
    assert campaign.main([*words, "--faults", "2", "--seed", "9"]) == 0
    assert [each["seed"] for each in json.loads(kept.read_text())["rounds"]] == [9]


def test_a_terminated_campaign_ends_its_round_at_once_keeps_it_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rare(_Target):
        peace_s = 3600.0

    async def played(size: Size, seed: int, keep: Callable[[Round], None], _: Path) -> None:
        nemesis = Nemesis([_Target("a"), Rare("rare")], seed, lambda: 1_000_000)
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(nemesis.run(size.faults, time.monotonic() + 3600, size.is_ended), 60)
        keep(Round(seed, dict(nemesis.counts), 7, 3, 2, 60.0, []))

    monkeypatch.setattr(campaign, "play", played)
    before = signal.getsignal(signal.SIGTERM)
    words = ["--faults", "1000000000", "--round", "1000000000", "--kept", str(tmp_path / "kept.json")]
    assert campaign.main(words) == 0
    [kept] = json.loads((tmp_path / "kept.json").read_text())["rounds"]
    assert kept["faults"]["a"] > 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_longest_time_without_a_commit_counts_also_where_it_has_not_ended() -> None:
    ledger = Ledger(last_at=time.monotonic() - 20)
    ledger.acknowledged("agent", 1, "hash")
    assert 20 <= ledger.longest_stall_s < 50
    ledger.looked_at(ledger.last_at + 19)
    assert ledger.longest_stall_s < 50
    ledger.looked_at(ledger.last_at + 90)
    assert ledger.longest_stall_s == 90


@pytest.mark.parametrize("answers", [True, False])
def test_a_round_is_kept_before_its_fleet_ends_though_a_caller_and_a_store_never_answer(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_AFTER_S", "_ENDS_S", "_QUIET_S"):
        monkeypatch.setattr(campaign, name, 0.1)
    is_up = True
    kept = list[tuple[Round, bool]]()

    class NeverOver(Lives):
        async def run(self, *_: Any) -> Any:
            await asyncio.Event().wait()

    class Store:
        async def list_agents(self) -> None:
            if not answers:
                await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def opened(_root: Path, _size: Size, seed: int, _peace: Peace) -> AsyncIterator[Any]:
        nonlocal is_up
        lives = NeverOver((), (), seed)
        lives.record.spans += [Span("line", owner, 0.0, 60.0) for owner in ("a", "b")]
        lives.store = Store()  # type: ignore[assignment]
        yield lives, None, [_Target("a")]
        is_up = False

    async def hold(*_: object) -> None:
        """Nobody holds a lease."""

    monkeypatch.setattr(campaign, "_opened", opened)
    monkeypatch.setattr(campaign, "hold", hold)
    size = Size(faults=10_000, within_s=0.1)
    asyncio.run(asyncio.wait_for(play(size, 1, lambda done: kept.append((done, is_up))), 30))
    [(done, was_up)] = kept
    assert was_up
    assert len(done.problems) == 1 + (not answers)
    assert "two owners" in done.problems[-1]


@pytest.mark.long(3)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_slowed_process_has_a_small_part_of_each_moment_and_then_all_of_it() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:

        def used_s() -> float:
            words = Path(f"/proc/{busy.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return int(words[11]) / os.sysconf("SC_CLK_TCK")

        before = used_s()
        assert asyncio.run(slowed(busy.pid, 1.0))
        assert used_s() - before < 0.5
        eventually(lambda: used_s() - before >= 0.7)
    finally:
        busy.kill()
        busy.wait()
    assert not asyncio.run(slowed(0, 1.0))


class _Target(Target):
    """Every third of its faults meets nothing."""

    peace_s = 0.01

    def __init__(self, name: str) -> None:
        self.name, self.faults, self.thrown, self.looks = name, list[str](), list[float](), 0

    async def strike(self, dice: Dice) -> str:
        self.thrown.append(dice.random())
        return "" if len(self.thrown) % 3 == 0 else self.name

    async def keep_up(self) -> None:
        self.looks += 1


def test_faults_of_several_targets_are_in_the_air_at_once_and_a_seed_gives_each_the_same() -> None:
    class Slow(_Target):
        async def strike(self, dice: Dice) -> str:
            self.thrown.append(dice.random())
            await asyncio.sleep(0.3)
            return self.name

    def thrown(seed: int) -> list[list[float]]:
        targets = [_Target("a"), _Target("b"), Slow("slow")]
        breaking = Nemesis(targets, seed, lambda: 12)
        asyncio.run(breaking.run(12, until_s=float("inf")))
        assert breaking.faults >= 12
        assert breaking.counts["a"] == len(targets[0].thrown) - len(targets[0].thrown) // 3
        assert breaking.counts["slow"] < breaking.counts["a"]
        return [each.thrown[:3] for each in targets[:2]]

    assert thrown(1) == thrown(1) != thrown(2)


def test_between_storms_of_twenty_seconds_agents_have_ten_and_the_time_to_commit() -> None:
    is_enough = True
    weather = Weather(lambda: is_enough, Peace())
    assert [weather.is_calm(now_s) for now_s in (100.0, 119.9, 120.0, 129.9, 130.0, 149.9)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    is_enough = False
    assert [weather.is_calm(now_s) for now_s in (150.0, 159.9, 160.0, 500.0)] == [True] * 4
    is_enough = True
    assert [weather.is_calm(now_s) for now_s in (501.0, 520.0, 521.0)] == [False, False, True]


def test_a_fleet_in_which_nothing_is_committed_any_more_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited in a calm for twenty hours, and found nothing."""
    for name, value in {"_STORM_S": 0.05, "_CALM_S": 0.05, "_STUCK_S": 0.3, "_LOOK_S": 0.01}.items():
        monkeypatch.setattr(nemesis, name, value)
    left = list[None]()
    breaking = Nemesis([_Target("a"), _Target("b")], 1, lambda: 0, failed=lambda: left.append(None))
    asyncio.run(asyncio.wait_for(breaking.run(10_000, until_s=time.monotonic() + 60), 30))
    assert breaking.problems == ["0.3 s of calm brought no commit for every 3 faults"]
    assert left == [None]


async def test_faults_wait_until_a_third_of_them_is_acknowledged_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemesis, "_STORM_S", 0.05)
    monkeypatch.setattr(nemesis, "_CALM_S", 0.05)
    commits = 0
    targets = [_Target("a"), _Target("b")]
    breaking = Nemesis(targets, 1, lambda: commits)
    running = asyncio.create_task(breaking.run(10_000, until_s=time.monotonic() + 60))
    await asyncio.sleep(0.6)
    held = breaking.faults
    await asyncio.sleep(0.6)
    assert 0 < breaking.faults == held
    assert all(each.looks for each in targets)
    commits = 1000
    while breaking.faults == held:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
