"""Steps about exactness: the suites where the source is, a batch as alone, and memory after a kill."""

import importlib.util
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvasir.cli.demo.self_test import self_test
from kvasir.cli.running.program import run_program

from kvasir_bench.memory_path.services import measured_services
from kvasir_bench.memory_path.turns import Agent
from kvasir_bench.prove.step import ProofScope, Report, Value, claim
from kvasir_bench.system import SHORT_HOME

_WORDS = (3, 30, 45, 90, 120, 140, 200, 260)  # of each agent's text: cells and blocks end in the midst of some
_REPLY_TOKENS, _LATER_TURNS = 40, 3
# On a slow machine no suite may take the time of the others. Pytest's exit code after an interrupt.
_SUITE_LIMIT, _INTERRUPTED = 90.0, 2
# A program in the background ignores interrupts, and so would pytest. One is enough: a terminal's comes beside that of
# the step, and a second one would cut the ends of fixtures short, whose services would be left.
_PYTEST = """import signal, sys, pytest
def once(*found):
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.default_int_handler(*found)
signal.signal(signal.SIGINT, once)
sys.exit(pytest.main(sys.argv[1:]))"""
_COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")


def kernels(scope: ProofScope, report: Report) -> Value:
    """The check of this device's kernels that an engine makes at its start, for all KV policies of the model."""
    report("loading the model")
    options = ["--model", scope.model] if scope.model else []
    facts = run_program("inference_svc.describe", options, "the model cannot be used", report)
    found = facts["kernels"]
    checked = [
        claim(f"kernels write, read and attend to pages of {policy} as the reference does", not why)
        for policy, why in found["policies"].items()
    ]
    if found["failure"]:
        checked.append(claim(f"the engine's own check of its kernels finds no fault: {found['failure']}", False))
    served = {"device": facts["device"], "blas": facts["blas"], "layers": facts["policy"]["layer_count"]}
    return {"claims": checked, **served, **{name: why for name, why in found.items() if name != "policies"}}


@dataclass(frozen=True, slots=True)
class Decoded:
    first_s: float
    last_s: float
    token_ids: list[int]


def batch_as_alone(scope: ProofScope, report: Report) -> Value:
    """Agents with turns at once, and each alone, with an engine that has seen none of them."""
    count = 4 if scope.is_quick else len(_WORDS)
    together, alone = (_decoded(scope, report, count, at_once=at_once) for at_once in (count, 1))
    are_equal = all(
        one.token_ids == other.token_ids
        for pair in zip(together, alone, strict=True)
        for one, other in zip(*pair, strict=True)
    )
    overlap = overlapping(together)
    tokens = sum(len(turn.token_ids) for turns in alone for turn in turns)
    what = f"{count} agents at once decode in {_LATER_TURNS + 1} turns what each decodes alone, token for token"
    claims = [claim(what, are_equal and overlap > 0 and tokens > count)]
    return {"claims": claims, "agents": count, "tokens": tokens, "turns_beside_others": overlap}


def overlapping(agents: Sequence[Sequence[Decoded]]) -> int:
    """The turns that decoded while one of another agent did."""
    return sum(
        any(
            one.first_s < other.last_s and other.first_s < one.last_s
            for others in agents
            if others is not turns
            for other in others
        )
        for turns in agents
        for one in turns
    )


def _decoded(scope: ProofScope, report: Report, count: int, *, at_once: int) -> list[list[Decoded]]:
    with measured_services(
        SHORT_HOME, model=scope.model, played=(), memory_gib=1.0, options=("--batch-invariant",)
    ) as services:
        report("starting a store and an engine")
        services.start()

        def turns(place: int) -> list[Decoded]:
            found = []
            with services.client() as client:
                agent = Agent(client, f"agent-{place}", _WORDS[place], _REPLY_TOKENS)
                for begin in (agent.cold, *[agent.goes_on] * _LATER_TURNS):
                    began = time.monotonic()
                    seen = begin()
                    found.append(Decoded(began + seen.first_token_s, began + seen.last_token_s, seen.token_ids))
            return found

        report(f"{count} agents, {at_once} at once")
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(turns, range(count)))


def kill_and_restore(scope: ProofScope, report: Report) -> Value:
    """The self-test of `kvasir doctor`."""
    report("storing a fact, killing both services, asking for it")
    found = self_test(scope.model)
    what = "after kill -9 of both services a memory comes back whole, and the reply is that of an agent without a kill"
    return {"claims": [claim(what, not found["problems"])], **found}


def source() -> Path | None:
    """The checkout that this package is part of; None for an installed wheel, which has no tests."""
    found = importlib.util.find_spec("inference_svc")
    root = Path(found.origin).parents[1] if found and found.origin else Path()
    has_tests = (root / "tests/on_gpu.py").is_file() and importlib.util.find_spec("pytest") is not None
    return root if has_tests else None


def suite(*folders: str) -> Callable[[ProofScope, Report], Value]:
    """A step that runs tests of a checkout, on the device that MLX finds, as many as there is time for. Of its long
    tests one part.
    """

    def run(_scope: ProofScope, report: Report) -> Value:
        root = source()
        if root is None:
            return {"claims": [], "why": "no checkout with tests and pytest: see the step of the kill"}
        return _counted(root, folders, report)

    return run


def _counted(root: Path, folders: Sequence[str], report: Report) -> Value:
    report("pytest")
    options = ("-o", "addopts=", "-q", "-rf", "-p", "no:cacheprovider", "-p", "no:randomly")
    # TF32 is off, as in `make test-gpu`: fp32 products are exact only without it.
    settings = ("MLX_ENABLE_TF32=0", "KVASIR_TURN=0")
    command = ["env", *settings, sys.executable, "-c", _PYTEST, *options, *folders]
    is_cut, code, out, err = _within(_SUITE_LIMIT, command, root)
    lines = out.strip().splitlines()
    counts = {kind: int(count) for count, kind in _COUNTED.findall(lines[-1] if lines else "")}
    failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in lines if line.startswith("FAILED ")]
    passed = counts.get("passed", 0)
    what = f"{passed} tests of {', '.join(folders)} pass{', all that there was time for' if is_cut else ''}"
    is_met = passed > 0 and not failed and not counts.keys() & {"failed", "error", "errors"}
    return {
        "claims": [claim(what, is_met and code == (_INTERRUPTED if is_cut else 0))],
        **counts,
        "failed_tests": failed,
        "is_cut_short": is_cut,
        "why": "" if is_cut or code in (0, 1) else " ".join((err or out).split())[-400:],
    }


def _within(seconds: float, command: Sequence[str], root: Path) -> tuple[bool, int, str, str]:
    """Whether pytest was interrupted because its time was over, its exit code, stdout and stderr."""
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, cwd=root, text=True, stdin=none, stdout=pipe, stderr=pipe) as running:
        try:
            out, err = running.communicate(timeout=seconds)
            return False, running.returncode, out, err
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # it ends its fixtures' services, and counts
            out, err = running.communicate()
            return True, running.returncode, out, err
        except BaseException:
            running.send_signal(signal.SIGINT)  # an end of this step is one of its tests
            raise
