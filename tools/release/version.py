"""The version of a release: a tag of git gives it, and the packages and the changelog of the tree get it."""

import re
import subprocess
from datetime import date
from pathlib import Path

# Where a package has its version, as what stands before it.
PLACES = {
    "pyproject.toml": r'^version = "',
    "clients/python/kvasir/__init__.py": r'^__version__ = "',
    "clients/go/client.go": r'^const Version = "',
    "clients/typescript/package.json": r'^  "version": "',
    "clients/rust/Cargo.toml": r'^version = "',
    "clients/java/pom.xml": r"^  <version>",
    "clients/java/README.md": r"^Then `org\.kvasir:kvasir-client:",
}
_VERSION = r"\d+\.\d+\.\d+"
CHANGES = "### What a client must change"


class ReleaseError(Exception):
    """What keeps a release from being made, and what to do about it."""


def stated(root: Path) -> dict[str, str]:
    """The version that each package of this tree has, by file."""
    found = {}
    for name, before in PLACES.items():
        match = re.search(f"({before})({_VERSION})", (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None:
            raise ReleaseError(f"{name}: expected a line {before}{_VERSION}")
        found[name] = match[2]
    return found


def of_tag(root: Path) -> str:
    """The version that a tag of this commit names; the tree must be the commit's."""
    tag = _git(root, "describe", "--exact-match", "--tags", "--match", "v*")
    stands = stated(root)["pyproject.toml"]
    if not re.fullmatch(f"v{_VERSION}", tag):
        raise ReleaseError(
            f"no tag vX.Y.Z names this commit, so it has no version{f' (its tag is {tag})' if tag else ''}: "
            f"`git tag v{stands}` gives it one; `make release TRY=1` builds {stands} of the files as they are"
        )
    if changed := _git(root, "diff", "--name-only", "-z", "HEAD").rstrip("\0"):
        raise ReleaseError(f"{tag} is not what lies here: commit or restore {', '.join(changed.split(chr(0)))}")
    return tag.removeprefix("v")


def write(root: Path, version: str) -> None:
    """Give the packages and the changelog of a tree this version, and the changelog today's date."""
    page = root / "CHANGELOG.md"
    section = re.search(rf"^## {re.escape(version)}\b.*?(?=^## |\Z)", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if section is None or CHANGES not in section[0]:
        raise ReleaseError(f"CHANGELOG.md: expected a section '## {version}' with a part '{CHANGES}'")
    for name, before in PLACES.items():
        text = (root / name).read_text(encoding="utf-8")
        text = re.sub(f"({before}){_VERSION}", rf"\g<1>{version}", text, count=1, flags=re.MULTILINE)
        (root / name).write_text(text, encoding="utf-8")
    dated = section[0].replace("unreleased", date.today().isoformat(), 1)
    page.write_text(page.read_text("utf-8").replace(section[0], dated, 1), encoding="utf-8")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
