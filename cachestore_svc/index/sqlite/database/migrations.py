"""The schema as numbered steps, each in a transaction of its own; one that was released never changes."""

from collections.abc import Callable
from sqlite3 import Connection

from sqlite_utils import Database

from cachestore_svc.facts.ownership import had_before
from cachestore_svc.facts.records import Origin
from cachestore_svc.index.refusals import data_too_new

_FIRST = (
    # What the store knows of itself: incarnation of its history, inode of the database that it was written in.
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE namespaces (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        last_event INTEGER NOT NULL DEFAULT 0
    )""",
    # Names, types and shapes of tensor files; a few per KV identity, shared by all its blobs.
    "CREATE TABLE schemas (hash TEXT PRIMARY KEY, tensors TEXT NOT NULL) WITHOUT ROWID",
    # Ids are never used again, so that no reference can come to mean another blob. What a tensor file's header has
    # (kv_identity_hash to schema_hash) is NULL for a manifest.
    """CREATE TABLE blobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        hash TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('manifest', 'block', 'tail', 'state')),
        kv_identity_hash TEXT,
        start INTEGER,
        tokens INTEGER,
        chain TEXT,
        schema_hash TEXT REFERENCES schemas (hash),
        created_unix_ms INTEGER NOT NULL,
        promised_unix_ms INTEGER NOT NULL DEFAULT 0,
        marked_unix_ms INTEGER,
        is_damaged INTEGER NOT NULL DEFAULT 0,
        UNIQUE (namespace_id, hash)
    )""",
    "CREATE INDEX blobs_by_mark ON blobs (namespace_id, marked_unix_ms) WHERE marked_unix_ms IS NOT NULL",
    "CREATE INDEX blobs_damaged ON blobs (namespace_id) WHERE is_damaged",
    "CREATE INDEX blobs_by_schema ON blobs (schema_hash)",
    """CREATE TABLE agents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        name TEXT NOT NULL,
        is_pinned INTEGER NOT NULL DEFAULT 0,
        retained_versions INTEGER,
        created_unix_ms INTEGER NOT NULL,
        UNIQUE (namespace_id, name)
    )""",
    """CREATE TABLE labels (
        agent_id INTEGER NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (agent_id, name)
    ) WITHOUT ROWID""",
    """CREATE TABLE lines (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        agent_id INTEGER NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
        kv_identity_hash TEXT NOT NULL,
        used_unix_ms INTEGER NOT NULL,
        UNIQUE (agent_id, kv_identity_hash)
    )""",
    # A manifest has a row here while some version is it; what it names has rows in manifest_blobs. Those rows are the
    # reference counts: none is stored, so none can disagree.
    """CREATE TABLE manifests (
        blob_id INTEGER PRIMARY KEY REFERENCES blobs (id),
        token_count INTEGER NOT NULL,
        total_bytes INTEGER NOT NULL,
        request_id TEXT NOT NULL
    )""",
    """CREATE TABLE manifest_blobs (
        manifest_id INTEGER NOT NULL REFERENCES manifests (blob_id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        blob_id INTEGER NOT NULL REFERENCES blobs (id),
        PRIMARY KEY (manifest_id, position)
    ) WITHOUT ROWID""",
    "CREATE INDEX manifest_blobs_by_blob ON manifest_blobs (blob_id)",
    """CREATE TABLE versions (
        line_id INTEGER NOT NULL REFERENCES lines (id) ON DELETE CASCADE,
        version INTEGER NOT NULL,
        parent_version INTEGER NOT NULL,
        manifest_id INTEGER NOT NULL REFERENCES manifests (blob_id),
        origin INTEGER NOT NULL,
        origin_detail TEXT NOT NULL,
        created_unix_ms INTEGER NOT NULL,
        PRIMARY KEY (line_id, version)
    ) WITHOUT ROWID""",
    "CREATE INDEX versions_by_manifest ON versions (manifest_id)",
    # What was computed -> which bytes.
    """CREATE TABLE prefixes (
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        block_hash TEXT NOT NULL,
        blob_id INTEGER NOT NULL REFERENCES blobs (id) ON DELETE CASCADE,
        PRIMARY KEY (namespace_id, block_hash)
    ) WITHOUT ROWID""",
    "CREATE INDEX prefixes_by_blob ON prefixes (blob_id)",
    # By name, not by line: a lease may come before the first version, and its generation outlives the agent.
    """CREATE TABLE leases (
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        agent_name TEXT NOT NULL,
        kv_identity_hash TEXT NOT NULL,
        owner TEXT NOT NULL,
        generation INTEGER NOT NULL,
        expires_unix_ms INTEGER NOT NULL,
        PRIMARY KEY (namespace_id, agent_name, kv_identity_hash)
    ) WITHOUT ROWID""",
    """CREATE TABLE events (
        namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
        sequence INTEGER NOT NULL,
        at_unix_ms INTEGER NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (namespace_id, sequence)
    ) WITHOUT ROWID""",
)


def _first(connection: Connection) -> None:
    for statement in _FIRST:
        connection.execute(statement)


def _provenance(connection: Connection) -> None:
    """What came by import or pull is marked where it lies. Of what came before the mark, all that such a version names
    counts as brought, and so does every version that names any of it; none of it stays bound.
    """
    run = connection.execute
    run("ALTER TABLE blobs ADD COLUMN is_brought INTEGER NOT NULL DEFAULT 0")
    run("CREATE INDEX blobs_brought ON blobs (namespace_id) WHERE is_brought")
    run("UPDATE blobs SET is_brought = 1 WHERE id IN (SELECT manifest_id FROM versions WHERE origin IN (4, 5))")
    named = "SELECT blob_id FROM manifest_blobs JOIN blobs AS m ON m.id = manifest_id WHERE m.is_brought"
    naming = "SELECT manifest_id FROM manifest_blobs JOIN blobs AS b ON b.id = blob_id WHERE b.is_brought"
    changed = 1
    while changed:
        changed = run(f"UPDATE blobs SET is_brought = 1 WHERE NOT is_brought AND id IN ({named})").rowcount  # noqa: S608
        changed += run(f"UPDATE blobs SET is_brought = 1 WHERE NOT is_brought AND id IN ({naming})").rowcount  # noqa: S608
    run("DELETE FROM prefixes WHERE blob_id IN (SELECT id FROM blobs WHERE is_brought)")


def _leases_without_a_clock(connection: Connection) -> None:
    """How long a lease holds is counted in memory: a clock that is set must not end or prolong it."""
    for statement in (
        "ALTER TABLE leases RENAME COLUMN expires_unix_ms TO ttl_ms",
        "ALTER TABLE leases ADD COLUMN is_released INTEGER NOT NULL DEFAULT 0",
        "UPDATE leases SET is_released = ttl_ms = 0, ttl_ms = 30000",
    ):
        connection.execute(statement)


def _windows(connection: Connection) -> None:
    """Layers of a window have blocks of their own: a block's place is its group and its start."""
    connection.execute("ALTER TABLE blobs ADD COLUMN window INTEGER NOT NULL DEFAULT 0")


def _unused(connection: Connection) -> None:
    """How long an agent was not used, counted by sweeps. `used`: its uses as the last sweep saw them."""
    connection.execute(
        """CREATE TABLE unused (
            agent_id INTEGER PRIMARY KEY REFERENCES agents (id) ON DELETE CASCADE,
            used TEXT NOT NULL,
            unused_ms INTEGER NOT NULL
        )"""
    )


def _written(connection: Connection) -> None:
    """Bytes of blobs that were written, by day (UTC, counted from 1970)."""
    connection.execute(
        """CREATE TABLE written (
            day INTEGER NOT NULL,
            namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
            bytes INTEGER NOT NULL,
            PRIMARY KEY (day, namespace_id)
        ) WITHOUT ROWID"""
    )


def _owners(connection: Connection) -> None:
    """Which store owns an agent; by name, because the fact outlives the agent. No row: this one."""
    connection.execute(
        """CREATE TABLE owners (
            namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
            agent_name TEXT NOT NULL,
            state INTEGER NOT NULL,
            generation INTEGER NOT NULL,
            peer TEXT NOT NULL,
            move_id TEXT NOT NULL,
            since_unix_ms INTEGER NOT NULL,
            was_owned INTEGER NOT NULL,
            tells TEXT NOT NULL,
            PRIMARY KEY (namespace_id, agent_name)
        ) WITHOUT ROWID"""
    )


def _had_by(connection: Connection) -> None:
    """Which peers had an agent or were offered it. Of a sealed namespace no key is here to read that."""
    run = connection.execute
    run("ALTER TABLE owners ADD COLUMN had_by TEXT NOT NULL DEFAULT ''")
    facts = "SELECT namespace_id, agent_name, state, peer, move_id FROM owners WHERE generation > 0"
    for namespace_id, agent, state, peer, move_id in run(facts).fetchall():
        moves = run(
            """SELECT origin_detail FROM versions JOIN lines ON lines.id = line_id JOIN agents ON agents.id = agent_id
                WHERE namespace_id = ? AND name = ? AND origin = ?""",
            (namespace_id, agent, int(Origin.MOVE)),
        )
        had_by = had_before(state, peer, move_id, [str(origin) for (origin,) in moves])
        run("UPDATE owners SET had_by = ? WHERE namespace_id = ? AND agent_name = ?", (had_by, namespace_id, agent))


def _dropped(connection: Connection) -> None:
    """Which versions an agent had that are not kept any more."""
    connection.execute(
        """CREATE TABLE dropped (
            agent_id INTEGER NOT NULL REFERENCES agents (id) ON DELETE CASCADE,
            manifest_hash TEXT NOT NULL,
            version INTEGER NOT NULL,
            origin INTEGER NOT NULL,
            PRIMARY KEY (agent_id, manifest_hash)
        ) WITHOUT ROWID"""
    )


def _removals(connection: Connection) -> None:
    """Which object of a bucket has a blob's bytes, and which are being removed."""
    connection.execute("ALTER TABLE blobs ADD COLUMN edition INTEGER NOT NULL DEFAULT 0")
    connection.execute(
        """CREATE TABLE removals (
            namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
            hash TEXT NOT NULL,
            edition INTEGER NOT NULL,
            size_bytes INTEGER NOT NULL,
            since_unix_ms INTEGER NOT NULL,
            removed_unix_ms INTEGER,
            PRIMARY KEY (namespace_id, hash, edition)
        ) WITHOUT ROWID"""
    )


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (
    _first,
    _provenance,
    _leases_without_a_clock,
    _windows,
    _unused,
    _written,
    _owners,
    _had_by,
    _dropped,
    _removals,
)


def migrate(connection: Connection, now_unix_ms: int) -> bool:
    """Bring a database to today's form, in autocommit mode. Raises FailedPrecondition (DATA_TOO_NEW)."""
    table = Database(connection).table("migrations")
    if not table.exists():
        table.create({"number": int, "applied_unix_ms": int}, pk="number")
    applied = {int(row["number"]) for row in table.rows}
    if unknown := applied - set(range(1, len(MIGRATIONS) + 1)):
        raise data_too_new(max(unknown), len(MIGRATIONS))
    for number, step in enumerate(MIGRATIONS, start=1):
        if number not in applied:
            connection.execute("BEGIN IMMEDIATE")
            try:
                step(connection)
                connection.execute("INSERT INTO migrations VALUES (?, ?)", (number, now_unix_ms))
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
    return len(applied) < len(MIGRATIONS)
