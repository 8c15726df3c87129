"""The steps of a proof one after the other: finished ones are read from the home, the others are measured and kept."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.credentials import replace_private_text
from kvasir.errors import FailedPrecondition, KvasirError

from kvasir_bench.prove.power import slept_s
from kvasir_bench.prove.step import ProofScope, Report, Step, Value


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """Records of steps in `directory`, which count only for the versions and the scope that `made_with` names."""

    directory: Path
    made_with: Mapping[str, Any]

    def read(self, name: str) -> dict[str, Any] | None:
        """The step's record; None if there is none, or one that was made with something else."""
        try:
            found = json.loads(self._file(name).read_text("utf-8"))
            return found["record"] if found["made_with"] == self.made_with else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def keep(self, name: str, record: Mapping[str, Any]) -> None:
        """On return the record survives a loss of power."""
        text = json.dumps({"made_with": self.made_with, "record": record})
        replace_private_text(self._file(name), text)

    def clear(self) -> None:
        for file in self.directory.glob("*.json"):
            file.unlink()

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.json"


@contextlib.contextmanager
def only_proof(directory: Path) -> Iterator[None]:
    """Raises FailedPrecondition while another process is inside for the same home."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise FailedPrecondition("a `kvasir prove` is already running in this home", reason="ALREADY_RUNNING") from None
    finally:
        os.close(descriptor)


_TRIES = 3


@dataclass(frozen=True, slots=True)
class Prover:
    """What a proof needs. `measured` runs a step in a process of its own; `wait` returns when the machine is well."""

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
                try:
                    record = self._record(step)
                except KeyboardInterrupt:
                    self.report(f"stopped; the same command goes on with step {place + 1}")
                    raise
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
