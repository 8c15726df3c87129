"""A part that cannot start has a time without faults, and is a problem only then; what it and others did is kept."""

import asyncio
import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.fleet import campaign, targets
from tests.campaigns.fleet.campaign import Size, play
from tests.campaigns.fleet.evidence import leave_evidence
from tests.campaigns.fleet.kept import Round
from tests.campaigns.fleet.nemesis import Nemesis, Weather
from tests.campaigns.fleet.targets import Peace, Target
from tests.campaigns.history.lives import Lives
from tests.running import in_memory
from tools.fleet.fleet import Member
from tools.fleet.part import FleetError, Part
from tools.kvasir_tiny.words import Dice


def _failing(folder: Path) -> Part:
    return Part("store-1", ("sh", "-c", "echo no database; exit 2"), folder / "log", lambda: False)


def test_a_part_that_does_not_start_ends_a_storm_and_is_given_up_in_peace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "STARTS_S", 0.5)
    monkeypatch.setattr(targets, "_LONG_S", 0.3)
    peace, gave_up = Peace(), list[str]()
    weather = Weather(lambda: True, peace)
    assert not weather.is_calm(100.0)

    def start() -> None:
        try:
            peace.start_again(_failing(tmp_path))
        except FleetError as error:
            gave_up.append(str(error))

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    assert not weather.is_calm(101.0), "it may start at the next try"
    time.sleep(1.5)
    assert starting.is_alive(), "a storm may be why it does not"
    assert weather.is_calm(102.0), "of twenty seconds of storm two are over"
    assert weather.is_calm(190.0), "as long as it does not start"
    starting.join(30)
    assert "no database" in gave_up[0]
    assert not weather.is_calm(191.0)


def test_a_part_that_starts_in_the_peace_that_it_wanted_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_LONG_S", 0.3)
    peace = Peace()
    weather = Weather(lambda: True, peace)
    script = f"test -e {tmp_path}/calm && touch {tmp_path}/up && exec sleep 60"
    part = Part("engine-1", ("sh", "-c", script), tmp_path / "log", (tmp_path / "up").exists)
    starting = threading.Thread(target=peace.start_again, args=(part,), daemon=True)
    starting.start()
    try:
        while not weather.is_calm(101.0):
            time.sleep(0.02)
        (tmp_path / "calm").touch()
        starting.join(30)
        assert part.is_running
        assert not peace.is_wanted
        assert not weather.is_calm(200.0)
    finally:
        part.kill()


def test_a_round_with_a_part_that_cannot_be_repaired_ends_and_is_kept_with_that_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_AFTER_S", "_ENDS_S", "_QUIET_S"):
        monkeypatch.setattr(campaign, name, 0.1)
    monkeypatch.setattr(targets, "STARTS_S", 0.3)
    kept = list[Round]()

    class Stuck(Target):
        name, peace_s = "store-1", 0.01

        async def strike(self, dice: Dice) -> str:
            await asyncio.to_thread(targets.start_again, _failing(tmp_path))
            return "never"

    class Other(Target):
        name, peace_s, is_broken = "link", 0.01, False

        async def strike(self, dice: Dice) -> str:
            self.is_broken = True
            await asyncio.sleep(0.2)
            self.is_broken = False
            return "hang"

    other = Other()

    class Store:
        async def list_agents(self) -> None:
            """It answers."""

    @contextlib.asynccontextmanager
    async def opened(_root: Path, _size: Size, seed: int, _peace: Peace) -> AsyncIterator[Any]:
        lives = Lives((), (), seed)
        lives.store = Store()  # type: ignore[assignment]
        lives.ledger.commits = 1_000_000
        yield lives, None, [Stuck(), other]

    async def nothing(*_: object) -> None:
        """Nobody lives, and nobody holds a lease."""

    monkeypatch.setattr(campaign, "_opened", opened)
    monkeypatch.setattr(campaign, "hold", nothing)
    monkeypatch.setattr(Lives, "run", nothing)
    asyncio.run(asyncio.wait_for(play(Size(faults=1_000_000), 1, kept.append), 60))
    [done] = kept
    [problem] = done.problems
    assert "store-1 could not be repaired: store-1 ended at its start: no database" in problem
    assert done.faults["hang"] > 0
    assert not other.is_broken


def test_the_first_failure_leaves_evidence_once() -> None:
    class Unlucky(Target):
        name, peace_s = "postgres", 0.01

        async def strike(self, dice: Dice) -> str:
            raise OSError("no such server")

    failed = list[int]()
    nemesis = Nemesis([Unlucky()], 1, lambda: 0, failed=lambda: failed.append(1))
    asyncio.run(asyncio.wait_for(nemesis.run(10, float("inf")), 30))
    assert (nemesis.problems, failed) == (["postgres could not be repaired: no such server"], [1])


@pytest.mark.long(2)
@pytest.mark.skipif(sys.platform != "linux", reason="programs are forked there")
def test_logs_and_stacks_of_a_service_and_its_supervisor_are_kept_and_both_live_on(tmp_path: Path) -> None:
    root = in_memory.home()
    (root / "logs").mkdir()
    member = Member("store-1", root, root / "logs")
    member.part.begin = campaign._begin({"clock": root / "clock"})
    member.runs("store", "serve", "--listen", member.address)
    campaign.set_ahead(root / "clock", 0.0)
    try:
        targets.start_again(member.part)
        pid = member.pid
        leave_evidence(root, [member], tmp_path / "kept")
        assert "serve_store" in (tmp_path / "kept" / "store-1.log").read_text()
        assert "cachestore_svc/__main__.py" in (tmp_path / "kept" / "store-1" / "store.log").read_text()
        assert member.part.is_running
        assert (member.pid, os.kill(pid, 0)) == (pid, None)
    finally:
        member.part.stop()
        shutil.rmtree(root, ignore_errors=True)
