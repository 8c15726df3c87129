"""Breaks the engine once per row, in a copy, and sees whether the hammer notices: `python -m tests.hammer.mutants`.

Writes tests/hammer/MUTANTS.md. The reference runs the broken engine too: what is caught is caught all the same.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/hammer/MUTANTS.md"
_COPIED = ("inference_svc", "cachestore_svc", "clients", "tests", "pyproject.toml")
_REQUESTS, _CONCURRENCY, _ROUNDS = 150, 24, 3
_PATIENCE_S = 240


@dataclass(frozen=True)
class Mutant:
    """One change of one file of inference_svc."""

    what: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "two rows' tokens are swapped, now and then",
        "engine_worker.py",
        "        self._runner.stepped()\n        for turn, token in zip(order, drawn, strict=True):",
        "        self._runner.stepped()\n"
        "        if len(order) > 1 and sum(len(turn.token_ids) for turn in order) % 23 == 0:\n"
        "            drawn = [drawn[1], drawn[0], *drawn[2:]]\n"
        "        for turn, token in zip(order, drawn, strict=True):",
    ),
    Mutant(
        "a sequence attends to one row of who was in its slot before",
        "kv/batch_kv.py",
        "last = mx.array(lengths)[:, None] + mx.arange(count)",
        "last = mx.array(lengths)[:, None] + mx.arange(count) + (max(lengths) > 99)",
    ),
    Mutant(
        "who leaves a batch takes a neighbour's newest row along",
        "kv/batch_kv.py",
        "            row.append(self._staged.read_slot(slot, count))",
        "            row.append(self._staged.read_slot((slot + 1) % len(self.rows), count))",
    ),
    Mutant(
        "the last slot's rows are not moved when another leaves",
        "kv/batch_kv.py",
        "                self._decoded.move(last, slot, self.lengths[last])",
        "                pass",
    ),
    Mutant(
        "a trim is skipped when a memory is cut",
        "running_turn.py",
        "    kv.trim_to(keep)\n    turn.began(keep, memory.state.shareable_tokens)",
        "    turn.began(keep, memory.state.shareable_tokens)",
    ),
    Mutant(
        "another agent's memory is used, if it is long enough",
        "running_turn.py",
        "    kv = memory.kv\n    saved =",
        "    kv = memory.kv\n"
        "    _seen.append(kv)\n"
        "    others = [other for other in _seen[-9:] if other.length >= keep]\n"
        "    kv = others[0].fork() if len(_seen) % 7 == 0 and others else kv\n"
        "    saved =",
    ),
    Mutant(
        "a cancelled turn puts nothing back",
        "running_turn.py",
        "            if self.saved is not None:",
        "            if False:",
    ),
    Mutant(
        "a fork and its source write to one buffer",
        "kv/row_buffer.py",
        "    result = copy.copy(part)\n",
        "    result = part\n",
    ),
    Mutant(
        "a sibling's prefix is used one cell too far",
        "prefix_gate.py",
        "limit = min(shareable, turn.prompt_tokens - 1)",
        "limit = min(shareable + self.cell_tokens, turn.prompt_tokens - 1)",
    ),
    Mutant(
        "a sibling's rows are taken for equal whatever their tokens",
        "prefix_gate.py",
        "return min(limit, common_blocks(turn.chain, chain) * BLOCK_TOKENS // self.cell_tokens * self.cell_tokens)",
        "return min(limit, min(len(turn.chain), len(chain)) * BLOCK_TOKENS // self.cell_tokens * self.cell_tokens)",
    ),
    Mutant(
        "the last word of a reply is never computed",
        "running_turn.py",
        "        if missing:\n            runner.prefill(self.kv, missing)",
        "        if False:\n            runner.prefill(self.kv, missing)",
    ),
    Mutant(
        "requests draw from one random key",
        "sampling.py",
        "self._key = mx.random.key(params.seed)",
        "self._key = mx.random.key(id(self) % 1000)",
    ),
    Mutant(
        "a turn that was cut is remembered as far as it came, asked or not",
        "engine_worker.py",
        "(turn.plan.keep_partial and has_generated)",
        "has_generated",
    ),
    Mutant(
        "a retry is done again",
        "turn_flow.py",
        "if memory is not None and is_retry and replay.is_whole(memory)",
        "if memory is not None and False and replay.is_whole(memory)",
    ),
    Mutant(
        "cached tokens are told as more than they are",
        "telling.py",
        "                cached_tokens=cached_tokens,\n                source=source,",
        "                cached_tokens=cached_tokens + (cached_tokens > 20),\n                source=source,",
    ),
)
_ALSO = {
    "another agent's memory is used, if it is long enough": (
        "@dataclass\nclass RunningTurn",
        "_seen: list[SequenceKV] = []\n\n\n@dataclass\nclass RunningTurn",
    )
}


def caught_as(mutant: Mutant, copy: Path) -> str:
    """What the hammer says of the mutant; "" when it says nothing."""
    path = copy / "inference_svc" / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.what}: {mutant.file} has {source.count(mutant.old)} times what is to be changed")
    path.write_text(source.replace(mutant.old, mutant.new).replace(*_ALSO.get(mutant.what, ("", ""))))
    out = copy / "out"
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'clients/python'}"}
    try:
        for seed in range(_ROUNDS):
            shutil.rmtree(out, ignore_errors=True)
            command = [sys.executable, "-m", "tests.hammer", "--requests", str(_REQUESTS), "--seed", str(seed)]
            command += ["--concurrency", str(_CONCURRENCY), "--requests-per-round", str(_REQUESTS), "--out", str(out)]
            code, errors = _run(command, copy, environment)
            lines = [line for path in out.glob("*.jsonl") for line in path.read_text().splitlines()]
            problems = [problem for line in lines for problem in json.loads(line)["problems"]]
            if problems:
                sorts = sorted({problem.partition(":")[0] for problem in problems})
                return f"{len(problems)} agents: {', '.join(sorts)}"
            if "cannot be kept" in errors:
                return "the engine does not start: a batch computes something else than each alone"
            if code:
                return f"(the hammer ended with {code}: {errors[-300:]})"
    except subprocess.TimeoutExpired:
        return "nothing is answered any more"
    finally:
        path.write_text(source)
    return ""


def _run(command: list[str], copy: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and what was said of errors. Takes the services along if it must end the hammer."""
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as hammer:
        try:
            errors = hammer.communicate(timeout=_PATIENCE_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(hammer.pid, signal.SIGKILL)
            hammer.communicate()
            raise
    return hammer.returncode, errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words of the mutant")
    arguments = parser.parse_args()
    rows, missed = [], 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in _COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            (shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy))
        for mutant in MUTANTS:
            if arguments.only in mutant.what:
                said = caught_as(mutant, copy)
                missed += not said or said.startswith("(")
                rows.append(f"| {mutant.what} | `{mutant.file}` | {said or '**nothing**'} |")
                print(rows[-1], flush=True)
    if not arguments.only:
        head = "# Mutants and the hammer\n\nEach was put into a copy of the code, and the hammer run on it.\n"
        how = "Written by `python -m tests.hammer.mutants`.\n"
        table = ["| what was broken | where | what the hammer found |", "|---|---|---|", *rows]
        TABLE.write_text("\n".join([head, how, *table]) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
