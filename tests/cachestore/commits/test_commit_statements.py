"""A commit of a long line runs as many statements as one of a short line: known blocks cost none. What others stored
costs a commit and a look for a prefix nothing.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachestore_svc.index.catalog import CatalogChange
from cachestore_svc.index.sqlite.rows import Rows, Value
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, upload
from tests.made_models.synthetic import SMALL, SyntheticAgent

SHORT, LONG = 20 * 256 + 10, 80 * 256 + 10
_STEPS = 20  # of SQLite's machine, between two counts


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


def test_a_commit_reads_as_many_rows_on_a_long_line_as_on_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, rows_of = Counter[int](), Rows.all

    def counted(rows: Rows, sql: str, **values: Value) -> list[tuple[Any, ...]]:
        found = rows_of(rows, sql, **values)
        read[tokens] += len(found)
        return found

    with Lab(tmp_path / "data").open() as store:
        for seed, tokens in enumerate((SHORT, LONG)):
            agent, terms = SyntheticAgent(SMALL, seed), CommitTerms(bind_shared=True)
            upload(store, first := agent.turn(tokens, is_prompt=True))
            store.snapshots.commit(NS, f"agent {seed}", first.manifest_digest, 0, terms)
            upload(store, second := agent.turn(300, is_prompt=True))
            known = store.snapshots.known(NS, second.manifest_digest)
            with monkeypatch.context() as patched:
                patched.setattr(Rows, "all", counted)
                store.snapshots.commit(NS, f"agent {seed}", second.manifest_digest, 1, terms, known)
    assert 5 < read[SHORT] == read[LONG] < 20, read


def test_a_commit_runs_as_many_statements_on_a_long_line_as_on_a_short_one(tmp_path: Path) -> None:
    with Lab(tmp_path / "data").open() as store:
        short = statements_of_the_second_commit(store, 1, SHORT)
        long = statements_of_the_second_commit(store, 2, LONG)
    assert 10 < len(short) == len(long) < 60, (len(short), len(long))


def work_beside(store: Store, others: int) -> tuple[int, int]:
    """The database's steps for a commit and for a look, beside so many bound hashes of others."""
    agent, terms = SyntheticAgent(SMALL, others), CommitTerms(bind_shared=True)
    first = agent.turn(LONG, is_prompt=True)
    upload(store, first)
    name = f"beside {others}"
    kv_hash = store.snapshots.commit(NS, name, first.manifest_digest, 0, terms).kv_identity_hash
    bind = f"""WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {others})
        INSERT INTO prefixes SELECT 1, 'of others ' || n, (SELECT MIN(blob_id) FROM prefixes) FROM numbers"""
    store._opened.core.catalog.write(NS, lambda change: change.connection.execute(bind).rowcount)
    second, steps = agent.turn(300, is_prompt=True), list[int]()
    upload(store, second)
    works = (
        lambda: store.snapshots.commit(NS, name, second.manifest_digest, 1, terms),
        lambda: store.prefixes.find(NS, kv_hash, agent.block_hashes(NS), (0,)),
    )
    for work in works:
        heard: list[None] = []
        counted(store, lambda heard=heard: heard.append(None))  # type: ignore[misc]
        work()
        counted(store, None)
        steps.append(_STEPS * len(heard))
    return steps[0], steps[1]


def counted(store: Store, heard: Callable[[], None] | None) -> None:
    def count(change: CatalogChange) -> None:
        change.connection.set_progress_handler(heard, _STEPS)  # type: ignore[attr-defined]

    store._opened.core.catalog.write(NS, count)


def test_blocks_of_others_cost_a_commit_and_a_look_for_a_prefix_nothing(tmp_path: Path) -> None:
    with Lab(tmp_path / "few").open() as few, Lab(tmp_path / "many").open() as many:
        (commit, look), (commit_beside, look_beside) = work_beside(few, 10), work_beside(many, 2_000)
    assert commit_beside < 1.2 * commit, (commit, commit_beside)
    assert look_beside < 1.2 * look, (look, look_beside)
