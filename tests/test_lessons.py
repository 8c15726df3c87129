"""The table of faults elsewhere names tests that exist, and leaves none of those out that this engine must not have."""

from tests.lessons import REQUIRED, TABLE, covered, named_in_table, table


def test_every_named_test_exists_and_reports_that_it_covers_its_row() -> None:
    there = covered()
    for row, tests in named_in_table(TABLE.read_text()).items():
        assert [test for test in tests if test not in there.get(row, [])] == [], f"row {row}: python -m tests.lessons"


def test_every_fault_that_an_engine_can_have_has_a_test() -> None:
    named = named_in_table(TABLE.read_text())
    assert sorted(row for row in REQUIRED if not named.get(row)) == []


def test_a_table_reports_what_was_found() -> None:
    rows = {1: ["tests/a.py::test_one", "tests/b.py::test_two"], 4: ["tests/a.py::TestX::test_three"]}
    assert {row: tests for row, tests in named_in_table(table(rows)).items() if tests} == rows
