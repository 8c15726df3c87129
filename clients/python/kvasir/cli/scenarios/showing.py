"""A scenario's run as people and scripts read it: in the scenario's order, though turns run beside each other."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from kvasir_orchestrator import (
    Event,
    OutcomeChecked,
    ReplyPiece,
    RunDone,
    RunStarted,
    Scenario,
    TurnDone,
    TurnRetried,
    TurnStarted,
)
from kvasir_orchestrator.outcomes import expectation
from kvasir_orchestrator.transcript import Message
from rich.console import Console

from kvasir.cli.caller import Caller
from kvasir.cli.rows import counted

_OfTurn = TurnStarted | ReplyPiece | TurnRetried | TurnDone


class ShownRun:
    """Writes a run. Events beside the turn that is written now wait for their place."""

    def __init__(self, caller: Caller, scenario: Scenario) -> None:
        self._caller, self._out, self._scenario = caller, caller.out, scenario
        self._next = 0  # the turn that is written now
        self._waiting: dict[int, list[_OfTurn]] = {}
        self._headline = ""

    def show(self, event: Event) -> None:
        """Write an event, or keep it until its place comes."""
        match event:
            case RunStarted():
                before = f", {event.done} of them done before" if event.done else ""
                self._caller.say(f"{self._scenario.name}: {counted(event.turns, 'turn')}{before}")
            case OutcomeChecked():
                self._outcome(event)
            case RunDone():
                self._end(event)
            case _:
                self._waiting.setdefault(event.turn.index, []).append(event)
                while self._waiting.get(self._next):
                    self._write(self._waiting[self._next].pop(0))

    def _write(self, event: _OfTurn) -> None:
        self._under(self._scenario.phases[event.turn.phase].title)
        match event:
            case TurnStarted():
                self._begin(event)
            case ReplyPiece():
                self._out.print(event.text, end="")
                self._out.file.flush()
            case TurnRetried():
                self._caller.say(f"\n{event.error.message}; retrying in {event.wait_s:.1f} s")
                self._speaker(event)
            case TurnDone():
                if event.is_from_journal:
                    self._begin(event)
                    self._out.print(event.answer.text, end="")
                self._out.print()
                self._out.print(f"    {reuse(event)}", style="dim")
                self._next += 1

    def _begin(self, event: TurnStarted | TurnDone) -> None:
        for message in event.new:
            self._out.print("\n".join(f"  {line}" for line in message["content"].splitlines()), style="dim")
        self._speaker(event)

    def _speaker(self, event: _OfTurn) -> None:
        self._out.print(f"{self._scenario.names[event.turn.agent]}: ", end="", style="bold cyan")

    def _under(self, headline: str) -> None:
        if headline != self._headline:
            self._headline = headline
            self._out.print(f"\n== {headline}", style="bold")

    def _outcome(self, event: OutcomeChecked) -> None:
        self._under("Outcomes")
        if event.is_met:
            self._out.print(f"met      {event.outcome.label}", style="green")
        else:
            name = self._scenario.names[event.turn.agent]
            got = f"expected: {expectation(event.outcome)}; {name} said {event.text!r}"
            self._out.print(f"NOT MET  {event.outcome.label} ({got})", style="red")

    def _end(self, event: RunDone) -> None:
        self._out.print(
            f"\n{event.outcomes_met} of {counted(event.outcomes, 'outcome')} met; "
            f"{event.extended} of {counted(event.later_turns, 'later turn')} EXTEND; "
            f"{computed(event.new_tokens, event.prompt_tokens)}"
        )
        if event.forgotten:
            self._out.print(f"deleted: {', '.join(event.forgotten)}")


def reuse(done: TurnDone) -> str:
    """What a turn reused and what it missed, in words."""
    answer = done.answer
    kind = "miss" if not answer.cached_tokens else "partial hit" if answer.reason else "hit"
    why = f": {answer.reason}" if answer.reason else ""
    left_out = f"; full: oldest messages left out from now on: {answer.left_out}" if answer.left_out else ""
    before = "done before; " if done.is_from_journal else ""
    if done.is_first and answer.match == "extend":
        before += "goes on from an earlier run; "
    return (
        f"{before}{answer.match.upper()}, {answer.cached_tokens} cached + {answer.new_tokens} new tokens, "
        f"{kind} ({answer.source}{why}), first token after {answer.first_token_s * 1000:.0f} ms"
        f"{left_out}"
    )


def computed(new_tokens: int, prompt_tokens: int) -> str:
    share = f"{new_tokens / max(1, prompt_tokens):.1%}"
    return f"{new_tokens:,} of {prompt_tokens:,} prompt tokens computed, {share}"


def event_row(scenario: Scenario, event: Event) -> dict[str, Any] | None:
    """An event as a line of JSON; None for a piece of a reply."""
    if isinstance(event, RunStarted):
        return {"event": "run_started", "scenario": scenario.name, **asdict(event)}
    if isinstance(event, RunDone):
        return {"event": "run_done", **asdict(event)}
    place = _place(event.turn)
    match event:
        case TurnStarted():
            return {"event": "turn_started", **place, "new": list(event.new)}
        case TurnRetried():
            said = {"reason": event.error.reason, "message": event.error.message}
            return {"event": "turn_retried", **place, **said, "attempt": event.attempt, "wait_s": event.wait_s}
        case TurnDone():
            flags = {"is_first": event.is_first, "is_from_journal": event.is_from_journal}
            return {
                "event": "turn_done",
                **place,
                **flags,
                **asdict(event.answer),
                "new_tokens": event.answer.new_tokens,
            }
        case OutcomeChecked():
            found = {"label": event.outcome.label, "text": event.text, "is_met": event.is_met}
            return {"event": "outcome_checked", **place, **found}
    return None


class Counter(Protocol):
    """Counts a text's tokens, or those of messages in the model's template."""

    def count_tokens(self, *, prompt: str | None = None, messages: Sequence[Message] | None = None) -> int: ...


def dry_rows(scenario: Scenario, counter: Counter | None) -> list[dict[str, Any]]:
    """Every prompt, with a mark where a reply will stand, and what its agent will remember; tokens with a counter."""
    said = {turn.index: f"‹{scenario.names[turn.agent]}, turn {turn.index + 1}›" for turn in scenario.plan.turns}
    rows: list[dict[str, Any]] = []
    remembered: dict[str, int] = {}  # tokens, by agent
    for turn in scenario.plan.turns:
        before = scenario.transcript(turn.agent, said, until=turn.index)
        new = scenario.new_messages(turn, said)
        is_first = scenario.plan.of_agent(turn.agent)[0] is turn
        prompt_tokens = counter.count_tokens(messages=[*before, *new]) if counter else None
        reused_tokens = remembered.get(turn.agent, 0) if counter else None
        if counter and prompt_tokens:
            remembered[turn.agent] = prompt_tokens + counter.count_tokens(prompt=said[turn.index])
        reused = {"match": "none" if is_first else "extend", "reused_messages": 0 if is_first else len(before)}
        tokens = {"prompt_tokens": prompt_tokens, "reused_tokens": reused_tokens}
        shown = [*(before if is_first else []), *new]
        rows.append({**_place(turn), "waits_for": sorted(turn.after), **reused, **tokens, "new": shown})
    return rows


def _place(turn: Any) -> dict[str, Any]:
    """Where a turn stands in its scenario."""
    return {"turn": turn.index, "phase": turn.phase, "round": turn.round, "agent": turn.agent}


def show_dry_rows(out: Console, scenario: Scenario, rows: Sequence[dict[str, Any]]) -> None:
    phase = ""
    for row in rows:
        if row["phase"] != phase:
            phase = row["phase"]
            out.print(f"\n== {scenario.phases[phase].title}", style="bold")
        waits = ", ".join(str(index + 1) for index in row["waits_for"]) or "nothing"
        reused = row["reused_messages"]
        kept = f"EXTEND, {counted(reused, 'message')} reused" if reused else "nothing to reuse"
        if row["prompt_tokens"] is not None:
            kept += f", {row['reused_tokens']:,} of {row['prompt_tokens']:,} tokens"
        out.print(f"turn {row['turn'] + 1}: {scenario.names[row['agent']]} waits for {waits}; {kept}")
        for message in row["new"]:
            first, *others = message["content"].splitlines()
            out.print("\n".join([f"  {message['role']}: {first}", *(f"    {line}" for line in others)]), style="dim")
    if all(row["prompt_tokens"] is not None for row in rows):
        whole, reused = (sum(row[name] for row in rows) for name in ("prompt_tokens", "reused_tokens"))
        out.print(f"\n{computed(whole - reused, whole)}; a reply counts as its mark")
