"""Every mutant breaks today's code in one place, and every table tells of the mutants that there are."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.campaigns.mutation.mutant import NOTHING, Asked, Mutant, Suite, VoidMutant, rows_of
from tests.campaigns.mutation.runner import Known, Run, noticed
from tests.campaigns.mutation.suites import SUITES
from tests.campaigns.mutation.trees import ROOT

_TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
every_suite = pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))


@every_suite
def test_every_mutant_changes_one_place_of_todays_code_and_what_it_makes_is_python(suite: Suite) -> None:
    void = []
    for mutant in suite.mutants:
        try:
            path = mutant.path_in(ROOT / suite.package)
            compile(mutant.applied_to(path.read_text()), path, "exec")
        except (VoidMutant, SyntaxError) as error:
            void.append(str(error))
    assert void == []


@every_suite
def test_every_mutant_has_a_name_of_its_own_and_tests_to_ask(suite: Suite) -> None:
    names = [mutant.what for mutant in suite.mutants]
    assert len(set(names)) == len(names)
    words = {word for mutant in suite.mutants for word in mutant.tests.split()}
    assert bool(suite.ask) != bool(words)
    assert [word for word in sorted(words) if not suite.test_files(word, ROOT)] == []


@every_suite
def test_a_table_has_the_mutants_of_its_list_in_order_each_with_the_test_that_noticed(suite: Suite) -> None:
    text = (ROOT / suite.table).read_text()
    rows = rows_of(text)
    listed = [(mutant.what, mutant.file) for mutant in suite.mutants]
    assert [(what, file) for what, file, _ in rows] == listed, "run: python -m tests.campaigns.mutation --tables"
    assert text == suite.table_text([noticed for _, _, noticed in rows])
    if suite.ask is None:
        said = {noticed.strip("`") for _, _, noticed in rows}
        assert sorted(said - _test_names()) == []


def test_a_mutant_whose_place_is_gone_or_doubled_is_void(tmp_path: Path) -> None:
    mutant = Mutant("a rule is left out", "rules.py", "if rule:", "if True:")
    with pytest.raises(VoidMutant, match="0 files"):
        mutant.path_in(tmp_path)
    for source in ("", "if rule:\nif rule:\n"):
        with pytest.raises(VoidMutant, match="times"):
            mutant.applied_to(source)
    assert mutant.applied_to("if rule: pass") == "if True: pass"


def test_a_run_asks_once_for_each_mutant_mends_what_it_broke_and_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def ask(mutant: Mutant, copy: Path) -> Asked:
        asked.append((mutant.what, (copy / "house/rules.py").read_text()))
        return Asked("" if "two" in mutant.what else "a test")

    mutants = [Mutant(f"rule {what} is left out", "rules.py", f"rule_{what}()", "pass") for what in ("one", "two")]
    suite = Suite("rules", "Mutants of rules", "house", Path("RULES.md"), mutants, ask=ask)
    (tmp_path / "house").mkdir()
    (tmp_path / "house/rules.py").write_text("rule_one(); rule_two()")
    for tree in ("today", "today", "tomorrow"):
        known = Known(tmp_path / "out/rules.jsonl", tree)
        Run(suite, [tmp_path], known).run(mutants)
    broken = [("rule one is left out", "pass; rule_two()"), ("rule two is left out", "rule_one(); pass")]
    assert asked == broken * 2, "the same tree is not asked twice, and another tree is"
    assert (tmp_path / "house/rules.py").read_text() == "rule_one(); rule_two()"
    column = noticed(suite, known)
    assert column == ["a test", NOTHING]
    assert [by for _, _, by in rows_of(suite.table_text(column))] == column


@cache
def _test_names() -> frozenset[str]:
    return frozenset(name for path in (ROOT / "tests").rglob("test_*.py") for name in _TEST.findall(path.read_text()))
