"""The packages of a release, each built in a copy of the tree and put into the folder of the release."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULE = "kvasir.org/client"
# Zip files know no earlier time; equal files make an equal archive, whenever it is made.
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_BUILT_WITHIN_S = 1800


@dataclass(frozen=True)
class Package:
    """`build(tree, out, version)` writes into the folder `out`; `tool` is a program that it needs."""

    name: str
    build: Callable[[Path, Path, str], None]
    tool: str = ""

    def missing(self) -> str:
        """The tool that is not here; empty if the package can be built."""
        return self.tool if self.tool and shutil.which(self.tool) is None else ""


def python(tree: Path, out: Path, version: str) -> None:
    """The source archive, the wheel that is built from it, and the versions that are installed beside it."""
    _run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out], tree)
    unpacked = tree / "out" / "sdist"
    shutil.unpack_archive(out / f"kvasir-{version}.tar.gz", unpacked, filter="data")
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out], unpacked / f"kvasir-{version}")
    shutil.copy(tree / "constraints.txt", out)


def image(tree: Path, out: Path, version: str) -> None:
    """The Dockerfile, whose context is the release, and the compose file, which builds it there."""
    shutil.copy(tree / "compose" / "Dockerfile", out)
    text = (tree / "compose" / "compose.yaml").read_text(encoding="utf-8")
    (out / "compose.yaml").write_text(text.replace("../out/release", ".").replace(":latest", f":{version}"), "utf-8")


def npm(tree: Path, out: Path, _version: str) -> None:
    folder = tree / "clients" / "typescript"
    _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], folder)
    _run(["npm", "pack", "--loglevel=error", "--pack-destination", out], folder)


def go(tree: Path, out: Path, version: str) -> None:
    """A proxy of modules as files, which `GOPROXY=file://…/go` reads."""
    folder, tag = tree / "clients" / "go", f"v{version}"
    versions = out / "go" / MODULE / "@v"
    versions.mkdir(parents=True)
    (versions / "list").write_text(f"{tag}\n", encoding="utf-8")
    (versions / f"{tag}.info").write_text(f'{{"Version": "{tag}"}}\n', encoding="utf-8")
    shutil.copy(folder / "go.mod", versions / f"{tag}.mod")
    _zip(folder, versions / f"{tag}.zip", f"{MODULE}@{tag}")


def crate(tree: Path, out: Path, version: str) -> None:
    folder = tree / "clients" / "rust"
    _run(["cargo", "package", "--quiet", "--no-verify", "--allow-dirty"], folder)
    shutil.copy(folder / "target" / "package" / f"kvasir-client-{version}.crate", out)


def maven(tree: Path, out: Path, _version: str) -> None:
    """A repository of Maven as files: the jar, its sources and its documentation."""
    to = f"-DaltDeploymentRepository=release::default::{(out / 'maven').as_uri()}"
    _run(["mvn", "-q", "-B", "-DskipTests", to, "deploy"], tree / "clients" / "java")


def swift(tree: Path, out: Path, version: str) -> None:
    _zip(tree / "clients" / "swift", out / f"kvasir-swift-{version}.zip", f"kvasir-swift-{version}")


PACKAGES = (
    Package("python", python),
    Package("image", image),
    Package("go", go),
    Package("swift", swift),
    Package("npm", npm, "npm"),
    Package("crate", crate, "cargo"),
    Package("maven", maven, "mvn"),
)


def _zip(folder: Path, archive: Path, below: str) -> None:
    """All files of a folder, under the name `below`."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(f"{below}/{file.relative_to(folder).as_posix()}", _LONG_AGO)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            made.writestr(entry, file.read_bytes())


def _run(command: Sequence[str | Path], folder: Path) -> None:
    """What a builder prints goes to standard error: of a release only its files stand on standard output."""
    subprocess.run(command, cwd=folder, env=os.environ, stdout=sys.stderr, check=True, timeout=_BUILT_WITHIN_S)
