"""Room between namespaces: nobody holds all of it, whoever comes finds some, and those who wait are served in turn."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.server.fair_shares import RoundRobin, Shares
from kvasir.server.shared_room import ModestRoom, Place, SharedRoom, is_only_upkeep
from kvasir.waits import PATIENCE_S

NAMES = st.sampled_from("abcd")
STEPS = st.lists(st.tuples(NAMES, st.integers(-40, 40)))


@given(STEPS)
def test_shares_never_give_out_more_than_there_is_and_always_leave_some(steps: list[tuple[str, int]]) -> None:
    shares, held = Shares(100), Counter[str]()
    for name, amount in steps:
        if amount < 0:
            given_back = min(-amount, held[name])
            shares.give_back(name, given_back)
            held[name] -= given_back
        elif shares.take(name, amount):
            held[name] += amount
        assert shares.held_by_all == held.total() <= 100
        assert all(shares.held(each) == held[each] for each in "abcd")


@pytest.mark.parametrize(("greedy", "most"), [(1, 75), (2, 42), (3, 30), (10, 9)])
def test_greedy_namespaces_get_equal_shares_and_leave_one_for_who_comes(greedy: int, most: int) -> None:
    shares, names = Shares(100), [f"greedy{number}" for number in range(greedy)]
    # One unit each in turn, until nobody gets any more.
    while sum(shares.take(name, 1) for name in names):
        pass
    assert {abs(shares.held(name) - most) <= 1 for name in names} == {True}
    left = 100 - shares.held_by_all
    assert left >= 100 // (1 + 3 * greedy)
    assert shares.take("who comes", left)


def test_who_comes_first_does_not_keep_more_than_a_share_once_others_come() -> None:
    shares = Shares(100)
    while shares.take("first", 1):
        pass
    assert shares.take("second", 10)
    shares.give_back("first", 1)
    assert not shares.take("first", 1)


def test_shares_remember_nobody_who_holds_nothing() -> None:
    shares = Shares(100)
    shares.take("a", 3)
    shares.give_back("a", 3)
    assert not shares._held


def test_namespaces_are_served_in_turn_and_each_in_its_order() -> None:
    waiting: RoundRobin[int] = RoundRobin()
    for number in range(4):
        waiting.put("a", number)
    waiting.put("b", 10)
    waiting.put("c", 20)
    taken = [waiting.take() for _ in range(7)]
    assert taken == [("a", 0), ("b", 10), ("c", 20), ("a", 1), ("a", 2), ("a", 3), None]


def test_what_may_not_be_taken_holds_up_its_own_namespace_alone() -> None:
    waiting: RoundRobin[int] = RoundRobin()
    for name, number in (("a", 9), ("a", 1), ("b", 2)):
        waiting.put(name, number)
    assert waiting.take(lambda _, number: number < 5) == ("b", 2)
    assert waiting.take(lambda _, number: number < 5) is None
    assert waiting.take() == ("a", 9)


@given(st.lists(st.tuples(NAMES, st.integers(0, 9)), max_size=30), st.data())
def test_nobody_is_served_twice_while_another_waits(items: list[tuple[str, int]], data: st.DataObject) -> None:
    waiting: RoundRobin[tuple[str, int, int]] = RoundRobin()
    for place, (name, number) in enumerate(items):
        waiting.put(name, (name, number, place))
    left = [(name, number, place) for place, (name, number) in enumerate(items)]
    if left and data.draw(st.booleans()):
        gone = data.draw(st.sampled_from(left))
        assert waiting.remove(gone[0], gone)
        assert not waiting.remove(gone[0], gone)
        left.remove(gone)
    served: list[tuple[str, int, int]] = []
    while taken := waiting.take():
        served.append(taken[1])
        # Since its last turn, everybody else who waited the whole time had one.
        name = taken[0]
        before = max((index for index, each in enumerate(served[:-1]) if each[0] == name), default=None)
        if before is not None:
            between = {each[0] for each in served[before + 1 : -1]}
            assert between >= {each[0] for each in left if each not in served} - {name}
    assert sorted(served) == sorted(left)
    assert all(
        [p for n, _, p in served if n == name] == sorted(p for n, _, p in served if n == name) for name in "abcd"
    )


async def test_room_is_given_in_turn_and_one_namespace_leaves_some() -> None:
    room, order = SharedRoom(100), list[str]()

    async def hold(name: str, units: int) -> None:
        await room.wait_for(name, units)
        order.append(name)

    greedy = [asyncio.create_task(hold("a", 25)) for _ in range(6)]
    await asyncio.sleep(0)
    assert room.held("a") == 75
    await hold("b", 20)  # at once
    waits = asyncio.create_task(hold("b", 20))
    await asyncio.sleep(0)
    order.clear()
    for _ in range(3):
        room.give_back("a", 25)
        await asyncio.sleep(0)
    await asyncio.wait_for(waits, 1)
    assert order[:2] == ["b", "a"] or order[:2] == ["a", "b"]
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_what_is_larger_than_the_room_goes_through_alone_and_a_cancel_takes_nothing() -> None:
    room = SharedRoom(100)
    await room.wait_for("a", 250)
    waits = asyncio.create_task(room.wait_for("b", 300))
    behind = asyncio.create_task(room.wait_for("b", 5))
    await asyncio.sleep(0)
    assert not waits.done()
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    room.give_back("a", 250)
    await asyncio.wait_for(behind, 1)
    assert room.held_units == room.held("b") == 5


async def test_who_waits_for_much_is_not_overtaken_for_ever() -> None:
    room = SharedRoom(100)
    await room.wait_for("small", 10)
    large = asyncio.create_task(room.wait_for("large", 95))
    await asyncio.sleep(0)
    passed = 0
    while not large.done() and passed < 1000:
        # One of the small ones ends as the next one comes: the room is never empty.
        following = asyncio.create_task(room.wait_for(f"small{passed}", 10))
        await asyncio.sleep(0)
        if passed == 0:
            room.give_back("small", 10)
        else:
            room.give_back(f"small{passed - 1}", 10)
        await asyncio.sleep(0)
        passed += 1
        if not following.done():
            break
    await asyncio.wait_for(large, 1)
    assert 1 < passed <= 17
    room.give_back("large", 95)
    await asyncio.wait_for(following, 1)


async def test_a_holder_hears_of_those_who_wait_with_no_more_than_it_has() -> None:
    room = SharedRoom(100)
    room.take("much", 70)
    room.take("little", 20)
    much, little = (asyncio.create_task(room.wanted_from(name)) for name in ("much", "little"))
    waiting = asyncio.create_task(room.wait_for("much", 10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # What another of its own namespace could use, it may give up; what "little" has is not for "much".
    assert much.done()
    assert not little.done()
    other = asyncio.create_task(room.wait_for("new", 30))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert little.done()
    for task in (waiting, other):
        task.cancel()
    await asyncio.gather(waiting, other, return_exceptions=True)
    assert not room._watching


async def test_who_waits_for_more_than_its_share_holds_up_nobody_however_often_it_is_overtaken() -> None:
    room = SharedRoom(100)
    while room.take_if_fits("greedy", 1):
        pass
    waiting = asyncio.create_task(room.wait_for("greedy", 1))
    await asyncio.sleep(0)
    for _ in range(100):
        async with asyncio.timeout(60), room.held_for("other", 1):
            pass
    assert not waiting.done()
    room.give_back("greedy", 1)
    await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("beside", [1, 2])
async def test_a_namespace_has_few_units_while_another_was_here_in_the_last_seconds(beside: int) -> None:
    now = 0.0
    room = ModestRoom(16, beside, clock=lambda: now)
    await room.wait_for("modest", 1)
    room.give_back("modest", 1)
    greedy = [asyncio.create_task(room.wait_for("greedy", 1)) for _ in range(20)]
    await asyncio.sleep(0)
    assert room.held("greedy") == beside
    room.give_back("greedy", 1)
    await asyncio.sleep(0)
    assert (room.held("greedy"), sum(each.done() for each in greedy)) == (beside, beside + 1)
    await asyncio.wait_for(room.wait_for("modest", 1), 10)
    room.give_back("modest", 1)
    now = PATIENCE_S + 1
    room.give_back("greedy", 1)
    await asyncio.sleep(0)
    assert room.held("greedy") == 12, "alone it has its usual share"
    for each in greedy:
        each.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_one_who_holds_nothing_has_more_units_than_few_at_once() -> None:
    room = ModestRoom(16, 2, clock=lambda: 0.0)
    await room.wait_for("one", 1)
    await asyncio.wait_for(room.wait_for("other", 5), 10)


async def test_excused_units_are_not_of_the_few_until_they_come_back() -> None:
    room = ModestRoom(16, 2, clock=lambda: 0.0)
    await room.wait_for("modest", 1)
    waiting = [asyncio.create_task(room.wait_for("greedy", 1)) for _ in range(9)]
    await asyncio.sleep(0)
    assert room.held("greedy") == 2
    room.excuse("greedy", 1)
    await asyncio.sleep(0)
    assert room.held("greedy") == 3
    room.give_back_excused("greedy", 1)
    await asyncio.sleep(0)
    assert room.held("greedy") == 2
    room.give_back("greedy", 1)
    await asyncio.sleep(0)
    assert (room.held("greedy"), sum(each.done() for each in waiting)) == (2, 4)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_namespaces_that_were_here_long_ago_are_forgotten() -> None:
    now = 0.0
    room = ModestRoom(16, 1, clock=lambda: now)
    for name in ("again", "gone", "again"):
        room.take(name, 1)
        room.give_back(name, 1)
        now += PATIENCE_S / 2
    room.take("one", 1)
    assert not room.take_if_fits("one", 1), "`again` was here just now"
    assert list(room._seen) == ["again", "one"]
    now += PATIENCE_S / 2
    assert room.take_if_fits("one", 1)


async def test_a_namespace_whose_program_only_keeps_itself_up_is_not_here() -> None:
    """In whosever call units are given back, each that waited is seen as what it is."""
    room, order = ModestRoom(1, 1, clock=lambda: 0.0), list[str]()

    async def call(name: str) -> None:
        if name == "idle":
            is_only_upkeep()
        async with Place((room, name)):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(call(name) for name in ("busy", "idle", "busy", "idle")))
    assert order == ["busy", "idle", "busy", "idle"]
    assert list(room._seen) == ["busy"]


async def test_strangers_limit_no_namespace() -> None:
    room = ModestRoom(16, 1, clock=lambda: 0.0)
    await room.wait_for("", 1)
    for _ in range(3):
        await asyncio.wait_for(room.wait_for("one", 1), 10)
