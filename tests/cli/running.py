"""Runs `kvasir` as a process of its own, with what it prints and how it ends.

They are forked, which saves the imports each time, but for those that a test begins as people do.
"""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.cli import failures
from kvasir.cli.caller import Caller
from kvasir.cli.running.health import ENGINE_SERVICE, is_ready
from kvasir.cli.running.home import Endpoint, Home, Running
from kvasir.cli.showing.terminal import PlainConsole

from tests.command_tree import TREE
from tests.running.ports import free_port
from tests.running.programs import Program, run
from tests.running.waiting import eventually

KVASIR = Path(sys.executable).with_name("kvasir")
QUIET = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)


def in_process(*arguments: str | Path) -> Ended:
    """A command within this process, for one that ends before it starts anything."""
    out, err = io.StringIO(), io.StringIO()
    caller = Caller(
        as_json="--json" in arguments, out=PlainConsole(file=out, width=200), err=PlainConsole(file=err, width=200)
    )
    with contextlib.redirect_stderr(err):
        code = failures.code_of(
            lambda: TREE(list(map(str, arguments)), obj=caller, prog_name="kvasir", standalone_mode=False), caller
        )
    return Ended(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Begun:
    """A command that goes on."""

    process: "Program | subprocess.Popen[bytes]"
    out_file: Path
    err_file: Path

    @property
    def out(self) -> str:
        return self.out_file.read_text() if self.out_file.exists() else ""

    @property
    def err(self) -> str:
        return self.err_file.read_text() if self.err_file.exists() else ""


@dataclass(frozen=True)
class Cli:
    """The command line with one home."""

    home: Path

    def __call__(self, *arguments: str | Path, stdin: str = "", timeout_s: float = 120) -> Ended:
        """Run a command to its end. No command prints a trace."""
        command = ("--home", str(self.home), *map(str, arguments))
        ended = run("kvasir", *command, given=stdin, timeout_s=timeout_s, env=QUIET)
        assert "Traceback" not in ended.stderr, ended.stderr
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def done(self, *arguments: str | Path, stdin: str = "") -> Ended:
        """As a call, of a command that must succeed."""
        ended = self(*arguments, stdin=stdin)
        assert ended.code == 0, ended.err or ended.out
        return ended

    @contextmanager
    def running(self, *arguments: str | Path, is_fresh: bool = False) -> Iterator[Begun]:
        """A command that goes on; it is stopped at the end, with SIGTERM. A fresh one has its own interpreter."""
        command = ("--home", str(self.home), *map(str, arguments))
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            process = _fresh(command, out, err) if is_fresh else Program("kvasir", command, out=out, err=err, env=QUIET)
            try:
                yield Begun(process, out, err)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)


def _fresh(command: Sequence[str], out: Path, err: Path) -> "subprocess.Popen[bytes]":
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen([KVASIR, *command], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=QUIET)


def answers(address: str, service: str) -> bool:
    """Whether a service says that it is ready."""
    return asyncio.run(is_ready(Endpoint(address), service))


def wait_until_ready(home: Path, up: Begun) -> Running:
    def is_ready() -> bool:
        assert up.process.poll() is None, up.err
        running = Home(home).running()
        return running is not None and answers(running.engine, ENGINE_SERVICE)

    eventually(is_ready, within_s=90)
    running = Home(home).running()
    assert running is not None
    return running


def three_free_ports() -> int:
    """The first of them."""
    while True:
        first = free_port()
        with socket.socket() as second, socket.socket() as third, contextlib.suppress(OSError, OverflowError):
            second.bind(("127.0.0.1", first + 1))
            third.bind(("127.0.0.1", first + 2))
            return first


def process_exists(pid: int) -> bool:
    """Whether any process with this id lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
