"""What tests of replicas stand on: a server of PostgreSQL, a bucket, and store processes over both."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cachestore.bucket.test_over_s3 import credentials, faults  # noqa: F401
from tests.cachestore.replicas.processes import Replicas, replicas_in
from tests.running.postgres import PostgresServer, postgres  # noqa: F401


@pytest.fixture
def replicas(
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
    credentials: Path,  # noqa: F811
) -> Iterator[Replicas]:
    with replicas_in(tmp_path, postgres, credentials) as made:
        yield made
