"""How a command begins and ends in a terminal, and without one: signals at a wait for keys and in its imports, and
standard files that are closed."""

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvasir.__main__
import pytest

# A thread's own signal is noted for the main thread, whose wait goes on: as one that comes just before the wait.
_PROGRAM = """
import signal, threading, time
from kvasir.cli.talking.chat import texts

def interrupt():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests in the background ignores it
threading.Thread(target=interrupt).start()
for _ in texts(lambda: "asked> ", print):
    pass
"""


@pytest.mark.parametrize("with_editing", [True, False])
def test_a_signal_that_comes_just_before_the_wait_for_keys_is_answered_without_a_key(*, with_editing: bool) -> None:
    ours, theirs = pty.openpty()
    hides = "" if with_editing else "import sys; sys.modules['readline'] = None\n"
    program = [sys.executable, "-c", hides + _PROGRAM]
    with subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        try:
            screen = ""
            # Up to the next prompt: before it the terminal keeps a line's end for itself.
            while "asked> " not in screen.partition("leaves.")[2] and select.select([ours], [], [], 20)[0]:
                screen += os.read(ours, 4096).decode()
            assert "asked> " in screen.partition("leaves.")[2]
            os.write(ours, b"\x04")
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(ours)


# Importing the command line is where its program spends the first half second.
_INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "kvasir.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests in the background ignores it
sys.meta_path.insert(0, Interrupting())
from kvasir.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_trace() -> None:
    program = [sys.executable, "-c", _INTERRUPTED_IMPORT, "--version"]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("before", "while_it_runs"),
    [(signal.default_int_handler, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)],
)
def test_ctrl_c_is_a_commands_own_once_it_runs_unless_its_caller_ignores_it(
    monkeypatch: pytest.MonkeyPatch, before: Any, while_it_runs: Any
) -> None:
    found: list[Any] = []
    command_line = SimpleNamespace(main=lambda: found.append(signal.getsignal(signal.SIGINT)))
    monkeypatch.setitem(sys.modules, "kvasir.cli.main", command_line)
    own = signal.signal(signal.SIGINT, before)
    try:
        kvasir.__main__.main()
    finally:
        signal.signal(signal.SIGINT, own)
    assert found == [while_it_runs]


_SHOWING_FILES = """
import os, sys
from pathlib import Path
from types import SimpleNamespace

def show():
    files = (sys.stdin, sys.stdout, sys.stderr)
    facts = [(file.fileno(), file.isatty(), os.get_inheritable(file.fileno())) for file in files]
    os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), repr(facts).encode())

sys.modules["kvasir.cli.main"] = SimpleNamespace(main=show)
from kvasir.__main__ import main
main()
"""


def test_a_command_whose_caller_closed_its_standard_files_has_others_of_their_numbers(tmp_path: Path) -> None:
    told = tmp_path / "told"
    words = [sys.executable, "-c", _SHOWING_FILES, str(told)]
    subprocess.run(["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], check=True, timeout=60)
    assert told.read_text() == repr([(number, False, True) for number in (0, 1, 2)])
