"""A data directory with a sealed namespace."""

from pathlib import Path

import pytest

from tests.cachestore.core.lab import NS, Lab


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Not yet opened."""
    return Lab(tmp_path / "data").seal(NS)
