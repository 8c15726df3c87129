"""Runs mutants and writes their tables' last columns: `python -m tests.campaigns.mutation [suite …] [--only words]`."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.campaigns.mutation import trees
from tests.campaigns.mutation.mutant import NOTHING, ROOT, Suite
from tests.campaigns.mutation.runner import Known, Run, noticed
from tests.campaigns.mutation.suites import SUITES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}; all without one")
    parser.add_argument("--only", default="", help="words of the mutants to ask for")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many copies work at once")
    parser.add_argument("--out", type=Path, default=ROOT / "out/mutants", help="where progress is kept")
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    names = arguments.suites or list(SUITES)
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


def _run(suite: Suite, copies: list[Path], known: Known, only: str) -> bool:
    """Whether every mutant was noticed."""
    run = Run(suite, copies, known)
    mutants = [mutant for mutant in suite.mutants if only in mutant.what]
    if words := run.unsound_tests(mutants):
        print(f"{suite.name}: not run, because these tests fail although nothing is broken: {', '.join(words)}")
        return False
    run.run(mutants)
    column = noticed(suite, known)
    (ROOT / suite.table).write_text(suite.renewed(column))
    print(
        f"{suite.name}: {len(column) - column.count(NOTHING)} of {len(column)} noticed, see {suite.table}", flush=True
    )
    return all((asked := known.of(each.what)) and asked.noticed_by for each in mutants)


if __name__ == "__main__":
    sys.exit(main())
