"""A home's locks, and the processes that hold them: those alone are ended, whichever number a file names."""

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvasir.cli.running.home import Home
from kvasir.errors import FailedPrecondition
from kvasir.syncing import try_file
from kvasir.waits import ANSWER_S, LOOK_S, SOON_S

# A service is killed after so long without a line of its log. An engine gives calls 10 s, and the store 10 s more
# for what it has in RAM alone; while the store takes it, however much it is, the engine logs that every 5 s.
GRACE_S = 30.0
_LONGEST_S = 900.0


@dataclass
class Patience:
    """With processes that are to end: `grace_s` from the last growth of their logs, a quarter of an hour in
    all."""

    grace_s: float
    logs: Path  # one log, or a directory of them
    longest_s: float = _LONGEST_S
    _began: float = field(default_factory=time.monotonic)
    _grew: float = field(default_factory=time.monotonic)
    _size: int = field(init=False)

    def __post_init__(self) -> None:
        self._size = self._size_now()

    @property
    def is_over(self) -> bool:
        now, size = time.monotonic(), self._size_now()
        if size != self._size:
            self._grew, self._size = now, size
        return now >= min(self._grew + self.grace_s, self._began + self.longest_s)

    @property
    def in_words(self) -> str:
        waited = time.monotonic() - self._began
        return f"within {waited:.3g} s" if waited >= self.longest_s else f"and logged nothing for {self.grace_s:g} s"

    def _size_now(self) -> int:
        logs = self.logs.glob("*.log") if self.logs.is_dir() else [self.logs]
        return sum(log.stat().st_size for log in logs if log.exists())


def holders(lock_file: Path) -> list[int]:
    """The processes that hold the lock; never this process."""
    try:
        lock = lock_file.stat()
    except OSError:
        return []
    found = _with_lock_linux(lock) if sys.platform == "linux" else named_openers(lock_file)
    return sorted(set(found) - {os.getpid()})


def is_led(home: Home) -> bool:
    """Whether a `kvasir up` of this home lives."""
    return bool(holders(home.up_lock_file))


def disk_failure(folder: Path) -> str:
    """Why a file cannot begin there, as on a disk that the system made read-only after an error; empty if one can, or
    could on a full disk, which takes other changes.
    """
    try:
        try_file(folder)
    except OSError as error:
        return "" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return ""


class Ended(NamedTuple):
    pids: list[int]
    is_engine_killed: bool  # it did not end by itself: it may have had something to store


def end_group(home: Home, say: Callable[[str], None]) -> Ended:
    """End `kvasir up`, which ends its services, and any that are left of it."""
    led = holders(home.up_lock_file)
    # Its services have their own time, in turn.
    killed = [pid for pid in led if _end(pid, home.up_lock_file, say, 3 * GRACE_S, home.logs)]
    if led:
        _wait_for_helpers(home.services_lock_file)
    # A `kvasir up` whose engine ended by itself has removed its file, unless it was killed or the disk takes no change.
    is_engine_killed = bool(led) and not killed and home.running() is not None and not disk_failure(home.run)
    left = end_services(home, say)
    return Ended([*led, *left.pids], is_engine_killed or left.is_engine_killed)


def _wait_for_helpers(lock_file: Path) -> None:
    """A service's helper process, which has its lock too, ends by itself a moment after its service."""
    give_up = time.monotonic() + ANSWER_S
    while holders(lock_file) and time.monotonic() < give_up:
        time.sleep(LOOK_S)


def end_services(home: Home, say: Callable[[str], None]) -> Ended:
    """End the services that a killed `kvasir up` left, the store last: the engine may have something to store."""
    running = home.running()
    engine, last = (running.engine_pid, running.store_pid) if running is not None else (0, 0)
    pids = sorted(holders(home.services_lock_file), key=lambda pid: (pid == last, -pid))
    killed = [pid for pid in pids if _end(pid, home.services_lock_file, say, GRACE_S, home.logs)]
    return Ended(pids, engine in killed)


def _end(pid: int, lock_file: Path, say: Callable[[str], None], grace_s: float, logs: Path) -> bool:
    """Whether it had to be killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if pid not in holders(lock_file):  # others were ended first: by now the number may be another program's
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        patience = Patience(grace_s, logs)
        while not patience.is_over:
            if pid not in holders(lock_file):
                # Its log is open for a moment longer, and its disk could not be unmounted.
                for _ in _moments(SOON_S):
                    if not _has_files(pid):
                        break
                return number == signal.SIGKILL
            time.sleep(LOOK_S)
        say(f"process {pid} did not end {patience.in_words} and is killed")
    return True


def _has_files(pid: int) -> bool:
    """Whether the process may have files open. A zombie, in a container that collects none, has none on Linux."""
    try:
        if sys.platform == "linux":
            return any(Path(f"/proc/{pid}/fd").iterdir())
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _with_lock_linux(lock: os.stat_result) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _holds(folder, lock):
            yield int(folder.name)


def _holds(process: Path, lock: os.stat_result) -> bool:
    """Whether a descriptor of the process has this file open and locked."""
    try:
        links = list((process / "fd").iterdir())
    except OSError:  # another user's, or gone meanwhile
        return False
    return any(_is_locked(process, link, lock) for link in links)


def _is_locked(process: Path, link: Path, lock: os.stat_result) -> bool:
    try:
        seen = link.stat()
        is_it = (seen.st_dev, seen.st_ino) == (lock.st_dev, lock.st_ino)
        return is_it and "FLOCK" in (process / "fdinfo" / link.name).read_text()
    except OSError:  # this descriptor was closed meanwhile, as a program that starts does with many
        return False


def named_openers(lock_file: Path) -> set[int]:
    """As macOS tells it: those of the home's own processes, by `up.json`, that have the file open. A number alone may
    be another program's by now, and another program may only read the file; one that is both is ours."""
    running = Home(lock_file.parent.parent).running()
    if running is None:
        return set()
    ours = {running.pid, running.store_pid, running.engine_pid, running.http_pid} - {0}
    # Of ours alone: to look at the files of all programs takes a Mac up to a second.
    program = shutil.which("lsof") or "/usr/sbin/lsof"
    words = [program, "-wta", "-p", ",".join(map(str, ours)), "--", str(lock_file)]
    return ours & {int(word) for word in _printed(*words).split()} if ours else set()


def claimer(port: int) -> str:
    """Which `kvasir up` keeps this UDP port for its gateway; empty where another program has it, or none."""
    for pid, words in _with_udp_port(port):
        names = [Path(word).name for word in words]
        if "kvasir" in names:
            return f"`{shlex.join(['kvasir', *words[names.index('kvasir') + 1 :]])}` (pid {pid}) has it"
    return ""


def _with_udp_port(port: int) -> Iterator[tuple[int, Sequence[str]]]:
    """Processes of this user, each with its command line."""
    if sys.platform != "linux":
        program = shutil.which("lsof") or "/usr/sbin/lsof"
        for pid in _printed(program, "-nPt", f"-iUDP:{port}").split():
            yield int(pid), _printed("ps", "-wwo", "args=", "-p", pid).split()
        return
    tables = [each.read_text() for each in map(Path, ("/proc/net/udp", "/proc/net/udp6")) if each.exists()]
    rows = [line.split() for table in tables for line in table.splitlines()]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}")}
    for process in Path("/proc").iterdir() if sockets else ():
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if process.name.isdigit() and any(_is_one_of(sockets, link) for link in (process / "fd").iterdir()):
                words = (process / "cmdline").read_text(errors="replace")
                yield int(process.name), words.rstrip("\0").split("\0")


def _is_one_of(names: set[str], link: Path) -> bool:
    try:
        return str(link.readlink()) in names
    except OSError:  # closed meanwhile
        return False


def _printed(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


@contextlib.contextmanager
def led(home: Home) -> Iterator[None]:
    """Be the home's only `kvasir up`. Raises FailedPrecondition if there is one."""
    with _private_file(home.up_lock_file) as descriptor:
        if not _try_lock(descriptor):
            [pid, *_] = holders(home.up_lock_file) or [0]
            text = f"`kvasir up` is already running in {home.root} (pid {pid})"
            raise FailedPrecondition(
                f"{text}; use it, or end it with `{home.command('down')}`", reason="ALREADY_RUNNING"
            )
        yield


@contextlib.contextmanager
def locked(home: Home, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock that services inherit, as its only `kvasir up`. Services that a killed one left are ended first."""
    with _private_file(home.services_lock_file) as descriptor:
        if not _try_lock(descriptor):
            ended = end_services(home, say)
            say(f"ended what a killed `kvasir up` left here: {', '.join(map(str, ended.pids))}")
            # The system lets go of a lock a moment after its process is gone.
            if not any(_try_lock(descriptor) for _ in _moments(ANSWER_S)):
                text = f"{home.services_lock_file}: another program holds it"
                raise FailedPrecondition(text, reason="ALREADY_RUNNING")
        home.running_file.unlink(missing_ok=True)  # nothing runs here
        os.set_inheritable(descriptor, True)
        yield descriptor


@contextlib.contextmanager
def tokens_locked(home: Home) -> Iterator[None]:
    """While no other command changes the home's credentials and tokens. Waits for one that does."""
    directory = os.open(home.tokens, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


@contextlib.contextmanager
def _private_file(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _moments(seconds: float) -> Iterator[None]:
    """Times to try again, until the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.05)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
