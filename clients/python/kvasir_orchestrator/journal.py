"""The journal of a run: the scenario, then a line for each whole turn. A last line that a crash cut is dropped."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from kvasir.errors import DataLoss, FailedPrecondition, InvalidArgument
from kvasir.syncing import sync, sync_directory
from pydantic import TypeAdapter

from kvasir_orchestrator.memory import Answer
from kvasir_orchestrator.plan import Turn
from kvasir_orchestrator.scenario import Scenario

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Head:
    """The first line."""

    run_id: str
    scenario: str
    variant: int
    forgets: bool


@dataclass(frozen=True, slots=True)
class _Noted:
    """The line of a turn."""

    turn: int
    agent: str
    answer: Answer


_HEAD, _NOTED = TypeAdapter(_Head), TypeAdapter(_Noted)  # a report may be of somebody else's file


class Journal:
    """One run's journal. Made by `begin` and `resume`, which lock its file; `read` only looks."""

    def __init__(self, path: Path, run_id: str, text: str, variant: int, forgets: bool) -> None:
        self.path, self.run_id, self.text, self.variant = path, run_id, text, variant
        self.forgets = forgets  # whether permanent agents are deleted before the first turn
        self.answers: dict[int, Answer] = {}
        self.speakers: dict[int, str] = {}
        self.is_finished = False
        self._descriptor: int | None = None

    @classmethod
    def begin(cls, path: Path, scenario: Scenario, run_id: str, *, forgets: bool = False) -> Self:
        """A new journal. Raises FailedPrecondition where a file is already."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        journal = cls(path, run_id, scenario.text, scenario.variant, forgets)
        head = {"format": _FORMAT, "run_id": run_id, "variant": scenario.variant, "scenario": scenario.text}
        head["forgets"] = forgets
        # It gets its name with its first line: one without could neither go on nor be distinguished from a damaged one.
        nameless = path.with_name(f".{path.name}.{run_id}")
        journal._lock(os.open(nameless, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600))
        try:
            journal._write({"kvasir_scenario_journal": head})
            os.link(nameless, path)
            sync_directory(path.parent)
        except BaseException as error:
            journal.close()
            if isinstance(error, FileExistsError):
                text = f"{path} exists: go on with it without --fresh, or name another journal"
                raise FailedPrecondition(text, reason="JOURNAL_EXISTS", field="journal") from None
            raise
        finally:
            nameless.unlink()
        return journal

    @classmethod
    def resume(cls, path: Path, scenario: Scenario) -> Self:
        """A journal that goes on. Raises FailedPrecondition for another scenario's, or while it is in use."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        locked = cls(path, "", "", 0, forgets=False)
        locked._lock(descriptor)
        try:
            journal, whole_bytes = cls._parsed(path)
            if (journal.text, journal.variant) != (scenario.text, scenario.variant):
                text = f"{path} is of another text or variant of this scenario: finish that run, or start again"
                raise FailedPrecondition(text, reason="SCENARIO_CHANGED", field="journal")
            journal.check(scenario)
            os.ftruncate(descriptor, whole_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        journal._descriptor = descriptor
        return journal

    @classmethod
    def read(cls, path: Path) -> Self:
        """A journal's content. Raises DataLoss if it is none, and OSError."""
        return cls._parsed(path)[0]

    @classmethod
    def check_unused(cls, path: Path) -> None:
        """Raises FailedPrecondition while a process runs from this journal."""
        with cls(path, "", "", 0, forgets=False) as locked:
            locked._lock(os.open(path, os.O_RDONLY))

    def check(self, scenario: Scenario) -> None:
        """Raises DataLoss unless its turns are the scenario's, each with all those that come first."""
        turns = scenario.plan.turns
        for index, agent in self.speakers.items():
            if not 0 <= index < len(turns) or turns[index].agent != agent:
                raise _damaged(self.path, f"turn {index} of {agent} is none of the scenario")
            if lost := turns[index].after - self.answers.keys():
                raise _damaged(self.path, f"turn {min(lost)} is lost, and turn {index} is noted")

    @property
    def model(self) -> str:
        """The name of the model that answered; empty where that is unknown."""
        return next((answer.model for answer in self.answers.values() if answer.model), "")

    def record(self, turn: Turn, request_id: str, answer: Answer) -> None:
        """Note a whole turn; it is on disk when this returns."""
        self._write({"turn": turn.index, "agent": turn.agent, "request_id": request_id, "answer": asdict(answer)})
        self.answers[turn.index], self.speakers[turn.index] = answer, turn.agent

    def finish(self) -> None:
        """Note that nothing is left to do."""
        self.is_finished = True
        self._write({"finished": True})

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            text = f"{self.path} is in use: another process runs this scenario"
            raise FailedPrecondition(text, reason="JOURNAL_IN_USE", field="journal") from None
        self._descriptor = descriptor

    def _write(self, value: dict[str, Any]) -> None:
        if self._descriptor is None:
            raise InvalidArgument("the journal was opened to be read")
        line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        whole_bytes = os.fstat(self._descriptor).st_size
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            sync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, whole_bytes)  # half a line before another one would be damage
            raise

    @classmethod
    def _parsed(cls, path: Path) -> tuple[Self, int]:
        """The journal, and the bytes of its whole lines."""
        *lines, _cut = path.read_bytes().split(b"\n")
        try:
            value = json.loads(lines[0])["kvasir_scenario_journal"]
            if value["format"] != _FORMAT:
                raise DataLoss(f"{path}: format {value['format']}, expected {_FORMAT}", reason="JOURNAL_DAMAGED")
            head = _HEAD.validate_python(value)
            journal = cls(path, head.run_id, head.scenario, head.variant, head.forgets)
            for line in lines[1:]:
                value = json.loads(line)
                if "turn" in value:
                    noted = _NOTED.validate_python(value)
                    journal.answers[noted.turn], journal.speakers[noted.turn] = noted.answer, noted.agent
                journal.is_finished = journal.is_finished or "finished" in value
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _damaged(path, str(error)) from None
        return journal, sum(len(line) + 1 for line in lines)


def _damaged(path: Path, why: str) -> DataLoss:
    return DataLoss(f"{path} is no journal of a scenario: {why}", reason="JOURNAL_DAMAGED")
