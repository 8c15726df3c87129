"""The engine of `kvasir up -d`, begun before its options are known: it imports for longer than the command reads them.
This file imports nothing that takes long.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import TYPE_CHECKING

from kvasir.cli.own_services.second_process import RESTS

if TYPE_CHECKING:
    from asyncio import Future

_PROGRAM = ("-Pm", "inference_svc")
_NO_ENGINE = {"--help", "--at-login", "--remove-at-login"}  # words of `kvasir up` with which this process runs none


class EngineAhead:
    """A process that rests. It ends with this one, also where that is killed, until `go_on`."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs, hangups_wait():
            self._process = subprocess.Popen(
                [sys.executable, "-X", RESTS, *_PROGRAM, "serve"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                umask=0o077,
            )

    def go_on(self, argv: Sequence[str], files: Sequence[int]) -> "Adopted | None":
        """On the event loop: let it run this command line, with the first of these files as output; it holds the
        others. None where it is not of that program, or has ended: then its like reports why.
        """
        begins = 1 + len(_PROGRAM)
        with self._ours:
            if tuple(argv[:begins]) != (sys.executable, *_PROGRAM) or self._process.poll() is not None:
                return None
            with contextlib.suppress(OSError):
                socket.send_fds(self._ours, [b"!"], [*files])
                self._ours.sendall(json.dumps(argv[begins:]).encode())
                return Adopted(self._process)
        return None


class Adopted:
    """A process that the event loop did not begin, as asyncio's own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        import asyncio

        self._process, self._loop = process, asyncio.get_running_loop()
        self._ended: Future[int] = self._loop.create_future()
        Thread(target=self._wait, name="engine-ahead", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        import asyncio

        return await asyncio.shield(self._ended)

    def _wait(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is over
            self._loop.call_soon_threadsafe(self._ended.set_result, code)


_masks: list[set[int]] = []  # services begin at once


@contextlib.contextmanager
def hangups_wait() -> Iterator[None]:
    """A process that starts meanwhile gets a SIGHUP once `Reloading.on_hangup` lets it in, and does not end by it."""
    _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())  # whichever ends last restores what was first


_begun: list[EngineAhead] = []


def begin_engine(words: Sequence[str]) -> None:
    """In the process that runs the services of a command line of these words."""
    if RESTS in sys._xoptions and not _NO_ENGINE.intersection(words):
        with contextlib.suppress(OSError):  # it begins later, then
            _begun.append(EngineAhead())


def begun_engine() -> EngineAhead | None:
    return _begun.pop() if _begun else None
