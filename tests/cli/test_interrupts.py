"""How a command begins and ends in a terminal, and without one: signals at a wait for keys and in its imports, standard
files that are closed, and the process of `kvasir up -d`, which imports beside the command that starts it."""

import json
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
import psutil
import pytest
from kvasir.cli.own_services import second_process
from kvasir.cli.own_services.second_process import SecondProcess, begun, is_up_alone

from tests.running.waiting import eventually

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
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests in the background ignores it
sys.meta_path.insert(0, Interrupting())
from kvasir.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "code"),
    [("kvasir.cli.own_services.installed_messages", 128 + signal.SIGINT), ("kvasir.cli.main", -signal.SIGINT)],
)
def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_trace(module: str, code: int) -> None:
    program = [sys.executable, "-c", _INTERRUPTED_IMPORT, module]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


@pytest.mark.parametrize(
    ("before", "while_it_runs"),
    [(signal.default_int_handler, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)],
)
def test_ctrl_c_is_a_commands_own_once_it_runs_unless_its_caller_ignores_it(
    monkeypatch: pytest.MonkeyPatch, before: Any, while_it_runs: Any
) -> None:
    found: list[Any] = []
    command_line = SimpleNamespace(main=lambda _: found.append(signal.getsignal(signal.SIGINT)))
    monkeypatch.setitem(sys.modules, "kvasir.cli.main", command_line)
    own = signal.signal(signal.SIGINT, before)
    try:
        kvasir.__main__.main()
    finally:
        signal.signal(signal.SIGINT, own)
    assert found == [while_it_runs]


def test_ctrl_c_just_before_a_command_begins_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "kvasir.cli.main", SimpleNamespace(main=interrupted))
    with pytest.raises(SystemExit) as ended:
        kvasir.__main__.main()
    assert ended.value.code == 128 + signal.SIGINT


def test_ctrl_c_ends_a_measured_store_in_no_error(tmp_path: Path) -> None:
    """The terminal's signal ended a process that it had started, which was reported as a fault of its own."""
    words = ["bench", "store", "--quick", "--directory", tmp_path]
    program = [
        sys.executable,
        "-c",
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvasir.__main__ import main\nmain()",
        *words,
    ]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        seen = psutil.Process(process.pid)
        eventually(lambda: any("keys" in each.cmdline() for each in seen.children()))
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, "kvasir: " in said) == (128 + signal.SIGINT, False), said


_SHOWING_FILES = """
import os, sys
from pathlib import Path
from types import SimpleNamespace

def show(_):
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


@pytest.mark.parametrize("words", [["up"], ["up", "--json"], ["agents", "list", "-d"], ["chat", "--detach"], []])
def test_other_commands_begin_no_second_process(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(second_process, "subprocess")
    assert begun(words) is None


@pytest.mark.parametrize(
    ("words", "is_up"),
    [
        (["up", "-d"], True),
        (["--home", "status", "--json", "up", "-d"], True),
        (["--home", "up", "logs", "-d", "up"], False),
        (["chat", "up", "-d"], False),
        (["--help", "up", "-d"], False),
        (["--home"], False),
    ],
)
def test_only_up_itself_runs_without_the_modules_of_other_commands(
    words: list[str], is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_up_alone(words, None), "in the foreground the command checks all first"
    monkeypatch.setattr(sys, "_xoptions", {"resting": True})
    assert is_up_alone(words, None) is is_up
    assert begun(words) is None, "it does not detach itself"


def test_the_process_of_up_in_the_background_begins_before_the_command_line_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Any] = []

    def begin(words: list[str]) -> list[str]:
        events.append("begun")
        return words

    class Imported:
        @property
        def main(self) -> Any:
            events.append("imported")
            return events.append

    monkeypatch.setattr(second_process, "SecondProcess", begin)
    monkeypatch.setattr(sys, "argv", ["kvasir", "--home", "/h", "up", "-d", "--json", "--no-http"])
    monkeypatch.setitem(sys.modules, "kvasir.cli.own_services.up_alone", Imported())
    kvasir.__main__.main()
    assert events == ["begun", "imported", ["--home", "/h", "up", "-d", "--json", "--no-http"]]


def test_ps_shows_the_second_process_as_it_was_typed() -> None:
    words = ["--home", "/h", "up", "--detach", "--no-http", "-d"]
    process = SecondProcess(words)._process
    with process:
        assert psutil.Process(process.pid).cmdline()[-7:] == ["kvasir", *words]
        process.kill()


def test_the_second_process_runs_its_command_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    log.write_text("before\n")
    process = SecondProcess(["up", "-d", "--unknown"]).go_on(log)
    assert process.stdout is not None
    with process, process.stdout as out:
        assert "--unknown" in json.loads(out.read())["error"]["message"]
    assert process.returncode != 0
    assert log.read_text().startswith("before\n")


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)  # not every container collects it
    except psutil.NoSuchProcess:
        return True


@pytest.mark.long(2)
def test_the_second_process_ends_with_the_command_that_began_it() -> None:
    program = "from kvasir.cli.own_services.second_process import begun; print(begun(['up', '-d'])._process.pid)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    eventually(lambda: _has_ended(int(ended.stdout)))
