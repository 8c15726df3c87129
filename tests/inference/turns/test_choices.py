"""Several replies in one stream: each in its order, begun once, and all ended together."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from kvasir.errors import Internal, KvasirError, ResourceExhausted

from inference_svc.engine.api import SamplingParams, TokenLogprobs
from inference_svc.memory.outcomes import Source
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns.choices import Choices, begin
from inference_svc.turns.outbox import Outbox, ReaderLimits
from inference_svc.turns.turn_data import PromptInput, TurnDelta, TurnEvent, TurnProgress, TurnRequest, TurnStarted
from inference_svc.turns.turn_state import TurnTask

STARTED = TurnStarted(5, 0, Source.COLD, Outcome.NONE, 0)


def running() -> TurnTask:
    return TurnTask(Outbox(ReaderLimits(max_unread_bytes=1 << 20, stall_s=60), lambda: 0.0))


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


async def heard(choices: Choices) -> list[tuple[int, TurnEvent]]:
    return [event async for event in choices.events()]


class Engines:
    """Begins turns until it has no room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.begun: list[tuple[TurnRequest, TurnTask]] = []

    def begin(self, request: TurnRequest) -> TurnTask:
        if len(self.begun) == self.room:
            raise ResourceExhausted("no room")
        self.begun.append((request, running()))
        return self.begun[-1][1]


def request(choices: int, seed: int) -> TurnRequest:
    fields: dict[str, Any] = {"request_id": "r", "namespace": "n", "agent_id": "", "parent_version": None}
    return TurnRequest(
        **fields,
        input=PromptInput("x"),
        input_digest="",
        sampling=SamplingParams(1, seed=seed),
        max_tokens_is_default=True,
        choices=choices,
    )


def test_each_choice_comes_in_its_order_and_only_one_beginning_is_told() -> None:
    async def work() -> list[tuple[int, TurnEvent]]:
        turns = [running() for _ in range(3)]
        for number, turn in enumerate(turns):
            turn.outbox.put(STARTED)
            turn.outbox.put(TurnProgress(number, 5))
            for word in "abc":
                turn.outbox.put(TurnDelta(f"{number}{word}", (number,)))
            turn.outbox.close()
        return await heard(Choices(turns))

    events = run(work)
    assert [event for _, event in events if isinstance(event, TurnStarted)] == [STARTED]
    assert isinstance(events[0][1], TurnStarted)
    assert [event for _, event in events if isinstance(event, TurnProgress)] == [TurnProgress(0, 5)]
    for number in range(3):
        told = [event.text for choice, event in events if choice == number and isinstance(event, TurnDelta)]
        assert "".join(told) == f"{number}a{number}b{number}c"


def test_a_choice_that_waits_holds_up_no_other() -> None:
    async def work() -> list[tuple[int, TurnEvent]]:
        quick, slow = running(), running()
        events: list[tuple[int, TurnEvent]] = []
        quick.outbox.put(TurnDelta("quick", ()))
        async for choice, event in Choices([slow, quick]).events():
            events.append((choice, event))
            if event == TurnDelta("quick", ()):
                quick.outbox.close()
                slow.outbox.put(TurnDelta("slow", ()))
                slow.outbox.close()
        return events

    assert run(work) == [(1, TurnDelta("quick", ())), (0, TurnDelta("slow", ()))]


def test_the_first_choice_that_fails_ends_the_stream() -> None:
    async def work() -> None:
        turns = [running(), running()]
        turns[1].outbox.close(Internal("it broke"))
        choices = Choices(turns)
        try:
            await heard(choices)
        finally:
            choices.cancel()
            assert all(turn.is_cancelled for turn in turns)

    with pytest.raises(KvasirError, match="it broke"):
        run(work)


def test_choices_for_which_there_is_no_room_leave_none_running() -> None:
    engines = Engines(room=2)
    with pytest.raises(ResourceExhausted):
        begin(engines, request(3, seed=0))  # type: ignore[arg-type]
    assert [turn.is_cancelled for _, turn in engines.begun] == [True, True]


def test_choice_i_has_the_seed_plus_i_in_64_bits() -> None:
    engines = Engines(room=9)
    begin(engines, request(3, seed=2**64 - 2))  # type: ignore[arg-type]
    assert [asked.sampling.seed for asked, _ in engines.begun] == [2**64 - 2, 2**64 - 1, 0]
    assert [asked.choice for asked, _ in engines.begun] == [0, 1, 2]


def test_what_was_not_read_becomes_one_delta_that_says_all_of_it() -> None:
    one, other = TokenLogprobs(-1.0), TokenLogprobs(-2.0, ((7, -0.5),))

    async def work() -> list[tuple[int, TurnEvent]]:
        turn = running()
        turn.outbox.put(TurnDelta("", (1,), "think", (one,)))
        turn.outbox.put(TurnDelta("say", (2,), "ing", (other,)))
        turn.outbox.close()
        return await heard(Choices([turn]))

    assert run(work) == [(0, TurnDelta("say", (1, 2), "thinking", (one, other)))]
