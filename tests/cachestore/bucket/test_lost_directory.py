"""A store whose machine is gone goes on at another one: its index is in PostgreSQL, its blobs are in a bucket."""

import shutil
from pathlib import Path

from kvasir.clients import StoreClient

from tests.cachestore.bucket.test_over_s3 import credentials, faults, pytestmark  # noqa: F401
from tests.cachestore.service.running import publish, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot
from tests.running.postgres import PostgresServer, postgres  # noqa: F401


def test_a_store_whose_directory_is_gone_goes_on_by_its_database_and_its_bucket(
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
    credentials: Path,  # noqa: F811
) -> None:
    database, where = postgres.url(postgres.new_database()), "s3://bucket/agents"
    options = ["--catalog", database, "--blobs", where, "--blob-credentials-file", str(credentials)]
    memory = SyntheticAgent(SMALL, 1)
    first, second = memory.turn(300), memory.turn(300)
    with store_home(tmp_path / "a") as gone, store_home(tmp_path / "b") as home:
        store = gone.start(*options)
        with store.client() as client:
            _publish(client, first, 0)
        store.kill()
        shutil.rmtree(gone.data_dir)
        store = home.start(*options)
        with store.client() as client:
            _assert_there(client, first)
            _publish(client, second, 1)
        store.kill()
        with home.start(*options).client() as client:
            _assert_there(client, first)
            _assert_there(client, second)


def test_a_directory_has_no_successor_where_its_blobs_lay_in_it(tmp_path: Path, postgres: PostgresServer) -> None:  # noqa: F811
    database = postgres.url(postgres.new_database())
    with store_home(tmp_path / "a") as gone, store_home(tmp_path / "b") as home:
        store = gone.start("--catalog", database)
        with store.client() as client:
            _publish(client, SyntheticAgent(SMALL, 1).turn(300), 0)
        store.stop()
        refusal = home.refusal("--catalog", database, "--accept-older")
        assert "lists the blobs of another directory" in refusal


def _publish(client: StoreClient, turn: SyntheticSnapshot, parent: int) -> None:
    client.put_blobs(turn.new_blobs)
    assert publish(client, "ada", turn, parent).version == parent + 1


def _assert_there(client: StoreClient, turn: SyntheticSnapshot) -> None:
    assert [digest for digest, _ in client.get_blobs(turn.digests)] == turn.digests
    assert bytes(client.get_blob(turn.manifest_digest)) == turn.manifest_bytes
