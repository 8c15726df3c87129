"""The plan of a scenario: each turn, what it shows its agent, its hearers, and the turns that it waits for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvasir_orchestrator.model import Phase, ScenarioFile
from kvasir_orchestrator.templates import Pieces, Quote, TemplateError, parse
from kvasir_orchestrator.yaml_lines import Lines, Path, Problem

MAX_TURNS = 2_000


@dataclass(frozen=True, slots=True)
class QuotedTurns:
    """Turns whose words stand here, in order: at the head of a prompt, or where a template quotes them."""

    turns: tuple[int, ...]


Prompt = tuple[str | QuotedTurns, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one agent. `index` counts from 0 over the whole scenario, `round` from 1 in the phase."""

    index: int
    phase: str
    round: int
    agent: str
    heard: tuple[int, ...]  # others' messages since its last turn
    prompts: tuple[Prompt, ...]  # its prompts, one message each
    hearers: frozenset[str]  # who hears this turn's words
    readers: frozenset[str]  # who may be shown them by a template: hearers and speaker among them
    after: frozenset[int]  # turns that come first


@dataclass(frozen=True, slots=True)
class Plan:
    """The turns of a scenario, in the order of the plan."""

    turns: tuple[Turn, ...]

    def of_agent(self, agent: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.agent == agent]

    def find(self, phase: str, agent: str, round_: int | None) -> Turn | None:
        """An agent's turn in a phase; the last one if no round is named."""
        found = [turn for turn in self.turns if (turn.phase, turn.agent) == (phase, agent)]
        if round_ is None:
            return found[-1] if found else None
        return next((turn for turn in found if turn.round == round_), None)


def hearers_of(phase: Phase, speaker: str) -> frozenset[str]:
    """The agents that hear a speaker in a phase; the speaker not among them."""
    if speaker in phase.visibility.whispers:
        return frozenset(phase.visibility.whispers[speaker]) - {speaker}
    return frozenset((*phase.agents, *phase.visibility.listeners)) - {speaker}


def readers_of(phase: Phase, speaker: str) -> frozenset[str]:
    """The agents that a speaker's words in a phase may be shown to, by any template."""
    others = () if speaker in phase.visibility.whispers else phase.visibility.readers
    return hearers_of(phase, speaker) | {speaker, *others}


def plan_of(scenario: ScenarioFile, values: Mapping[str, str], lines: Lines) -> tuple[Plan, list[Problem]]:
    """The plan of a scenario whose names are right, and what is wrong with its templates and turns."""
    planner = _Planner(scenario, values, lines)
    for number, phase in enumerate(scenario.phases):
        planner.add_phase(number, phase)
    return Plan(tuple(planner.turns)), planner.problems


class _Planner:
    """Walks through the phases and remembers what each agent has seen."""

    def __init__(self, scenario: ScenarioFile, values: Mapping[str, str], lines: Lines) -> None:
        self.turns: list[Turn] = []
        self.problems: list[Problem] = []
        self._phases: dict[str, Phase] = {}
        self._seen: dict[str, set[int]] = {agent: set() for agent in scenario.agents}
        self._last: dict[str, int] = {}
        self._values, self._lines = values, lines

    def add_phase(self, number: int, phase: Phase) -> None:
        told: dict[str, list[tuple[int, Pieces]]] = {}
        here: Path = ("phases", number)
        for agent in phase.agents:
            common = self._parsed(phase.prompt or [], (*here, "prompt"), agent)
            own = self._parsed(phase.agent_prompts.get(agent, []), (*here, "agent_prompts", agent), agent)
            told[agent] = [*common, *own]
        self._phases[phase.name] = phase
        for round_ in range(1, phase.round_count + 1):
            before = len(self.turns)
            for agent in phase.agents:
                prompts = [pieces for of_round, pieces in told[agent] if of_round == round_]
                turn = self._turn(phase, round_, agent, prompts, before if phase.together else len(self.turns))
                if not turn.heard and not turn.prompts:
                    text = f"{agent} has nothing to answer in round {round_}: expected a prompt, or somebody to hear"
                    self.problems.append(self._lines.problem((*here, "agents", phase.agents.index(agent)), text))
                self.turns.append(turn)

    def _parsed(self, texts: Sequence[str], path: Path, reader: str) -> list[tuple[int, Pieces]]:
        """Each prompt that is understood, with its round."""
        parsed = []
        for place, text in enumerate(texts):
            # A text that stands alone has the field's own line.
            where = (*path, place) if (*path, place) in self._lines.of_path else path
            try:
                pieces = parse(text, self._values)
            except TemplateError as error:
                self.problems.append(self._lines.problem(where, str(error)))
                pieces = (text,)
            for quote in (piece for piece in pieces if isinstance(piece, Quote)):
                self._check(quote, reader, where)
            parsed.append((place + 1, pieces))
        return parsed

    def _check(self, quote: Quote, reader: str, path: Path) -> None:
        """Note a template that shows nothing, or what its reader may not see."""
        if quote.phase not in self._phases:
            return
        meant = self._meant(quote)
        if not meant:
            text = f"{quote} shows nothing: {quote.agent} neither sends nor receives a message in {quote.phase!r}"
            self.problems.append(self._lines.problem(path, text))
        if hidden := sorted({turn.agent for turn in meant if reader not in turn.readers}):
            text = (
                f"{quote} would show {reader} what {', '.join(hidden)} says in {quote.phase!r}, which it"
                f" may not see: expected {reader} among that phase's agents, visibility.listeners or visibility.readers"
            )
            if any(agent in self._phases[quote.phase].visibility.whispers for agent in hidden):
                text += ", and no visibility.whispers that leaves it out"
            self.problems.append(self._lines.problem(path, text))

    def _meant(self, quote: Quote) -> list[Turn]:
        """The turns of a phase that an agent took, or heard."""
        turns = (turn for turn in self.turns if turn.phase == quote.phase)
        return [turn for turn in turns if quote.agent == turn.agent or quote.agent in turn.hearers]

    def _turn(self, phase: Phase, round_: int, agent: str, prompts: Iterable[Pieces], before: int) -> Turn:
        """The agent's next turn. It hears turns before `before`; what its templates quote stands there alone."""
        told = tuple(tuple(self._resolved(piece, agent) for piece in pieces) for pieces in prompts)
        heard = self._new(agent, (turn for turn in self.turns[:before] if agent in turn.hearers))
        quoted = (part.turns for prompt in told for part in prompt if isinstance(part, QuotedTurns))
        own = {self._last[agent]} if agent in self._last else set()
        turn = Turn(
            index=len(self.turns),
            phase=phase.name,
            round=round_,
            agent=agent,
            heard=heard,
            prompts=tuple(prompt for prompt in told if any(_says_something(part) for part in prompt)),
            hearers=hearers_of(phase, agent),
            readers=readers_of(phase, agent),
            after=frozenset(own).union(heard, *quoted),
        )
        self._last[agent] = turn.index
        self._seen[agent].add(turn.index)
        return turn

    def _resolved(self, piece: str | Quote, reader: str) -> str | QuotedTurns:
        if isinstance(piece, str):
            return piece
        return QuotedTurns(self._new(reader, (turn for turn in self._meant(piece) if reader in turn.readers)))

    def _new(self, agent: str, meant: Iterable[Turn]) -> tuple[int, ...]:
        """Those of the turns that the agent has not seen; seen from now on."""
        seen = self._seen[agent]
        new = tuple(turn.index for turn in meant if turn.index not in seen)
        seen.update(new)
        return new


def _says_something(part: str | QuotedTurns) -> bool:
    return bool(part.turns if isinstance(part, QuotedTurns) else part.strip())
