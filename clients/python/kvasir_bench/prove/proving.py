"""The steps of a proof one after the other: finished ones are read from the home, the others are measured and kept."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import KvasirError

from kvasir_bench.prove.power import slept_s
from kvasir_bench.prove.state import KeptSteps
from kvasir_bench.prove.step import ProofScope, Report, Step, Value

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Prover:
    """What a proof needs of the world. `measured` runs a step in a process of its own; `wait` returns when the machine
    is well.
    """

    scope: ProofScope
    kept: KeptSteps
    measured: Callable[[Step], Value]
    wait: Callable[[], None]
    report: Report
    slept: Callable[[], float] = slept_s

    def prove(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        """The records of all steps, in order. A step that fails is recorded with its reason, and not kept."""
        records: list[dict[str, Any]] = []
        for place, step in enumerate(steps):
            record = self.kept.read(step.name)
            if record is None:
                rest = remaining_s(records, steps, self.scope, self.kept)
                self.report(f"[{place + 1}/{len(steps)}] {step.title}; {in_words(rest)} in all remain")
                record = self._record(step)
                if "failed" not in record:
                    self.kept.keep(step.name, record)
            else:
                self.report(f"[{place + 1}/{len(steps)}] {step.title}: finished before")
            records.append(record)
        return records

    def _record(self, step: Step) -> dict[str, Any]:
        """Measured again where the machine slept meanwhile: its times would count the sleep."""
        about = {"name": step.name, "title": step.title, "expected_s": step.expected_s(self.scope)}
        for _ in range(_TRIES):
            self.wait()
            began, slept = time.monotonic(), self.slept()
            try:
                found: dict[str, Any] = {"value": self.measured(step)}
            except KvasirError as error:
                found = {"failed": error.message}
            asleep = self.slept() - slept
            record = {**about, "seconds": round(time.monotonic() - began, 1), "slept_s": round(asleep, 1), **found}
            if asleep < 1:
                break
            self.report(f"the machine slept for {asleep:.0f} s: {step.title} is measured again")
        return record


def remaining_s(
    records: Sequence[Mapping[str, Any]], steps: Sequence[Step], scope: ProofScope, kept: KeptSteps
) -> float:
    """The estimate of all steps that are not finished, on a machine that was as slow as in the finished ones."""
    expected = sum(record["expected_s"] for record in records)
    pace = sum(record["seconds"] for record in records) / expected if expected else 1.0
    waiting = (step for step in steps[len(records) :] if kept.read(step.name) is None)
    return pace * sum(step.expected_s(scope) for step in waiting)


def in_words(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {seconds:.0f} s"
