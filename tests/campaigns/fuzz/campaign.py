"""Sends the requests of a seed to a service, and holds every answer, and the service itself, to the contract."""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import psutil

_AT_ONCE = 4
_SETTLES_WITHIN_S = 20.0
# What a busy service may keep: pooled threads, channels that are not closed yet, memory of its allocator.
_MORE_THREADS, _MORE_DESCRIPTORS, _MORE_BYTES = 48, 40, 256 << 20
# MLX 0.32 never ends the thread of a CPU stream, and each loaded model has a stream: so much is left by each load.
_MODEL_LOADED, _MIB_PER_LOAD = "model.loaded", 5
_BUGS_IN_THE_LOG = ("rpc.failed", "Traceback", "Task exception was never retrieved", "never awaited")


class Outcome(NamedTuple):
    """How a call of this name ended, whether it did what was asked, and what is wrong with that."""

    name: str
    status: str
    did_it: bool
    problem: str | None
    call: str


# Sends the request of a number, which may be several calls.
Send = Callable[[int], Iterable[Outcome]]


class Target(Protocol):
    """What is fuzzed."""

    @property
    def pids(self) -> Sequence[int]: ...
    @property
    def log(self) -> str: ...
    def start(self) -> None: ...
    def sending(self, seed: int) -> contextlib.AbstractContextManager[Send]: ...
    def is_well(self) -> str | None: ...
    def end(self) -> Sequence[str]: ...
    def close(self) -> None: ...


@dataclass
class Findings:
    """What a run saw."""

    seed: int
    requests: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    started: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def note(self, number: int, outcome: Outcome) -> None:
        self.counts[outcome.status] += 1
        self.counts[f"{outcome.name} {outcome.status}"] += 1
        self.counts[f"{outcome.name} did it"] += outcome.did_it
        if outcome.problem:
            self.problem(number, outcome.problem, outcome.call)

    def problem(self, number: int, what: str, call: str = "") -> None:
        """Print at once, so that a run that is ended tells what it found."""
        self.problems.append(f"seed {self.seed} request {number}: {what}" + (f"\n    {call}" if call else ""))
        print(self.problems[-1], flush=True)

    def summary(self) -> str:
        statuses = {name: count for name, count in sorted(self.counts.items()) if " " not in name}
        return (
            f"{self.requests} requests, seed {self.seed}: {statuses}\n"
            f"threads, descriptors, MiB: {dict(self.started)} at the start, {dict(self.ended)} at the end\n"
            f"{len(self.problems)} problems"
        )


def fuzz(target: Target, seed: int, numbers: Sequence[int]) -> Findings:
    """All these requests, some at once. The target has been started."""
    findings = Findings(seed)
    findings.started = _resources(target)
    waiting = SimpleQueue[int]()
    for number in numbers:
        waiting.put(number)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for done in [pool.submit(_worker, target, findings, waiting) for _ in range(_AT_ONCE)]:
            done.result()
    _settled(target, findings)
    for line in target.log.splitlines():
        if any(bug in line for bug in _BUGS_IN_THE_LOG):
            findings.problem(-1, f"in the log: {line[:600]}")
    for problem in target.end():
        findings.problem(-1, problem)
    return findings


def _worker(target: Target, findings: Findings, waiting: "SimpleQueue[int]") -> None:
    with target.sending(findings.seed) as send, contextlib.suppress(Empty):
        while True:
            _try(target, findings, send, waiting.get_nowait())


def _try(target: Target, findings: Findings, send: Send, number: int) -> None:
    for outcome in send(number):
        findings.note(number, outcome)
    findings.requests += 1
    try:
        problem = target.is_well()
    except Exception as error:  # noqa: BLE001  whatever it is, it is told with the request
        problem = f"{type(error).__name__}: {error}"
    if problem:
        findings.problem(number, f"not well after it: {problem}")


def _settled(target: Target, findings: Findings) -> None:
    """Wait until nothing is held any more; what still is after a while, is a leak."""
    give_up = time.monotonic() + _SETTLES_WITHIN_S
    loads = target.log.count(_MODEL_LOADED)
    most_threads, most_mib = _MORE_THREADS + loads, (_MORE_BYTES >> 20) + _MIB_PER_LOAD * loads
    for _ in itertools.count():
        findings.ended = _resources(target)
        more = findings.ended.copy()
        more.subtract(findings.started)
        is_settled = more["threads"] <= most_threads and more["descriptors"] <= _MORE_DESCRIPTORS
        if is_settled or time.monotonic() > give_up:
            break
        time.sleep(0.5)
    if not is_settled or more["mib"] > most_mib:
        findings.problem(-1, f"kept more than it had at the start: {dict(more)}")


def _resources(target: Target) -> Counter[str]:
    found: Counter[str] = Counter()
    for pid in target.pids:
        process = psutil.Process(pid)
        found["threads"] += process.num_threads()
        found["descriptors"] += process.num_fds()
        found["mib"] += process.memory_info().rss >> 20
    return found
