"""A scenario that has been read and checked, with its plan. Start here: `Scenario.read("gossip.yaml")`."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Self

from kvasir.errors import NotFound
from pydantic import ValidationError

from kvasir_orchestrator.checks import problems_of
from kvasir_orchestrator.model import PATTERNS, Agent, Outcome, Phase, ScenarioFile
from kvasir_orchestrator.plan import Plan, Turn, plan_of
from kvasir_orchestrator.templates import TemplateError, parse
from kvasir_orchestrator.transcript import Message, new_messages, transcript
from kvasir_orchestrator.yaml_lines import MAX_FILE_CHARACTERS, Lines, Problem, ScenarioInvalid, read

_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "no such field; `kvasir scenario schema` has all of them",
    "model_type": "expected fields with values",
    "dict_type": "expected fields with values",
    "list_type": "expected a list",
    "string_type": "expected a text",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
}
_SHIPPED = resources.files("kvasir_orchestrator") / "scenarios"


@dataclass(frozen=True)
class Scenario:
    """Agents, phases and outcomes, all in order; `plan` has every turn. Made by `read`, `parse` and `shipped`."""

    text: str  # of the file
    variant: int  # 0: the first of all values
    file: ScenarioFile
    plan: Plan
    names: Mapping[str, str]  # how others call an agent
    personas: Mapping[str, str]
    outcomes: tuple[Outcome, ...]

    @classmethod
    def read(cls, path: str | Path, variant: int = 0) -> Self:
        """Raises ScenarioInvalid, with the line of everything that is wrong, and OSError."""
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(MAX_FILE_CHARACTERS + 1)
        except UnicodeDecodeError as error:
            raise ScenarioInvalid(str(path), [Problem(1, "", f"expected UTF-8: {error.reason}")]) from None
        return cls.parse(text, str(path), variant)

    @classmethod
    def shipped(cls, name: str, variant: int = 0) -> Self:
        """One of the scenarios that come with Kvasir. Raises NotFound."""
        if name not in shipped_names():
            known = ", ".join(shipped_names())
            raise NotFound(f"no scenario {name!r}: expected a file, or one of {known}", reason="SCENARIO_NOT_FOUND")
        return cls.parse((_SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml", variant)

    @classmethod
    def parse(cls, text: str, source: str = "scenario", variant: int = 0) -> Self:
        """As `read`, of the file's text; `source` stands in refusals."""
        data, lines = read(text, source)
        file = _validated(data, lines, source)
        values = drawn_values(file, variant)
        problems = problems_of(file, lines)
        personas = {
            key: _filled(agent.persona, values, ("agents", key, "persona"), lines, problems)
            for key, agent in file.agents.items()
        }
        outcomes = tuple(
            _filled_outcome(outcome, values, number, lines, problems) for number, outcome in enumerate(file.outcomes)
        )
        if problems:
            raise ScenarioInvalid(source, problems)
        plan, problems = plan_of(file, values, lines)
        if problems:
            raise ScenarioInvalid(source, problems)
        names = {key: agent.name or key.capitalize() for key, agent in file.agents.items()}
        return cls(text, variant, file, plan, names, personas, outcomes)

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def stem(self) -> str:
        """What agents and journals are named after: other words were never told to the same agents."""
        return f"{self.name}+{self.variant}" if self.variant else self.name

    @property
    def agents(self) -> Mapping[str, Agent]:
        return self.file.agents

    @cached_property
    def phases(self) -> Mapping[str, Phase]:
        return {phase.name: phase for phase in self.file.phases}

    def agent_id(self, agent: str, run_id: str) -> str:
        """An agent's name at the engine: of its own in each variant, and in each run if it is ephemeral."""
        of_file = self.agents[agent]
        if of_file.lifetime == "ephemeral":
            return f"{self.stem}/{run_id}/{agent}"
        return of_file.id or f"{self.stem}/{agent}"

    def new_messages(self, turn: Turn, said: Mapping[int, str]) -> list[Message]:
        """What a turn adds to its agent's transcript before the reply."""
        return new_messages(turn, self.names, self.plan, said)

    def transcript(self, agent: str, said: Mapping[int, str], until: int | None = None) -> list[Message]:
        """An agent's transcript before its turn `until`; None: with all its turns."""
        end = len(self.plan.turns) if until is None else until
        return transcript(agent, end, self.personas, self.names, self.plan, said)


def shipped_names() -> list[str]:
    """The scenarios that come with Kvasir."""
    return sorted(each.name.removesuffix(".yaml") for each in _SHIPPED.iterdir() if each.name.endswith(".yaml"))


def _validated(data: object, lines: Lines, source: str) -> ScenarioFile:
    try:
        return ScenarioFile.model_validate(data)
    except ValidationError as error:
        problems = []
        for each in error.errors(include_url=False, include_context=True):
            said = PATTERNS.get(str(each.get("ctx", {}).get("pattern")), each["msg"])
            text = _expected(each["type"], said, each["input"])
            problems.append(lines.problem(each["loc"], text))
        raise ScenarioInvalid(source, problems) from None


def _expected(kind: str, said: str, given: object) -> str:
    """pydantic's words in ours."""
    text = _WORDS.get(kind) or said.removeprefix("String should ").removeprefix("Input should be ")
    if not text.startswith(("expected", "is missing", "no such field")):
        text = f"expected {text}"
    if isinstance(given, dict | list) or kind in ("missing", "extra_forbidden"):
        return text
    is_long = isinstance(given, str) and len(given) > 40
    return f"{text}, got {len(given)} characters" if is_long else f"{text}, got {given!r}"  # type: ignore[arg-type]


def drawn_values(file: ScenarioFile, variant: int) -> dict[str, str]:
    """A word for each value: the first of them, or, in a variant, one that its number draws."""

    def place(key: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{variant} {key}".encode()).digest()) if variant else 0

    return {key: words[place(key) % len(words)] for key, words in file.values.items()}


def _filled(
    text: str, values: Mapping[str, str], path: tuple[str | int, ...], lines: Lines, problems: list[Problem]
) -> str:
    """A text that has values and quotes nobody."""
    try:
        pieces = parse(text, values)
    except TemplateError as error:
        problems.append(lines.problem(path, str(error)))
        return text
    if any(not isinstance(piece, str) for piece in pieces):
        problems.append(lines.problem(path, "expected no ${phase.messages[agent]} here: only prompts quote"))
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _filled_outcome(
    outcome: Outcome, values: Mapping[str, str], number: int, lines: Lines, problems: list[Problem]
) -> Outcome:
    texts = {name: text for name in ("equals", "contains", "lacks") if (text := getattr(outcome, name)) is not None}
    here = ("outcomes", number)
    filled = {name: _filled(text, values, (*here, name), lines, problems) for name, text in texts.items()}
    return outcome.model_copy(update=filled)
