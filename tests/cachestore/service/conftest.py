"""Fixtures of the store's service tests: one store per module for what only asks, a fresh one for what breaks it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.clients import StoreClient

from tests.cachestore.service.running import RunningStore, StoreHome, store_home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[StoreHome]:
    """A place where stores can be started; they end with the test."""
    with store_home(tmp_path / "h") as made:
        yield made


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    """A store on a Unix socket that the tests of a module share."""
    with store_home(tmp_path_factory.mktemp("s")) as made:
        yield made.start()


@pytest.fixture
def client(shared_store: RunningStore) -> Iterator[StoreClient]:
    """The owner of the shared store."""
    with shared_store.client() as connected:
        yield connected
