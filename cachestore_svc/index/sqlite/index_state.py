"""What the index says of agents and versions, in the words of the journal; and how far it followed its journal.

Read as it lies there: a damaged database has text where numbers belong, and rows that name nothing. Its tables are read
whole, and none of SQLite's indexes is asked, which may contradict them.
"""

from typing import Any

from blake3 import blake3

from cachestore_svc.index.sqlite.index import Rows
from cachestore_svc.index.sqlite.migrations import MIGRATIONS
from cachestore_svc.journal.journal_lines import Position
from cachestore_svc.journal.replay import Agent, Namespace, State, Version

_FACT = "journal"
_HEX = 32

# In the order of the manifest: the inner rows are sorted, and an aggregate takes them as they come.
_HELD = """SELECT manifest_id, group_concat(blob, '|') FROM (
    SELECT manifest_id, hash || ':' || size_bytes || ':' || kind || ':' || namespace_id AS blob
    FROM manifest_blobs NOT INDEXED
    LEFT JOIN blobs ON blobs.id = manifest_blobs.blob_id {where} ORDER BY manifest_id, position) GROUP BY manifest_id"""
_MANIFESTS = """SELECT manifests.blob_id, token_count, total_bytes, request_id, kind, namespace_id
    FROM manifests LEFT JOIN blobs ON blobs.id = manifests.blob_id"""


def has_tables(rows: Rows) -> bool:
    """Whether this is the database of a store at all."""
    return rows.one("SELECT 1 FROM sqlite_master WHERE name = 'versions'") is not None


def has_marks(rows: Rows) -> bool:
    """Whether the database is of a form that marks blobs that were brought."""
    return any(column[1] == "is_brought" for column in rows.all("PRAGMA table_info(blobs)"))


def position(rows: Rows) -> tuple[str, Position] | None:
    """The journal's store and how far the index followed it; None when it never had a journal."""
    found = rows.one("SELECT value FROM facts WHERE name = ?", _FACT)
    if found is None:
        return None
    store, sequence, chain = str(found[0]).split(" ")
    return store, Position(int(sequence), chain)


def set_position(rows: Rows, store: str, reached: Position) -> None:
    rows.run("INSERT OR REPLACE INTO facts VALUES (?, ?)", _FACT, f"{store} {reached.sequence} {reached.chain}")


def incarnation(rows: Rows, inode: str) -> str | None:
    """The name of the event history; None when there is none, or when the database was written under another inode."""
    facts = dict(rows.all("SELECT name, value FROM facts"))
    return facts.get("incarnation") if facts.get("inode") == inode else None


def begin_incarnation(rows: Rows, inode: str, name: str) -> str:
    rows.many("INSERT OR REPLACE INTO facts VALUES (?, ?)", [("incarnation", name), ("inode", inode)])
    return name


def forget_incarnation(rows: Rows) -> None:
    rows.run("DELETE FROM facts WHERE name = 'incarnation'")


def integrity_problems(rows: Rows) -> list[str]:
    """What SQLite finds wrong with its tables and their indexes, in its own words."""
    return [str(answer) for (answer,) in rows.all("PRAGMA integrity_check") if answer != "ok"]


def dangling_rows(rows: Rows) -> list[str]:
    """Rows that name a row that is not there, in words."""
    found = rows.all("PRAGMA foreign_key_check")
    return [f"a row of {row[0]} names a row of {row[2]} that is not there" for row in found]


def is_too_new(rows: Rows) -> bool:
    """Whether a later Kvasir changed the form of the database."""
    if not has_tables(rows):
        return False
    found = rows.one("SELECT MAX(number) FROM migrations")
    return bool(found and isinstance(found[0], int) and found[0] > len(MIGRATIONS))


def fingerprint(rows: Rows, manifest_id: int) -> str:
    """What the rows of a manifest say of it and of its blobs: none can change or go without a trace. It is of this
    database, whose numbers it holds."""
    facts = rows.one(f"{_MANIFESTS} WHERE manifests.blob_id = ?", manifest_id)
    held = rows.one(_HELD.format(where="WHERE manifest_id = ?"), manifest_id)
    return _fingerprint(facts, held[1] if held else "")


def state_of(rows: Rows) -> State:
    """Everything that the journal tells, as the index has it now."""
    state: State = {name: Namespace() for (name,) in rows.all("SELECT name FROM namespaces NOT INDEXED")}
    agents: dict[Any, Agent] = {}
    of_lines: dict[Any, tuple[Any, Agent]] = {}
    for agent_id, namespace, name, *facts in rows.all(
        """SELECT agents.id, namespaces.name, agents.name, is_pinned, retained_versions, created_unix_ms
            FROM agents NOT INDEXED JOIN namespaces NOT INDEXED ON namespaces.id = agents.namespace_id"""
    ):
        agents[agent_id] = state[namespace].agents[name] = Agent(tuple(facts))
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
    _add_marks(rows, state)
    # A namespace that only holds blobs is nothing that the journal tells.
    return {name: space for name, space in state.items() if space.agents or space.brought}


def _add_marks(rows: Rows, state: State) -> None:
    if has_marks(rows):
        for namespace, hash_ in rows.all(
            """SELECT namespaces.name, blobs.hash FROM blobs NOT INDEXED JOIN namespaces NOT INDEXED
                ON namespaces.id = blobs.namespace_id WHERE is_brought"""
        ):
            state[namespace].brought.add(hash_)


def _fingerprints(rows: Rows) -> dict[Any, str]:
    held = dict(rows.all(_HELD.format(where="")))
    return {facts[0]: _fingerprint(facts, held.get(facts[0], "")) for facts in rows.all(_MANIFESTS)}


def _fingerprint(facts: tuple[Any, ...] | None, blobs: str) -> str:
    said = f"{(facts or ())[1:]}|{blobs}"
    return blake3(said.encode()).hexdigest()[:_HEX]
