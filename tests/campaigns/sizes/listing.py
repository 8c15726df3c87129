"""How long a page of very many agents takes: `python -m tests.campaigns.sizes.listing [--postgres]`."""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
from kvasir_bench.arithmetic import percentile

from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running import postgres

PAGES = 200
_SOURCE = "a"  # the agent whose version all others have, with a manifest of their own
_NUMBERS = "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {agents})"
# Ids begin above those of the store's own rows.
_FILL = (
    """INSERT INTO blobs (id, namespace_id, hash, size_bytes, kind, created_unix_ms)
        {numbers} SELECT 1000 + n, 1, substr('{zeros}' || n, 1 + length(CAST(n AS TEXT))), 100, 'manifest', 0
        FROM numbers""",
    "INSERT INTO manifests {numbers} SELECT 1000 + n, 30, 1000, '' FROM numbers",
    """INSERT INTO agents (id, namespace_id, name, created_unix_ms)
        {numbers} SELECT 1000 + n, 1, 'agent ' || n, 0 FROM numbers""",
    "INSERT INTO labels (agent_id, name, value) {numbers} SELECT 1000 + n, 'team', 'team ' || n % 100 FROM numbers",
    """INSERT INTO lines (id, agent_id, kv_identity_hash, used_unix_ms) {numbers}
        SELECT 1000 + n, 1000 + n, (SELECT kv_identity_hash FROM lines WHERE id = 1), n FROM numbers""",
    """INSERT INTO versions (line_id, version, parent_version, manifest_id, origin, origin_detail, created_unix_ms)
        {numbers} SELECT 1000 + n, 1, 0, 1000 + n, 1, '', 0 FROM numbers""",
)


def fill(store: Store, agents: int) -> None:
    for statement in _FILL:
        sql = statement.format(numbers=_NUMBERS.format(agents=agents), zeros="0" * 64)
        store._core.catalog.write(NS, lambda change, sql=sql: change.connection.execute(sql).rowcount)  # type: ignore[misc]


def measured(store: Store, agents: int, page_size: int) -> dict[str, float]:
    """Milliseconds of pages that begin at places taken by chance."""
    source, took = random.Random(1), list[float]()
    for _ in range(PAGES):
        prefix = f"agent {source.randrange(1, 10)}"
        token = store.agents.page(NS, 1, name_prefix=prefix).next_page_token
        began = time.perf_counter()
        page = store.agents.page(NS, page_size, token, prefix)
        took.append(1000 * (time.perf_counter() - began))
        assert len(page.agents) == min(page_size, agents // 10)
        assert all(len(agent.lines) == 1 and agent.labels for agent in page.agents)
    return {"median_ms": round(statistics.median(took), 1), "p99_ms": round(percentile(took, 99), 1)}


@contextmanager
def filled(root: Path, agents: int, *, is_on_server: bool) -> Iterator[Store]:
    """A store of so many agents."""
    with ExitStack() as exits:
        url = ""
        if is_on_server:
            server = exits.enter_context(postgres.running())
            url = server.url(server.new_database())
        store = exits.enter_context(Lab(root, catalog=url).open())
        publish(store, _SOURCE, SyntheticAgent(SMALL, 1).turn(30), 0)
        fill(store, agents)
        if url:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("VACUUM ANALYZE")  # as the server's autovacuum does
        yield store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1_000_000)
    parser.add_argument("--postgres", action="store_true", help="on a server of PostgreSQL that is started for it")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvasir-listing-") as directory,
        filled(Path(directory) / "data", given.agents, is_on_server=given.postgres) as store,
    ):
        pages = {size: measured(store, given.agents, size) for size in (100, 1000)}
    print(json.dumps({"agents": given.agents, "is_on_postgres": given.postgres, "pages": pages}, indent=1))


if __name__ == "__main__":
    main()
