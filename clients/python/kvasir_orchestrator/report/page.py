"""A run as one HTML page without scripts: the conversation by phase, who could see it, and what each turn reused."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvasir_orchestrator.memory import Answer
from kvasir_orchestrator.model import Outcome, Phase
from kvasir_orchestrator.outcomes import expectation, is_met
from kvasir_orchestrator.plan import Turn, hearers_of, readers_of
from kvasir_orchestrator.scenario import Scenario

_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
_PAGES.filters.update(fixed="{:.1f}".format, whole="{:,.0f}".format)

_Done = Sequence[tuple[Turn, Answer]]
_Parts = Sequence[tuple[str, float]]  # from the bottom up, each with its class of colour


@dataclass(frozen=True, slots=True)
class _Plot:
    """A picture over the turns, in the page's own colours, so that light and dark both suit. `parts` and `title` of
    each turn are a bar."""

    label: str
    unit: str
    turns: Sequence[tuple[_Parts, str]]
    is_stacked: bool = True
    width, height, left, bottom = 720, 190, 56, 24

    @property
    def count(self) -> int:
        return len(self.turns)

    @property
    def top(self) -> float:
        whole = sum if self.is_stacked else max
        return max((whole(value for _, value in parts) for parts, _ in self.turns), default=0) or 1

    def y(self, value: float) -> float:
        return 10 + (self.height - 10 - self.bottom) * (1 - value / self.top)

    def x(self, turn: float) -> float:
        return self.left + turn * (self.width - self.left) / max(1, self.count)

    def bars(self) -> Iterator[tuple[str, list[tuple[str, float, float, float, float]]]]:
        """Of each turn its title, and its parts as rectangles: class, x, y, width and height."""
        for place, (parts, title) in enumerate(self.turns):
            tops = list(accumulate((value for _, value in parts), initial=0.0))
            yield (
                title,
                [
                    (kind, self.x(place + 0.1), self.y(end), self.x(0.8) - self.left, self.y(begin) - self.y(end))
                    for (kind, _), begin, end in zip(parts, tops, tops[1:], strict=False)
                ],
            )

    def lines(self) -> Iterator[tuple[str, str]]:
        """The points of each class of colour."""
        for number, kind in enumerate(("old", "new")):
            values = (parts[number][1] for parts, _ in self.turns)
            yield kind, " ".join(f"{self.x(place + 0.5):.1f},{self.y(value):.1f}" for place, value in enumerate(values))


def html_page(scenario: Scenario, run_id: str, answers: Mapping[int, Answer]) -> str:
    """The page of a run; of one that was stopped, with the turns that are whole."""
    done = [(turn, answers[turn.index]) for turn in scenario.plan.turns if turn.index in answers]
    said = {turn.index: answer.text for turn, answer in done}
    titles = [f"turn {turn.index + 1}, {scenario.names[turn.agent]}: {_reuse(answer)}" for turn, answer in done]
    of_turns = [answer for _, answer in done]
    tokens = [(("old", each.cached_tokens), ("new", each.new_tokens)) for each in of_turns]
    waits = [(("new", each.first_token_s * 1000),) for each in of_turns]
    both = zip(*map(accumulate, _counts(of_turns)), strict=True)
    sums = [((("old", whole), ("new", new)), "") for whole, new in both]
    return _PAGES.get_template("page.html").render(
        scenario=scenario,
        run_id=run_id,
        done=done,
        said=said,
        tiles=_tiles(scenario, done),
        outcomes=list(_outcomes(scenario, said)),
        tokens=_Plot("Prompt tokens of each turn", "tokens", list(zip(tokens, titles, strict=True))),
        waits=_Plot("Time to the first token of each turn", "ms", list(zip(waits, titles, strict=True))),
        sums=_Plot("Prompt tokens up to each turn", "tokens", sums, is_stacked=False),
        sight=partial(_sight, scenario),
        reuse=_reuse,
        heard_by=partial(_heard_by, scenario),
        memory=partial(_memory, scenario, said),
    )


def _counts(answers: Sequence[Answer]) -> tuple[list[int], list[int]]:
    """Of all turns the tokens of their prompts, and those that were computed."""
    return [each.prompt_tokens for each in answers], [each.new_tokens for each in answers]


def _tiles(scenario: Scenario, done: _Done) -> dict[str, str]:
    prompts, new = map(sum, _counts([answer for _, answer in done]))
    firsts = sorted(answer.first_token_s for _, answer in done)
    later = [answer for turn, answer in done if scenario.plan.of_agent(turn.agent)[0] is not turn]
    extended = sum(answer.match == "extend" or answer.source == "replay" for answer in later)
    return {
        "turns": f"{len(done)} of {len(scenario.plan.turns)}",
        "prompt tokens computed": f"{new:,} of {prompts:,}",
        "of later turns extend a memory": f"{extended} of {len(later)}",
        "to the first token, median": f"{firsts[len(firsts) // 2] * 1000:,.0f} ms" if firsts else "–",
    }


def _outcomes(scenario: Scenario, said: Mapping[int, str]) -> Iterator[tuple[str, Outcome, str, str]]:
    """Each with its state, the expected answer, and the reply."""
    for outcome in scenario.outcomes:
        turn = scenario.plan.find(outcome.phase, outcome.agent, outcome.round)
        assert turn is not None
        text = said.get(turn.index)
        state = "not reached" if text is None else "met" if is_met(outcome, text.strip()) else "missed"
        got = "" if text is None else f"{scenario.names[turn.agent]}: {text.strip()}"
        yield state, outcome, expectation(outcome), got


def _sight(scenario: Scenario, phase: Phase, agent: str) -> str:
    """What an agent has of a phase, in words; empty: nothing."""
    others = [speaker for speaker in phase.agents if speaker != agent]
    hears = [speaker for speaker in others if agent in hearers_of(phase, speaker)]
    reads = [speaker for speaker in others if agent in readers_of(phase, speaker) and speaker not in hears]
    parts = ["speaks"] * (agent in phase.agents)
    for verb, speakers in (("hears", hears), ("may read", reads)):
        if speakers:
            names = "all" if speakers == others else ", ".join(scenario.names[each] for each in speakers)
            parts.append(f"{verb} {names}")
    return "; ".join(parts)


def _heard_by(scenario: Scenario, turn: Turn) -> str:
    return ", ".join(scenario.names[agent] for agent in scenario.agents if agent in turn.hearers) or "nobody"


def _reuse(answer: Answer) -> str:
    why = f" ({answer.reason})" if answer.reason else ""
    return (
        f"{answer.match.upper()}, {answer.source}{why}: {answer.cached_tokens:,} tokens reused, {answer.new_tokens:,} "
        f"computed, first token after {answer.first_token_s * 1000:,.0f} ms"
    )


def _memory(scenario: Scenario, said: Mapping[int, str], agent: str) -> list[dict[str, str]]:
    """An agent's transcript as far as it goes."""
    reached = next((turn.index for turn in scenario.plan.of_agent(agent) if turn.index not in said), None)
    return scenario.transcript(agent, said, until=reached)
