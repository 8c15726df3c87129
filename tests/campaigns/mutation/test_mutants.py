"""Every mutant breaks today's code in one place, and every table has a test that noticed each of them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.campaigns.mutation import mutant as mutants
from tests.campaigns.mutation.mutant import NOTHING, ROOT, Asked, Mutant, Suite, VoidMutant, rows_of
from tests.campaigns.mutation.runner import Known, Run, noticed
from tests.campaigns.mutation.suites import SUITES

_TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
every_suite = pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))


@every_suite
def test_every_mutant_changes_one_place_of_todays_code_and_what_it_makes_is_python(suite: Suite) -> None:
    void = []
    for mutant in suite.mutants:
        try:
            path = mutant.path_in(ROOT / suite.package)
            compile(mutant.function_in(path.read_text()), path, "exec")
        except (VoidMutant, SyntaxError) as error:
            void.append(str(error))
    assert void == []


@every_suite
def test_every_mutant_has_a_name_of_its_own_and_tests_to_ask(suite: Suite) -> None:
    names = [mutant.what for mutant in suite.mutants]
    assert names
    assert len(set(names)) == len(names)
    words = {word for mutant in suite.mutants for word in mutant.tests.split()}
    assert suite.ask or [word for word in sorted(words) if not suite.test_files(word, ROOT)] == []


@every_suite
def test_a_table_is_read_whole_and_names_a_test_that_noticed_each_mutant(suite: Suite) -> None:
    text = (ROOT / suite.table).read_text()
    assert len(suite.mutants) == text.count("\n|") - 2, "a row that cannot be read"
    assert text == suite.renewed([mutant.noticed for mutant in suite.mutants])
    if suite.ask is None:
        assert sorted({mutant.noticed.strip("`") for mutant in suite.mutants} - _test_names()) == []


_SOURCE = """
class House:
    def enter(self, guest, rooms):
        with self.lock:
            if guest.is_known and rooms > 0:
                self.count(guest, 1)
                self.greet(guest)
        return [room for room in rooms if room.is_free]
"""


@pytest.mark.parametrize(
    ("steps", "old", "new"),
    [
        ("drop `self.greet`", "                self.greet(guest)\n", ""),
        ("never `is_known`", "guest.is_known and rooms > 0", "False"),
        ("always `is_free`", "room.is_free", "True"),
        ("omit `rooms > 0`", "guest.is_known and rooms > 0", "guest.is_known and guest.is_known"),
        ("omit `guest` 1", "self.count(guest, 1)", "self.count(1)"),
        ("put `1` by `_ + 1`", "guest, 1", "guest, 1 + 1"),
        (
            "late `self.count`",
            "self.count(guest, 1)\n                self.greet(guest)",
            "self.greet(guest)\n                self.count(guest, 1)",
        ),
        ("before `return` by `self.leave()`", "        return", "        self.leave()\n        return"),
        ("after `self.greet` by `return`", "self.greet(guest)", "self.greet(guest)\n                return"),
        ("replace `self.greet` by `guest.go()`", "self.greet(guest)", "guest.go()"),
        (
            "drop `self.count`; then drop `self.greet`",
            "                self.count(guest, 1)\n                self.greet(guest)",
            "                pass",
        ),
    ],
)
def test_a_step_changes_the_one_node_that_it_names(steps: str, old: str, new: str) -> None:
    mutant = Mutant("a guest is ignored", "house.py:House.enter", steps, "house")
    expected = ast.parse(_SOURCE.replace(old, new))
    assert ast.unparse(mutant.applied_to(_SOURCE)) == ast.unparse(expected)
    assert ast.unparse(mutant.function_in(_SOURCE)) == ast.unparse(expected.body[0].body[0])  # type: ignore[attr-defined]


def test_a_lock_is_taken_away_by_unwrapping_it() -> None:
    found = ast.unparse(
        Mutant("nobody locks", "house.py:House.enter", "unwrap `self.lock`", "house").applied_to(_SOURCE)
    )
    assert "lock" not in found
    assert "self.greet(guest)" in found


@pytest.mark.parametrize(
    ("place", "steps"),
    [
        ("House.leave", "drop `self.greet`"),
        ("House.enter", "drop `self.leave`"),
        ("House.enter", "drop `self.`"),
        ("House.enter", "put `1` by `1`"),
        ("House.enter", "break `1` by `2`"),
    ],
)
def test_a_mutant_whose_place_is_gone_or_doubled_is_void(place: str, steps: str, tmp_path: Path) -> None:
    mutant = Mutant("a guest is ignored", f"house.py:{place}", steps, "house")
    with pytest.raises(VoidMutant):
        mutant.applied_to(_SOURCE)
    with pytest.raises(VoidMutant, match="0 files"):
        mutant.path_in(tmp_path)


def test_a_run_asks_once_for_each_mutant_undoes_it_and_continues_after_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(copy: Path) -> Asked:
        asked.append((copy / "house/rules.py").read_text())
        return Asked("" if "rule_one" in asked[-1] else "a test")

    rows = "".join(
        f"| rule {what} is left out | `rules.py:` | drop `rule_{what}` | rules | x |\n" for what in ("one", "two")
    )
    (tmp_path / "tests/campaigns/mutation/tables").mkdir(parents=True)
    (tmp_path / "tests/campaigns/mutation/tables/rules.md").write_text(f"# Rules\n\n{rows}")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    suite = Suite("rules", "house", ask=ask)
    (tmp_path / "house").mkdir()
    (tmp_path / "house/rules.py").write_text("rule_one(); rule_two()")
    for tree in ("today", "today", "tomorrow"):
        known = Known(tmp_path / "out/rules.jsonl", tree)
        Run(suite, [tmp_path], known).run(suite.mutants)
    assert asked == ["rule_two()", "rule_one()"] * 2, "the same tree is not asked twice, and another tree is"
    assert (tmp_path / "house/rules.py").read_text() == "rule_one(); rule_two()"
    assert noticed(suite, known) == ["a test", NOTHING]
    assert [mutant.noticed for mutant in rows_of(suite.renewed(noticed(suite, known)))] == ["a test", NOTHING]


@cache
def _test_names() -> frozenset[str]:
    return frozenset(name for path in (ROOT / "tests").rglob("test_*.py") for name in _TEST.findall(path.read_text()))
