"""An acknowledged snapshot survives kill -9 anywhere."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cachestore.core.survival import kill_campaign
from tests.cachestore.core.survival.kill_campaign import campaign

KILLS = int(os.environ.get("KVASIR_KILLS", "30"))


@pytest.mark.long(6)
def test_kills_of_a_sealed_store_lose_no_snapshot_and_leave_nothing_plain(memory_directory: Path) -> None:
    report = campaign(memory_directory / "sealed", kills=KILLS // 3, seed=8, is_sealed=True)
    assert report.problems == []
    assert report.acknowledged > 0
    assert report.differences_per_life > 0


@pytest.mark.long(8)
def test_kills_lose_no_acknowledged_snapshot_and_mix_none(memory_directory: Path) -> None:
    """A kill leaves the page cache as it is, so a directory in memory shows the same."""
    report = campaign(memory_directory / "data", kills=KILLS, seed=7)
    assert report.problems == []
    assert report.acknowledged >= KILLS
    assert report.differences_per_life > 0


def test_a_store_that_refuses_a_sound_commit_fails_the_campaign(
    memory_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed a thread of the child, and nobody looked."""

    def refused(*_: Any, **__: Any) -> None:
        raise ValueError("a sound commit")

    monkeypatch.setattr(kill_campaign, "publish", refused)
    with pytest.raises(RuntimeError, match="the child failed by itself"):
        campaign(memory_directory / "data", kills=1)
