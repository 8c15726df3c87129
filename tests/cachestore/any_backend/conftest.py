"""The pairs of catalog and blobs that the suite runs on: a new backend of blobs gets a row here.

No test of this folder reaches around the ports. What is true of SQLite or of files alone is tested in `index`, `blobs`
and `core`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.recovery.medium import blobs_of
from tests.cachestore.any_backend.memory_blobs import MemoryBlobs
from tests.cachestore.core.lab import Lab
from tests.running.postgres import PostgresServer, postgres  # noqa: F401


def _with_bucket(root: Path) -> Lab:
    lab = Lab(root, catalog="s3://memory")
    bucket = Bucket(MemoryStore(), "s3://memory")
    lab.kept_blobs = blobs_of(replace(lab.config(), blobs=bucket.where, blob_tier_bytes=1 << 20), Disk(), bucket)
    return lab


PAIRS: dict[str, Callable[[Path], Lab]] = {
    "SQLite and a directory": Lab,
    "SQLite and a directory, sealed": lambda root: Lab(root).seal("default", "other"),
    "SQLite and memory": lambda root: Lab(root, kept_blobs=MemoryBlobs()),
    "a bucket alone, one namespace sealed": lambda root: _with_bucket(root).seal("other"),
}
# On a server, which makes each test slower: `make test-fleet`.
ON_POSTGRES: dict[str, Callable[[Path, str], Lab]] = {
    "PostgreSQL and a directory": lambda root, url: Lab(root, catalog=url),
    "PostgreSQL and a directory, sealed": lambda root, url: Lab(root, catalog=url).seal("default", "other"),
}


# No user has blobs in memory: its cases, a tenth of a second each, take turns.
TURNS = {"SQLite and memory": pytest.mark.long(0.1), **dict.fromkeys(ON_POSTGRES, pytest.mark.fleet)}


@pytest.fixture(params=[pytest.param(name, marks=TURNS.get(name, ())) for name in (*PAIRS, *ON_POSTGRES)])
def new_lab(request: pytest.FixtureRequest) -> Callable[[Path], Lab]:
    """Makes a lab on the pair."""
    if request.param in PAIRS:
        return PAIRS[request.param]
    server: PostgresServer = request.getfixturevalue("postgres")
    return lambda root: ON_POSTGRES[request.param](root, server.url(server.new_database()))


@pytest.fixture
def lab(new_lab: Callable[[Path], Lab], tmp_path: Path) -> Lab:
    """A data directory not yet opened, on each pair in turn."""
    return new_lab(tmp_path / "data")
