"""A sample of the campaign of moves."""

from pathlib import Path

import pytest

from tests.campaigns.moves.campaign import run

SAMPLE = ("none", "cut", "kill source", "kill destination", "two movers", "clocks", "partition", "claim")


@pytest.mark.long(9)
def test_whatever_is_cut_or_killed_an_agent_has_one_owner_and_all_that_was_acknowledged(tmp_path: Path) -> None:
    assert sum(run(tmp_path, len(SAMPLE), seed=5, accidents=SAMPLE).values()) == len(SAMPLE)
