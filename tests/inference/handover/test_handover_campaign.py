"""Turns that move at random tokens: none of their readers hears another reply, whatever breaks."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.inference.handover.handover_campaign import DISTURBANCES, Campaign
from tests.inference.handover.two_engines import TwoEngines, two_engines

MOVES, DISTURBED = 300, 40


@pytest.mark.long(25)
def test_a_few_moves_at_random_tokens_are_not_heard(two: TwoEngines) -> None:
    campaign = Campaign(two, random.Random(6))
    asyncio.run(asyncio.wait_for(campaign.moves(5), 120))
    assert campaign.findings.problems == []


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_300_moves_at_random_tokens_are_not_heard_and_nothing_that_breaks_makes_two_owners(tmp_path: Path) -> None:
    with two_engines(tmp_path) as two:
        campaign = Campaign(two, random.Random(7))
        asyncio.run(campaign.moves(MOVES))
        for number in range(DISTURBED):
            asyncio.run(campaign.disturbed(DISTURBANCES[number % len(DISTURBANCES)]))
    print(campaign.findings.summary())
    assert campaign.findings.problems == []
    assert campaign.findings.moves >= MOVES
