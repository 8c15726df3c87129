"""Faults of the engine, for each of which the hammer is run to see what it finds.

The reference runs the broken engine too: what the hammer finds, it finds all the same.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.campaigns.mutation.mutant import Asked, Mutant, Suite
from tests.campaigns.mutation.trees import run_in

_REQUESTS, _CONCURRENCY, _ROUNDS = 150, 24, 3
_PATIENCE_S = 240

MUTANTS = (
    Mutant(
        "two rows' tokens are swapped, now and then",
        "decoding.py",
        "        drawn = [each.draws.read() for each in islice(self._launched, steps)]\n",
        "        drawn = [each.draws.read() for each in islice(self._launched, steps)]\n"
        "        for launched, row in zip(self._launched, drawn, strict=False):\n"
        "            if len(row) > 1 and sum(len(each.token_ids) for each in launched.order) % 23 == 0:\n"
        "                row[:2] = row[1::-1]\n",
    ),
    Mutant(
        "a sequence attends to one row of who was in its slot before",
        "decoded_layer.py",
        "mx.arange(width)[None, None, None] <= seen",
        "mx.arange(width)[None, None, None] <= seen + (max(lengths) > 99)",
    ),
    Mutant(
        "the last slot's rows are not moved when another leaves",
        "decoded_layer.py",
        "                self._decoded.move(last, slot, min(last_length, self._window or last_length))",
        "                pass",
    ),
    Mutant(
        "a trim is skipped when a memory is cut",
        "beginning.py",
        "forked = reuse.kv.fork(reuse.tokens)",
        "forked = reuse.kv.fork()",
    ),
    Mutant(
        "another agent's memory is used, if it is long enough",
        "beginning.py",
        "    return Reuse(memory.kv, keep, memory.chain, memory.state.shareable_tokens)",
        "    _seen.append(memory.kv)\n"
        "    others = [other for other in _seen[-9:] if other.length >= keep]\n"
        "    kv = others[0] if len(_seen) % 7 == 0 and others else memory.kv\n"
        "    return Reuse(kv, keep, memory.chain, memory.state.shareable_tokens)",
        also=("MOST_REWIND_POINTS = 4\n", "MOST_REWIND_POINTS = 4\n_seen: list[SequenceKV] = []\n"),
    ),
    Mutant(
        "a turn works on its memory, not on a fork of it",
        "beginning.py",
        "forked = reuse.kv.fork(reuse.tokens)",
        "forked = (reuse.kv.trim_to(reuse.tokens), reuse.kv)[1]",
    ),
    Mutant(
        "a fork and its source write to one page",
        "pool.py",
        "is_own.append(page is not None and holders[page] == 1)",
        "is_own.append(page is not None)",
    ),
    Mutant(
        "a sibling's prefix is used one cell too far",
        "prefix_sharing.py",
        "most = min(shareable, turn.prompt_tokens - 1)",
        "most = min(shareable + BLOCK_TOKENS, turn.prompt_tokens - 1)",
    ),
    Mutant(
        "a sibling's rows are taken for equal whatever their tokens",
        "prefix_sharing.py",
        "common_prefix_length(turn.chain, source.chain)) * BLOCK_TOKENS",
        "min(len(turn.chain), len(source.chain))) * BLOCK_TOKENS",
    ),
    Mutant(
        "the last word of a reply is never computed",
        "beginning.py",
        "        runner.prefill(kv, missing.tolist())",
        "        pass",
    ),
    Mutant(
        "requests draw from one random key",
        "sampling.py",
        "self._key = mx.random.key(params.seed)",
        "self._key = mx.random.key(id(self) % 1000)",
    ),
    Mutant(
        "a turn that was cut is remembered as far as it came, asked or not",
        "engine/sequence.py",
        "(self.plan.keep_partial and has_generated and is_own)",
        "has_generated",
    ),
    Mutant(
        "a retry is done again",
        "turn_flow.py",
        "if memory is not None and is_again and is_whole(memory)",
        "if memory is not None and False and is_whole(memory)",
    ),
    Mutant(
        "cached tokens are told as more than they are",
        "turn_reporter.py",
        "            cached_tokens=cached_tokens,\n            source=source,",
        "            cached_tokens=cached_tokens + (cached_tokens > 20),\n            source=source,",
    ),
)


def ask_the_hammer(_mutant: Mutant, copy: Path) -> Asked:
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


HAMMER = Suite(
    "hammer",
    "Mutants and the hammer",
    "inference_svc",
    Path("tests/campaigns/hammer/MUTANTS.md"),
    MUTANTS,
    ask=ask_the_hammer,
    column="what the hammer found",
)
