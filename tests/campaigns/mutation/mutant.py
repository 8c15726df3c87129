"""One deliberate fault of the code, and a list of such faults with the table that says which test noticed each."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

NOTHING = "**nothing**"
NOT_RUN = "not run yet"
_ROW = re.compile(r"^\| (?P<what>.+?) \| `(?P<file>[^`]+)` \| (?P<noticed>.*?) \|$")


class VoidMutant(Exception):
    """The code no longer has the place, once and only once, that a mutant breaks."""


@dataclass(frozen=True)
class Mutant:
    """A change of one file of a package, and the tests to ask, in this order."""

    what: str
    file: str  # the end of its path
    old: str
    new: str
    tests: str = ""
    also: tuple[str, str] = ("", "")  # a second change that the first one needs

    def path_in(self, package: Path) -> Path:
        """The file to change. Raises VoidMutant."""
        found = [path for path in package.rglob("*.py") if path.as_posix().endswith(f"/{self.file}")]
        if len(found) != 1:
            raise VoidMutant(f"{self.what}: {len(found)} files of {package.name} are called {self.file}")
        return found[0]

    def applied_to(self, source: str) -> str:
        """The source with the fault. Raises VoidMutant."""
        for fragment in (self.old, self.also[0]):
            if fragment and (count := source.count(fragment)) != 1:
                raise VoidMutant(f"{self.what}: {self.file} has {count} times what is to be changed: {fragment!r}")
        source = source.replace(self.old, self.new)
        return source.replace(*self.also) if self.also[0] else source


@dataclass(frozen=True)
class Asked:
    """What the tests said of a broken copy."""

    noticed_by: str  # a test, or what was found; "" where nothing was noticed
    went_wrong: str = ""  # why the tests say nothing about the fault


@dataclass(frozen=True)
class Suite:
    """The mutants of one part of the code."""

    name: str
    title: str
    package: str
    table: Path  # from the root of the repository
    mutants: Sequence[Mutant]
    tests: str = ""  # where the tests of a mutant's word are
    ask: Callable[[Mutant, Path], Asked] | None = None  # where no test file is asked: of a broken copy
    column: str = "which test noticed"

    def test_files(self, word: str, root: Path) -> list[Path]:
        return sorted(root.glob(self.tests.format(word)))

    def table_text(self, noticed: Sequence[str]) -> str:
        """The table, given its last column in the order of the mutants."""
        rows = [f"| {each.what} | `{each.file}` | {by} |" for each, by in zip(self.mutants, noticed, strict=True)]
        head = [f"# {self.title}", "", "Each fault was put into a copy of the code, and the tests were run on it.", ""]
        how = f"Written by `python -m tests.campaigns.mutation {self.name}`; `make mutants` writes every such table."
        return "\n".join([*head, how, "", f"| what was broken | where | {self.column} |", "|---|---|---|", *rows, ""])


def rows_of(table: str) -> list[tuple[str, str, str]]:
    """What was broken, where, and what noticed it, of each row."""
    found = (_ROW.match(line) for line in table.splitlines())
    return [(row["what"], row["file"], row["noticed"]) for row in found if row]
