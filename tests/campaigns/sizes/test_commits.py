"""A commit waits for the index's server a counted number of times, which may only fall."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cachestore_svc.index.postgres.pipeline import Answer, Pipeline, Statement
from tests.campaigns.sizes.commits import Committer, asked_by_one, measured, opened, stored
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


@pytest.mark.parametrize("blocks", [0, 20])
def test_a_commit_sends_no_read_twice(
    postgres: PostgresServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
) -> None:
    """Short memories are looked up, of long ones all but the new blobs are known."""
    reads: list[tuple[object, ...]] = []
    run = Pipeline.run

    def heard(pipeline: Pipeline, statements: Sequence[Statement]) -> list[Answer]:
        reads.extend((each.sql, *each.values) for each in statements if each.sql.lstrip().startswith("SELECT"))
        return run(pipeline, statements)

    with opened(tmp_path, postgres.url(postgres.new_database())) as store:
        committer = Committer(store, 1, stored(store, blocks) if blocks else None)
        measured([committer], 3)
        snapshot = committer.prepared()
        monkeypatch.setattr(Pipeline, "run", heard)
        committer.commit(snapshot)
    assert len(reads) > 5
    assert any("COUNT((" in str(each[0]) for each in reads) == bool(blocks)
    assert len(reads) == len({*reads})
