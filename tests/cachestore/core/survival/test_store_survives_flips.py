"""No flipped bit is ever served."""

from pathlib import Path

from tests.cachestore.core.survival.flip_campaign import campaign


def test_100_bit_flips_in_sealed_files_are_each_found_named_and_never_served(tmp_path: Path) -> None:
    assert list(campaign(tmp_path / "data", flips=100, seed=3, is_sealed=True)) == []


def test_300_bit_flips_are_each_found_named_and_never_served(tmp_path: Path) -> None:
    assert list(campaign(tmp_path / "data", flips=300, seed=2)) == []
