"""A whole fleet under kills, cuts, freezes and set clocks loses nothing that it acknowledged, and mixes up nothing."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.campaigns.fleet import campaign
from tests.campaigns.fleet.campaign import Size, play
from tests.campaigns.fleet.kept import Round
from tests.campaigns.fleet.nemesis import Nemesis, _calm_left_s
from tests.campaigns.fleet.targets import slowed
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


def test_a_resumed_campaign_adds_rounds_of_new_seeds_until_its_faults_are_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def played(size: Size, seed: int) -> Round:
        return Round(seed, {"kill": size.faults}, 7, 3, 2, 60.0, ["lost"] if seed == 3 else [])

    monkeypatch.setattr(campaign, "play", played)
    kept = tmp_path / "new" / "kept.json"
    words = ["--round", "4", "--kept", str(kept)]
    assert campaign.main([*words, "--faults", "6", "--resume"]) == 0
    assert campaign.main([*words, "--faults", "11", "--resume"]) == 1
    rounds = json.loads(kept.read_text())["rounds"]
    assert [(each["seed"], each["faults"]["kill"]) for each in rounds] == [(1, 4), (2, 2), (3, 4), (4, 1)]
    assert campaign.main([*words, "--faults", "2", "--seed", "9"]) == 0
    assert [each["seed"] for each in json.loads(kept.read_text())["rounds"]] == [9]


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
        give_up = time.monotonic() + 30
        while used_s() - before < 0.7:
            assert time.monotonic() < give_up
            time.sleep(0.02)
    finally:
        busy.kill()
        busy.wait()
    assert not asyncio.run(slowed(0, 1.0))


class _Target:
    """Every third of its faults meets nothing."""

    peace_s = 0.01

    def __init__(self, name: str) -> None:
        self.name, self.faults, self.thrown = name, list[str](), list[float]()

    async def strike(self, dice: Dice) -> str:
        self.thrown.append(dice.random())
        return "" if len(self.thrown) % 3 == 0 else self.name


def test_faults_of_several_targets_are_in_the_air_at_once_and_a_seed_gives_each_the_same() -> None:
    class Slow(_Target):
        async def strike(self, dice: Dice) -> str:
            self.thrown.append(dice.random())
            await asyncio.sleep(0.3)
            return self.name

    def thrown(seed: int) -> list[list[float]]:
        targets = [_Target("a"), _Target("b"), Slow("slow")]
        nemesis = Nemesis(targets, seed)
        asyncio.run(nemesis.run(12, until_s=float("inf")))
        assert nemesis.faults >= 12
        assert nemesis.counts["a"] == len(targets[0].thrown) - len(targets[0].thrown) // 3
        assert nemesis.counts["slow"] < nemesis.counts["a"]
        return [each.thrown[:3] for each in targets[:2]]

    assert thrown(1) == thrown(1) != thrown(2)


def test_between_storms_of_twenty_seconds_agents_have_ten_without_faults() -> None:
    assert [_calm_left_s(since) for since in (0.0, 19.9, 20.0, 26.0, 30.0, 56.0)] == [0.0, 0.0, 10.0, 4.0, 0.0, 4.0]
