"""One process of a fleet: how it is started, found ready, killed and ended."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

READY_S = 120.0
_ENDS_S = 60.0


class FleetError(Exception):
    """A part that is not installed, did not start, or is in use. Its text has the remedy."""


class Process(Protocol):
    """What a part needs of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


Begin = Callable[["Part"], Process]


@dataclass
class Part:
    """A process with a log; it runs as another user where its program refuses root."""

    name: str
    argv: Sequence[str]
    log_file: Path
    is_ready: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    end_by: int = signal.SIGTERM
    begin: Begin | None = None
    kept_descriptors: Sequence[int] = ()
    process: Process | None = None

    def start(self) -> None:
        """Begin it, and return at once."""
        self.process = (self.begin or _popen)(self)

    def wait_until_ready(self, within_s: float = READY_S) -> None:
        """Raises FleetError, with the end of its log, where it ends or takes too long."""
        give_up = time.monotonic() + within_s
        while not self.is_ready():
            if not self.is_running:
                raise FleetError(f"{self.name} ended at its start: {self._last_words()}")
            if time.monotonic() > give_up:
                raise FleetError(f"{self.name} is not ready after {within_s:g} s: {self._last_words()}")
            time.sleep(0.05)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: int) -> None:
        """A signal to the process, if it lives."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def stop(self) -> None:
        """Let it end by itself, in a minute; then kill it."""
        self.send(self.end_by)
        if self.process is not None:
            try:
                self.process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def _last_words(self) -> str:
        with suppress(OSError):
            return f"{self.log_file.read_text(errors='replace').strip()[-600:]} (log: {self.log_file})"
        return f"log: {self.log_file}"


def _popen(part: Part) -> Process:
    # A session of its own: Ctrl-C reaches the fleet alone, which ends its parts in order.
    more: dict[str, Any] = {"user": part.user, "group": part.user} if part.user else {}
    with part.log_file.open("ab") as log:
        return subprocess.Popen(
            part.argv,
            env={**os.environ, **part.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=part.kept_descriptors,
            cwd="/",
            **more,
        )


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str, *folders: str, advice: str) -> str:
    """The path of a program: in PATH, or the newest in folders that may have wildcards. Raises FleetError."""
    if found := shutil.which(name):
        return found
    for folder in folders:
        base = Path(folder).expanduser()
        for each in sorted(Path(base.anchor).glob(str(base.relative_to(base.anchor) / name)), reverse=True):
            return str(each)
    raise FleetError(f"{name} is not installed here. {advice}")
