"""A whole fleet under kills, cuts, freezes and set clocks loses nothing that it acknowledged, and mixes up nothing."""

import asyncio

import pytest

from tests.campaigns.fleet.campaign import Size, run
from tools.fleet import servers


@pytest.mark.long(40)
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(servers.missing("nginx")), reason=servers.missing("nginx"))
def test_a_few_faults_of_a_fleet_lose_no_commit_and_no_turn_knows_what_was_taken_back() -> None:
    result = asyncio.run(run(Size(faults=10, agents=6, engines=2, within_s=60), seed=2))
    print(result.summary())
    assert result.findings.problems == []
    assert result.nemesis.faults > 3
    assert result.commits > 10
