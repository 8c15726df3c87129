"""The agents and versions of the index in the form of the journal. Tables are read whole and as they are: a damaged
database may have text for numbers, rows that refer to nothing, and indexes that contradict them.
"""

import re
import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from blake3 import blake3

from cachestore_svc.index.refusals import index_damaged
from cachestore_svc.index.sqlite.database.failures import NO_TEXT
from cachestore_svc.index.sqlite.database.migrations import MIGRATIONS
from cachestore_svc.index.sqlite.events import fact, set_fact
from cachestore_svc.index.sqlite.provenance import TEXT_OWN
from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.journal.journal_lines import Position
from cachestore_svc.journal.replay import Agent, Namespace, State, Version

_Answer = TypeVar("_Answer")
_FACT = "journal"
_HEX = 32
# Messages of integrity_check about an index that its table contradicts.
_OF_AN_INDEX = re.compile(r"row \d+ missing from index |wrong # of entries in index |non-unique entry in index ")

# In the order of the manifest: the inner rows are sorted, and an aggregate takes them as they come.
_HELD = """SELECT manifest_id, group_concat(blob, '|') FROM (
    SELECT manifest_id, hash || ':' || size_bytes || ':' || kind || ':' || namespace_id AS blob
    FROM manifest_blobs NOT INDEXED
    LEFT JOIN blobs ON blobs.id = manifest_blobs.blob_id {where} ORDER BY manifest_id, position) GROUP BY manifest_id"""
_MANIFESTS = """SELECT manifests.blob_id, token_count, total_bytes, request_id, kind, namespace_id
    FROM manifests LEFT JOIN blobs ON blobs.id = manifests.blob_id"""


def has_tables(rows: Rows) -> bool:
    """Whether this is a store's index at all."""
    return bool(_columns(rows, "versions"))


def journal_position(rows: Rows) -> tuple[str, Position] | None:
    """The journal's store and how far the index followed it; None when it never had a journal."""
    found = fact(rows, _FACT)
    if found is None:
        return None
    store, sequence, chain = found.split(" ")
    return store, Position(int(sequence), chain)


def set_journal_position(rows: Rows, store: str, reached: Position) -> None:
    """Note how far the index followed its journal."""
    set_fact(rows, _FACT, f"{store} {reached.sequence} {reached.chain}")


def problems(rows: Rows) -> list[tuple[str, str]]:
    """Faults of tables and look-ups (INDEX_DAMAGED), and entries that name a missing one (DANGLING_ROW)."""
    dangling = rows.all("PRAGMA foreign_key_check")
    rows_of = (f"a row of {row[0]} names a row of {row[2]} that is not there" for row in dangling)
    return [*(("INDEX_DAMAGED", each) for each in _faults(rows)), *(("DANGLING_ROW", each) for each in rows_of)]


def _faults(rows: Rows) -> list[str]:
    return [str(answer) for (answer,) in rows.all("PRAGMA integrity_check") if answer != "ok"]


def _columns(rows: Rows, table: str) -> set[str]:
    return {str(column[1]) for column in rows.all(f"PRAGMA table_info({table})")}


def wrong_indexes(rows: Rows) -> bool:
    """Whether SQLite's own indexes contradict its tables. Raises DataLoss (INDEX_DAMAGED) for damaged tables."""
    faults = _faults(rows)
    for fault in faults:
        if not _OF_AN_INDEX.match(fault):
            raise index_damaged(fault)
    return bool(faults)


def is_too_new(rows: Rows) -> bool:
    """Whether a later Kvasir changed its form."""
    if not has_tables(rows):
        return False
    found = rows.one("SELECT MAX(number) FROM migrations")
    return bool(found and isinstance(found[0], int) and found[0] > len(MIGRATIONS))


def fingerprint(rows: Rows, manifest_id: int) -> str:
    """A checksum over the rows of a manifest and its blobs: none can change or go without a trace. It holds numbers of
    this database, so it means nothing in another."""
    facts = rows.one(f"{_MANIFESTS} WHERE manifests.blob_id = :manifest", manifest=manifest_id)
    held = rows.one(_HELD.format(where="WHERE manifest_id = :manifest"), manifest=manifest_id)
    return _fingerprint(facts, held[1] if held else "")


def state(rows: Rows) -> State:
    """Everything that the journal records, as the index has it now."""
    found_state: State = {name: Namespace() for (name,) in rows.all("SELECT name FROM namespaces NOT INDEXED")}
    agents: dict[Any, Agent] = {}
    of_lines: dict[Any, tuple[Any, Agent]] = {}
    for agent_id, namespace, name, *facts in rows.all(
        """SELECT agents.id, namespaces.name, agents.name, is_pinned, retained_versions, created_unix_ms
            FROM agents NOT INDEXED JOIN namespaces NOT INDEXED ON namespaces.id = agents.namespace_id"""
    ):
        agents[agent_id] = found_state[namespace].agents[name] = Agent(tuple(facts))
    for agent_id, name, value in rows.all("SELECT agent_id, name, value FROM labels"):
        if agent_id in agents:
            agents[agent_id].labels[name] = value
    for line_id, agent_id, kv_hash in rows.all("SELECT id, agent_id, kv_identity_hash FROM lines NOT INDEXED"):
        if agent_id in agents:
            of_lines[line_id] = kv_hash, agents[agent_id]
    held = _fingerprints(rows)
    for line_id, version, parent, manifest_id, origin, detail, created, hash_, size in rows.all(
        """SELECT line_id, version, parent_version, manifest_id, origin, origin_detail, versions.created_unix_ms,
            blobs.hash, blobs.size_bytes FROM versions NOT INDEXED LEFT JOIN blobs ON blobs.id = versions.manifest_id"""
    ):
        if line_id in of_lines:
            kv_hash, agent = of_lines[line_id]
            of_manifest = held.get(manifest_id, "")
            agent.versions[kv_hash, version] = Version(parent, hash_, size, origin, detail, created, of_manifest)
    _add_marks(rows, found_state)
    _add_owners(rows, found_state)
    # A namespace that only holds blobs is nothing that the journal records.
    return {name: space for name, space in found_state.items() if space.agents or space.brought or space.owners}


def state_anyway(rows: Rows) -> State:
    """The same where text is damaged: it is then read as what it resembles."""
    return _read_anyway(rows, state)


def namespaces_anyway(rows: Rows) -> list[str]:
    """Names of all namespaces, where text is damaged, too."""
    names = "SELECT name FROM namespaces NOT INDEXED"
    return _read_anyway(rows, lambda rows: sorted(str(name) for (name,) in rows.all(names)))


def _read_anyway(rows: Rows, work: Callable[[Rows], _Answer]) -> _Answer:
    """The answer of `work`, also where text is no UTF-8: it is then decoded once more, which is slower."""
    connection = rows.connection
    assert isinstance(connection, sqlite3.Connection), "no other keeps a journal"
    try:
        return work(rows)
    except sqlite3.OperationalError as error:
        if not str(error).startswith(NO_TEXT):
            raise
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        return work(rows)
    finally:
        connection.text_factory = str


def _add_marks(rows: Rows, found_state: State) -> None:
    if "is_brought" in _columns(rows, "blobs"):
        for namespace, hash_, mark in rows.all(
            """SELECT namespaces.name, blobs.hash, is_brought FROM blobs NOT INDEXED JOIN namespaces NOT INDEXED
                ON namespaces.id = blobs.namespace_id WHERE is_brought"""
        ):
            found_state[namespace].brought.add(hash_)
            if mark == TEXT_OWN:
                found_state[namespace].own_texts.add(hash_)


def _add_owners(rows: Rows, found_state: State) -> None:
    if columns := _columns(rows, "owners"):
        had_by = "had_by" if "had_by" in columns else "NULL"  # of an index that no start has migrated
        for namespace, agent, *facts in rows.all(
            f"""SELECT namespaces.name, agent_name, state, generation, peer, move_id, since_unix_ms, was_owned, tells,
                {had_by} FROM owners NOT INDEXED JOIN namespaces NOT INDEXED ON namespaces.id = owners.namespace_id"""  # noqa: S608
        ):
            found_state[namespace].owners[agent] = tuple(facts)


def _fingerprints(rows: Rows) -> dict[Any, str]:
    held = dict(rows.all(_HELD.format(where="")))
    return {facts[0]: _fingerprint(facts, held.get(facts[0], "")) for facts in rows.all(_MANIFESTS)}


def _fingerprint(facts: tuple[Any, ...] | None, blobs: str) -> str:
    said = f"{(facts or ())[1:]}|{blobs}"
    return blake3(said.encode()).hexdigest()[:_HEX]
