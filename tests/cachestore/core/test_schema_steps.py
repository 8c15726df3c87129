"""Files of SQL as steps of a schema: where a statement ends, and which steps are to come."""

import resource
import sqlite3
from pathlib import Path

import pytest
from kvasir.errors import FailedPrecondition

from cachestore_svc.index.postgres.schema import STEPS
from cachestore_svc.index.sqlite.database.migrations import migrate
from cachestore_svc.index.steps import missing, statements


def test_a_statement_ends_at_a_semicolon_before_an_empty_line_and_a_function_is_whole(tmp_path: Path) -> None:
    function = "CREATE FUNCTION f() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN\n    RETURN NULL;\nEND $$"
    step = tmp_path / "step.sql"
    step.write_text(f"-- One.\nCREATE TABLE one (a BIGINT);\n\n{function};\n")
    assert statements(step) == ("-- One.\nCREATE TABLE one (a BIGINT)", function)


def test_no_statement_of_a_step_is_empty_or_holds_two() -> None:
    found = [statement for step in STEPS for statement in step]
    begins = ("CREATE ", "ALTER ", "INSERT ", "UPDATE ")
    lines = [[line for line in each.splitlines() if not line.startswith("--")] for each in found]
    assert [sum(line.startswith(begins) for line in each) for each in lines] == [1] * len(found)


def test_steps_that_were_not_applied_come_in_their_order() -> None:
    assert missing({1, 2}, 11) == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(FailedPrecondition) as refused:
        missing({1, 12}, 11)
    assert refused.value.reason == "DATA_TOO_NEW"


def test_steps_that_the_disk_does_not_take_are_refused_by_its_error_and_apply_later(tmp_path: Path) -> None:
    """SQLite rolls back by itself then."""
    connection = sqlite3.connect(tmp_path / "catalog.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(sqlite3.OperationalError, match="disk"):
            migrate(connection, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert migrate(connection, 1)
    connection.close()
