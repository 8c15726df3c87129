"""Fixtures of the store's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import Lab
from tests.running import in_memory


@pytest.fixture(scope="module")
def memory_directory() -> Iterator[Path]:
    """A place in memory where there is one: for tests whose model does not need a disk that really syncs."""
    with tempfile.TemporaryDirectory(dir=in_memory.directory(), prefix="kvasir-test-") as directory:
        yield Path(directory)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A data directory not yet opened."""
    return Lab(tmp_path / "data")


@pytest.fixture
def store(lab: Lab) -> Iterator[Store]:
    """An open store on the lab's directory."""
    with lab.open() as opened:
        yield opened
