"""A sample of the campaign of moves."""

from pathlib import Path
from typing import Any

import pytest
from kvasir.clients import StoreClient
from kvasir.errors import Unavailable

from tests.campaigns.moves.campaign import ViolationError, run

SAMPLE = ("none", "cut", "kill source", "kill destination", "two movers", "clocks", "partition", "claim")


@pytest.mark.long(9)
def test_whatever_is_cut_or_killed_an_agent_has_one_owner_and_all_that_was_acknowledged(tmp_path: Path) -> None:
    assert sum(run(tmp_path, len(SAMPLE), seed=5, accidents=SAMPLE).values()) == len(SAMPLE)


@pytest.mark.long(5)
def test_stores_that_never_move_an_agent_fail_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise Unavailable("nothing moves")

    monkeypatch.setattr(StoreClient, "moving_agent", refused)
    with pytest.raises(ViolationError, match="0 of 1 undisturbed moves arrived"):
        run(tmp_path, 1, seed=5, accidents=("none",))
