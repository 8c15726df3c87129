"""A sample of the campaign of hand-overs."""

import asyncio
import random

import pytest

from tests.inference.handover.handover_campaign import Campaign
from tests.inference.handover.two_engines import TwoEngines


@pytest.mark.long(19)
def test_a_few_moves_at_random_tokens_are_not_heard(two: TwoEngines) -> None:
    campaign = Campaign(two, random.Random(6))
    asyncio.run(asyncio.wait_for(campaign.moves(5), 120))
    assert campaign.findings.problems == []
