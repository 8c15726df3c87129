"""A commit of a long line runs as many statements as one of a short line: known blocks cost none."""

from collections.abc import Callable
from pathlib import Path

from cachestore_svc.index.catalog import CatalogChange
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, upload
from tests.made_models.synthetic import SMALL, SyntheticAgent

SHORT, LONG = 3 * 256 + 10, 40 * 256 + 10


def traced(store: Store, heard: Callable[[str], None] | None) -> None:
    def trace(change: CatalogChange) -> None:
        change.connection.set_trace_callback(heard)  # type: ignore[attr-defined]

    store._opened.core.catalog.write(NS, trace)


def statements_of_the_second_commit(store: Store, seed: int, tokens: int) -> list[str]:
    agent, name, terms = SyntheticAgent(SMALL, seed), f"agent {seed}", CommitTerms(bind_shared=True)
    first, second = agent.turn(tokens, is_prompt=True), None
    upload(store, first)
    store.snapshots.commit(NS, name, first.manifest_digest, 0, terms)
    second = agent.turn(300, is_prompt=True)
    upload(store, second)
    heard: list[str] = []
    traced(store, heard.append)
    store.snapshots.commit(NS, name, second.manifest_digest, 1, terms)
    traced(store, None)
    found = store.prefixes.find(NS, store.agents.get(NS, name).lines[0].kv_identity_hash, agent.block_hashes(NS), (0,))
    assert found.tokens == (tokens + 300) // 256 * 256
    # Those of triggers are rows', each once for a version or an agent.
    return [each for each in heard if not each.startswith("--")]


def test_a_commit_runs_as_many_statements_on_a_long_line_as_on_a_short_one(tmp_path: Path) -> None:
    with Lab(tmp_path / "data").open() as store:
        short = statements_of_the_second_commit(store, 1, SHORT)
        long = statements_of_the_second_commit(store, 2, LONG)
    assert 10 < len(short) == len(long) < 60, (len(short), len(long))
