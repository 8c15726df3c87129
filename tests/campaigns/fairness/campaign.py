"""The fairness campaign: `python -m tests.campaigns.fairness.campaign`, or `make campaign-fairness`.

For each resource that callers share, namespace `a` does its worst while namespace `b` does ordinary work. `b` is
measured alone and beside the attack, in turns, in the same minutes. Alone means: beside a process that keeps one core
busy, as the attacker's own client does on the same machine; that client is no part of the services. A row holds when

- 99 % of what `b` does takes at most three times as long as it does alone, or at most the floor of its kind: what so
  short a time loses to two processes that are scheduled on the same cores says nothing about queues;
- no call of `b` is refused or given up, and none of its turns becomes a miss that it was not alone;
- resident memory of both services stays below the row's bound.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns.fairness.arena import ATTACKERS, Arena, Memory, open_arena
from tests.campaigns.fairness.rows import ROWS, Row
from tests.campaigns.fairness.worker import Worked, Worker, open_worker
from tests.running.system_fixtures import ROOT

RATIO = 3.0
# Seconds below which a ratio is not held against a row. A call of the store: two fifths of the 250 ms after which an
# engine goes on without it. A turn, or a page: half a second is no wait. A gap: four words a second are still read.
FLOORS_S = {"turn": 0.5, "formed": 0.5, "health": 0.5, "page": 0.5, "gap": 0.25}
_FLOOR_S = 0.1
_ROUNDS = 2


@dataclass
class Verdict:
    """What a row saw."""

    row: Row
    alone: Worked = field(default_factory=Worked)
    attacked: Worked = field(default_factory=Worked)
    memory: Memory = field(default_factory=Memory)
    trouble: str = ""

    @property
    def problems(self) -> Sequence[str]:
        """Why the row does not hold; empty if it does."""
        return [*self._slow(), *self._lost(), *self._large(), *([self.trouble] if self.trouble else [])]

    def _slow(self) -> Iterator[str]:
        for what in sorted(self.attacked.seconds):
            alone, beside = self.alone.percentile(what, 0.99), self.attacked.percentile(what, 0.99)
            if beside > max(RATIO * alone, FLOORS_S.get(what, _FLOOR_S)):
                yield f"{what} {beside:.2f} s, alone {alone:.3f} s"

    def _lost(self) -> Iterator[str]:
        for what, count in (self.attacked.failures - self.alone.failures).items():
            yield f"{count} x {what}"
        for reason, count in (self.attacked.misses - self.alone.misses).items():
            yield f"{count} misses {reason}"

    def _large(self) -> Iterator[str]:
        for service, most in self.row.most_mib.items():
            if self.memory.most.get(service, 0) > most:
                yield f"{service} {self.memory.most[service]} MiB, at most {most}"

    def as_json(self) -> Mapping[str, Any]:
        def told(worked: Worked) -> Mapping[str, Any]:
            times = {
                what: {"n": len(seconds), "p50": worked.percentile(what, 0.5), "p99": worked.percentile(what, 0.99)}
                for what, seconds in worked.seconds.items()
            }
            return {"seconds": times, "failures": worked.failures, "misses": worked.misses}

        return {
            "name": self.row.name,
            "resource": self.row.resource,
            "alone": told(self.alone),
            "attacked": told(self.attacked),
            "most_mib": self.memory.most,
            "problems": self.problems,
        }

    def line(self) -> str:
        def shown(what: str) -> str:
            before, beside = (each.percentile(what, 0.99) for each in (self.alone, self.attacked))
            return f"{before * 1000:6.0f} {beside * 1000:6.0f}"

        slowest = max(
            (what for what in self.attacked.seconds if what not in FLOORS_S),
            key=lambda what: self.attacked.percentile(what, 0.99),
            default="look",
        )
        times = f"{slowest:6s} {shown(slowest)} {shown('turn')} {shown('formed')} {shown('gap')}"
        memory = " ".join(f"{self.memory.most.get(service, 0):5d}" for service in self.row.most_mib)
        end = "; ".join(self.problems) or "holds"
        return f"{self.row.name:20s} {times} {memory}  {end}"


HEAD = (
    "99 %, in milliseconds, alone and beside the attack: the slowest call of the store; a turn; a turn with a format\n"
    "of its own; a gap between two words. Then the most MiB of the services, and what does not hold.\n"
    f"{'row':20s} {'call':6s} " + f"{'alone':>6s} {'beside':>6s} " * 4 + f"{'store':>5s} {'engine':>5s} {'http':>5s}"
)


async def try_row(row: Row, directory: Path, seconds: float, rounds: int = _ROUNDS) -> Verdict:
    """One row, in a house of its own: rounds of alone and attacked."""
    verdict = Verdict(row)
    with open_arena(directory) as arena:
        async with open_worker(arena) as worker:
            with verdict.memory.sampled(arena.services):
                for _ in range(rounds):
                    with _busy_core():
                        _add(verdict.alone, await worker.work(seconds))
                    await _attacked(verdict, arena, worker, seconds)
        for service in (arena.house.store, arena.house.engine):
            if not service.is_running:
                verdict.trouble = f"{service.name} ended: {service.log[-300:]}"
    return verdict


async def _attacked(verdict: Verdict, arena: Arena, worker: Worker, seconds: float) -> None:
    with _attacker(verdict.row, arena) as attacker:
        is_ready = await asyncio.to_thread(_read_line, attacker) == "ready"
        _add(verdict.attacked, await worker.work(seconds))
        if not is_ready or attacker.poll() is not None:
            verdict.trouble = f"the attack ended by itself with {attacker.poll()}"


def _read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextlib.contextmanager
def _attacker(row: Row, arena: Arena) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.campaigns.fairness.attacker", row.name]
    told = {
        "store_address": arena.house.store.address,
        "engine_address": arena.house.engine.address,
        "gateway_url": arena.gateway.url,
        "tokens": [arena.tokens[name] for name in ATTACKERS],
    }
    with _process(command) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        yield process


def _busy_core() -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
    return _process([sys.executable, "-c", "while True: pass"])


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _add(total: Worked, more: Worked) -> None:
    for what, seconds in more.seconds.items():
        total.seconds.setdefault(what, []).extend(seconds)
    total.failures += more.failures
    total.misses += more.misses


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fairness.campaign", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=[row.name for row in ROWS], metavar="NAME", help="these rows"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase of a row")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="how often alone and attacked follow each other")
    parser.add_argument("--json", type=Path, help="also write everything here")
    arguments = parser.parse_args()
    # A campaign that is told to end ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(HEAD, flush=True)
    verdicts = []
    for row in ROWS:
        if arguments.only and row.name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory(prefix="fair") as directory:
            verdicts.append(asyncio.run(try_row(row, Path(directory), arguments.seconds, arguments.rounds)))
        print(verdicts[-1].line(), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([verdict.as_json() for verdict in verdicts], indent=1))
    ends = Counter(bool(verdict.problems) for verdict in verdicts)
    print(f"{ends[False]} rows hold, {ends[True]} do not")
    return 1 if ends[True] else 0


if __name__ == "__main__":
    sys.exit(main())
