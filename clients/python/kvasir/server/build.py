"""Which build of Kvasir runs: its version and, if known, its commit."""

import json
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGE = "kvasir"
_GIT_S = 2.0


def version() -> str:
    return metadata.version(_PACKAGE)


def commit() -> str:
    """The commit that was installed from a repository, or the one of the checkout that runs; else empty."""
    try:
        told = json.loads(metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")
    except ValueError:
        told = {}
    return str(told.get("vcs_info", {}).get("commit_id", "")) or _of_checkout(Path(__file__).parents[4])


def _of_checkout(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    try:
        argv = ["git", "-C", str(root), "rev-parse", "HEAD"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
