"""A home that nobody has used: the only one that what runs in it knows, with a release at ~/kvasir."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LONGEST_S = 1500
# A toolchain that rustup manages lies in the caller's home; what it builds does not.
_KEPT = ("PATH", "LANG", "SSL_CERT_FILE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "RUSTUP_HOME", "JAVA_HOME")

# A Mac has the second one, as a user's machine may have either.
_CHECKS = (["sha256sum"], ["shasum", "-a", "256"])


class Failed(Exception):
    """What went wrong, with the last words of the program."""


class NotRun(Exception):
    """Why this cannot run here."""


@dataclass
class Place:
    home: Path
    path: list[Path] = field(default_factory=list)  # before the caller's own

    def environment(self) -> Mapping[str, str]:
        kept = {name: value for name in _KEPT if (value := os.environ.get(name))}
        rustup = Path.home() / ".rustup"
        if rustup.is_dir():
            kept.setdefault("RUSTUP_HOME", str(rustup))
        # Without the environment of this repository: a line must not find what it has yet to install.
        own = Path(sys.prefix, "bin").resolve()
        others = [each for each in kept["PATH"].split(":") if Path(each).resolve() != own]
        found = [*map(str, self.path), *others]
        # Maven takes the home of the user's entry, and not HOME.
        java = f"-Duser.home={self.home}"
        return {**kept, "PATH": ":".join(found), "HOME": str(self.home), "MAVEN_OPTS": java}

    def run(self, line: str, folder: Path | None = None) -> str:
        """What the line prints on standard output; runs in the home, or in the folder."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=folder or self.home,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
        if done.returncode:
            raise Failed(f"{line}\n  ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:].strip()}")
        return done.stdout

    def another(self, name: str) -> "Place":
        """A second home, which has the same release at ~/kvasir."""
        home = self.home.parent / name
        home.mkdir()
        (home / "kvasir").symlink_to(self.home / "kvasir")
        return Place(home, list(self.path))


def talk(place: Place, kvasir: str = "kvasir") -> None:
    """What is installed serves an agent who remembers, and stops."""
    place.run(f"{kvasir} up -d")
    try:
        place.run(f'{kvasir} chat ada --once "My dog is called Rex."')
        reply = place.run(f'{kvasir} chat ada --once "What is my dog called?"')
        if "Rex" not in reply:
            raise Failed(f"ada does not remember: {reply!r}")
    finally:
        place.run(f"{kvasir} down")


def check_sums(folder: Path) -> None:
    """Raises CalledProcessError for a file that is not the one that SHA256SUMS names."""
    check = next(words for words in _CHECKS if shutil.which(words[0]))
    subprocess.run([*check, "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
