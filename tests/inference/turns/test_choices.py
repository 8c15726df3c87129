"""Several replies in one stream: each in its order, begun once, and all ended together."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from kvasir.errors import Internal, ResourceExhausted

from inference_svc.engine.api import Prefilled, SamplingParams, TokenLogprobs
from inference_svc.memory.outcomes import Source
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns.progress import Outbox, Progress, ReaderLimits, TurnTiming
from inference_svc.turns.turn_data import PromptInput, TurnDelta, TurnEvent, TurnRequest, TurnStarted
from inference_svc.turns.turn_service import Choices

STARTED = TurnStarted(5, 0, Source.COLD, Outcome.NONE, 0)


def outbox(choices: int = 1, max_unread_bytes: int = 1 << 20) -> Outbox:
    return Outbox(ReaderLimits(max_unread_bytes, stall_s=60), lambda: 0.0, choices)


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


async def heard(box: Outbox) -> list[tuple[int, TurnEvent]]:
    return [event async for event in box.events()]


class Engines:
    """Begins turns until it has no room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.begun: list[tuple[TurnRequest, Progress]] = []

    def begin(self, request: TurnRequest) -> Progress:
        if len(self.begun) == self.room:
            raise ResourceExhausted("no room")
        self.begun.append((request, Progress(request, outbox(), TurnTiming(0.0), NamespaceCounters())))
        return self.begun[-1][1]


def request(choices: int, seed: int) -> TurnRequest:
    return TurnRequest(
        request_id="r",
        namespace="n",
        agent_id="",
        input=PromptInput("x"),
        input_digest="",
        sampling=SamplingParams(1, seed=seed),
        clamps_max_tokens=True,
        choices=choices,
    )


def test_each_choice_comes_in_its_order_and_only_one_beginning_is_reported() -> None:
    async def work() -> list[tuple[int, TurnEvent]]:
        box = outbox(3)
        for number in (1, 0, 2):
            box.put(STARTED, number)
            box.put(Prefilled(number, 5), number)
        for word in "abc":
            for number in range(3):
                box.put(TurnDelta(f"{number}{word}", (number,)), number)
        for _ in range(3):
            box.close()
        return await heard(box)

    events = run(work)
    assert events[:2] == [(1, STARTED), (1, Prefilled(1, 5))]
    assert events[2:] == [(number, TurnDelta(f"{number}a{number}b{number}c", (number,) * 3)) for number in range(3)]


def test_a_choice_that_waits_holds_up_no_other() -> None:
    async def work() -> list[tuple[int, TurnEvent]]:
        box, events = outbox(2), list[tuple[int, TurnEvent]]()
        box.put(TurnDelta("quick", ()), 1)
        async for choice, event in box.events():
            events.append((choice, event))
            if event == TurnDelta("quick", ()):
                box.close()
                box.put(TurnDelta("slow", ()), 0)
                box.close()
        return events

    assert run(work) == [(1, TurnDelta("quick", ())), (0, TurnDelta("slow", ()))]


def test_the_first_choice_that_fails_ends_the_stream_behind_what_was_told_before() -> None:
    async def work() -> list[tuple[int, TurnEvent]]:
        box, events = outbox(3), list[tuple[int, TurnEvent]]()
        box.put(TurnDelta("before", ()), 0)
        box.close(Internal("it broke"))
        box.put(TurnDelta("after", ()), 0)
        box.close(Internal("another"))
        try:
            async for event in box.events():
                events.append(event)
        except Internal as error:
            assert error.message == "it broke"  # noqa: PT017 - what was told before counts too
            return events
        raise AssertionError("the error did not arrive")

    assert run(work) == [(0, TurnDelta("before", ()))]


def test_all_choices_of_a_request_share_what_its_reader_may_leave_unread() -> None:
    async def work() -> None:
        box = outbox(4, max_unread_bytes=100)
        for number in range(3):
            box.put(TurnDelta("x" * 30, ()), number)
        assert not box.overrun
        box.put(TurnDelta("x" * 30, ()), 3)
        assert box.overrun

    run(work)


def test_choices_for_which_there_is_no_room_leave_none_running() -> None:
    engines = Engines(room=2)
    with pytest.raises(ResourceExhausted):
        Choices(request(3, seed=0), outbox(), engines.begin)
    assert [turn.is_cancelled for _, turn in engines.begun] == [True, True]


def test_choice_i_has_the_seed_plus_i_in_64_bits() -> None:
    engines = Engines(room=9)
    Choices(request(3, seed=2**64 - 2), outbox(), engines.begin)
    assert [asked.sampling.seed for asked, _ in engines.begun] == [2**64 - 2, 2**64 - 1, 0]
    assert [asked.choice for asked, _ in engines.begun] == [0, 1, 2]


def test_what_was_not_read_becomes_one_delta_that_says_all_of_it() -> None:
    one, other = TokenLogprobs(-1.0), TokenLogprobs(-2.0, ((7, -0.5),))

    async def work() -> list[tuple[int, TurnEvent]]:
        box = outbox()
        box.put(TurnDelta("", (1,), "think", (one,)))
        box.put(TurnDelta("say", (2,), "ing", (other,)))
        box.close()
        return await heard(box)

    assert run(work) == [(0, TurnDelta("say", (1, 2), "thinking", (one, other)))]
