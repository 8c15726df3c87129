"""`make test-clients`: every client whose toolchain is here is built, tested, and taken through the steps.

    python -m tests.conformance [--no-build] [LANGUAGE…]

Exits 0 when all that ran passed, 1 when one failed, 2 for a language that is not known, 3 when nothing could be run."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conformance.programs import LANGUAGES, Language
from tests.conformance.steps import AnyWorld, run
from tests.conformance.testee import Testee

BUILD_WITHIN_S = 1800
EXAMPLE_WITHIN_S = 60
ANSWERS_WITHIN_S = 60


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("languages", nargs="*", metavar="LANGUAGE", help="default: all")
    parser.add_argument("--no-build", action="store_true", help="neither build nor unit tests: what was built is run")
    given = parser.parse_args()
    known = {language.name: language for language in LANGUAGES}
    if unknown := set(given.languages) - set(known):
        print(f"not known: {', '.join(sorted(unknown))}; expected some of {', '.join(known)}", file=sys.stderr)
        return 2
    asked = [known[name] for name in given.languages or known]
    absent = {each.name: missing for each in asked if (missing := missing_tools(each))}
    present = [each for each in asked if each.name not in absent]
    failed = {}
    if not given.no_build:
        failed = {each.name: problem for each in present if (problem := attempt(build, each))}
    ready = [each for each in present if each.name not in failed]
    for each in ready:
        # Services of its own: what one client left behind is not the next one's fault.
        if problem := attempt(conform, each):
            failed[each.name] = problem
    for each in asked:
        if each.name in absent:
            say(f"{each.name}: NOT RUN, not installed here: {', '.join(absent[each.name])}")
        else:
            say(f"{each.name}: {'FAILED: ' + failed[each.name] if each.name in failed else 'passed'}")
    say(f"{len(present) - len(failed)} passed, {len(failed)} failed, {len(absent)} skipped")
    return 1 if failed else 0 if present else 3


def missing_tools(language: Language) -> list[str]:
    return [tool for tool in language.tools if not answers(tool)]


def answers(tool: str) -> bool:
    """Whether the tool is there. macOS has a `java` that only says that there is none."""
    if shutil.which(tool) is None:
        return False
    asked = [tool, {"go": "version", "java": "-version"}.get(tool, "--version")]
    return subprocess.run(asked, capture_output=True, timeout=ANSWERS_WITHIN_S, check=False).returncode == 0


def attempt(what: Callable[[Language], None], language: Language) -> str:
    """What went wrong, in words; empty if nothing did. Whatever it is, the next language has its turn."""
    try:
        what(language)
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  pytest's own is none
        return str(error) or type(error).__name__
    return ""


def build(language: Language) -> None:
    for command in (*language.build, *([language.test] if language.test else [])):
        say(f"{language.name}: {' '.join(command)}")
        subprocess.run(command, cwd=language.folder, check=True, timeout=BUILD_WITHIN_S)


def conform(language: Language) -> None:
    say(f"{language.name}: {len(language.steps)} steps against live services")
    with language.world() as live:
        with Testee(language.program, language.folder) as program:
            run(program, live, say, language.steps)
            assert program.end() == 0, "the program did not end well when its input did"
        example(language, live)


def example(language: Language, live: AnyWorld) -> None:
    """The first example of the client's README runs."""
    if language.example is None:
        return
    done = subprocess.run(
        language.example,
        cwd=language.folder,
        env={**os.environ, **live.env},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=EXAMPLE_WITHIN_S,
    )
    assert done.stdout.strip(), "the first example printed nothing"
    say(f"  its first example: {done.stdout.strip()[:80]}")


if __name__ == "__main__":
    sys.exit(main())
