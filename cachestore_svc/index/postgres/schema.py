"""The schema in PostgreSQL: `steps`, in one transaction. Tables and the order of their columns are those of SQLite,
because the statements are.
"""

from pathlib import Path

from cachestore_svc.index.sqlite.rows import Connection
from cachestore_svc.index.steps import missing, statements

SCHEMA = "kvasir"
_FILES = {int(file.name.partition("-")[0]): file for file in Path(__file__).with_name("steps").glob("*.sql")}
STEPS = tuple(statements(_FILES[number]) for number in range(1, len(_FILES) + 1))


def migrate(connection: Connection, now_unix_ms: int) -> None:
    """Bring a database to today's form, within the caller's transaction. Raises FailedPrecondition (DATA_TOO_NEW)."""
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
    table = "migrations (number BIGINT PRIMARY KEY, applied_unix_ms BIGINT NOT NULL)"
    connection.execute(f"CREATE TABLE IF NOT EXISTS {table}")
    applied = {int(number) for (number,) in connection.execute("SELECT number FROM migrations").fetchall()}
    for number in missing(applied, len(STEPS)):
        for statement in STEPS[number - 1]:
            connection.execute(statement)
        made = "INSERT INTO migrations VALUES (:number, :now)"
        connection.execute(made, {"number": number, "now": now_unix_ms})
