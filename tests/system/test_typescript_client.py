"""One client of another language is compiled against today's contract, and goes through the conformance steps.

TypeScript's, because its tools come in ten seconds on a clean machine and compile in three. Go takes a minute and a
half there, Rust and Java more. `make test-clients` has them all.
"""

import subprocess

import pytest

from clients.conformance import testee
from clients.conformance.__main__ import missing_tools
from clients.conformance.programs import LANGUAGES
from clients.conformance.steps import STEPS, run, two_hundred_turns_at_once
from clients.conformance.world import world

[TYPESCRIPT] = (language for language in LANGUAGES if language.name == "typescript")
INSTALL, *BUILD = TYPESCRIPT.build
assert TYPESCRIPT.test is not None


def done(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=TYPESCRIPT.folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def installed() -> None:
    if missing := missing_tools(TYPESCRIPT):
        pytest.skip(f"the TypeScript client was not run, not installed here: {', '.join(missing)}")
    package, packages = TYPESCRIPT.folder / "package.json", TYPESCRIPT.folder / "node_modules/.package-lock.json"
    if packages.exists() and packages.stat().st_mtime > package.stat().st_mtime:
        return
    if (fetched := done(*INSTALL)).returncode != 0:
        pytest.skip(f"the TypeScript client was not run, npm brings no packages: {fetched.stderr[-200:]}")


def test_a_client_of_another_language_fits_the_contract(installed: None) -> None:
    for command in (*BUILD, TYPESCRIPT.test):
        built = done(*command)
        assert built.returncode == 0, built.stdout + built.stderr
    with world() as live, testee.Testee(TYPESCRIPT.program, TYPESCRIPT.folder) as program:
        run(program, live, print, [step for step in STEPS if step is not two_hundred_turns_at_once])
