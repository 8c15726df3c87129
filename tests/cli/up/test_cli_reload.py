"""What `kvasir reload` says of services that have ended or hang: processes that hold the home's lock as they do."""

import fcntl
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.cli.callers import reload
from kvasir.cli.running.home import Home, Running
from kvasir.cli.running.own_credentials import make_credentials

from tests.cli.running import in_process


def _not_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The one service of a home; a SIGHUP ends it."""
    home = Home(tmp_path)
    home.make()
    make_credentials(home)
    with home.services_lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()], preexec_fn=_not_under_nohup)
    home.write_running(Running(pid=1, store="unix:/s", engine="unix:/e", engine_pid=process.pid))
    yield process
    process.kill()
    process.wait()


def test_a_service_that_ends_meanwhile_is_reported_at_once_and_keeps_no_old_set(
    engine: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    threading.Thread(target=engine.wait).start()
    began = time.monotonic()
    told = in_process("--home", tmp_path, "reload", "--json")
    assert time.monotonic() - began < 5
    assert (told.code, told.value) == (0, {"engine": {"service": "engine", "outcome": "ended"}})


def test_a_service_that_hangs_is_told_to_read_the_new_set_later(
    engine: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "PATIENCE_S", 0.2)
    engine.send_signal(signal.SIGSTOP)
    told = in_process("--home", tmp_path, "reload")
    assert told.code == 4
    assert "engine: notes nothing in its audit; if it hangs, it reads the new set once it runs" in told.out
    assert "engine: a service that hangs keeps the old set until it runs again" in told.err
    assert "is the disk full?" in told.err
