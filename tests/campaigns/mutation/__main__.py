"""Runs mutants and writes their tables: `python -m tests.campaigns.mutation [suite …] [--only words] [--jobs n]`."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.campaigns.mutation import trees
from tests.campaigns.mutation.mutant import NOT_RUN, NOTHING, Suite, rows_of
from tests.campaigns.mutation.runner import Known, Run, noticed
from tests.campaigns.mutation.suites import SUITES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}; all without one")
    parser.add_argument("--only", default="", help="words of the mutants to ask for; then no table is written")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many copies work at once")
    parser.add_argument("--out", type=Path, default=trees.ROOT / "out/mutants", help="where progress is kept")
    parser.add_argument(
        "--tables", action="store_true", help="run nothing: tables of today's lists, with what is known"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    names = arguments.suites or list(SUITES)
    if arguments.tables:
        for name in names:
            _renew_table(SUITES[name])
        return 0
    failures = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies = [Path(directory, str(number)) for number in range(arguments.jobs)]
        trees.copy_tree(copies[0])  # the tree of this moment: edits that come while we run do not mix in
        for copy in copies[1:]:
            trees.copy_tree(copy, copies[0])
        tree = trees.digest_of(copies[0])
        for copy in copies:
            trees.do_not_shrink(copy)
        for name in names:
            known = Known(arguments.out / f"{name}.jsonl", tree)
            failures += not _run(SUITES[name], copies, known, arguments.only)
    return 1 if failures else 0


def _renew_table(suite: Suite) -> None:
    """For who renamed or added a mutant: whatever the table does not know is shown as not run yet."""
    path = trees.ROOT / suite.table
    known = {what: noticed for what, _, noticed in rows_of(path.read_text() if path.exists() else "")}
    path.write_text(suite.table_text([known.get(mutant.what, NOT_RUN) for mutant in suite.mutants]))


def _run(suite: Suite, copies: list[Path], known: Known, only: str) -> bool:
    """Whether every mutant was noticed."""
    run = Run(suite, copies, known)
    mutants = [mutant for mutant in suite.mutants if only in mutant.what]
    if not only and (words := run.unsound_tests()):
        print(f"{suite.name}: not run, because these tests fail although nothing is broken: {', '.join(words)}")
        return False
    run.run(mutants)
    if only:
        return all((asked := known.of(each.what)) and asked.noticed_by for each in mutants)
    column = noticed(suite, known)
    if column is None:
        print(f"{suite.name}: no table is written, because some tests ended in no answer")
        return False
    (trees.ROOT / suite.table).write_text(suite.table_text(column))
    print(
        f"{suite.name}: {len(column) - column.count(NOTHING)} of {len(column)} noticed, see {suite.table}", flush=True
    )
    return NOTHING not in column


if __name__ == "__main__":
    sys.exit(main())
