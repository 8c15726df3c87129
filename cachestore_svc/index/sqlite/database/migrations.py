"""The schema as numbered steps, in one transaction: files of SQL, functions where that is not enough."""

from collections.abc import Callable
from pathlib import Path
from sqlite3 import Connection

from sqlite_utils import Database

from cachestore_svc.facts.ownership import had_before
from cachestore_svc.facts.records import Origin
from cachestore_svc.index.steps import missing, statements


def _of_file(name: str) -> Callable[[Connection], None]:
    def step(connection: Connection) -> None:
        for statement in statements(Path(__file__).with_name("steps") / f"{name}.sql"):
            connection.execute(statement)

    return step


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


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (
    _of_file("first"),
    _provenance,
    *map(_of_file, ("leases-without-a-clock", "windows", "unused", "written", "owners")),
    _had_by,
    *map(_of_file, ("dropped", "removals")),
)


def migrate(connection: Connection, now_unix_ms: int) -> bool:
    """Bring a database to today's form, in autocommit mode. Raises FailedPrecondition (DATA_TOO_NEW)."""
    table = Database(connection).table("migrations")
    if not table.exists():
        table.create({"number": int, "applied_unix_ms": int}, pk="number")
    steps = missing({int(row["number"]) for row in table.rows}, len(MIGRATIONS))
    if not steps:
        return False
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number in steps:
            MIGRATIONS[number - 1](connection)
            connection.execute("INSERT INTO migrations VALUES (?, ?)", (number, now_unix_ms))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full or failing disk has rolled it back
            connection.execute("ROLLBACK")
        raise
    return True
