"""Messages on their way: what is not asked for does not come, and one namespace's that never end keep nobody else's."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

import pytest
from kvasir.credentials import Principal
from kvasir.errors import DeadlineExceeded, InvalidArgument, NotFound
from kvasir.server import arriving, interceptors
from kvasir.server.arriving import (
    MAX_HELD,
    MAX_WAITING_CHECKS,
    UNREADABLE,
    Arriving,
    Doorstep,
    Turnstiles,
    begun,
    for_a_while,
    the_only,
)
from kvasir.server.interceptors import Authentication
from kvasir.server.shared_room import Place, SharedRoom


async def these(*messages: object) -> AsyncIterator[object]:
    for message in messages:
        yield message


async def half_a_message() -> AsyncIterator[object]:
    await asyncio.Event().wait()
    yield "never"


async def test_no_message_is_requested_without_room_for_it() -> None:
    room, asked = SharedRoom(4), list[str]()

    async def half(name: str) -> AsyncIterator[object]:
        asked.append(name)
        await asyncio.Event().wait()
        yield "never"

    held = [asyncio.create_task(the_only(Arriving(half("greedy"), 60, Place((room, "greedy"))))) for _ in range(9)]
    await asyncio.sleep(0.01)
    assert asked == ["greedy"] * 3
    # Whoever comes is served, between two messages of a stream too.
    several = Arriving(these(1, 2, 3), 60, Place((room, "other")))
    assert [message async for message in several] == [1, 2, 3]
    assert room.held("other") == 0
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert room.held_units == 0


async def test_a_call_keeps_the_room_of_its_message_until_it_is_answered_and_its_place_for_a_while() -> None:
    way, answering, order = SharedRoom(4), SharedRoom(2), list[str]()

    async def call(name: str, lasts_s: float, at_most_s: float = 60) -> None:
        answered = for_a_while(Place((answering, name)), at_most_s)
        async with begun(these(name), 60, Place((way, name)), answered) as request:
            order.append(request)
            await asyncio.sleep(lasts_s)

    first, second = (asyncio.create_task(call("greedy", 60)) for _ in range(2))
    await asyncio.sleep(0.01)
    assert order == ["greedy"], "half of what is free is left for others"
    assert (way.held("greedy"), answering.held("greedy")) == (1, 1), "its message is still counted"
    await call("other", 0)
    assert order == ["greedy", "other"]
    first.cancel()
    await asyncio.sleep(0.01)
    assert (way.held_units, answering.held("greedy")) == (0, 1)
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert answering.held_units == 0
    # What lasts gives its place to the next, and gives it back once.
    lasting = asyncio.create_task(call("greedy", 0.1, at_most_s=0.01))
    await asyncio.sleep(0.05)
    assert answering.held_units == 0
    await call("greedy", 0)
    await lasting
    assert answering.held_units == 0


async def test_many_credentials_of_one_namespace_keep_no_other_from_its_place() -> None:
    async def half() -> AsyncIterator[object]:
        await asyncio.Event().wait()
        yield "never"

    async def called(edge: Authentication, caller: Principal, requests: AsyncIterator[object]) -> object:
        interceptors._principal.set(caller)
        async with edge._begun(requests) as request:
            return request

    edge = Authentication(None, {}, 2 << 20)
    silent = [asyncio.create_task(called(edge, Principal(f"a{n}", "a", frozenset()), half())) for n in range(50)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        assert await called(edge, Principal("b", "b", frozenset()), these("here")) == "here"
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    assert edge.arriving_alone.held_units == edge.answering.held_units == 0


@pytest.mark.parametrize("lasting_s", [60.0, 0.001])
async def test_of_a_namespace_two_calls_are_answered_at_once_while_another_was_here_and_those_that_last(
    monkeypatch: pytest.MonkeyPatch, lasting_s: float
) -> None:
    monkeypatch.setattr(interceptors, "LOOK_S", lasting_s)
    monkeypatch.setattr(interceptors, "QUICK_A_SECOND", 1e9)
    answered: list[str] = []

    async def called(edge: Authentication, namespace: str, go_on: asyncio.Event | None) -> None:
        interceptors._principal.set(Principal(namespace, namespace, frozenset()))
        async with edge._begun(these("here")):
            answered.append(namespace)
            if go_on is not None:
                await go_on.wait()

    edge = Authentication(None, {}, 2 << 20)
    await called(edge, "b", None)
    go_on = asyncio.Event()
    crowd = [asyncio.create_task(called(edge, "a", go_on)) for _ in range(3)]
    await asyncio.sleep(0.01)
    if lasting_s < 1:
        async with asyncio.timeout(20):
            while len(answered) < 4 or edge.answering.held("a"):  # noqa: ASYNC110  by other tasks
                await asyncio.sleep(0.005)
    assert (edge.answering.held("a"), answered) == ((2, ["b", "a", "a"]) if lasting_s > 1 else (0, ["b", *"aaa"]))
    go_on.set()
    await asyncio.wait_for(asyncio.gather(*crowd), 20)
    assert edge.answering.held_units == 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_quick_call_keeps_its_place_for_a_moment_while_another_namespace_was_here(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """However it ends. So a namespace has few calls a second beside others, and alone as many as it can."""
    monkeypatch.setattr(interceptors, "QUICK_A_SECOND", 40)

    async def called(edge: Authentication, namespace: str, *, is_refused: bool = False) -> None:
        interceptors._principal.set(Principal(namespace, namespace, frozenset()))
        enter = partial(edge._all_in_time, bounds_each=False) if is_stream else edge._begun
        with suppress(NotFound):
            async with enter(these("here")):
                if is_refused:
                    raise NotFound("no such blob")

    edge = Authentication(None, {}, 2 << 20)
    for _ in range(40):
        await called(edge, "a", is_refused=True)
        assert edge.answering.held("a") == 0, "nobody else is here"
    await called(edge, "b")
    began_s = time.monotonic()
    await called(edge, "a", is_refused=True)
    await asyncio.gather(*(called(edge, "a") for _ in range(8)))
    assert time.monotonic() - began_s > 0.19, "nine calls in two places"
    async with asyncio.timeout(20):
        while edge.answering.held_units:  # noqa: ASYNC110  by timers
            await asyncio.sleep(0.005)


async def test_the_wait_for_room_counts_into_the_time_of_the_first_message() -> None:
    room = SharedRoom(1)
    await room.wait_for("other", 1)
    with pytest.raises(DeadlineExceeded, match="no message came"):
        await the_only(Arriving(these("here"), 0.01, Place((room, "me"))))


async def test_a_late_or_unreadable_message_is_refused_and_gives_its_room_back() -> None:
    room = SharedRoom(4)
    with pytest.raises(DeadlineExceeded):
        await the_only(Arriving(half_a_message(), 0.01, Place((room, "me"))))
    with pytest.raises(InvalidArgument):
        await the_only(Arriving(these(UNREADABLE), 1, Place((room, "me"))))
    assert room.held_units == 0


async def test_every_message_of_a_stream_without_limits_of_its_own_must_come_in_time() -> None:
    async def one_and_silence() -> AsyncIterator[object]:
        yield "first"
        await asyncio.Event().wait()

    arriving = Arriving(one_and_silence(), 0.05, bounds_each=True)
    assert await anext(arriving) == "first"
    with pytest.raises(DeadlineExceeded):
        await anext(arriving)


async def test_a_place_that_is_not_had_whole_is_not_had_at_all() -> None:
    first, second = SharedRoom(4), SharedRoom(1)
    second.take("other", 1)
    place = Place((first, "me"), (second, "mine"))
    waiting = asyncio.create_task(place.__aenter__())
    await asyncio.sleep(0)
    assert first.held("me") == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (first.held("me"), second.held("mine")) == (0, 0)
    second.give_back("other", 1)
    for _ in range(2):
        async with place:
            assert (first.held("me"), second.held("mine")) == (1, 1)
    assert (first.held_units, second.held_units) == (0, 0)


@pytest.mark.parametrize(("namespace", "order"), [("", [39, 37, 36, 35, 34, 33]), ("mine", [33, 34, 35, 36, 37, 39])])
async def test_few_go_on_at_once_and_then_of_strangers_the_newest_and_of_a_namespace_the_oldest(
    namespace: str, order: list[int]
) -> None:
    turnstiles, passed = Turnstiles(), list[int]()
    coming = comers(turnstiles, namespace, 40, passed)
    await asyncio.sleep(0)
    assert passed == list(range(33)), "a few need not wait"
    coming[38].cancel()
    await asyncio.wait(coming)
    assert passed[33:] == order
    assert len(turnstiles[namespace]) == 0
    # After a while, a few need not wait again.
    await asyncio.sleep(0.05)
    await asyncio.wait_for(turnstiles.passed(namespace), 0.001)


async def test_beyond_the_limit_the_largest_crowd_loses_its_oldest_place() -> None:
    turnstiles, passed = Turnstiles(), list[int]()
    crowd = comers(turnstiles, "crowd", 33 + MAX_HELD, passed)
    await until(lambda: len(turnstiles["crowd"]) == MAX_HELD)
    few = comers(turnstiles, "few", 33 + 2, [])
    await until(lambda: len(turnstiles["few"]) == 2)
    await until(lambda: len(passed) >= 35)
    assert len(turnstiles["crowd"]) <= MAX_HELD - 2, "none beyond the limit of all"
    assert passed[:35] == list(range(35))
    for task in (*crowd, *few):
        task.cancel()
    await asyncio.gather(*crowd, *few, return_exceptions=True)
    assert not any(turnstiles.values())


async def test_refusals_that_wait_go_on_before_their_time_is_over_and_when_the_service_ends() -> None:
    turnstiles = Turnstiles()
    coming = comers(turnstiles, "mine", 400, [])
    await asyncio.sleep(0)
    began_s = time.monotonic()
    await asyncio.wait_for(turnstiles.passed("mine", left_s=0.1), 3)
    assert time.monotonic() - began_s < 3, "the others need seven seconds"
    assert len(turnstiles["mine"]) > 100
    turnstiles.open()
    await asyncio.wait_for(asyncio.gather(*coming, turnstiles.passed("mine")), 3)
    assert len(turnstiles["mine"]) == 0


async def test_a_connection_whose_check_sent_nothing_comes_again_among_all_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arriving, "_MAX_UNPROVEN", 3)
    turnstiles, went, silent = Turnstiles(), list[str](), list[asyncio.Task[object]]()
    doorstep = Doorstep(turnstiles)

    async def passed(namespace: str) -> None:
        went.append("all" if namespace == "" else "first")

    async def called(connection: str, *messages: str) -> None:
        while len(doorstep) < MAX_WAITING_CHECKS:
            silent.append(asyncio.create_task(doorstep.the_only(half_a_message())))
            await asyncio.sleep(0)
        with suppress(InvalidArgument):  # of no message
            async with doorstep.entered(connection):
                await doorstep.the_only(these(*messages))

    monkeypatch.setattr(turnstiles, "passed", passed)
    for connection, messages in (("a", "x"), ("a", "x"), ("b", ""), ("b", ""), ("b", "x"), ("b", "x")):
        await called(connection, *messages)
    assert went == ["first", "first", "first", "all", "all", "first"]
    for connection in "cdefc":
        await called(connection)
    assert went[-1] == "first", "few are remembered"
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)


def comers(turnstiles: Turnstiles, namespace: str, count: int, passed: list[int]) -> list[asyncio.Task[None]]:
    """So many calls that come at once, noted when they go on."""

    async def come(number: int) -> None:
        await turnstiles.passed(namespace)
        passed.append(number)

    return [asyncio.create_task(come(number)) for number in range(count)]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)
