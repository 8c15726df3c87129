"""Lets the system start `kvasir up` at login: launchd on macOS, the user's systemd on Linux."""

import contextlib
import hashlib
import os
import plistlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.cli.running.holding import GRACE_S
from kvasir.cli.running.home import DEFAULT_HOME, Home
from kvasir.cli.running.program import MODULE
from kvasir.credentials import replace_private_text
from kvasir.errors import FailedPrecondition
from kvasir.options.finding import variables
from kvasir.waits import HANGS_S, PATIENCE_S, PAUSE_S

_LABEL = "org.kvasir.up"
# Each service raises its own limit to the hard one; this is the least.
_OPEN_FILES = 65_536
# Three services end one after the other.
_STOP, _AGAIN = int(3 * GRACE_S + PATIENCE_S), int(PATIENCE_S)
# Where Hugging Face's library looks for models, whose other variables may be secrets.
_OF_MODELS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT")
# Exit codes of launchctl: the job has not ended yet (of a first end, and of another), and there is no such job.
_IN_PROGRESS, _ABSENT = (36, 37), (3, 113)


@dataclass(frozen=True, slots=True)
class Job:
    """What is started at login: its file, that file's content, and the commands that take it up and give it up.
    launchd gives it up some time after its command has ended; `show` fails from then on."""

    file: Path
    content: bytes
    begin: tuple[tuple[str, ...], ...]
    end: tuple[str, ...]
    show: tuple[str, ...] = ()


def job_of(home: Home, words: Sequence[str]) -> Job:
    """The job of a home, whose `kvasir up` has these further words. Paths in them are of the present directory."""
    argv = [_lasting(sys.executable), MODULE, "kvasir", "--home", str(home.root), "up", "--as-login-job", *words]
    is_usual = home.root == DEFAULT_HOME.expanduser()
    other = "" if is_usual else "-" + hashlib.blake2b(os.fsencode(home.root), digest_size=4).hexdigest()
    return _launchd(f"{_LABEL}{other}", argv, home) if sys.platform == "darwin" else _systemd(f"kvasir{other}", argv)


def _lasting(program: str) -> str:
    """The program by a path that stays: Homebrew's own one has a version, which the next upgrade removes."""
    prefix, is_homebrews, below = program.partition("/Cellar/")
    name, *parts = below.split("/")
    lasting = Path(prefix, "opt", name, *parts[1:])
    return str(lasting) if is_homebrews and lasting.exists() and lasting.samefile(program) else program


def start_at_login(job: Job) -> None:
    """Write the job's file, and begin it now. Raises FailedPrecondition."""
    replace_private_text(job.file, job.content.decode())
    with contextlib.suppress(FailedPrecondition):  # `begin` reports what is wrong
        _end(job, "")
    for command in job.begin:
        _do(command, f"{job.file} is written and not begun")


def forget_at_login(job: Job) -> bool:
    """End the job, and remove its file. Returns whether there was one. Raises FailedPrecondition."""
    if not job.file.exists():
        return False
    _end(job, f"{job.file} stays")
    job.file.unlink()
    return True


def _end(job: Job, otherwise: str) -> None:
    """launchctl returns before the services have ended, in most cases without an error, and launchd takes no job of
    this name until then."""
    give_up_s = time.monotonic() + _STOP + PATIENCE_S
    _do(job.end, otherwise, (*_IN_PROGRESS, *_ABSENT) if job.show else ())
    while job.show and _do(job.show, otherwise, _ABSENT) == 0:
        if time.monotonic() >= give_up_s:
            raise FailedPrecondition(f"{otherwise}: `{shlex.join(job.end)}`: it goes on", reason="NOT_AT_LOGIN")
        time.sleep(PAUSE_S)


def _do(command: Sequence[str], otherwise: str, allowed: Sequence[int] = ()) -> int:
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_STOP + HANGS_S)
        code, problem = ended.returncode, ended.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        code, problem = -1, str(error)
    if code and code not in allowed:
        raise FailedPrecondition(f"{otherwise}: `{shlex.join(command)}`: {problem}", reason="NOT_AT_LOGIN")
    return code


def _environment() -> dict[str, str]:
    """The options that the environment gives, and where programs and models are found."""
    return {"PATH": os.pathsep.join(os.get_exec_path())} | variables(_OF_MODELS)


def _launchd(label: str, argv: Sequence[str], home: Home) -> Job:
    file, domain = Path.home() / "Library" / "LaunchAgents" / f"{label}.plist", f"gui/{os.getuid()}"
    content = {
        "Label": label,
        "ProgramArguments": list(argv),
        "WorkingDirectory": str(Path.cwd()),
        "EnvironmentVariables": _environment(),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},  # after `kvasir down` it ends with 0
        "ThrottleInterval": _AGAIN,
        "ExitTimeOut": _STOP,
        "SoftResourceLimits": {"NumberOfFiles": _OPEN_FILES},
        "Umask": 0o077,
        "ProcessType": "Interactive",
        "StandardErrorPath": str(home.logs / "up.log"),
    }
    begin, job = ("launchctl", "bootstrap", domain, str(file)), f"{domain}/{label}"
    return Job(file, plistlib.dumps(content), (begin,), ("launchctl", "bootout", job), ("launchctl", "print", job))


def _systemd(name: str, argv: Sequence[str]) -> Job:
    lines = (
        "[Unit]",
        "Description=Kvasir: store, engine and HTTP gateway",
        "[Service]",
        f"ExecStart={' '.join(map(_quoted, argv)).replace('$', '$$')}",
        f"WorkingDirectory={str(Path.cwd()).replace('%', '%%')}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in _environment().items()),
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
    return Job(file, "\n".join(lines).encode(), begin, (*systemctl, "disable", "--now", name))


def _quoted(word: str) -> str:
    """A word of a unit file. In commands, $ has a meaning too."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + word.replace("%", "%%") + '"'
