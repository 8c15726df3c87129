"""No turn knows what was taken back before it began, and none lacks what was acknowledged: in no random life."""

import asyncio
from pathlib import Path

import pytest

from tests.campaigns.history.lives import Findings
from tests.campaigns.history.world import open_lives


def run(root: Path, lives: int, seed: int, at_once: int, within_s: float) -> Findings:
    async def all_lives() -> Findings:
        async with open_lives(root, seed) as world:
            findings = await world.run(lives, at_once, within_s)
            await world.look_for_all()
            return findings

    findings = asyncio.run(all_lives())
    print(findings.summary())
    return findings


@pytest.mark.long(7)
@pytest.mark.timeout(300)
def test_a_few_lives_know_what_was_acknowledged_and_nothing_that_was_taken_back(tmp_path: Path) -> None:
    findings = run(tmp_path, 6, seed=3, at_once=6, within_s=40)
    assert findings.problems == []
    assert findings.lives > 3


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_500_lives_know_what_was_acknowledged_and_nothing_that_was_taken_back(tmp_path: Path) -> None:
    findings = run(tmp_path, 560, seed=4, at_once=8, within_s=7000)
    assert findings.problems == []
    assert findings.lives >= 500
