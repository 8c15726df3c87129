"""Keeps a Mac awake while a service has work, by a child of `caffeinate`. Other systems have no such program."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from subprocess import DEVNULL, Popen

from kvasir.waits import SOON_S


class Awake:
    """Looks every few seconds: a Mac falls asleep after minutes. The child ends with the process, however it ends."""

    def __init__(self, has_work: Callable[[], bool]) -> None:
        self._has_work = has_work
        self._child: Popen[bytes] | None = None

    async def run(self) -> None:
        """Until it is cancelled. Where there is no `caffeinate` it ends at once."""
        program = shutil.which("caffeinate")
        try:
            while program is not None:
                self._look(program)
                await asyncio.sleep(SOON_S)
        finally:
            if self._child is not None:
                self._child.kill()
                self._child.wait()

    def _look(self, program: str) -> None:
        is_awake = self._child is not None and self._child.poll() is None
        if self._has_work() and not is_awake:
            with contextlib.suppress(OSError):  # where no process can begin, the work goes on
                words = (program, "-i", "-w", str(os.getpid()))
                self._child = Popen(words, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        elif self._child is not None and is_awake and not self._has_work():
            self._child.terminate()
