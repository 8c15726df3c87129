"""A home has one group: the lock of its `kvasir up`, and the one that its services inherit and hold while any lives.

Its tokens have a lock of their own: they are made and changed beside a `kvasir up` that starts or runs."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvasir.cli.running.holding import end_services, holders
from kvasir.cli.running.home import Home
from kvasir.errors import FailedPrecondition
from kvasir.waits import ANSWER_S


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
