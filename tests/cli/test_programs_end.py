"""Programs that a command starts end with it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.cli.running import eventually

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
