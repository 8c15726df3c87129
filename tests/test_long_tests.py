"""Every long test has its turn, no commit goes without a test of a promise or of a fault of others, and none passes
whose thread raised, or an object at its end.
"""

import ast
import functools
import random
import re
import subprocess
import threading
from pathlib import Path

import pytest

from tests.lessons import REQUIRED, covered
from tests.long_tests import LONGEST_TURN_S, PARTS, PROMISES, part_of, parts, whose_turn_it_is

ROOT = Path(__file__).parents[1]


@functools.cache
def body_of(path: str) -> list[ast.stmt]:
    return ast.parse((ROOT / path).read_text()).body


def is_long(test: str) -> bool:
    """Of a test that is there: whether it may be left out."""
    path, *names = test.split("::")
    body = body_of(path)
    if any("mark.long" in ast.unparse(node) for node in body if isinstance(node, ast.Assign)):  # pytestmark
        return True
    for name in names:
        found = next(node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)
        if any("mark.long" in ast.unparse(decorator) for decorator in found.decorator_list):
            return True
        body = found.body
    return False


def test_a_file_whose_tests_are_all_long_is_seen() -> None:
    behind = (
        "tests/inference/engine/turns/test_behind_cells.py::test_a_stream_decodes_behind_each_cell_and_before_the_next"
    )
    assert is_long(behind)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_keeps_its_tests_at_every_commit(promise: str) -> None:
    assert PROMISES[promise]
    assert [test for test in PROMISES[promise] if is_long(test)] == []


def test_every_fault_of_others_keeps_a_test_at_every_commit() -> None:
    tests = covered()
    assert [fault for fault in sorted(REQUIRED) if all(is_long(test) for test in tests[fault])] == []


def test_files_take_turns_in_parts_that_take_about_as_long() -> None:
    drawn = random.Random(3)
    tests = [(f"test_{drawn.randrange(600)}.py", drawn.uniform(3, 30)) for _ in range(1200)]
    part = parts(tests)
    assert part == parts(reversed(tests)), "what was collected first must not matter"
    filled = [sum(seconds for file, seconds in tests if part[file] == number) for number in range(PARTS)]
    assert max(filled) < 1.1 * min(filled)


def test_each_long_test_has_one_turn_and_one_that_takes_longer_than_a_turn_has_none() -> None:
    tests = {"a": ("test_1.py", LONGEST_TURN_S), "b": ("test_1.py", LONGEST_TURN_S + 1), "c": ("test_2.py", 3)}
    turns = [whose_turn_it_is(tests, part) for part in range(PARTS)]
    assert sorted(name for turn in turns for name in turn) == ["a", "c"]


def test_a_file_of_many_long_tests_has_several_turns() -> None:
    tests = {f"{number:02}": ("test_1.py", 5) for number in range(20)}
    turns = [sorted(turn) for part in range(PARTS) if (turn := whose_turn_it_is(tests, part))]
    assert sorted(turns) == [sorted(tests)[first : first + 8] for first in (0, 8, 16)], (
        "neighbours share what they start"
    )


def test_the_file_of_a_test_without_a_turn_has_another_that_runs_at_commits() -> None:
    alone = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file == Path(__file__):
            continue
        seconds = [float(each) for each in re.findall(r"mark\.long\(([\d.]+)\)", file.read_text())]
        without = sum(each > LONGEST_TURN_S for each in seconds)
        if without and file.read_text().count("def test_") <= without:
            alone.append(str(file.relative_to(ROOT)))
    assert alone == []


def test_a_commit_and_a_number_name_a_part_and_nothing_else_does() -> None:
    assert [part_of(turn) for turn in ("0", "b", "14", "95e86db")] == [0, 11, 0x14, 0x95E86DB % PARTS]
    with pytest.raises(pytest.UsageError, match="KVASIR_TURN is 'all'"):
        part_of("all")


def test_make_check_ignores_only_paths_that_exist() -> None:
    printed = subprocess.run(["make", "-n", "checked"], cwd=ROOT, capture_output=True, text=True, check=True)
    ignored = re.findall(r"--ignore=(\S+)", printed.stdout)
    assert ignored
    assert [path for path in ignored if not (ROOT / path).exists()] == []


@pytest.mark.xfail(raises=pytest.PytestUnhandledThreadExceptionWarning, strict=True)
def test_a_thread_that_raises_fails_its_test() -> None:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


@pytest.mark.xfail(raises=pytest.PytestUnraisableExceptionWarning, strict=True)
def test_an_object_that_raises_at_its_end_fails_its_test() -> None:
    class Raising:
        def __del__(self) -> None:
            raise ZeroDivisionError

    Raising()
