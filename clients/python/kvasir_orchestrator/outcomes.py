"""Checks of answers by a scenario's outcomes."""

import re
from collections.abc import Iterator, Mapping

from kvasir_orchestrator.events import OutcomeChecked
from kvasir_orchestrator.model import Outcome
from kvasir_orchestrator.scenario import Scenario


def checked(scenario: Scenario, said: Mapping[int, str]) -> Iterator[OutcomeChecked]:
    """Each outcome of a scenario whose turns are all done."""
    for outcome in scenario.outcomes:
        turn = scenario.plan.find(outcome.phase, outcome.agent, outcome.round)
        assert turn is not None  # the file was checked
        text = said[turn.index].strip()
        yield OutcomeChecked(outcome, turn, text, is_met(outcome, text))


def is_met(outcome: Outcome, text: str) -> bool:
    if outcome.equals is not None:
        return text == outcome.equals
    if outcome.contains is not None:
        return outcome.contains in text
    if outcome.lacks is not None:
        return outcome.lacks not in text
    return re.fullmatch(outcome.matches or "", text) is not None


def expectation(outcome: Outcome) -> str:
    """The check in words."""
    given = {name: text for name in ("equals", "contains", "lacks", "matches") if (text := getattr(outcome, name))}
    return " ".join(f"{name} {text!r}" for name, text in given.items())
