"""A process that loads, decodes and exits does so with exit code 0, whatever it was doing."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from inference_svc.engine.engine import Engine
from tests.inference.engine.driving import Driver, tokens_of

engine = Engine.open(Path(sys.argv[1]), cache_dir=Path(sys.argv[2]), memory_budget_bytes=1 << 26)
driver = Driver(engine)
driver.turn(tokens_of(300), key=driver.key(), max_tokens=4)
listener = driver.submit(tokens_of(3000), max_tokens=100)
how = sys.argv[3]
if how in ("closed", "failed"):
    listener.end()
if how in ("closed", "at work"):
    engine.close()
if how == "failed":
    raise RuntimeError("the engine is still open")
"""


def exit_code(model_dir: Path, cache_dir: Path, how: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model_dir), str(cache_dir), how],
        timeout=120,
        capture_output=True,
        check=False,
    ).returncode


@pytest.mark.parametrize("how", ["closed", "at work", "left open"])
def test_a_process_exits_cleanly(model_dir: Path, tmp_path: Path, how: str) -> None:
    assert exit_code(model_dir, tmp_path, how) == 0


def test_a_process_that_fails_with_an_open_engine_ends_with_its_own_error(model_dir: Path, tmp_path: Path) -> None:
    assert exit_code(model_dir, tmp_path, "failed") == 1


@pytest.mark.campaign
@pytest.mark.parametrize("run", range(100))
def test_a_hundred_processes_exit_cleanly(model_dir: Path, tmp_path: Path, run: int) -> None:
    assert exit_code(model_dir, tmp_path, ("closed", "at work", "left open")[run % 3]) == 0
