"""Who may begin a turn, what may be held, what a reader may leave: with numbers, and all of it comes back."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.errors import ResourceExhausted

from inference_svc.engine.api import Prefilled
from inference_svc.turns.admission import Admission, AdmissionLimits
from inference_svc.turns.progress import Outbox, ReaderLimits
from inference_svc.turns.turn_data import TurnDelta, TurnEvent

LIMITS = AdmissionLimits(
    max_turns=8,
    max_turns_per_namespace=6,
    max_turns_per_caller=4,
    max_open_prompt_bytes=1000,
    kv_memory_bytes=100,
    kv_backlog=2.0,
    max_restoring_bytes=1 << 20,
    max_publishing_bytes=1 << 20,
)


class Room:
    def __init__(self, limits: AdmissionLimits = LIMITS) -> None:
        self.now = 0.0
        self.admission = Admission(limits, lambda: self.now)
        self.taken = ExitStack()

    def take(self, turns: int, namespace: str, caller: str, prompt_bytes: int = 1) -> None:
        for _ in range(turns):
            self.taken.enter_context(self.admission.turn(namespace, caller, prompt_bytes))

    def refusal(self, namespace: str, caller: str, prompt_bytes: int = 1) -> ResourceExhausted:
        with pytest.raises(ResourceExhausted) as refused:
            self.take(1, namespace, caller, prompt_bytes)
        return refused.value


def test_no_credential_and_no_namespace_takes_every_place() -> None:
    room = Room()
    room.take(4, "north", "a")
    busy = room.refusal("north", "a")
    assert (busy.reason, busy.metadata) == ("CALLER_BUSY", {"turns": "4", "max_turns": "4"})
    assert busy.retry_after_s
    room.take(2, "north", "b")
    assert room.refusal("north", "b").reason == "NAMESPACE_BUSY"
    room.take(1, "south", "a")  # another namespace's credential of the same name is another caller
    assert room.refusal("south", "a").reason == "NAMESPACE_BUSY"
    room.take(1, "west", "a")  # who has no turn yet finds the last place
    assert room.refusal("east", "a").reason == "QUEUE_FULL"
    room.taken.close()
    room.take(4, "north", "a")


def test_two_namespaces_leave_a_place_for_a_third() -> None:
    """Two times three quarters were all of it."""
    room = Room(replace(LIMITS, max_turns_per_caller=8))
    for namespace in ("north", "south"):
        with pytest.raises(ResourceExhausted):
            room.take(8, namespace, "a")
    room.take(1, "west", "a")


def test_prompts_of_one_namespace_leave_room_for_anothers_and_one_alone_always_fits() -> None:
    """Thirty-two of 8 MiB refused everybody a prompt of 18 bytes, and told how much they held."""
    room = Room()
    room.take(1, "north", "a", 2000)
    full = room.refusal("north", "b", 1)
    assert full.reason == "PROMPTS_TOO_LARGE"
    assert full.metadata == {"prompt_bytes": "1", "open_bytes": "2000", "max_bytes": "1000"}
    room.taken.close()
    room.take(3, "north", "a", 250)
    assert room.refusal("north", "a", 250).reason == "PROMPTS_TOO_LARGE"
    room.take(2, "south", "a", 18)


def test_kv_that_open_turns_may_need_is_bounded_before_any_is_allocated_and_leaves_others_some() -> None:
    room = Room()
    with room.admission.kv("north", 150):
        with pytest.raises(ResourceExhausted) as busy, room.admission.kv("north", 1):
            pass
        assert busy.value.metadata == {"needed_bytes": "1", "open_bytes": "150", "max_bytes": "200"}
        with room.admission.kv("south", 25), room.admission.kv("south", 5):
            pass
    with room.admission.kv("north", 500):
        pass


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(601, 999)), max_size=12), st.integers(1, 150))
def test_who_is_refused_is_told_its_own_numbers_and_the_limits_only(others: list[tuple[str, int]], own: int) -> None:
    room, told = Room(), list[ResourceExhausted]()
    for _ in range(10):
        for namespace, amount in others:
            with contextlib.suppress(ResourceExhausted):
                room.take(1, namespace, "x", amount)
                room.taken.enter_context(room.admission.kv(namespace, amount))
        try:
            room.take(1, "me", "x", own)
            room.taken.enter_context(room.admission.kv("me", own))
        except ResourceExhausted as refusal:
            told.append(refusal)
    may_be_told = {*(count * own for count in range(11)), *range(11), *(1000, 200, 8, 6, 4)}
    for refusal in told:
        numbers = {int(number) for number in re.findall(r"\d+", refusal.message)}
        assert numbers | set(map(int, refusal.metadata.values())) <= may_be_told
        assert refusal.retry_after_s in {1.0 / turns for turns in range(1, 11)}


def test_the_time_to_come_back_follows_how_long_the_namespaces_own_turns_take() -> None:
    room = Room()
    soon = room.admission.retry_after_s("north")
    for _ in range(50):
        with room.admission.turn("north", "a", 1):
            room.now += 60.0
    assert room.admission.retry_after_s("north") > 10 * soon
    assert room.admission.retry_after_s("south") == soon


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 5)

    asyncio.run(bounded())


def test_a_reader_that_takes_nothing_is_overrun_by_bytes_or_by_time_and_one_that_reads_is_not() -> None:
    async def scenario() -> None:
        now = 0.0
        outbox = Outbox(ReaderLimits(max_unread_bytes=100, stall_s=10), lambda: now)
        events = outbox.events()
        for _ in range(100):
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            now += 100.0  # nothing comes: it is the turn that is slow
            assert not outbox.overrun
            outbox.put(TurnDelta("word ", (1,)))
            assert isinstance((await waiting)[1], TurnDelta)
            assert not outbox.overrun
        now += 11.0
        assert "11 s" in outbox.overrun
        now -= 11.0
        for _ in range(6):  # the one in its hands counts until it asks for the next
            outbox.put(TurnDelta("word ", (1,)))
        assert not outbox.overrun
        outbox.put(TurnDelta("word ", (1,)))
        assert "104 bytes" in outbox.overrun

    run(scenario)


def test_what_was_not_taken_yet_becomes_one_message_and_nothing_of_it_is_lost() -> None:
    async def scenario() -> None:
        outbox = Outbox(ReaderLimits(max_unread_bytes=1 << 20, stall_s=60), lambda: 0.0)
        for number in range(1000):
            outbox.put(Prefilled(number, 1000))
        for number in range(1000):
            outbox.put(TurnDelta(f"{number} ", (number,)))
        outbox.close()
        taken: list[TurnEvent] = [event async for _, event in outbox.events()]
        assert taken[0] == Prefilled(999, 1000)
        assert len(taken) == 2
        assert isinstance(taken[1], TurnDelta)
        assert taken[1].token_ids == tuple(range(1000))
        assert taken[1].text == "".join(f"{number} " for number in range(1000))

    run(scenario)
