"""Programs that a command starts are its own; they end with it, those of a measurement also where it is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kvasir_bench.wire import _SINK

from tests.cli.running import in_process
from tests.running.waiting import eventually

ROOT, PRODUCTION = Path(__file__).parents[2], ("clients", "cachestore_svc", "inference_svc")

ENDS_S = 60.0
_COMMAND = """
import signal, sys
from kvasir.cli.running.program import done
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
done("draws", sys.argv[1:], shows_stderr=True)
"""
_DRAWS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], "started").write_text("")
time.sleep(600)
"""


@pytest.mark.long(3)
def test_no_file_of_the_current_directory_stands_for_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "statistics.py").write_text("raise SystemExit('not the one of Python')")
    monkeypatch.chdir(tmp_path)
    assert in_process("--home", tmp_path / "home", "peers", "ls", "--json").value["peers"] == []
    sources = [path for folder in PRODUCTION for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in sources if re.search(r'(?:sys\.executable|python),\s+"-m"', path.read_text())] == []


def test_a_program_that_draws_for_itself_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(_DRAWS)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    argv = [sys.executable, "-c", _COMMAND, str(tmp_path)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": paths}) as command:
        eventually((tmp_path / "started").exists)
        [program] = psutil.Process(command.pid).children()
        try:
            command.terminate()
            assert command.wait(ENDS_S) == 143
            assert not program.is_running()
        finally:
            if program.is_running():
                program.kill()


@pytest.mark.long(2)
def test_a_program_that_measures_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(
        f"from kvasir.cli.running.program import end_with_input; end_with_input()\n{_DRAWS}"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    words = f"from kvasir.cli.running.program import run_program; run_program('draws', [{str(tmp_path)!r}], '')"
    with subprocess.Popen([sys.executable, "-c", words], env={**os.environ, "PYTHONPATH": paths}) as command:
        eventually((tmp_path / "started").exists)
        programs = psutil.Process(command.pid).children()
        command.kill()
    _, alive = psutil.wait_procs(programs, timeout=ENDS_S)
    assert (len(programs), alive) == (1, [])


_OWN = """
import pathlib, sys, time
from kvasir.cli.own_services.own_processes import OwnProcesses
from kvasir.cli.running.supervisor import Service
folder = pathlib.Path(sys.argv[1])
async def is_ready():
    return (folder / "started").exists()
argv = (sys.executable, "-m", "draws", str(folder))
own = OwnProcesses()
own.start([Service("draws", argv, folder / "log", is_ready, 60)])
(folder / "ready").touch()
time.sleep(600)
"""


@pytest.mark.long(5)
def test_services_of_a_command_s_own_end_with_one_that_is_killed(tmp_path: Path) -> None:
    """An engine of a self-test or a bench would keep its memory until the machine starts again."""
    (tmp_path / "draws.py").write_text(_DRAWS)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    argv = [sys.executable, "-c", _OWN, str(tmp_path)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": paths}) as command:
        eventually((tmp_path / "ready").exists)
        services = psutil.Process(command.pid).children()
        command.kill()
    _, alive = psutil.wait_procs(services, timeout=10)
    for each in alive:
        each.kill()
    assert (len(services), alive) == (1, [])


def test_a_program_ends_with_its_input() -> None:
    words = "import time; from kvasir.cli.running.program import end_with_input; end_with_input(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE) as program:
        try:
            assert program.stdin is not None
            program.stdin.write(b"a word is no end")
            program.stdin.close()
            assert program.wait(ENDS_S) == -signal.SIGTERM
        finally:
            program.kill()


@pytest.mark.long(3)
def test_mlx_lms_server_ends_with_its_input() -> None:
    argv = [sys.executable, "-m", "kvasir_bench.engine.mlx_lm_server", "kvasir-tiny", "0", "1"]
    assert subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=ENDS_S, check=False).returncode == -signal.SIGTERM


def test_a_receiver_ends_when_its_sender_is_gone() -> None:
    argv = [sys.executable, "-c", _SINK, "", "10"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as sink:
        try:
            assert sink.stdout is not None
            with socket.create_connection(("127.0.0.1", int(sink.stdout.readline()))) as wire:
                wire.sendall(b"half")
            assert sink.wait(ENDS_S) == 0
        finally:
            sink.kill()
