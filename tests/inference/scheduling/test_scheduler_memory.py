"""Who gets bytes, whose memory is dropped for them, and which turn gives way."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from inference_svc.engine.scheduling.memory_ledger import Reservation
from inference_svc.engine.scheduling.schedulable import Rules
from tests.inference.scheduling.scheduling_world import (
    BACKGROUND,
    CELL,
    INTERACTIVE,
    Hot,
    Job,
    Kv,
    World,
    key_of,
    memory,
)
from tests.made_models.sampling import sampled


def hot(budget: int, **sizes: int) -> Hot:
    """Memories that were left in this order."""
    memories = Hot(budget)
    for name, size in sizes.items():
        assert memories.remember(key_of(name), size)
    return memories


def names(memories: Hot) -> set[str]:
    return {key.agent_id for key in memories.sizes()}


# --- the ledger ---


class LedgerHistory(RuleBasedStateMachine):
    """Turns reserve, take, leave and fail, memories are forked and dropped, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.memories = Hot(100)
        self.turns: dict[int, tuple[Reservation, Kv]] = {}

    @rule(owner=st.integers(0, 3), size=st.integers(0, 120), keep=st.integers(0, 60), extends=st.integers(0, 2))
    def begins(self, owner: int, size: int, keep: int, extends: int) -> None:
        """A turn that shares the beginning of a memory, which stays as it is."""
        if owner in self.turns:
            return
        found, kv = self.memories.get(key_of(extends)), Kv(self.memories.allocator)
        if found is not None:
            kv = found.kv.fork(keep)
        most, source = size + len(kv.pages), key_of(extends) if found else None
        reservation = Reservation("home", most, extends=source, kept_pages=lambda: len(kv.pages))
        missing = self.memories.missing_bytes(size, {key_of(extends)})
        assert self.memories.reserve(reservation, {key_of(extends)}) is (missing == 0)
        if missing:
            kv.release()
        else:
            self.turns[owner] = (reservation, kv)

    @rule(owner=st.integers(0, 3), count=st.integers(0, 60))
    def computes(self, owner: int, count: int) -> None:
        if owner in self.turns:
            reservation, kv = self.turns[owner]
            kv.grow_to(len(kv.pages) + min(count, reservation.left_pages))

    @rule(owner=st.integers(0, 3), key=st.none() | st.integers(0, 2))
    def ends(self, owner: int, key: int | None) -> None:
        if owner in self.turns:
            reservation, kv = self.turns.pop(owner)
            if key is None:
                kv.release()
            else:
                self.memories.put(key_of(key), memory(kv))
            self.memories.ledger.release(reservation)

    @rule(source=st.integers(0, 2), to=st.integers(0, 2), size=st.integers(0, 60))
    def is_forked(self, source: int, to: int, size: int) -> None:
        if found := self.memories.get(key_of(source)):
            self.memories.put(key_of(to), memory(found.kv.fork(size)))

    @rule(key=st.integers(0, 2))
    def is_dropped(self, key: int) -> None:
        self.memories.drop(key_of(key))

    @invariant()
    def free_and_held_are_all_there_is(self) -> None:
        ledger, allocator = self.memories.ledger, self.memories.allocator
        assert ledger.free_bytes + ledger.used_bytes + ledger.promised_bytes == ledger.total_bytes == 100
        assert min(ledger.free_bytes, ledger.used_bytes, ledger.promised_bytes) >= 0
        held = {page for _, kv in self.turns.values() for page in kv.pages} | self.memories.pages
        assert (allocator.used, allocator.free) == (len(held), 100 - len(held))


def test_free_and_used_and_promised_bytes_are_the_total_after_any_calls() -> None:
    run_state_machine_as_test(
        LedgerHistory, settings=settings(max_examples=sampled(20, of=60), stateful_step_count=40, deadline=None)
    )


def test_a_turn_that_extends_a_memory_needs_room_only_for_what_is_new() -> None:
    world = World(budget_bytes=100)
    world.memories.remember(key_of("a"), 70)
    warm = Job(80, 15, key=key_of("a"), reusable_tokens=70)
    world.submit(warm)
    world.admit()
    assert (warm.cells.cached, world.memories.ledger.free_bytes) == (70, 5)
    world.run()
    assert names(world.memories) == {"a"}


def test_the_memory_that_a_turn_goes_back_in_stays_whole_until_the_turn_ends() -> None:
    world = World(budget_bytes=100)
    world.memories.remember(key_of("a"), 60)
    back = Job(20, 10, key=key_of("a"), reusable_tokens=10)
    world.submit(back)
    world.step()
    assert world.memories.sizes() == {key_of("a"): 60}
    back.is_cancelled = True
    world.run()
    assert (world.memories.sizes(), world.memories.ledger.free_bytes) == ({key_of("a"): 60}, 40)


def test_a_turn_alone_that_does_not_fit_beside_its_own_memory_begins_on_what_it_keeps_of_it() -> None:
    world = World(budget_bytes=100)
    world.memories.remember(key_of("a"), 90)
    back = Job(60, 10, key=key_of("a"), reusable_tokens=20)
    world.submit(back)
    world.run(50)
    assert (back.cells.cached, back.lost_memory, world.memories.sizes()) == (20, False, {key_of("a"): 69})


def test_a_dropped_memory_frees_only_what_nobody_else_holds() -> None:
    memories = hot(100, a=80)
    memories.put(key_of("b"), memory(memories.get(key_of("a")).kv.fork(70)))  # type: ignore[union-attr]
    memories.expect_use(key_of("b"))
    assert memories.missing_bytes(31, {key_of("b")}) == 1
    assert memories.hold(30, {key_of("b")})
    assert names(memories) == {"b"}


def test_a_fork_needs_no_room() -> None:
    memories = hot(100, a=60, b=40)
    memories.put(key_of("c"), memory(memories.get(key_of("a")).kv.fork(60)))  # type: ignore[union-attr]
    assert names(memories) == {"a", "b", "c"}


# --- whose memory goes ---


def test_of_strangers_the_longest_unused_memory_goes_first_and_one_in_use_never() -> None:
    memories = hot(100, busy=30, old=30, young=30)
    assert memories.hold(5, extends=key_of("busy"))
    assert memories.hold(30)
    assert names(memories) == {"busy", "young"}


def test_background_memories_go_first() -> None:
    memories = hot(100, old=30)
    assert memories.remember(key_of("background"), 30, BACKGROUND)
    assert memories.hold(50)
    assert names(memories) == {"old"}


def test_a_memory_that_a_turn_is_being_planned_with_goes_last() -> None:
    memories = hot(100, planned=30, young=30)
    memories.expect_use(key_of("planned"))
    assert memories.hold(50)
    assert names(memories) == {"planned"}


def test_nothing_is_dropped_for_what_cannot_fit_anyway() -> None:
    memories = hot(100, running=50, idle=40)
    assert memories.hold(0, extends=key_of("running"))
    assert not memories.hold(60)
    assert memories.missing_bytes(60) == 10
    assert names(memories) == {"running", "idle"}


def hits(agents: list[int], room: int, at_once: int = 1) -> list[bool]:
    """Which of these turns found its agent's memory hot; every memory is one cell, and `room` of them fit."""
    world = World(budget_bytes=room * CELL)
    found: list[bool] = []
    for start in range(0, len(agents), at_once):
        jobs = []
        for agent in agents[start : start + at_once]:
            world.memories.expect_use(key_of(agent))
            is_hot = world.memories.get(key_of(agent)) is not None
            jobs.append(Job(CELL - 1, 1, key=key_of(agent), reusable_tokens=is_hot * CELL))
        world.submit(*jobs)
        world.run()
        found += [bool(job.cells.cached) for job in jobs]
    return found


@pytest.mark.parametrize(("agents", "room", "at_once"), [(5, 4, 1), (8, 5, 1), (8, 6, 2), (12, 8, 4), (3, 2, 1)])
def test_agents_in_a_ring_too_large_for_the_budget_do_not_drop_each_others_memory_in_turn(
    agents: int, room: int, at_once: int
) -> None:
    """(LESSONS 27) Dropping the least recently used, nobody would ever find its memory. The best that can be done finds
    (room - 1) of (agents - 1).
    """
    ring = list(range(agents)) * 12
    found = hits(ring, room, at_once)[4 * agents :]
    assert sum(found) / len(found) >= 0.8 * (room - at_once) / (agents - 1)


def test_agents_that_all_fit_always_find_their_memory() -> None:
    assert all(hits([0, 1, 2, 3] * 6, room=4)[4:])


def test_when_a_ring_ends_those_who_go_on_soon_have_their_memory() -> None:
    """What was kept for the ring does not stay for ever."""
    found = hits([*range(6)] * 6 + [0, 1, 2] * 12, room=4)
    assert all(found[-24:])


def test_an_agent_in_the_middle_of_a_dialogue_keeps_its_memory_though_others_come_round() -> None:
    turns = [turn for other in [1, 2, 3, 4, 5] * 6 for turn in (0, 0, other)]
    found = [is_hot for agent, is_hot in zip(turns, hits(turns, room=3), strict=True) if agent == 0]
    assert all(found[4:])


def test_many_agents_at_random_find_as_much_as_least_recently_used_would() -> None:
    """The rule for rings costs nothing where there is none."""
    draw = random.Random(7)
    agents = [min(int(draw.expovariate(0.25)), 20) for _ in range(600)]
    recent: list[int] = []
    lru = 0
    for agent in agents:
        lru += agent in recent[-5:]
        recent = [other for other in recent if other != agent] + [agent]
    assert sum(hits(agents, room=5)) >= 0.9 * lru


# --- whose memory is protected ---


def test_a_turn_lets_those_begin_whose_memory_it_would_have_to_drop() -> None:
    """(LESSONS 27) Turns submitted together: the two with a memory run on it, then the third takes the room."""
    world = World(budget_bytes=3 * CELL)
    for agent in (1, 2):
        world.turn(agent, CELL - 1)
    world.run()
    large = Job(2 * CELL, 1, key=key_of(3))
    world.submit(large)
    warm = [world.turn(agent, 10) for agent in (1, 2)]
    world.run()
    assert [bool(job.cells.cached) for job in warm] == [True, True]
    assert not any(job.lost_memory for job in warm)
    assert large.ended_s == max(job.ended_s for job in world.ended if job.ended_s is not None)


def test_a_turn_protects_others_memories_only_for_so_long() -> None:
    world = World(budget_bytes=4 * CELL, rules=Rules(patience_s=2.0))
    for agent in (1, 2):
        world.turn(agent, 10)
    world.run()
    large = Job(4 * CELL - 10, 1, key=key_of(3))
    world.submit(large)
    while large.begun_s is None:
        if not any(job.key != key_of(3) for job in world.scheduler.running):
            world.turn(1, 1, 20)
        world.turn(2, 1, 20)
        world.step()
        assert world.now < 4.0, "it waits for ever"


def test_two_that_protect_each_other_do_not_wait_while_nobody_runs() -> None:
    world = World(budget_bytes=4 * CELL)
    for agent in (1, 2):
        world.turn(agent, 2 * CELL - 30, 20)
    world.run()
    both = [world.turn(agent, CELL, 20) for agent in (1, 2)]
    world.step()
    assert any(job.begun_s is not None for job in both)
    world.run()


# --- who gives way ---

BUSY = 8 * CELL


def busy_world(*priorities: object, rules: Rules | None = None) -> tuple[World, list[Job]]:
    """Long turns that fill the budget together."""
    world = World(budget_bytes=BUSY, rules=rules or Rules(background_gap_s=0.1))
    tokens = BUSY // len(priorities) - 200
    jobs = [Job(tokens, 200, priority=priority) for priority in priorities]  # type: ignore[arg-type]
    world.submit(*jobs)
    world.step()
    assert all(job.begun_s is not None for job in jobs)
    return world, jobs


def test_the_youngest_background_turn_gives_way_to_an_interactive_one_and_goes_on_later() -> None:
    world, (old, young) = busy_world(BACKGROUND, BACKGROUND)
    person = Job(CELL, 5)
    world.submit(person)
    world.step()
    world.step()
    assert person.begun_s is not None
    assert (old.preemptions, young.preemptions) == (0, 1)
    world.run()
    assert young.generated == young.reply_tokens


def test_no_more_give_way_than_are_needed_and_none_if_all_would_not_do() -> None:
    world, jobs = busy_world(BACKGROUND, INTERACTIVE, BACKGROUND, BACKGROUND)
    person = Job(BUSY // 2 - 1, 1)
    world.submit(person)
    world.step()
    assert [job.preemptions for job in jobs] == [0, 0, 1, 1]
    world, jobs = busy_world(BACKGROUND, INTERACTIVE, BACKGROUND, BACKGROUND)
    world.submit(Job(BUSY - 1, 1))
    world.step()
    assert [job.preemptions for job in jobs] == [0, 0, 0, 0]


def test_nobody_gives_way_while_dropping_idle_memories_is_enough() -> None:
    world, jobs = busy_world(BACKGROUND, BACKGROUND, BACKGROUND)
    jobs[0].is_cancelled = True
    world.step()
    assert world.memories.remember(key_of("idle"), BUSY // 3 - 10)
    person = Job(CELL, 1)
    world.submit(person)
    world.step()
    assert person.begun_s is not None
    assert [job.preemptions for job in jobs] == [0, 0, 0]
    assert world.memories.sizes() == {}


def test_interactive_turns_give_way_to_nobody_and_background_turns_ask_nobody() -> None:
    world, jobs = busy_world(INTERACTIVE, BACKGROUND)
    world.submit(Job(CELL, 1, priority=BACKGROUND))
    world.step()
    assert [job.preemptions for job in jobs] == [0, 0]
    world, jobs = busy_world(INTERACTIVE, INTERACTIVE)
    world.submit(Job(CELL, 1))
    world.step()
    assert [job.preemptions for job in jobs] == [0, 0]


def test_who_cannot_be_preempted_is_not_and_another_is() -> None:
    world, jobs = busy_world(BACKGROUND, BACKGROUND)
    jobs[1].can_be_preempted = False
    world.submit(Job(CELL, 1))
    world.step()
    assert [job.preemptions for job in jobs] == [1, 0]


@pytest.mark.parametrize("generated", [0, 2])
def test_a_turn_whose_kv_is_on_its_way_holds_its_room_and_computes_nothing(generated: int) -> None:
    """Whether it was preempted while its prompt was computed or while it decoded."""
    world, (old, young) = busy_world(BACKGROUND, BACKGROUND)
    young.restore_s = 1.0
    while young.generated < generated:
        world.step()
    person = Job(CELL, 1)
    world.submit(person)
    while not young.is_restoring:
        world.step()
    assert young.is_prefilling is (generated == 0)
    assert world.held_bytes(young) == young.needed_bytes
    world.submit(Job(CELL, 1))
    world.step()
    assert (old.preemptions, young.preemptions) == (1, 1)  # never who has no rows to give up
    world.run()
    assert young.generated == young.reply_tokens


def test_what_an_interactive_turn_protects_is_not_counted_as_its_room() -> None:
    """Else others would be preempted for it, and it would wait all the same."""
    world, jobs = busy_world(BACKGROUND, BACKGROUND, BACKGROUND)
    jobs[0].is_cancelled = True
    world.step()
    key = key_of("idle")
    assert world.memories.remember(key, BUSY // 3 - 10)
    free = world.memories.ledger.free_bytes
    assert world.memories.missing_bytes(free + 20) == 0
    assert world.memories.missing_bytes(free + 20, {key}) == 20


def test_a_predecessor_of_an_interactive_turns_line_does_not_give_way() -> None:
    world = World(budget_bytes=BUSY)
    before = Job(BUSY - 300, 100, key=key_of("a"), priority=BACKGROUND)
    world.submit(before)
    world.step()
    world.submit(Job(CELL, 1, key=key_of("a")), Job(CELL, 1))
    world.step()
    assert before.preemptions == 0
    world.run()


def test_a_turn_that_waited_long_enough_to_begin_does_not_give_way() -> None:
    world = World(budget_bytes=BUSY, rules=Rules(ageing_s=1.0))
    first, aged = Job(BUSY - 100, 99), Job(BUSY - 200, 100, priority=BACKGROUND)
    world.submit(first, aged)
    while aged.begun_s is None:
        world.step()
    assert aged.begun_s >= 1.0
    world.submit(Job(CELL, 1))
    world.step()
    assert aged.preemptions == 0


def test_a_row_can_be_what_is_missing() -> None:
    world = World(at_once=2)
    jobs = [Job(CELL, 50, priority=BACKGROUND) for _ in range(2)]
    world.submit(*jobs)
    world.step()
    person = Job(CELL, 1)
    world.submit(person)
    world.step()
    assert [job.preemptions for job in jobs] == [0, 1]
    world.run()
    assert world.ended[0] is person


def test_who_gave_way_does_not_take_the_room_back_however_old_it_is() -> None:
    world = World(budget_bytes=4 * CELL, rules=Rules(ageing_s=1.0))
    background = Job(2 * CELL, 400, priority=BACKGROUND)
    world.submit(background)
    while world.now < 2.0:
        world.step()
    person = Job(2 * CELL, 20)
    world.submit(person)
    world.step()
    assert background.preemptions == 1
    world.step()
    assert world.scheduler.running == [person]
    world.run()


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_turn_gives_way_only_so_often(most: int) -> None:
    """A person comes whenever it runs; in between it has the engine for itself."""
    world = World(budget_bytes=4 * CELL, rules=Rules(max_preemptions=most, ageing_s=1e9))
    background = Job(2 * CELL, 400, priority=BACKGROUND)
    world.submit(background)
    while background not in world.ended:
        if world.scheduler.running == [background] and not world.scheduler.waiting:
            world.submit(Job(2 * CELL, 20))
        world.step()
    assert background.preemptions == most


@given(st.integers(1, 3), st.integers(0, 3), st.floats(0.5, 3.0))
@settings(max_examples=sampled(10, of=15), deadline=None)
def test_background_turns_end_though_people_never_stop_asking_for_their_room(
    count: int, most: int, ageing_s: float
) -> None:
    """Each gives way so often and no more: no two turns chase each other for ever."""
    world = World(budget_bytes=4 * CELL, rules=Rules(max_preemptions=most, ageing_s=ageing_s))
    background = [Job(2 * CELL, 40, priority=BACKGROUND, restore_s=0.05 * number) for number in range(count)]
    world.submit(*background)
    while not all(job in world.ended for job in background):
        if sum(job.priority is INTERACTIVE for job in (*world.scheduler.waiting, *world.scheduler.running)) < 2:
            world.submit(Job(2 * CELL, 20))
        world.step()
        assert world.now < 300, "livelock"
    assert all(job.preemptions <= most for job in background)
