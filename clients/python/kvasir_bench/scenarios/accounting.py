"""What a played scenario shows: planted facts and their age, leaked words, and intervals. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvasir_orchestrator.model import Outcome
from kvasir_orchestrator.plan import Turn
from kvasir_orchestrator.scenario import Scenario, drawn_values

AGES: Mapping[str, range] = {"0-4": range(5), "5-9": range(5, 10), "10-19": range(10, 20), "20+": range(20, 1 << 31)}


@dataclass(frozen=True, slots=True)
class Checked:
    """One outcome. `age`: turns of the conversation since the fact was first told; None where there is none to know."""

    age: int | None
    is_met: bool


@dataclass(slots=True)
class Playthrough:
    """One variant of a scenario as it was played under one way to remember."""

    scenario: str
    variant: int
    way: str
    said: dict[int, tuple[str, int]] = field(default_factory=dict)  # by turn: the words, and how many tokens they are
    prompt_tokens: int = 0
    prefilled_tokens: int = 0  # of those: computed
    first_token_s: list[float] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Batch:
    """What conversations that ran beside each other took together."""

    scenario: str
    way: str
    conversations: int
    wall_s: float
    hot_bytes: int  # of KV that the engine keeps between turns, at most
    stored_bytes: int  # at the end
    engine: str = ""  # device and type of what it computes, such as "cpu, float32"


def age_of(scenario: Scenario, outcome: Outcome, asked: Turn) -> int | None:
    """Turns of the conversation since a prompt first told what the outcome expects. None: no prompt did."""
    expected = outcome.equals or outcome.contains
    told = (turn.index for turn in scenario.plan.turns[: asked.index + 1] if expected and expected in _prompts(turn))
    first = next(told, None)
    return None if first is None else asked.index - first


def _prompts(turn: Turn) -> str:
    return "\n".join("".join(part for part in prompt if isinstance(part, str)) for prompt in turn.prompts)


def leaks(scenario: Scenario, said: Mapping[int, str]) -> Iterator[str]:
    """Each drawn word that an agent spoke and was never shown. One that a model makes up by chance counts, too."""
    words = drawn_values(scenario.file, scenario.variant)
    for turn in scenario.plan.turns:
        before = scenario.transcript(turn.agent, said, until=turn.index)
        shown = "\n".join(message["content"] for message in (*before, *scenario.new_messages(turn, said)))
        for key, word in words.items():
            if _has(said[turn.index], word) and not _has(shown, word):
                yield f"{scenario.stem}, turn {turn.index}: {turn.agent} was never shown {key}"


def _has(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None
