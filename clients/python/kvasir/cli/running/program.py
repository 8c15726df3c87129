"""Runs programs of the services, which the SDK does not import: progress on their stderr, JSON on their stdout."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvasir.errors import FailedPrecondition

MODULE = "-Pm"
"""Python's option for the module to run; -P: none of the current directory, where a file may have a module's name."""


def option_words(name: str, value: object) -> list[str]:
    """An option of a command line, if it has a value."""
    return [name, str(value)] if value else []


def version_of(package: str) -> str:
    """Of an installed package; empty for another."""
    from importlib import metadata  # with readers of mails and archives, for which no start should wait

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


class Done(NamedTuple):
    """A program that has ended: its exit code, what it printed, and why it failed, by the last line of its stderr."""

    code: int
    out: str
    why: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)


def done(
    module: str,
    words: Sequence[str],
    say: Callable[[str], None] = lambda _: None,
    *,
    shows_stderr: bool = False,
    holds_input: bool = False,
) -> Done:
    """Run `python -m MODULE` to its end. `say` gets its stderr, line by line; `shows_stderr`: the terminal gets it.
    `holds_input`: its input ends with this process, also by a kill."""
    last = ""
    with tempfile.TemporaryFile("w+") as out:
        argv = [sys.executable, MODULE, module, *words]
        stderr = None if shows_stderr else subprocess.PIPE
        stdin = subprocess.PIPE if holds_input else None
        with ended_with_us(subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=stderr, text=True)) as process:
            for line in process.stderr or ():
                last = line.strip() or last
                say(line.rstrip())
        out.seek(0)
        why = last.removeprefix(f"{module}: ") or f"it ended with exit code {process.returncode}"
        return Done(process.returncode, out.read(), why)


def run_program(
    module: str, arguments: Sequence[str], failure: str, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The JSON of a program that measures. Raises FailedPrecondition: `failure` and the program's last line."""
    ended = done(module, arguments, say, holds_input=True)
    if ended.code:
        hint = "; install kvasir[engine]" if "No module named" in ended.why else ""
        raise FailedPrecondition(f"{failure}: {ended.why}{hint}")
    results: dict[str, Any] = ended.value
    return results


def end_with_input() -> None:
    """End this program, as SIGTERM does, with its input: its starter holds the other end until it ends or is killed."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def ended_with_us(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """Waits for the process at the block's end. An interrupted block ends it: our signal may not have reached it."""
    with process:
        try:
            yield process
            process.wait()
        except BaseException:
            process.terminate()
            raise
