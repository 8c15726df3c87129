"""A commit waits for the index's server a counted number of times, which may only fall."""

from pathlib import Path

from tests.campaigns.sizes.commits import Committer, asked_by_one, measured, opened
from tests.running.postgres import PostgresServer, postgres  # noqa: F401

MOST_ROUND_TRIPS = 5


def test_a_commit_waits_for_its_server_no_more_often_than_before(
    postgres: PostgresServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    with opened(tmp_path, postgres.url(postgres.new_database())) as store:
        committers = [Committer(store, number) for number in range(2)]
        assert measured(committers, 8)["p99_ms"] > 0
        asked = asked_by_one(committers[0])
    assert 3 < asked.total() <= MOST_ROUND_TRIPS, asked
