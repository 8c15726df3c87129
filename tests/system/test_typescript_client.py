"""One client of another language is compiled against today's contract, and goes through the conformance steps.

TypeScript's, because its tools come in ten seconds on a clean machine and compile in three. Go takes a minute and a
half there, Rust and Java more. `make test-clients` has them all.
"""

import re
import subprocess

import pytest

from tests.conformance import testee
from tests.conformance.__main__ import missing_tools
from tests.conformance.programs import LANGUAGES
from tests.conformance.steps import STEPS, run, two_hundred_turns_at_once
from tests.conformance.world import world

[TYPESCRIPT] = (language for language in LANGUAGES if language.name == "typescript")
INSTALL, *BUILD = TYPESCRIPT.build
assert TYPESCRIPT.test is not None
# As npm names that no registry was reached. Whatever else it says is ours to mend.
_NO_NETWORK = re.compile(r"^npm (?:error|ERR!) code (ENOTFOUND|ECONNREFUSED|ETIMEDOUT|EAI_AGAIN)$", re.MULTILINE)


def done(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=TYPESCRIPT.folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def installed() -> None:
    if missing := missing_tools(TYPESCRIPT):
        pytest.skip(f"the TypeScript client was not run, not installed here: {', '.join(missing)}")
    package, packages = TYPESCRIPT.folder / "package.json", TYPESCRIPT.folder / "node_modules/.package-lock.json"
    if packages.exists() and packages.stat().st_mtime > package.stat().st_mtime:
        return
    fetched = done(*INSTALL)
    if unreached := _NO_NETWORK.search(fetched.stderr):
        pytest.skip(f"the TypeScript client was not run, npm reaches no registry: {unreached[1]}")
    assert fetched.returncode == 0, fetched.stderr


def test_only_an_absent_network_excuses_npm() -> None:
    assert _NO_NETWORK.search("npm error code EAI_AGAIN\nnpm error errno EAI_AGAIN\n")
    assert not _NO_NETWORK.search("npm error code E404\nnpm error 404 Not Found: ENOTFOUND@1.0.0\n")


@pytest.mark.long(24)
def test_a_client_of_another_language_fits_the_contract(installed: None) -> None:
    for command in (*BUILD, TYPESCRIPT.test):
        built = done(*command)
        assert built.returncode == 0, built.stdout + built.stderr
    with world() as live, testee.Testee(TYPESCRIPT.program, TYPESCRIPT.folder) as program:
        run(program, live, print, [step for step in STEPS if step is not two_hundred_turns_at_once])
