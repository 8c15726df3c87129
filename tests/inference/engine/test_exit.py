"""A process that loads, decodes and exits does so with exit code 0, whatever it was doing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.on_gpu import gpu

# A process for each way, forked before anything runs, so that they import once. One way alone needs no fork.
PROGRAM = """
import os, sys
from pathlib import Path
from inference_svc.engine.engine import Engine
from tests.inference.engine.driving import Driver, tokens_of

model, cache, how, *more = sys.argv[1:]
children = {}
for way in (how, *more) if more else ():
    children[way] = os.fork()
    if not children[way]:
        how = way
        break
else:
    if children:
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children.values()), flush=True)
        os._exit(0)

engine = Engine.open(Path(model), cache_dir=Path(cache), memory_budget_bytes=1 << 26)
driver = Driver(engine)
driver.turn(tokens_of(300), key=driver.key(), max_tokens=4)
listener = driver.submit(tokens_of(1500), max_tokens=20)
if how in ("closed", "failed"):
    listener.end()
if how in ("closed", "at work"):
    engine.close()
if how == "failed":
    raise RuntimeError("the engine is still open")
"""


def exit_codes(model_dir: Path, cache_dir: Path, *ways: str) -> list[int]:
    command = [sys.executable, "-c", PROGRAM, str(model_dir), str(cache_dir), *ways]
    done = subprocess.run(command, timeout=120, capture_output=True, check=False, text=True)
    return [int(code) for code in done.stdout.split()] if ways[1:] else [done.returncode]


@pytest.mark.long(4)
def test_a_process_exits_cleanly_and_one_that_fails_with_its_own_error(model_dir: Path, tmp_path: Path) -> None:
    ways = ("closed", "at work", "left open", "failed")
    if sys.platform == "linux" and not gpu():
        codes = exit_codes(model_dir, tmp_path, *ways)
    else:  # GPUs do not bear a fork
        codes = [code for how in ways for code in exit_codes(model_dir, tmp_path, how)]
    assert codes == [0, 0, 0, 1]


@pytest.mark.campaign
@pytest.mark.parametrize("run", range(100))
def test_a_hundred_processes_exit_cleanly(model_dir: Path, tmp_path: Path, run: int) -> None:
    assert exit_codes(model_dir, tmp_path, ("closed", "at work", "left open")[run % 3]) == [0]
