"""This system's facts: its programs' output, its files, and its chip."""

import platform
import re
import subprocess
import sys
from pathlib import Path

SHORT_HOME = Path("/tmp")  # noqa: S108 - a socket's path must fit into a hundred bytes


def output_of(*command: str) -> str:
    """A system program's output; empty where there is none, or where it fails."""
    try:
        return subprocess.run(
            ["env", "LC_ALL=C", *command], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def text_of(file: str | Path) -> str:
    """A system file's text; empty where there is none."""
    try:
        return Path(file).read_text("utf-8").strip()
    except OSError:
        return ""


def sysctl(name: str) -> str:
    """A value of macOS; empty elsewhere, and where it has none of the name."""
    return output_of("sysctl", "-n", name).strip() if sys.platform == "darwin" else ""


def chip() -> str:
    if name := sysctl("machdep.cpu.brand_string"):
        return name
    found = re.search(r"^model name\s*:\s*(.+)$", text_of("/proc/cpuinfo"), re.M)
    return found[1] if found else platform.machine()
