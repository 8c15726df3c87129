"""Breaks the engine once per row, in a copy, and sees which test notices: `python -m tests.inference.engine.mutants`.

Writes tests/inference/engine/MUTANTS.md. A mutant that no test notices is a test that is missing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests/inference/engine/MUTANTS.md"
_COPIED = ("inference_svc", "clients", "tests", "pyproject.toml")

# That a test fails is enough to know here; the smallest example of it takes minutes.
_NO_SHRINKING = """
from hypothesis import Phase, settings
settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.generate])
settings.load_profile("no shrinking")
"""


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests to ask."""

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "a trim trims nothing",
        "kv/sequence_kv.py",
        "            layer.trim(layer.offset - length)",
        "            layer.trim(0)",
        "kv",
    ),
    Mutant(
        "a restored sequence is one token short",
        "kv/sequence_kv.py",
        "            layer.offset = keep\n",
        "            layer.offset = keep - (keep > 1)\n",
        "kv",
    ),
    Mutant(
        "rows are written in place, through a fork",
        "kv/row_buffer.py",
        "    result = copy.copy(part)\n",
        "    result = part\n",
        "kv",
    ),
    Mutant(
        "a fork shares its source's buffers",
        "kv/layer_kv.py",
        "other.keys, other.values = self.keys.fork(), self.values.fork()",
        "other.keys, other.values = self.keys, self.values",
        "kv",
    ),
    Mutant(
        "the second block of a restore is skipped",
        "tensor_files.py",
        "    for file in files[: -(-keep // BLOCK_TOKENS)]:",
        "    for file in files[: -(-keep // BLOCK_TOKENS)][:1] + files[: -(-keep // BLOCK_TOKENS)][2:]:",
        "kv",
    ),
    Mutant(
        "cells are counted from where a prefill begins",
        "grid.py",
        "    return min((position // cell_tokens + 1) * cell_tokens, prompt_tokens)",
        "    return min(position + cell_tokens, prompt_tokens)",
        "restore scheduling",
    ),
    Mutant(
        "live scales are finer than the stored ones",
        "kv/codec.py",
        "return codes, scales.astype(self.scale_type), biases.astype(self.scale_type)",
        "return codes, scales, biases",
        "restore kv",
    ),
    Mutant(
        "attention sees new rows before they were stored",
        "kv/layer_kv.py",
        "        return self.decoded(keys.dtype, values.dtype)\n",
        "        whole = self.decoded(keys.dtype, values.dtype)\n"
        "        news = zip(whole, (keys, values), strict=True)\n"
        "        return tuple(mx.concatenate([old[:, :, : -new.shape[2]], new], axis=2) for old, new in news)\n",
        "restore kv",
    ),
    Mutant(
        "a few rows behind the valid ones are read",
        "kv/row_buffer.py",
        "        if start == 0 and stop == self.capacity:",
        "        if start == 0 and stop + 8 >= self.capacity:",
        "kv",
    ),
    Mutant(
        "a cancelled turn puts nothing back",
        "running_turn.py",
        "            if self.saved is not None:",
        "            if False:",
        "turns",
    ),
    Mutant(
        "what is put back is one token short",
        "kv/sequence_kv.py",
        "            layer.offset = saved.start + parts[0].shape[2]",
        "            layer.offset = saved.start + parts[0].shape[2] - 1",
        "kv",
    ),
    Mutant(
        "numbers that are not finite are let through",
        "tensor_files.py",
        "        if not _is_finite(buffer, spec.dtype):",
        "        if False:",
        "turns",
    ),
    Mutant(
        "a file of other tokens is let through",
        "tensor_files.py",
        "    if parsed.identity != expected:",
        "    if False:",
        "turns",
    ),
    Mutant(
        "a file's length is not held against its header",
        "tensor_files.py",
        "        if checked.size_bytes == len(data):",
        "        if True:",
        "turns",
    ),
    Mutant(
        "blocks computed off the grid are shared",
        "grid.py",
        "    return stop if is_whole_cell and start == shareable else min(shareable, start // BLOCK"
        "_TOKENS * BLOCK_TOKENS)",
        "    return stop // BLOCK_TOKENS * BLOCK_TOKENS",
        "restore",
    ),
    Mutant(
        "the seed is ignored",
        "sampling.py",
        "mx.random.key(params.seed)",
        "mx.random.key(0)",
        "turns",
    ),
    Mutant(
        "requests draw from one random state",
        "sampling.py",
        "temperature, key=key)",
        "temperature)",
        "turns",
    ),
    Mutant(
        "the beginning of a stop string is told",
        "stop_strings.py",
        "certain = len(self._held) - self._possible_beginning()",
        "certain = len(self._held)",
        "text",
    ),
    Mutant(
        "the last token of a reply is never computed",
        "running_turn.py",
        "        if missing:\n            runner.prefill(self.kv, missing)",
        "        if False:\n            runner.prefill(self.kv, missing)",
        "restore turns",
    ),
    Mutant(
        "a stop string is remembered",
        "turn.py",
        "        if self.finish_reason is FinishReason.STOP_SEQUENCE:\n            reply_chars",
        "        if False:\n            reply_chars",
        "turns",
    ),
    Mutant(
        "the weights digest leaves the configuration out",
        "model_identity.py",
        "    hasher.update(_computing_config(directory))",
        "    pass",
        "models",
    ),
    Mutant(
        "the weights digest leaves the weights out",
        "model_identity.py",
        "        hasher.update(bytes.fromhex(digest))",
        "        pass",
        "models",
    ),
    Mutant(
        "a snapshot does not wait for the turn's end",
        "engine_worker.py",
        "        if not self._is_used(key):\n            work()",
        "        if True:\n            work()",
        "turns",
    ),
    Mutant(
        "a running turn cannot be cancelled",
        "scheduler.py",
        "        return [turn for turn in (*self.running, *self.waiting) if turn.is_cancelled]",
        "        return [turn for turn in self.waiting if turn.is_cancelled]",
        "turns",
    ),
    Mutant(
        "hot memory of other tokens is used",
        "running_turn.py",
        "if memory is None or not _begins_with(memory.state.token_ids, turn.plan.token_ids, keep):",
        "if memory is None:",
        "turns",
    ),
    Mutant(
        "an exact repetition computes two tokens",
        "plan.py",
        "        return len(self.token_ids) - (1 if self.speaks else 0)",
        "        return max(len(self.token_ids) - (2 if self.speaks else 0), 0)",
        "restore",
    ),
    Mutant(
        "a tail's name forgets what came before it",
        "tensor_files.py",
        '        parent = chain[-1] if chain else ""\n        tail_chain',
        '        parent = ""\n        tail_chain',
        "turns",
    ),
    Mutant(
        "K and V are swapped in files",
        "kv/layer_kv.py",
        "        return self.keys, self.values\n",
        "        return self.values, self.keys\n",
        "kv turns",
    ),
    Mutant(
        "a turn that is preempted leaves its tail",
        "preempted_turns.py",
        "for identity in identities)",
        "for identity in identities if identity.kind == 'block')",
        "preempted_turns",
    ),
    Mutant(
        "a turn that was preempted draws with a new sampler",
        "preempted_turns.py",
        "RunningTurn(turn, kv, preempted.sampler,",
        "RunningTurn(turn, kv, Sampler(turn.plan.sampling, turn.plan.token_ids, turn.matcher),",
        "preempted_turns",
    ),
    Mutant(
        "a turn is preempted with rows that lag behind in the batch",
        "engine_worker.py",
        "        self._batch.leave(running.kv)\n        self._preempted.put(running)",
        "        self._preempted.put(running)\n        self._batch.leave(running.kv)",
        "preempted_turns",
    ),
    Mutant(
        "a hot memory stays when its turn is preempted",
        "engine_worker.py",
        "            self.memories.drop(turn.plan.key)  # its rows are the turn's",
        "            pass",
        "preempted_turns",
    ),
    Mutant(
        "what was preempted is drawn again at the prompt's end",
        "engine_worker.py",
        "        if not turn.next_cell_draws:",
        "        if turn.computed + len(cell) < turn.prompt_tokens:",
        "preempted_turns",
    ),
    Mutant(
        "what was preempted is drawn again token by token",
        "engine_worker.py",
        "            is_known = not turn.next_token_draws",
        "            is_known = False",
        "preempted_turns",
    ),
    Mutant(
        "a sampler draws while what was preempted catches up",
        "engine_worker.py",
        "return self._running[turn].sampler if draws else self._no_draw",
        "return self._running[turn].sampler",
        "preempted_turns",
    ),
    Mutant(
        "files of turns that are preempted are held without a bound",
        "preempted_turns.py",
        "        return not more or held + more <= self._max_unstored_bytes",
        "        return True",
        "preempted_turns",
    ),
    Mutant(
        "files that were preempted are forgotten as soon as they are made",
        "preempted_turns.py",
        "        return not more or held + more <= self._max_unstored_bytes",
        "        return not more or more <= self._max_unstored_bytes",
        "preempted_turns",
    ),
    Mutant(
        "files that were preempted and stored are counted for ever",
        "preempted_turns.py",
        "            preempted.unstored_bytes = 0",
        "            pass",
        "preempted_turns",
    ),
    Mutant(
        "who is cancelled while it is preempted is never forgotten",
        "engine_worker.py",
        "        self._preempted.forget(turn)\n",
        "",
        "preempted_turns",
    ),
    Mutant(
        "blocks of an older memory are taken for those of a turn that is preempted",
        "engine_worker.py",
        "        if running is None and self._is_used(key):",
        "        if False:",
        "preempted_turns",
    ),
    Mutant(
        "a key is idle while its turn is preempted",
        "engine_worker.py",
        "        return self._running_of(key) is not None or self._preempted.has(key)",
        "        return self._running_of(key) is not None",
        "preempted_turns",
    ),
    Mutant(
        "damage to what was preempted ends the turn",
        "preempted_turns.py",
        "            except DataLoss as error:",
        "            except ZeroDivisionError as error:",
        "preempted_turns",
    ),
    Mutant(
        "nobody is preempted",
        "engine_worker.py",
        "        if any(self._make_room(turn) for turn in blocked):",
        "        if False:",
        "preempted_turns",
    ),
    Mutant(
        "who is preempted may be so again and again",
        "scheduler.py",
        "            and self._entries[turn].preemptions < self.rules.max_preemptions\n",
        "",
        "preempted_turns",
    ),
    Mutant(
        "a turn decodes before what was preempted has come back",
        "scheduler.py",
        "        return not turn.is_prefilling and not turn.is_cancelled and not turn.is_restoring",
        "        return not turn.is_prefilling and not turn.is_cancelled",
        "preempted_turns",
    ),
    Mutant(
        "the end of a thread does not clear its streams",
        "mlx_thread.py",
        "            mx.synchronize()\n            mx.clear_streams()\n",
        "            pass\n",
        "exit exit exit exit exit exit",
    ),
)


def caught_by(mutant: Mutant, copy: Path, tests_of: str = "engine/test_") -> str:
    """The first test that fails with the mutant; "" when none does."""
    path = copy / "inference_svc" / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.what}: {mutant.file} has {source.count(mutant.old)} times what is to be changed")
    path.write_text(source.replace(mutant.old, mutant.new))
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'clients/python'}"}
    try:
        for name in mutant.tests.split():
            tests = f"tests/inference/{tests_of}{name}.py"
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=120", "--no-header", tests]
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 1 and (failed := re.search(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)):
                return failed[1]
            if done.returncode:
                return f"(the tests ended with {done.returncode}: {done.stdout[-300:]})"
    finally:
        path.write_text(source)
    return ""


def report(
    mutants: Sequence[Mutant], table: Path, title: str, how: str, tests_of: str = "engine/test_", only: str = ""
) -> int:
    """Try those whose words hold `only`; the table is written when all were tried. 1 if a mutant was not noticed."""
    rows, missed = [], 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in _COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            (shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy))
        with (copy / "tests/conftest.py").open("a") as conftest:
            conftest.write(_NO_SHRINKING)
        for mutant in mutants:
            if only in mutant.what:
                test = caught_by(mutant, copy, tests_of)
                missed += not test or test.startswith("(")
                rows.append(f"| {mutant.what} | `{mutant.file}` | {(test and f'`{test}`') or '**nothing**'} |")
                print(rows[-1], flush=True)
    if not only:
        head = f"# {title}\n\nEach was put into a copy of the code; the test is the first that failed.\n"
        lines = ["| what was broken | where | which test noticed |", "|---|---|---|", *rows]
        table.write_text("\n".join([head, f"Written by `{how}`.\n", *lines]) + "\n")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words of the mutant")
    arguments = parser.parse_args()
    how = "python -m tests.inference.engine.mutants"
    return report(MUTANTS, TABLE, "Mutants of the engine", how, only=arguments.only)


if __name__ == "__main__":
    sys.exit(main())
