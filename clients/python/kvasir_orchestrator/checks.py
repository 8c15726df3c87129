"""What must hold between the parts of a scenario: every name stands for something, and templates look back only."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvasir_orchestrator.model import Phase, ScenarioFile
from kvasir_orchestrator.plan import MAX_TURNS
from kvasir_orchestrator.templates import Quote, TemplateError, parse
from kvasir_orchestrator.yaml_lines import Lines, Path, Problem


def problems_of(scenario: ScenarioFile, lines: Lines) -> list[Problem]:
    """All names that stand for nothing or for two things, and all templates that cannot be filled."""
    found = _Finder(scenario, lines)
    found.look()
    return found.problems


class _Finder:
    """Looks through a scenario and collects what is wrong."""

    def __init__(self, scenario: ScenarioFile, lines: Lines) -> None:
        self.problems: list[Problem] = []
        self._scenario, self._lines = scenario, lines
        self._phases = {phase.name: phase for phase in scenario.phases}

    def look(self) -> None:
        self._twice([phase.name for phase in self._scenario.phases], lambda n: ("phases", n, "name"), "phase")
        self._agents()
        for number, phase in enumerate(self._scenario.phases):
            self._phase(("phases", number), phase)
        self._cycles()
        for number, outcome in enumerate(self._scenario.outcomes):
            here: Path = ("outcomes", number)
            self._known(outcome.phase, self._phases, (*here, "phase"), "phase")
            if of_phase := self._phases.get(outcome.phase):
                self._known(outcome.agent, of_phase.agents, (*here, "agent"), f"agent of {of_phase.name!r}")
                if (outcome.round or 1) > of_phase.round_count:
                    text = f"expected at most {of_phase.round_count}, the rounds of {of_phase.name!r}"
                    self._add((*here, "round"), text)
        turns = sum(len(phase.agents) * phase.round_count for phase in self._scenario.phases)
        if turns > MAX_TURNS:
            self._add(("phases",), f"expected at most {MAX_TURNS} turns in all, got {turns}")

    def _agents(self) -> None:
        names: dict[str, str] = {}
        ids: dict[str, str] = {}
        for key, agent in self._scenario.agents.items():
            name = agent.name or key.capitalize()
            ids_key = agent.id or f"{self._scenario.name}/{key}"
            if (agent.id or "").startswith((f"{self._scenario.name}/", f"{self._scenario.name}+")):
                text = f"{agent.id!r} is a name for agents without an id, in some run: expected another beginning"
                self._add(("agents", key, "id"), text)
            for taken, value, field in ((names, name, "name"), (ids, ids_key, "id")):
                if value in taken:
                    self._add(("agents", key, field), f"{value!r} is {taken[value]}'s: expected a {field} of its own")
                taken.setdefault(value, key)

    def _phase(self, here: Path, phase: Phase) -> None:
        agents, seen = self._scenario.agents, phase.visibility
        self._twice(phase.agents, lambda n: (*here, "agents", n), "agent")
        for place, key in enumerate(phase.agents):
            self._known(key, agents, (*here, "agents", place), "agent")
        for field in ("listeners", "readers"):
            for place, key in enumerate(getattr(seen, field)):
                self._known(key, agents, (*here, "visibility", field, place), "agent")
        for speaker, hearers in seen.whispers.items():
            self._known(speaker, phase.agents, (*here, "visibility", "whispers", speaker), "agent of this phase")
            for place, key in enumerate(hearers):
                self._known(key, agents, (*here, "visibility", "whispers", speaker, place), "agent")
        for key in phase.agent_prompts:
            self._known(key, phase.agents, (*here, "agent_prompts", key), "agent of this phase")
        for of_prompts, texts in _prompts(phase):
            if len(texts) > phase.round_count:
                text = f"expected at most {phase.round_count} texts, one a round, got {len(texts)}"
                self._add((*here, *of_prompts), text)

    def _cycles(self) -> None:
        """Templates of a phase quote phases before it. One that looks ahead is reported with its circle."""
        order = {name: number for number, name in enumerate(self._phases)}
        quoted: dict[str, set[str]] = {name: set() for name in self._phases}
        for number, phase in enumerate(self._scenario.phases):
            for path, quote in self._quotes(number, phase):
                self._known(quote.phase, self._phases, path, "phase", f"{quote}: ")
                self._known(quote.agent, self._scenario.agents, path, "agent", f"{quote}: ")
                quoted[phase.name].add(quote.phase)
        for number, phase in enumerate(self._scenario.phases):
            for path, quote in self._quotes(number, phase):
                if order.get(quote.phase, -1) >= number:
                    circle = _path(quoted, quote.phase, phase.name)
                    what = f"a cycle of templates: {' → '.join([phase.name, *circle])}" if circle else "a later phase"
                    self._add(path, f"{quote}: expected an earlier phase, got {what}")

    def _quotes(self, number: int, phase: Phase) -> Iterator[tuple[Path, Quote]]:
        values = {key: drawn[0] for key, drawn in self._scenario.values.items()}
        for field, texts in _prompts(phase):
            for place, text in enumerate(texts):
                path: Path = ("phases", number, *field, place)
                path = path if path in self._lines.of_path else path[:-1]
                try:
                    pieces = parse(text, values)
                except TemplateError:
                    continue  # the plan reports it
                yield from ((path, piece) for piece in pieces if isinstance(piece, Quote))

    def _known(self, key: str, known: Iterable[str], path: Path, kind: str, before: str = "") -> None:
        names = list(known)
        if key not in names:
            self._add(path, f"{before}no {kind} {key!r}: expected one of {', '.join(names[:20]) or 'none'}")

    def _twice(self, keys: Sequence[str], path_of: Callable[[int], Path], kind: str) -> None:
        for place, key in enumerate(keys):
            if key in keys[:place]:
                self._add(path_of(place), f"{kind} {key!r} stands twice")

    def _add(self, path: Path, text: str) -> None:
        problem = self._lines.problem(path, text)
        if problem not in self.problems:
            self.problems.append(problem)


def _prompts(phase: Phase) -> Iterator[tuple[Path, Sequence[str]]]:
    """Every field of a phase that holds prompts, and its texts."""
    if phase.prompt:
        yield ("prompt",), phase.prompt
    for key, texts in phase.agent_prompts.items():
        yield ("agent_prompts", key), texts


def _path(arrows: Mapping[str, set[str]], start: str, end: str) -> list[str]:
    """The phases from one to another along the quotes, both included; empty if no way leads there."""
    ways = [[start]]
    met = {start}
    for way in ways:
        if way[-1] == end:
            return way
        for step in sorted(arrows.get(way[-1], set()) - met):
            met.add(step)
            ways.append([*way, step])
    return []
