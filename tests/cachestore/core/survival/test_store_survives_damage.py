"""No damage of a file loses an acknowledged version without a word."""

from pathlib import Path

import pytest

from tests.cachestore.core.survival.damage_campaign import campaign


@pytest.mark.long(6)
def test_20_damaged_stores_lose_no_version_without_a_word_and_come_back(memory_directory: Path) -> None:
    report = campaign(memory_directory / "stores", stores=20, seed=3, of_each_kind=1)
    assert report.problems == []
    assert report.started > 5
    assert report.refused.total() > 5
