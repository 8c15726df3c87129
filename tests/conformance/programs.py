"""Each language: the tools that it needs, how it is built and tested, its program, and its first example."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.http_steps import HTTP_STEPS
from tests.conformance.http_world import http_world
from tests.conformance.steps import STEPS, AnyWorld, Step
from tests.conformance.world import world

CLIENTS = Path(__file__).parents[2] / "clients"

Command = Sequence[str]


@dataclass(frozen=True)
class Language:
    """Commands run in the folder of the client. An example prints the reply's text."""

    name: str
    folder: Path
    tools: Sequence[str]
    build: Sequence[Command]
    # Its own tests, the golden cases of proto/vectors among them.
    test: Command | None
    program: Command
    # The source of the example, which README.md of the client shows as it is, and what runs it.
    example_file: str | None
    example: Command | None
    world: Callable[[], AbstractContextManager[AnyWorld]] = world
    steps: Sequence[Step] = STEPS

    def first_example(self) -> str:
        """Its source, less the first line, a comment that says what the file is."""
        assert self.example_file is not None
        source = (self.folder / self.example_file).read_text(encoding="utf-8")
        return source[source.index("\n") + 1 :].strip()


def _java(what: str) -> Command:
    """A class, or a source file; the build has left its class path in a file."""
    return ("sh", "-c", f"exec java -cp target/classes:target/test-classes:$(cat target/classpath) {what}")


LANGUAGES = (
    Language(
        name="python",
        folder=CLIENTS.parent,
        tools=(),
        build=(),
        test=None,  # make test has them
        program=(sys.executable, "-m", "tests.conformance.python_program"),
        example_file=None,
        example=None,
    ),
    Language(
        name="go",
        folder=CLIENTS / "go",
        tools=("go",),
        build=(("go", "build", "-o", "build/", "./internal/conformance", "./examples/first"),),
        test=("go", "test", "./..."),
        program=("build/conformance",),
        example_file="examples/first/main.go",
        example=("build/first",),
    ),
    Language(
        name="typescript",
        folder=CLIENTS / "typescript",
        tools=("node", "npm"),
        build=(("npm", "install", "--no-audit", "--no-fund", "--loglevel=error"), ("npm", "run", "--silent", "build")),
        test=("npm", "test", "--silent"),
        program=("node", "dist/conformance/program.js"),
        example_file="examples/first.ts",
        example=("node", "dist/examples/first.js"),
    ),
    Language(
        name="rust",
        folder=CLIENTS / "rust",
        tools=("cargo",),
        build=(("cargo", "build", "--quiet", "--examples"),),
        test=("cargo", "test", "--quiet", "--tests"),
        program=("target/debug/examples/conformance",),
        example_file="examples/first.rs",
        example=("target/debug/examples/first",),
    ),
    Language(
        name="java",
        folder=CLIENTS / "java",
        tools=("java", "mvn"),
        build=(("mvn", "-q", "-B", "test-compile"),),
        test=("mvn", "-q", "-B", "test"),
        program=_java("org.kvasir.client.Conformance"),
        example_file="examples/First.java",
        example=_java("examples/First.java"),
    ),
    Language(
        name="swift",
        folder=CLIENTS / "swift",
        tools=("swift",),
        build=(("swift", "build", "--quiet"),),
        test=None,  # it has no hashes of its own; the steps hold the rest
        program=("swift", "run", "--skip-build", "--quiet", "conformance"),
        example_file="Examples/first/main.swift",
        example=("swift", "run", "--skip-build", "--quiet", "first"),
        world=http_world,
        steps=HTTP_STEPS,
    ),
)
