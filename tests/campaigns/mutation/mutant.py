"""One deliberate fault of the code, and the table of such faults that says which test noticed each.

A table is a Markdown page, written by hand but for its last column: what is broken, in which file and function, by
which steps, which tests are asked, and which of them noticed.
"""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from tests.campaigns.mutation.steps import VoidStep, function_of, read_steps

ROOT = Path(__file__).parents[3]
NOTHING = "**nothing**"
NOT_RUN = "not run yet"
_ROW = re.compile(r"\| (.+?) \| `([^`]+)` \| (.+?) \| ([\w ]+) \| (.*?) \|")
_BAR = "\\|"  # a bar in a cell


class VoidMutant(Exception):
    """The code no longer has the place, once and only once, that a mutant breaks."""


@dataclass(frozen=True)
class Mutant:
    """A change of one function of a package, and the tests to ask, in this order."""

    what: str
    place: str  # the end of a file's path, a colon, and the function's qualified name
    steps: str
    tests: str
    noticed: str = field(default=NOT_RUN, compare=False)

    def path_in(self, package: Path) -> Path:
        """The file to change. Raises VoidMutant."""
        file = self.place.partition(":")[0]
        found = [path for path in _files_of(package) if path.as_posix().endswith(f"/{file}")]
        if len(found) != 1:
            raise VoidMutant(f"{self.what}: {len(found)} files of {package.name} are called {file}")
        return found[0]

    def applied_to(self, source: str) -> ast.Module:
        """The tree with the fault. Raises VoidMutant."""
        tree = ast.parse(source)
        self._break(lambda name: function_of(tree, name))
        return tree

    def function_in(self, source: str) -> ast.Module:
        """The one function with the fault, far sooner read and compiled than its file. Raises VoidMutant."""
        broken = self._break(lambda name: _function_alone(source, name))
        return broken if isinstance(broken, ast.Module) else ast.Module([broken], [])  # type: ignore[list-item]

    def _break(self, find: Callable[[str], ast.AST]) -> ast.AST:
        try:
            function = find(self.place.partition(":")[2])
            before = ast.dump(function)
            for step in read_steps(self.steps):
                step.apply(function)
        except VoidStep as error:
            raise VoidMutant(f"{self.what} ({self.place}): {error}") from error
        if ast.dump(function) == before:
            raise VoidMutant(f"{self.what} ({self.place}): nothing changes")
        return ast.fix_missing_locations(function)

    def row(self, noticed: str) -> str:
        return f"| {self.what} | `{self.place}` | {self.steps.replace('|', _BAR)} | {self.tests} | {noticed} |"


@dataclass(frozen=True)
class Asked:
    """The answer of the tests about a broken copy."""

    noticed_by: str  # a test, or what was found; "" where nothing was noticed
    went_wrong: str = ""  # why the tests say nothing about the fault


@dataclass(frozen=True)
class Suite:
    """The mutants of one part of the code."""

    name: str
    package: str
    ask: Callable[[Path], Asked] | None = None  # where no test file is asked: of a broken copy

    @property
    def table(self) -> str:
        return f"tests/campaigns/mutation/tables/{self.name}.md"

    @cached_property
    def mutants(self) -> Sequence[Mutant]:
        return rows_of((ROOT / self.table).read_text())

    def test_files(self, word: str, root: Path) -> list[Path]:
        return sorted(root.glob(f"tests/**/test_{word}.py"))

    def renewed(self, noticed: Sequence[str]) -> str:
        """The table's text, given its last column in the order of the mutants."""
        text = (ROOT / self.table).read_text()
        head = [line for line in text.splitlines() if not _ROW.fullmatch(line)]
        return "\n".join([*head, *map(Mutant.row, self.mutants, noticed), ""])


@cache
def _files_of(package: Path) -> Sequence[Path]:
    return list(package.rglob("*.py"))


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _function_alone(source: str, name: str) -> ast.AST:
    """A function or class of this qualified name, parsed anew. Raises VoidStep."""
    found = function_of(_parsed(source), name)
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ast.parse(source)
    first = min(node.lineno for node in (found, *found.decorator_list))
    lines = "\n".join(source.split("\n")[first - 1 : found.end_lineno])
    [alone] = ast.parse(f"if True:\n{lines}" if found.col_offset else lines).body
    return alone.body[0] if isinstance(alone, ast.If) else alone


def rows_of(table: str) -> list[Mutant]:
    """The mutants of a table."""
    found = (_ROW.fullmatch(line.replace(_BAR, "\0")) for line in table.splitlines())
    return [Mutant(*(cell.replace("\0", "|") for cell in row.groups())) for row in found if row]
