"""The process in which `kvasir up -d` runs its services. It begins with the command and imports all that the command
does, which takes most of a second, beside it; and it rests until the command has checked what it was given. This file
imports nothing that takes long.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BEFORE_WITH_VALUE = ("--home", "--address", "--engine", "--token-file", "--ca-file")  # options before a command
_BEFORE_ALONE = ("--json", "--until-eof")
_DETACHES = ("-d", "--detach")
RESTS = "resting"  # of Python's -X: the words stay those that were typed, also for `ps`


class SecondProcess:
    """One that rests. It ends with this process, also where that is killed, until `go_on`."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words` of the command line."""
        self._process = subprocess.Popen(
            [sys.executable, "-X", RESTS, "-Pm", "kvasir", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def go_on(self, log: Path) -> "subprocess.Popen[bytes]":
        """Let it run its command, with this file, which is there, as standard error."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its output shows that
            self._process.stdin.write(os.fsencode(log))
            self._process.stdin.close()
        return self._process


def begun(words: Sequence[str]) -> SecondProcess | None:
    """Of the words of a command line: a process if they are those of `kvasir up -d`, or seem so."""
    if "up" not in words or not any(word in words for word in _DETACHES) or RESTS in sys._xoptions:
        return None
    return SecondProcess(words)


def is_up_alone(words: Sequence[str], second: SecondProcess | None) -> bool:
    """Whether the words are surely those of `kvasir up`, of which one process or the other begins the services."""
    left = iter(words if second is not None or RESTS in sys._xoptions else ())
    for word in left:
        if word in BEFORE_WITH_VALUE:
            next(left, None)
        elif word not in _BEFORE_ALONE:
            return word == "up"
    return False


def rest() -> None:
    """In the second process, once all is imported: wait. Ends it where the command has ended."""
    if RESTS not in sys._xoptions:
        return
    sys.argv[1:] = ["--json", *(word for word in sys.argv[1:] if word not in (*_DETACHES, "--json"))]
    if not (log := sys.stdin.buffer.read()):
        sys.exit(1)
    for file, flags, number in ((os.devnull, os.O_RDONLY, 0), (log, os.O_WRONLY | os.O_APPEND, 2)):
        descriptor = os.open(file, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
