"""A command that is ended, by SIGTERM or by its terminal that closes, takes what it has started along."""

import os
import pty
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cli.running import KVASIR, QUIET, Cli, eventually


def _serving(command: psutil.Process) -> list[psutil.Process]:
    """The services that it has started and that listen."""
    return [each for each in command.children(recursive=True) if _listens(each)]


def _listens(process: psutil.Process) -> bool:
    try:
        return "serve" in process.cmdline() and any(link.laddr for link in process.net_connections("unix"))
    except psutil.NoSuchProcess:
        return False


def _ends_with(command: psutil.Process, count: int, end: Callable[[], None]) -> None:
    """It has so many services, `end` ends it, and then nothing is left."""
    eventually(lambda: len(_serving(command)) == count, within_s=60)
    started = command.children(recursive=True)
    end()
    _, left = psutil.wait_procs([command, *started], timeout=40)
    for each in left:
        each.kill()
    assert not left


@pytest.mark.long(11)
@pytest.mark.parametrize(("words", "count"), [(("bench", "memory", "--quick"), 2), (("bench", "store", "--quick"), 1)])
def test_sigterm_ends_the_services_of_a_measurement(tmp_path: Path, words: tuple[str, ...], count: int) -> None:
    with Cli(tmp_path / "home").running(*words, is_fresh=True) as begun:
        command = psutil.Process(begun.process.pid)
        _ends_with(command, count, lambda: begun.process.send_signal(signal.SIGTERM))
        assert "Traceback" not in begun.err


@pytest.mark.long(7)
def test_a_terminal_that_closes_ends_them_too() -> None:
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(theirs), os.O_RDWR))

    argv = (KVASIR, "bench", "memory", "--quick")
    bench = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=QUIET, preexec_fn=take_terminal)
    os.close(theirs)
    _ends_with(psutil.Process(bench.pid), 2, lambda: os.close(ours))
