"""What one namespace asks for does not keep another waiting: order, room, rows and cells are shared."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.api import AgentKey
from inference_svc.engine.scheduling.schedulable import BesideOthers, Rules
from inference_svc.engine.scheduling.step_schedule import Grant
from tests.inference.scheduling.scheduling_world import BACKGROUND, CELL, INTERACTIVE, Hot, Job, World, memory
from tests.made_models.sampling import sampled

BUDGET = 16 * CELL
NAMESPACES = ("a", "b", "c")


@st.composite
def jobs(draw: st.DrawFn, most_cells: int = 12, most_reply: int = 40) -> Job:
    return Job(
        draw(st.integers(1, most_cells)) * CELL,
        draw(st.integers(1, most_reply)),
        namespace=draw(st.sampled_from(NAMESPACES)),
        priority=draw(st.sampled_from([INTERACTIVE, BACKGROUND])),
        can_be_preempted=draw(st.booleans()),
    )


def of(namespace: str, count: int, cells: int = 1, reply: int = 1, **fields: object) -> list[Job]:
    return [Job(cells * CELL - reply, reply, namespace=namespace, **fields) for _ in range(count)]  # type: ignore[arg-type]


# --- order ---


@pytest.mark.long(2)
@given(
    st.lists(jobs(), min_size=2, max_size=8), st.dictionaries(st.integers(1, 40), jobs(), max_size=8), st.integers(1, 3)
)
@settings(max_examples=sampled(16, of=80), deadline=None)
def test_no_background_turn_however_old_begins_before_another_namespaces_interactive_one(
    first: list[Job], later: dict[int, Job], at_once: int
) -> None:
    """Unless that one found no room before: it does not keep others waiting."""
    world = World(rules=Rules(ageing_s=0.2), at_once=at_once)
    world.arrivals = {after: [job] for after, job in later.items()}
    world.submit(*first)
    world.run()
    for job in world.ended:
        assert job.begun_s is not None
        for other in world.ended:
            comes_first = other.priority is INTERACTIVE and other.namespace != job.namespace
            if job.priority is BACKGROUND and comes_first and other not in world.refused:
                assert other.begun_s is not None
                assert not other.submitted_s <= job.begun_s < other.begun_s


@given(st.lists(jobs(most_reply=1), min_size=2, max_size=8), st.dictionaries(st.integers(1, 40), jobs(most_reply=1)))
@settings(max_examples=sampled(16, of=80), deadline=None)
def test_no_background_prompt_is_computed_before_another_namespaces_interactive_one(
    first: list[Job], later: dict[int, Job]
) -> None:
    world = World(rules=Rules(ageing_s=0.0), cell_s=0.0)
    grant = world.scheduler.grant

    def checked(spent_s: float, *, is_behind_step: bool) -> Grant[Job] | None:
        people = {job.namespace for job in world.scheduler.running if job.is_prefilling and job.priority is INTERACTIVE}
        found = grant(spent_s, is_behind_step=is_behind_step)
        assert found is None or found.turn.priority is INTERACTIVE or people <= {found.turn.namespace}
        return found

    world.scheduler.grant = checked  # type: ignore[method-assign]
    world.arrivals = {after: [job] for after, job in later.items()}
    world.submit(*first)
    world.run()


def test_a_background_turn_waits_no_longer_for_its_own_people_because_others_find_no_room() -> None:
    rules = Rules(ageing_s=2.0)
    world = World(BUDGET, rules=rules, at_once=3)
    world.submit(Job(100, 900, namespace="b", can_be_preempted=False))
    world.step()
    world.submit(*of("b", 1, 14))
    world.step()
    [background] = of("a", 1, 4, 3, priority=BACKGROUND)
    world.submit(*of("a", 6, 1, 5), background)
    while background not in world.ended:
        people = [job for job in (*world.scheduler.waiting, *world.scheduler.running) if job.namespace == "a"]
        world.submit(*of("a", 7 - len(people), 1, 5))
        world.step()
        assert world.now < 60, "it starves"
    assert background.begun_s is not None
    assert background.begun_s <= background.submitted_s + rules.ageing_s + 2.0


@given(st.lists(st.sampled_from(NAMESPACES), min_size=2, max_size=24))
@settings(max_examples=sampled(12, of=60), deadline=None)
def test_turns_begin_one_of_each_namespace_after_the_other_and_in_order_inside(order: list[str]) -> None:
    world = World(at_once=1)
    submitted = [job for namespace in order for job in of(namespace, 1)]
    world.submit(*submitted)
    world.run()
    begun: Counter[str | None] = Counter()
    for job in world.begun:
        begun[job.namespace] += 1
        for other in {*order} - {job.namespace}:
            assert begun[other] >= min(begun[job.namespace] - 1, order.count(other))
    for namespace in NAMESPACES:
        mine = [job for job in submitted if job.namespace == namespace]
        assert [job for job in world.begun if job.namespace == namespace] == mine


# --- room ---


def fits_its_share(world: World, job: Job) -> bool:
    return world.held_by(job.namespace) + job.needed_bytes <= world.share_bytes


@pytest.mark.long(3)
@given(st.lists(jobs(), min_size=3, max_size=10), st.dictionaries(st.integers(1, 60), jobs(), max_size=8))
@settings(max_examples=sampled(18, of=120), deadline=None)
def test_a_turn_that_fits_its_namespaces_share_and_what_is_free_waits_for_no_other_namespace(
    first: list[Job], later: dict[int, Job]
) -> None:
    world = World(BUDGET, rules=Rules(ageing_s=0.2))

    def nobody_waits_who_fits() -> None:
        for namespace in NAMESPACES:
            waiting = [job for job in world.scheduler.waiting if job.namespace == namespace]
            if len({job.namespace for job in world.scheduler.waiting}) > 1 and len(waiting) == 1:
                [job] = waiting
                fits = fits_its_share(world, job) and job.needed_bytes <= world.memories.ledger.free_bytes
                assert not fits, "it waits for another namespace"

    world.when_begun = nobody_waits_who_fits
    world.arrivals = {after: [job] for after, job in later.items()}
    world.submit(*first)
    world.run()


@given(st.integers(1, 7), st.sampled_from([INTERACTIVE, BACKGROUND]), st.integers(1, 7), st.integers(5, 60))
@settings(max_examples=sampled(10, of=40), deadline=None)
def test_a_turn_that_fits_its_share_begins_though_another_namespace_never_stops_asking(
    cells: int, priority: object, others_cells: int, reply: int
) -> None:
    """Nobody can be preempted: it waits until those that run have ended, and for nobody who comes after it."""
    world = World(BUDGET)
    crowd = {"cells": others_cells, "reply": reply, "can_be_preempted": False}
    world.submit(*of("b", 40, **crowd))  # type: ignore[arg-type]
    world.step()
    [job] = of("a", 1, cells, priority=priority)
    before = [*world.scheduler.running]
    world.submit(job)
    while job.begun_s is None:
        waiting = [other for other in world.scheduler.waiting if other.namespace == "b"]
        world.submit(*of("b", 20 - len(waiting), **crowd))  # type: ignore[arg-type]
        world.step()
        assert world.steps < 1000, "it starves"
    assert job.begun_s <= max(other.ended_s or world.now for other in before) + 1e-9


def test_a_background_turn_that_requests_most_of_the_room_holds_up_no_person_of_another_namespace() -> None:
    """(FINDINGS M3) Its age made it count as interactive, and whoever came after it waited with three quarters free."""
    world = World(BUDGET)
    world.submit(*of("a", 1, 4, 300, can_be_preempted=False))
    world.step()
    world.submit(*of("a", 1, 14, priority=BACKGROUND))
    while world.now < 6.0:
        world.step()
        [person] = of("b", 1, 1, 4)
        world.submit(person)
        world.step()
        assert person.begun_s == person.submitted_s
        while person not in world.ended:
            world.step()


@pytest.mark.parametrize("own", [0, 1])
def test_a_turn_that_others_leave_no_room_keeps_none_of_its_own_namespace_waiting(own: int) -> None:
    """Others use their shares for ever: the turn that needs more than its own waits, and its colleagues go on."""
    world = World(BUDGET)
    world.submit(*of("b", 20, 2, 40, can_be_preempted=False), *of("a", own, 1, 60, can_be_preempted=False))
    world.step()
    [large] = of("a", 1, 13)
    world.submit(large)
    for _ in range(10):
        waiting = [job for job in world.scheduler.waiting if job.namespace == "b"]
        world.submit(*of("b", 20 - len(waiting), 2, 40, can_be_preempted=False))
        [small] = of("a", 1, 1, 4)
        world.submit(small)
        while small not in world.ended:
            world.step()
        assert world.now - small.submitted_s < 5
    assert large.begun_s is None
    # And it does not starve by them once there is room but for its own namespace's turns.
    while large.begun_s is None:
        world.submit(*of("a", 8 - len(world.scheduler.waiting), 1, 40, can_be_preempted=False))
        world.step()


@pytest.mark.parametrize("cells", [6, 9])
def test_who_holds_more_than_its_share_is_no_reason_to_let_ones_own_go_before(cells: int) -> None:
    """It gives that back while a turn of another namespace waits: so this one gets its room, if its own make way."""
    world = World(BUDGET)
    world.submit(*of("b", 20, 2, 40, can_be_preempted=False))
    world.step()
    assert world.held_by("b") > BUDGET // 2
    [large] = of("a", 1, cells)
    world.submit(*of("a", 2, 1, 40, can_be_preempted=False), large)
    while large.begun_s is None:
        waiting = [job for job in world.scheduler.waiting if job.namespace == "b"]
        world.submit(*of("b", 20 - len(waiting), 2, 40, can_be_preempted=False))
        world.submit(*of("a", 3 - len([job for job in world.scheduler.waiting if job.namespace == "a"]), 1, 40))
        world.step()
        assert world.steps < 2000, "it starves"


def test_whoever_comes_finds_room_at_once_though_nobody_can_be_preempted() -> None:
    world = World(BUDGET)
    world.submit(*of("b", 1))
    world.run()
    world.submit(*of("a", 40, 1, 200, can_be_preempted=False))
    world.step()
    assert world.held_by("a") == BUDGET - BUDGET // 8
    newcomers = of("b", 2, 1, 4)
    world.submit(*newcomers)
    world.step()
    assert [job.begun_s for job in newcomers] == [job.submitted_s for job in newcomers]


@pytest.mark.long(2)
def test_a_namespace_alone_has_all_of_the_room_and_has_it_again_when_the_other_has_long_left() -> None:
    world = World(BUDGET, rules=Rules(beside_others=BesideOthers(company_s=3.0)))
    world.submit(*of("a", 40, 1, 200, can_be_preempted=False))
    world.step()
    assert world.held_by("a") == BUDGET
    world.submit(*of("b", 1))
    left = None
    while world.held_by("a") < BUDGET or left is None:
        left = world.now if "b" in {job.namespace for job in world.ended} and left is None else left
        waiting = [job for job in world.scheduler.waiting if job.namespace == "a"]
        world.submit(*of("a", 20 - len(waiting), 1, 200, can_be_preempted=False))
        world.step()
        assert world.steps < 2000, "it never comes back to the whole room"
    assert world.now >= left + 2.9


# --- who gives way ---


def crowded(priorities: Sequence[object], reply: int = 200) -> tuple[World, list[Job]]:
    world = World(8 * CELL)
    each = 8 // len(priorities)
    mine = [job for priority in priorities for job in of("a", 1, each, reply, priority=priority)]
    world.submit(*mine)
    world.step()
    assert world.held_by("a") == 8 * CELL
    return world, mine


def test_turns_of_a_namespace_over_its_share_give_way_background_first_and_youngest_first() -> None:
    world, mine = crowded([INTERACTIVE, BACKGROUND, INTERACTIVE, BACKGROUND])
    person = of("b", 1, 2, 4)[0]
    world.submit(person)
    world.step()
    assert [job.preemptions for job in mine] == [0, 0, 0, 1]
    world.submit(*of("b", 1, 1, 4))
    world.step()
    assert person.begun_s is not None
    assert [job.preemptions for job in mine] == [0, 1, 0, 1]
    world, mine = crowded([INTERACTIVE] * 4)
    world.submit(*of("b", 1, 2, 4))
    world.step()
    assert [job.preemptions for job in mine] == [0, 0, 0, 1]
    world.run()
    assert all(job.generated == job.reply_tokens for job in mine)


@pytest.mark.parametrize(("cells", "give_way"), [(5, 5), (6, 0)])
def test_no_more_give_way_than_their_namespace_has_above_its_share(cells: int, give_way: int) -> None:
    """Of eight cells each has a share of three and a half: five turns of a cell, and then no more."""
    world = World(8 * CELL)
    mine = of("a", 8, 1, 200)
    world.submit(*mine)
    world.step()
    world.submit(*of("b", 1, cells, 4))
    world.step()
    assert sum(job.preemptions for job in mine) == give_way


def test_a_namespace_over_its_share_has_nobody_elses_turns_preempted() -> None:
    world = World(8 * CELL)
    mine = of("a", 1, 2, 300, priority=BACKGROUND)
    world.submit(*mine, *of("b", 4, 1, 300), *of("b", 1, 1, 200))
    world.step()
    world.submit(*of("b", 1, 3, 4))
    world.step()
    assert [job.preemptions for job in mine] == [0]


def test_of_two_namespaces_over_their_shares_neither_has_the_others_turns_preempted() -> None:
    world = World(8 * CELL)
    theirs = of("a", 1, 3, 200, priority=BACKGROUND)
    world.submit(*theirs, *of("b", 1, 3, 200), *of("c", 1, 1, 200))
    world.step()
    assert world.share_bytes < 3 * CELL == world.held_by("a") == world.held_by("b")
    world.submit(*of("b", 1, 1, 4))
    world.step()
    assert [job.preemptions for job in theirs] == [0]


def test_background_turns_of_a_namespace_within_its_share_stay() -> None:
    world = World(8 * CELL)
    small, large = of("a", 1, 2, 300, priority=BACKGROUND), of("b", 2, 3, 300, can_be_preempted=False)
    world.submit(*small, *large)
    world.step()
    world.submit(*of("c", 1, 2, 4))
    world.step()
    assert [job.preemptions for job in small] == [0]


@pytest.mark.long(5)
@given(st.lists(jobs(8, 200), min_size=4, max_size=12), st.dictionaries(st.integers(1, 60), jobs(8, 200), max_size=8))
@settings(max_examples=sampled(10, of=60), deadline=None)
def test_whoever_gives_way_all_come_to_their_end(first: list[Job], later: dict[int, Job]) -> None:
    """And nobody within its share gives way to another namespace: the world looks at each."""
    world = World(BUDGET, rules=Rules(ageing_s=0.5))
    world.arrivals = {after: [job] for after, job in later.items()}
    world.submit(*first)
    world.run()
    assert all(job.preemptions <= world.rules.max_preemptions for job in world.ended)


# --- rows ---


def test_an_engines_own_turns_before_it_is_ready_are_no_company_of_its_first_callers() -> None:
    """They are in no namespace."""
    world = World(rules=Rules(beside_others=BesideOthers(rows=4)), token_s=0.01, cell_s=0.001)
    world.submit(Job(1, 5))
    world.run()
    world.submit(*of("a", 8, 1, 20))
    world.run()
    assert max(len(decoded) for decoded in world.decoded) == 8


# --- cells ---


@given(st.integers(1, 12), st.integers(0, 10), st.integers(1, 4))
@settings(max_examples=sampled(10, of=40), deadline=None)
def test_a_namespaces_first_cell_waits_for_one_cell_of_each_other_however_many_prompts_they_have(
    crowd: int, after: int, cells: int
) -> None:
    world = World(rules=Rules(ageing_s=1e9))
    late = Job(cells * CELL, namespace="b")
    world.arrivals = {after: [late]} if after else {}
    world.submit(*of("a", crowd, 8), *of("c", crowd, 8), *([] if after else [late]))
    world.run()
    mine = [index for index, job in enumerate(world.prefilled) if job is late]
    if mine:
        assert mine[0] <= after + 2
        assert all(end - start <= 3 for start, end in pairwise(mine))


def test_short_cells_wait_for_no_long_one_before_they_have_taken_as_much_time() -> None:
    world = World(cost_s=lambda _position, tokens: tokens / 1000)
    world.submit(*of("a", 4, 20))
    world.step()
    people, before = [Job(8, namespace="b") for _ in range(6)], len(world.prefilled)
    world.submit(*people)
    while not {*people} <= {*world.prefilled}:
        world.step()
    assert [job.namespace for job in world.prefilled[before:]].count("a") <= 1


def test_time_that_a_namespace_does_not_take_is_not_saved() -> None:
    world = World(cost_s=lambda _position, tokens: tokens / 1000)
    world.submit(*of("a", 1, 90), Job(CELL, namespace="b"))
    while len(world.prefilled) < 40:
        world.step()
    world.submit(*of("b", 1, 40))
    while len(world.prefilled) < 60:
        world.step()
    assert 9 <= [job.namespace for job in world.prefilled[40:60]].count("b") <= 11


def test_nor_is_time_that_a_namespace_stood_back_for_people() -> None:
    """Its background prompt waited for another's person, and is beside that one's background prompt then."""
    world = World(rules=Rules(ageing_s=1e9), cost_s=lambda _position, tokens: tokens / 1000)
    world.submit(*of("c", 1, 60, priority=BACKGROUND), *of("a", 1, 40))
    while len(world.prefilled) < 40:
        world.step()
    world.submit(*of("a", 1, 40, priority=BACKGROUND))
    while len(world.prefilled) < 64:
        world.step()
    assert [job.namespace for job in world.prefilled[:40]].count("c") <= 1
    assert 10 <= [job.namespace for job in world.prefilled[44:64]].count("a") <= 11


@given(st.integers(1, 12), st.floats(0.01, 0.2), st.floats(0.01, 0.1))
@settings(max_examples=sampled(10, of=40), deadline=None)
def test_others_prompts_take_as_much_time_from_a_reply_as_it_takes_itself(
    crowd: int, cell_s: float, token_s: float
) -> None:
    """And one cell more. Without the rule each of its tokens waits for a step's whole prefill time."""
    world = World(cell_s=cell_s, token_s=token_s)
    person = Job(1, 60, namespace="b")
    world.submit(person)
    world.step()
    world.submit(*of("a", crowd, 12))
    began_s = world.now
    while person not in world.ended:
        world.step()
    assert world.now - began_s <= 2 * 59 * token_s * 1.5 + 2 * (cell_s + token_s)
    assert any(job.namespace == "a" for job in world.prefilled), "they stand still"


@given(st.integers(1, 6), st.integers(1, 60), st.floats(0.02, 0.3), st.floats(0.005, 0.05))
@settings(max_examples=sampled(10, of=40), deadline=None)
def test_a_reply_that_waited_for_others_cell_has_as_much_time_before_their_next(
    crowd: int, reply: int, cell_s: float, token_s: float
) -> None:
    """Short replies have none of their cells in them, and each had one. Between two replies they go on."""
    world = World(cell_s=cell_s, token_s=token_s)
    world.submit(*of("a", crowd, 400))
    world.step()
    for number in range(1, 6):
        world.submit(person := Job(5, reply, namespace="b"))
        while person not in world.ended:
            world.step()
        assert person.ended_s is not None
        taken_s = [second for job in world.scheduler.running for second in job.cells_s if second > person.cells_s[0]]
        reply_s = (reply - 1) * token_s
        assert reply_s / (cell_s + token_s) - 1.01 <= len(taken_s) <= reply_s / cell_s + 1e-9
        world.step()
        assert len(world.prefilled) >= 2 * number, "they stand still"


def test_prompts_that_come_one_by_one_owe_for_those_before() -> None:
    world = World(cell_s=0.1, token_s=0.01)
    world.submit(person := Job(1, 60, namespace="b"))
    world.step()
    began_s = world.now
    while person not in world.ended:
        if not any(job.namespace == "a" for job in (*world.scheduler.running, *world.scheduler.waiting)):
            world.step()
            world.submit(*of("a", 1))
        world.step()
    assert world.now - began_s <= 2 * 59 * 0.01 + 2 * 0.11


def test_nobody_owes_others_for_cells_beside_its_own_replies() -> None:
    world = World(cell_s=0.03, token_s=0.01)
    world.submit(Job(1, 400, namespace="a"), Job(200 * CELL, namespace="a"))
    for _ in range(12):
        world.step()
    person = Job(1, 300, namespace="b")
    world.submit(person)
    world.step()
    so_far = len(world.prefilled)
    for _ in range(10):
        world.step()
    assert len(world.prefilled) > so_far, "its prompt stands still"


def test_a_persons_prompt_that_owes_background_rows_is_not_overtaken_by_background_prompts() -> None:
    """It owed them what loading its memory took, and the other namespace's prompts had the time of a step meanwhile."""
    world = World(cell_s=0.1, token_s=0.01, file_s=0.002)
    world.submit(*of("a", 1, reply=200, priority=BACKGROUND), *of("a", 4, 12, priority=BACKGROUND))
    for _ in range(5):
        world.step()
    so_far = len(world.prefilled)
    world.submit(person := Job(5, namespace="b", files=1))
    while person not in world.ended:
        world.step()
    assert world.prefilled[so_far] is person


# --- hot memories ---


def key(namespace: str, agent: int) -> AgentKey:
    return AgentKey(namespace, f"agent {agent}")


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.booleans()), max_size=60),
)
@settings(max_examples=sampled(16, of=80), deadline=None)
def test_a_crowds_memories_drop_none_of_a_namespace_within_its_share(
    few: list[int], crowd: list[tuple[int, int, bool]]
) -> None:
    """Whether they are left by turns or made by forks."""
    memories = Hot(200)
    for agent, size in enumerate(few):
        assert memories.remember(key("b", agent), size)
    for agent, size, is_fork in crowd:
        mine, source = key("a", agent), memories.get(key("a", agent + 1))
        if not is_fork:
            memories.remember(mine, size)
        elif source is not None:
            memories.put(mine, memory(source.kv.fork(size)))
        assert {key("b", agent) for agent in range(len(few))} <= {*memories.sizes()}


def test_idle_memories_of_others_keep_no_turn_waiting() -> None:
    memories = Hot(100)
    memories.remember(key("b", 1), 40)
    assert memories.hold(90, namespace="a")
    assert memories.sizes() == {}


@pytest.mark.parametrize("own", [0, 50])
def test_running_turns_count_as_their_namespaces_too(own: int) -> None:
    """Of two namespaces with equal memories the one whose turns run as well loses its own first."""
    memories = Hot(100)
    memories.remember(key("a", 1), 20)
    memories.remember(key("b", 1), 20)
    if own:
        assert memories.hold(own, namespace="b")
    assert memories.hold(65 - own, namespace="c")
    assert [one.namespace for one in memories.sizes()] == (["a"] if own else ["b"])
