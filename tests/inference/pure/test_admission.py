"""Who may begin a turn, what may be held, what a reader may leave: with numbers, and all of it comes back."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.errors import ResourceExhausted

from inference_svc.admission import Admission, AdmissionLimits
from inference_svc.held_bytes import HeldBytes
from inference_svc.outbox import Outbox, Patience
from inference_svc.service_data import TurnDelta, TurnEvent, TurnProgress
from inference_svc.service_stats import ServiceStats

LIMITS = AdmissionLimits(
    max_turns=8, max_turns_per_namespace=6, max_turns_per_caller=4, max_open_prompt_bytes=1000, kv_backlog=2.0
)


class Room:
    def __init__(self) -> None:
        self.now = 0.0
        self.stats = ServiceStats(0.0)
        self.admission = Admission(LIMITS, self.stats, lambda: self.now)
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
    room.take(2, "south", "a")  # another namespace's credential of the same name is another caller
    assert room.refusal("south", "a").reason == "QUEUE_FULL"
    room.taken.close()
    room.take(4, "north", "a")
    assert room.stats.of("north").refusals == {"CALLER_BUSY": 1, "NAMESPACE_BUSY": 1}
    assert room.stats.of("south").refusals == {"QUEUE_FULL": 1}


def test_prompts_that_wait_are_bounded_in_bytes_and_one_alone_always_fits() -> None:
    room = Room()
    room.take(1, "north", "a", 2000)
    full = room.refusal("north", "b", 1)
    assert full.reason == "PROMPTS_TOO_LARGE"
    assert "2000" in full.message
    assert full.metadata["max_bytes"] == "1000"
    room.taken.close()
    room.take(1, "north", "b", 1)


def test_kv_that_open_turns_may_need_is_bounded_before_any_is_allocated() -> None:
    room = Room()
    with room.admission.kv("north", 150, budget_bytes=100):
        with room.admission.kv("north", 50, budget_bytes=100):
            with pytest.raises(ResourceExhausted) as busy, room.admission.kv("north", 1, budget_bytes=100):
                pass
        assert busy.value.metadata == {"needed_bytes": "1", "open_bytes": "200", "max_bytes": "200"}
        with room.admission.kv("north", 50, budget_bytes=100):
            pass


def test_the_time_to_come_back_follows_how_long_turns_take() -> None:
    room = Room()
    soon = room.admission.retry_after_s
    for _ in range(50):
        with room.admission.turn("north", "a", 1):
            room.now += 60.0
    assert room.admission.retry_after_s > 10 * soon


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=30))
def test_held_bytes_are_given_out_in_order_never_beyond_the_limit_and_all_come_back(
    holders: list[tuple[int, bool]],
) -> None:
    async def scenario() -> None:
        held, order, most = HeldBytes(50), list[int](), list[tuple[int, int]]()

        async def hold(number: int, size_bytes: int) -> None:
            await held.wait_for(size_bytes)
            order.append(number)
            most.append((held.held_bytes, size_bytes))
            try:
                await asyncio.sleep(0)
            finally:
                held.give_back(size_bytes)

        tasks = [asyncio.create_task(hold(number, size)) for number, (size, _) in enumerate(holders)]
        await asyncio.sleep(0)
        for task, (_, is_cancelled) in zip(tasks, holders, strict=True):
            if is_cancelled:
                task.cancel()
        await asyncio.wait_for(asyncio.wait(tasks), 5)
        assert order == sorted(order)
        assert held.held_bytes == 0
        # More than the limit only for one that is alone.
        assert all(all_bytes <= max(50, own_bytes) for all_bytes, own_bytes in most)
        alive = [number for number, (_, is_cancelled) in enumerate(holders) if not is_cancelled]
        assert set(alive) <= set(order)

    asyncio.run(scenario())


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 5)

    asyncio.run(bounded())


def test_a_reader_that_takes_nothing_is_overrun_by_bytes_or_by_time_and_one_that_reads_is_not() -> None:
    async def scenario() -> None:
        now = 0.0
        outbox = Outbox(Patience(max_unread_bytes=100, stall_s=10), lambda: now)
        events = outbox.events()
        for _ in range(100):
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            now += 100.0  # nothing comes: it is the turn that is slow
            assert not outbox.overrun
            outbox.put(TurnDelta("word ", (1,)))
            assert isinstance(await waiting, TurnDelta)
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
        outbox = Outbox(Patience(), lambda: 0.0)
        for number in range(1000):
            outbox.put(TurnProgress(number, 1000))
        for number in range(1000):
            outbox.put(TurnDelta(f"{number} ", (number,)))
        outbox.close()
        taken: list[TurnEvent] = [event async for event in outbox.events()]
        assert taken[0] == TurnProgress(999, 1000)
        assert len(taken) == 2
        assert isinstance(taken[1], TurnDelta)
        assert taken[1].token_ids == tuple(range(1000))
        assert taken[1].text == "".join(f"{number} " for number in range(1000))

    run(scenario)
