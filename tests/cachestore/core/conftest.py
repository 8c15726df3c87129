"""Fixtures of the store's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachestore_svc.store import Store
from tests.cachestore.core.lab import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A data directory not yet opened."""
    return Lab(tmp_path / "data")


@pytest.fixture
def store(lab: Lab) -> Iterator[Store]:
    """An open store on the lab's directory."""
    with lab.open() as opened:
        yield opened
