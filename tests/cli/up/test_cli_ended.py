"""A command that is ended, by SIGTERM or by its terminal that closes, takes along what it has started."""

import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kvasir.address import parse_address
from kvasir.cli.running.holding import holders, is_led
from kvasir.cli.running.home import Home

from tests.cli.running import KVASIR, QUIET, Cli
from tests.running import in_memory
from tests.running.waiting import eventually


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
    eventually(lambda: len(_serving(command)) == count, within_s=200)
    started = [command, *command.children(recursive=True)]
    end()
    try:
        eventually(lambda: all(map(_has_ended, started)), within_s=80)
    finally:
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # a service's own helper; not every container collects it
    except psutil.NoSuchProcess:
        return True


@pytest.mark.long(14)
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
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.setsid()
        os.close(os.open(os.ttyname(theirs), os.O_RDWR))

    argv = (KVASIR, "bench", "memory", "--quick")
    bench = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=QUIET, preexec_fn=take_terminal)
    os.close(theirs)
    _ends_with(psutil.Process(bench.pid), 2, lambda: os.close(ours))


@pytest.fixture
def home() -> Iterator[Home]:
    """Short, because a socket's path must fit into a hundred bytes."""
    home = Home(in_memory.home())
    yield home
    Cli(home.root)("down")
    shutil.rmtree(home.root)


def test_an_up_in_the_background_ends_with_the_command_that_waits_for_it(home: Home) -> None:
    with Cli(home.root).running("up", "-d", "--no-http") as up:
        eventually(lambda: holders(home.services_lock_file))
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(20) == 143
    eventually(lambda: not is_led(home) and not holders(home.services_lock_file))
    log = home.logs / "up.log"  # none, if it ended that soon
    assert not log.exists() or "engine is ready" not in log.read_text(), "at once: nobody would hear of it"


@pytest.mark.long(2)
def test_under_nohup_a_terminal_that_closes_does_not_end_up(home: Home) -> None:
    argv = ("nohup", KVASIR, "--home", home.root, "up", "--no-http")
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(argv, stdin=none, stdout=none, stderr=pipe, text=True, env=QUIET) as up:
        assert up.stderr is not None
        assert any("Starting in" in line for line in up.stderr)
        up.send_signal(signal.SIGHUP)
        assert any("store is ready" in line for line in up.stderr), "it went on"
        up.terminate()
        up.stderr.read()
    assert up.returncode == 0


@pytest.mark.long(4)
def test_an_up_whose_gateways_port_is_taken_while_it_starts_takes_the_next_one(home: Home) -> None:
    with Cli(home.root).running("up") as up, socket.socket() as other:
        first = eventually(lambda: (running := home.running()) and running.http)
        other.bind(("127.0.0.1", parse_address(first).port))  # before the gateway, which still imports
        other.listen()
        second = eventually(lambda: (running := home.running()) and running.is_ready and running.http, within_s=60)
        assert parse_address(second).port > parse_address(first).port
        assert up.process.poll() is None
        assert "has taken the gateway's port meanwhile" in up.err
