"""Asks the hammer what it finds in a broken copy of the engine.

The reference runs the broken engine too: what the hammer finds, it finds all the same.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.campaigns.mutation.mutant import Asked
from tests.campaigns.mutation.trees import run_in

_REQUESTS, _CONCURRENCY, _ROUNDS = 150, 24, 3
_PATIENCE_S = 240


def ask_the_hammer(copy: Path) -> Asked:
    """What the hammer finds, in one of a few rounds."""
    out = copy / "out"
    for seed in range(_ROUNDS):
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "tests.campaigns.hammer", "--requests", str(_REQUESTS), "--seed", str(seed)]
        command += ["--concurrency", str(_CONCURRENCY), "--requests-per-round", str(_REQUESTS), "--out", str(out)]
        try:
            done = run_in(copy, command, _PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Asked("nothing is answered any more")
        lines = [line for path in out.glob("*.jsonl") for line in path.read_text().splitlines()]
        if problems := [problem for line in lines for problem in json.loads(line)["problems"]]:
            sorts = sorted({problem.partition(":")[0] for problem in problems})
            return Asked(f"{len(problems)} agents: {', '.join(sorts)}")
        if "cannot be kept" in done.stderr:
            return Asked("the engine does not start: a batch computes something else than each alone")
        if done.returncode:
            return Asked("", f"the hammer ended with {done.returncode}: {done.stderr[-300:]}")
    return Asked("")
