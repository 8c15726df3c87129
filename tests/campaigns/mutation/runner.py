"""Breaks the code once per mutant, each time in a copy of the tree, and notes which test noticed it.

Goes on where it was ended: what is known of a mutant in this very tree is not asked again.
"""

import json
import queue
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.campaigns.mutation import trees
from tests.campaigns.mutation.mutant import NOTHING, Asked, Mutant, Suite

_PATIENCE_S = 1800.0
_FAILED = re.compile(r"^FAILED \S+::(\w+)", re.MULTILINE)
# The store's tests of kills do as many as find a fault of one write in a few; and no long test waits for its turn.
_MORE = {"KVASIR_KILLS": "200", "KVASIR_TURN": ""}


class Known:
    """What runs on this tree have found, on disk."""

    def __init__(self, path: Path, tree: str) -> None:
        self._path = path
        self._tree = tree
        self._found: dict[str, Asked] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                said = json.loads(line)
                if said.pop("tree") == tree:
                    what = said.pop("what")
                    self._found[what] = Asked(**said)

    def of(self, what: str) -> Asked | None:
        return self._found.get(what)

    def add(self, what: str, asked: Asked) -> None:
        self._found[what] = asked
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"tree": self._tree, "what": what, "noticed_by": asked.noticed_by, "went_wrong": asked.went_wrong}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Run:
    """One suite on a number of copies of the tree."""

    def __init__(self, suite: Suite, copies: Sequence[Path], known: Known) -> None:
        self._suite = suite
        self._copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for copy in copies:
            self._copies.put(copy)
        self._jobs = len(copies)
        self._known = known

    def unsound_tests(self, mutants: Sequence[Mutant]) -> list[str]:
        """Words whose tests fail although nothing is broken: they would notice everything."""
        words = [] if self._suite.ask else sorted({word for each in mutants for word in each.tests.split()})
        with ThreadPoolExecutor(self._jobs) as pool:
            return [word for word, is_sound in zip(words, pool.map(self._is_sound, words), strict=True) if not is_sound]

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Ask for each mutant that is not known yet, and print what noticed it."""
        begun, total = time.monotonic(), len(mutants)
        unknown = [mutant for mutant in mutants if self._known.of(mutant.what) is None]
        done = total - len(unknown)
        with ThreadPoolExecutor(self._jobs) as pool:
            for mutant, asked in zip(unknown, pool.map(self._ask, unknown), strict=True):
                done += 1
                said = asked.went_wrong or asked.noticed_by or "NOTHING"
                passed_s = time.monotonic() - begun
                print(f"{self._suite.name} {done}/{total} {passed_s:.0f} s | {mutant.what} | {said}", flush=True)

    def _is_sound(self, word: str) -> bool:
        name = f"(nothing is broken: {word})"
        if self._known.of(name) is None:
            copy = self._copies.get()
            try:
                asked = ask_tests(self._suite, word, copy)
            finally:
                self._copies.put(copy)
            self._known.add(name, asked)
            if said := asked.noticed_by or asked.went_wrong:
                print(f"{self._suite.name}: {word} fails although nothing is broken: {said}", flush=True)
        return self._known.of(name) == Asked("")

    def _ask(self, mutant: Mutant) -> Asked:
        copy = self._copies.get()
        try:
            with trees.broken(mutant, copy / self._suite.package):
                asked = self._asked(mutant, copy)
        finally:
            self._copies.put(copy)
        self._known.add(mutant.what, asked)
        return asked

    def _asked(self, mutant: Mutant, copy: Path) -> Asked:
        if self._suite.ask is not None:
            return self._suite.ask(copy)
        for word in mutant.tests.split():
            asked = ask_tests(self._suite, word, copy)
            if asked != Asked(""):
                return asked
        return Asked("")


def ask_tests(suite: Suite, word: str, copy: Path) -> Asked:
    """The first test that fails."""
    files = [str(path) for path in suite.test_files(word, copy)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=300", "--no-header", *files]
    try:
        done = trees.run_in(copy, command, _PATIENCE_S, _MORE)
    except subprocess.TimeoutExpired:
        return Asked("", f"the tests of {word} did not end")
    if done.returncode == 1 and (failed := _FAILED.search(done.stdout)):
        return Asked(failed[1])
    if done.returncode:
        return Asked("", f"the tests of {word} ended with {done.returncode}: {done.stdout[-300:]}")
    return Asked("")


def noticed(suite: Suite, known: Known) -> list[str]:
    """The last column of the table: of what this tree was not asked for, as it stands there."""
    column = []
    for mutant in suite.mutants:
        asked = known.of(mutant.what)
        if asked is None or asked.went_wrong:
            column.append(mutant.noticed)
        else:
            by = asked.noticed_by if suite.ask else f"`{asked.noticed_by}`"
            column.append(by if asked.noticed_by else NOTHING)
    return column
