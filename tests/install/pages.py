"""What the pages tell a user to type, and the program that each client's page shows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Client:
    """A client's page: its one line, and the program, which lies in `file` and is run by `run` in the same folder."""

    name: str
    tool: str
    file: str
    run: str
    # What the page leaves to the user's own project, by file.
    beside: Mapping[str, str] = field(default_factory=dict)
    prints: str = "Anna"  # a regular expression

    @property
    def line(self) -> str:
        return self._blocks()[0][1].strip()

    @property
    def program(self) -> str:
        return self._blocks()[1][1]

    def _blocks(self) -> list[tuple[str, str]]:
        page = (ROOT / "clients" / self.name / "README.md").read_text(encoding="utf-8")
        return _BLOCK.findall(page[page.index("Use it today") :])


_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>first</groupId><artifactId>first</artifactId><version>1</version>
<properties><maven.compiler.source>17</maven.compiler.source><maven.compiler.target>17</maven.compiler.target></properties>
<dependencies><dependency><groupId>org.kvasir</groupId><artifactId>kvasir-client</artifactId><version>[0,)</version></dependency></dependencies>
</project>
"""
_SWIFT = """// swift-tools-version:6.0
import PackageDescription
let package = Package(name: "first", platforms: [.macOS(.v13)], dependencies: [.package(path: "kvasir")], targets: [
    .executableTarget(name: "first", dependencies: [.product(name: "Kvasir", package: "kvasir")], path: "Sources")])
"""
CLIENTS = (
    Client("python", "python3", "first.py", "env/bin/python first.py", prints=r"\b(red|green|blue)\b"),
    Client("go", "go", "main.go", "go run ."),
    Client("typescript", "npm", "first.js", "node first.js"),
    Client("rust", "cargo", "src/main.rs", "cargo run --quiet"),
    Client(
        "java",
        "mvn",
        "src/main/java/First.java",
        "mvn -q -B compile org.codehaus.mojo:exec-maven-plugin:3.5.0:java -Dexec.mainClass=First",
        {"pom.xml": _POM},
    ),
    Client("swift", "swift", "Sources/main.swift", "swift run --quiet", {"Package.swift": _SWIFT}),
)


def python_lines() -> dict[str, str]:
    """The lines that put `kvasir` on the path, by the program that installs it."""
    page = (ROOT / "compose" / "README.md").read_text(encoding="utf-8")
    block = _BLOCK.findall(page[page.index("## Install") :])[0][1]
    return {re.split(r"[ -]", line)[0]: line for line in block.strip().splitlines()}
