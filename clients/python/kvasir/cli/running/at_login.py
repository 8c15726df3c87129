"""Lets the system start `kvasir up` at login: launchd on macOS, the user's systemd on Linux."""

import hashlib
import os
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.cli.running.holding import GRACE_S
from kvasir.cli.running.home import DEFAULT_HOME, Home
from kvasir.errors import FailedPrecondition
from kvasir.waits import HANGS_S, PATIENCE_S

_LABEL = "org.kvasir.up"
# Each service raises its own limit to the hard one; this is the least.
_OPEN_FILES = 65_536
# Three services end one after the other.
_STOP, _AGAIN = int(3 * GRACE_S + PATIENCE_S), int(PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Job:
    """What is started at login: its file, that file's content, and the commands that take it up and give it up."""

    file: Path
    content: bytes
    begin: tuple[tuple[str, ...], ...]
    end: tuple[tuple[str, ...], ...]


def job_of(home: Home, words: Sequence[str]) -> Job:
    """The job of a home, whose `kvasir up` has these further words. Paths in them are of the present directory."""
    argv = [sys.executable, "-m", "kvasir", "--home", str(home.root), "up", *words]
    is_usual = home.root == DEFAULT_HOME.expanduser()
    other = "" if is_usual else "-" + hashlib.blake2b(os.fsencode(home.root), digest_size=4).hexdigest()
    return _launchd(f"{_LABEL}{other}", argv, home) if sys.platform == "darwin" else _systemd(f"kvasir{other}", argv)


def start_at_login(job: Job) -> None:
    """Write the job's file, and begin it now. Raises FailedPrecondition."""
    job.file.parent.mkdir(parents=True, exist_ok=True)
    new = job.file.with_name(f".{job.file.name}.new")
    new.write_bytes(job.content)
    new.chmod(0o600)
    new.replace(job.file)
    for command in job.end:  # of another content
        subprocess.run(command, check=False, capture_output=True, timeout=HANGS_S)
    for command in job.begin:
        _do(command, f"{job.file} is written and not begun")


def forget_at_login(job: Job) -> bool:
    """End the job, and remove its file. Returns whether there was one. Raises FailedPrecondition."""
    if not job.file.exists():
        return False
    for command in job.end:
        _do(command, f"{job.file} stays")
    job.file.unlink()
    return True


def _do(command: Sequence[str], otherwise: str) -> None:
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANGS_S)
        problem = ended.stderr.strip() if ended.returncode else ""
        has_failed = bool(ended.returncode)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem, has_failed = str(error), True
    if has_failed:
        raise FailedPrecondition(f"{otherwise}: `{shlex.join(command)}`: {problem}", reason="NOT_AT_LOGIN")


def _launchd(label: str, argv: Sequence[str], home: Home) -> Job:
    file, domain = Path.home() / "Library" / "LaunchAgents" / f"{label}.plist", f"gui/{os.getuid()}"
    content = {
        "Label": label,
        "ProgramArguments": list(argv),
        "WorkingDirectory": str(Path.cwd()),
        "EnvironmentVariables": {"PATH": os.pathsep.join(os.get_exec_path())},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},  # after `kvasir down` it ends with 0
        "ThrottleInterval": _AGAIN,
        "ExitTimeOut": _STOP,
        "SoftResourceLimits": {"NumberOfFiles": _OPEN_FILES},
        "Umask": 0o077,
        "ProcessType": "Interactive",
        "StandardErrorPath": str(home.logs / "up.log"),
    }
    begin, end = ("launchctl", "bootstrap", domain, str(file)), ("launchctl", "bootout", f"{domain}/{label}")
    return Job(file, plistlib.dumps(content), (begin,), (end,))


def _systemd(name: str, argv: Sequence[str]) -> Job:
    lines = (
        "[Unit]",
        "Description=Kvasir: store, engine and HTTP gateway",
        "[Service]",
        f"ExecStart={' '.join(map(_quoted, argv))}",
        f"WorkingDirectory={str(Path.cwd()).replace('%', '%%')}",
        f"Environment={_quoted('PATH=' + os.pathsep.join(os.get_exec_path()))}",
        "Restart=on-failure",
        f"RestartSec={_AGAIN}",
        f"TimeoutStopSec={_STOP}",
        "KillMode=mixed",
        f"LimitNOFILE={_OPEN_FILES}",
        "UMask=0077",
        "[Install]",
        "WantedBy=default.target",
        "",
    )
    file, systemctl = Path.home() / ".config" / "systemd" / "user" / f"{name}.service", ("systemctl", "--user")
    begin = ((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", name))
    return Job(file, "\n".join(lines).encode(), begin, ((*systemctl, "disable", "--now", name),))


def _quoted(word: str) -> str:
    """A word of a unit file, in which % and $ mean something."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") + '"'
