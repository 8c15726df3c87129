"""What tests of replicas stand on: a server of PostgreSQL, a bucket, and store processes over both."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from cachestore_svc.index.catalog import open_postgres
from cachestore_svc.recovery import on_server
from cachestore_svc.store.store import Store
from tests.cachestore.any_backend.memory_blobs import MemoryBlobs
from tests.cachestore.bucket.test_over_s3 import credentials, faults  # noqa: F401
from tests.cachestore.core.lab import Lab
from tests.cachestore.replicas.processes import Replicas, replicas_in
from tests.running.postgres import PostgresServer, postgres  # noqa: F401

ALIKE = {"blobs": "s3://bucket/agents", "keys": "none"}

Opened = Callable[..., tuple[Store, Store]]


@pytest.fixture
def url(postgres: PostgresServer) -> str:  # noqa: F811
    return postgres.url(postgres.new_database())


@pytest.fixture
def labs(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Lab, Lab]:
    """Two labs that have one database and the same blobs."""
    monkeypatch.setattr(on_server, "open_postgres", partial(open_postgres, shared_as=ALIKE))
    a = Lab(tmp_path / "a", catalog=url, kept_blobs=MemoryBlobs(is_shared=True))
    return a, Lab(tmp_path / "b", a.clock, catalog=url, kept_blobs=a.kept_blobs)


@pytest.fixture
def opened(labs: tuple[Lab, Lab]) -> Iterator[Opened]:
    """Opens a store in each lab, with these settings."""
    a, b = labs
    with ExitStack() as exits:

        def open_both(**settings: object) -> tuple[Store, Store]:
            first = exits.enter_context(a.open(**settings))
            b.root.mkdir(mode=0o700)
            shutil.copy(a.root / on_server.NAME, b.root)
            return first, exits.enter_context(b.open(**settings))

        yield open_both


@pytest.fixture
def stores(labs: tuple[Lab, Lab], opened: Opened) -> tuple[Lab, Store, Store]:
    """A lab whose database and blobs two stores have."""
    return labs[0], *opened()


@pytest.fixture
def replicas(
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
    credentials: Path,  # noqa: F811
) -> Iterator[Replicas]:
    with replicas_in(tmp_path, postgres, credentials) as made:
        yield made
