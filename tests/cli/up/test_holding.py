"""What runs in a home: who holds its lock, also a program that closes files meanwhile, and what its file
of running services says.
"""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvasir.cli import doctor
from kvasir.cli.caller import Caller
from kvasir.cli.running import holding
from kvasir.cli.running.group import service_states
from kvasir.cli.running.holding import disk_failure, end_group, end_services, holders, named_openers
from kvasir.cli.running.home import Home, Running

from tests.cli.running import free_port, in_process
from tests.running.waiting import eventually


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere `lsof` tells")
def test_a_holder_is_found_though_it_closed_a_descriptor_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_file = tmp_path / "lock"
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: (*[folder / "999999"] * (folder.name == "fd"), *listed(folder)))
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()])
    try:
        assert holders(lock_file) == [process.pid]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("error", "is_failure"), [(errno.EROFS, True), (errno.ENOSPC, False), (errno.EDQUOT, False)])
def test_a_full_disk_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, *, is_failure: bool
) -> None:
    """Else `kvasir down` would take an engine that was killed for one that ended by itself on such a disk."""

    def refused(_: Path) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(holding, "try_file", refused)
    assert disk_failure(tmp_path) == (os.strerror(error) if is_failure else "")


def test_down_touches_no_process_that_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A number in a file may be another program's by now."""
    home = Home(tmp_path)
    home.make()
    for lock in (home.up_lock_file, home.services_lock_file):
        lock.touch()
    with subprocess.Popen(["sleep", "60"]) as other, home.services_lock_file.open() as reader:
        home.write_running(Running(pid=other.pid, store="unix:/s", engine="unix:/e", engine_pid=other.pid))
        assert in_process("--home", tmp_path, "down", "--json").value["ended"] == []
        assert other.poll() is None
        assert holders(home.services_lock_file) == [], reader
        other.kill()


def test_where_nobody_tells_who_holds_a_lock_both_number_and_file_must_be_ours(tmp_path: Path) -> None:
    """macOS. Whoever only has the file open, or only has the number, was a process to end."""
    home = Home(tmp_path)
    home.make()
    home.services_lock_file.touch()
    argv = (sys.executable, "-c", "import sys, time; lock = open(sys.argv[1]); time.sleep(60)")
    with (
        subprocess.Popen([*argv, home.services_lock_file]) as ours,
        subprocess.Popen([*argv, home.services_lock_file]) as reader,
        subprocess.Popen([*argv, "/dev/null"]) as stranger,
    ):
        try:
            assert named_openers(home.services_lock_file) == set()
            home.write_running(
                Running(pid=0, store="unix:/s", engine="unix:/e", store_pid=ours.pid, engine_pid=stranger.pid)
            )
            eventually(lambda: named_openers(home.services_lock_file) == {ours.pid})
            home.write_running(Running(pid=0, store="unix:/s", engine="unix:/e"))
            assert named_openers(home.services_lock_file) == set()
        finally:
            for process in (ours, reader, stranger):
                process.kill()


# Asked to end, the one waits until the other has let go of the lock.
HOLDER = """
import fcntl, pathlib, signal, sys, time
place, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def wait_for(file):
    while not (place / file).exists(): time.sleep(0.01)
def end(*_):
    (place / "asked").touch()
    wait_for("let_go")
    sys.exit()
if name == "ended": signal.signal(signal.SIGTERM, end)
lock = open(place / "run" / "services.lock")
fcntl.flock(lock, fcntl.LOCK_SH)
if name == "other":
    wait_for("asked")
    lock.close()
    (place / "let_go").touch()
time.sleep(60)
"""


def test_what_an_up_of_another_version_wrote_is_read(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    home.running_file.write_text('{"pid": 7, "store": "unix:/s", "engine": "unix:/e", "namespaces": ["red"]}')
    assert home.running() == Running(pid=7, store="unix:/s", engine="unix:/e")


def test_commands_on_a_copied_home_do_not_reach_the_original(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    home.write_running(Running(pid=1, store=home.socket_address("store"), engine="127.0.0.1:1", token_file="x"))
    known = home.running()
    assert known is not None
    assert home.endpoint("engine").address == known.engine == "127.0.0.1:1"
    shutil.copytree(home.root, tmp_path / "copy")
    copy = Home(tmp_path / "copy")
    assert copy.running() is None
    assert copy.endpoint("engine").address == copy.socket_address("engine")


def test_a_number_that_is_another_programs_by_now_is_not_killed(tmp_path: Path) -> None:
    """It held the lock when the group was listed, and let go of it while another one was ended."""
    home = Home(tmp_path)
    home.make()
    home.services_lock_file.touch()
    argv = (sys.executable, "-c", HOLDER, tmp_path)
    with subprocess.Popen([*argv, "other"]) as other, subprocess.Popen([*argv, "ended"]) as ended:
        try:
            eventually(lambda: set(holders(home.services_lock_file)) == {other.pid, ended.pid})
            home.write_running(Running(pid=0, store="unix:/s", engine="unix:/e", store_pid=other.pid))
            end_services(home, print)  # the store's number comes last
            assert (ended.wait(60), other.poll()) == (0, None)
        finally:
            other.kill()
            ended.kill()


# A `kvasir up` that ends when it is asked to, and leaves its file where its engine did not stop.
LEADER = """
import fcntl, pathlib, signal, sys, time
run, ends = pathlib.Path(sys.argv[1]) / "run", sys.argv[2]
def end(*_):
    if ends == "whole": (run / "up.json").unlink()
    sys.exit()
signal.signal(signal.SIGTERM, end if ends != "never" else signal.SIG_IGN)
lock = open(run / sys.argv[3])
fcntl.flock(lock, fcntl.LOCK_SH)
while True: time.sleep(0.05)
"""


@pytest.mark.long(2)
@pytest.mark.parametrize(
    ("ends", "is_orphan", "is_killed"),
    [
        ("whole", False, False),
        ("engine killed", False, True),
        ("engine killed", True, False),
        ("never", True, True),
        ("never", False, False),  # only `kvasir up` was killed
    ],
)
def test_down_ends_with_1_where_the_engine_had_to_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, is_orphan: bool, is_killed: bool
) -> None:
    """By its `kvasir up`, or by `down`, if that one was killed before."""
    home = Home(tmp_path)
    home.make()
    monkeypatch.setattr(holding, "GRACE_S", 0.5 if is_orphan else 0.2)
    lock_file = home.services_lock_file if is_orphan else home.up_lock_file
    for lock in (home.up_lock_file, home.services_lock_file):
        lock.touch()
    with subprocess.Popen([sys.executable, "-c", LEADER, tmp_path, ends, lock_file.name]) as ending:
        eventually(lambda: holders(lock_file) == [ending.pid])
        home.write_running(Running(pid=1, store="unix:/s", engine="unix:/e", engine_pid=ending.pid if is_orphan else 1))
        down = in_process("--home", tmp_path, "down", "--json")
        assert (down.code, down.value["engine_killed"], down.value["ended"]) == (is_killed, is_killed, [ending.pid])
        assert home.running() is None, "that was told"


_LINGERS = """
import fcntl, pathlib, signal, sys, time
lock, log = open(sys.argv[1], "w"), pathlib.Path(sys.argv[2])
log.touch()
signal.signal(signal.SIGTERM, lambda *_: lock.close())
fcntl.flock(lock, fcntl.LOCK_EX)
while not lock.closed:
    time.sleep(0.01)
time.sleep(0.8)
log.unlink()
"""


def test_down_returns_when_no_file_of_the_home_is_open(tmp_path: Path) -> None:
    """Its disk may be unmounted then. A program that ends lets go of its lock before its log."""
    home, log = Home(tmp_path), tmp_path / "log"
    home.make()
    with subprocess.Popen([sys.executable, "-c", _LINGERS, home.up_lock_file, log]) as ending:
        eventually(lambda: holders(home.up_lock_file) == [ending.pid])
        assert end_group(home, print).pids == [ending.pid]
        assert not log.exists()


def test_what_a_killed_up_named_is_reported_once_and_is_no_fault_of_each_service(tmp_path: Path) -> None:
    caller = Caller(Home(tmp_path))
    caller.home.make()
    gone = Running(pid=1, store=f"unix:{tmp_path}/s", engine=f"unix:{tmp_path}/e", http=f"127.0.0.1:{free_port()}")
    caller.home.write_running(gone)
    states = service_states(caller)
    assert [(each.name, each.state) for each in states] == [(name, "stopped") for name in ("store", "engine", "http")]
    [problem] = doctor.service_problems(caller, states)
    assert "(pid 1) was killed here" in problem
