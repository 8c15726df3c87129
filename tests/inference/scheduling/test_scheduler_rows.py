"""Which rows of a namespace decode in a step beside others: so many, in turn, urgent ones first."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.scheduling.schedulable import BesideOthers, Rules
from inference_svc.engine.scheduling.step_rows import Seats
from tests.inference.scheduling.scheduling_world import Job, World
from tests.inference.scheduling.test_scheduler_fairness import of
from tests.made_models.sampling import sampled


@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))
@settings(max_examples=sampled(12, of=60), deadline=None)
def test_in_company_a_namespace_has_so_many_rows_in_a_step_and_they_take_turns(
    crowd: int, others: int, rows: int, steps: int
) -> None:
    world = World(rules=Rules(beside_others=BesideOthers(rows=rows, seat_steps=steps)), token_s=0.001, cell_s=0.001)
    mine, theirs = of("a", crowd, 1, 120), of("b", others, 1, 400)
    world.submit(*theirs, *mine)
    while any(job.is_prefilling for job in (*mine, *theirs)):
        world.step()
    seen: dict[Job, list[int]] = {job: [] for job in mine}
    for step in range(-(-crowd // rows) * steps):
        world.step()
        for namespace, count in Counter(job.namespace for job in world.decoded[-1]).items():
            assert count == min(rows, crowd if namespace == "a" else others)
        for job in world.decoded[-1]:
            seen.get(job, []).append(step)
    assert all(len(steps) > 0 for steps in seen.values()), "somebody never has a seat"


@given(st.data(), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=sampled(16, of=80), deadline=None)
def test_a_seat_is_kept_for_its_steps_and_given_up_only_to_somebody(data: st.DataObject, rows: int, steps: int) -> None:
    seats: Seats[int] = Seats(steps)
    decoding: list[int] = []
    since: dict[int, int] = {}
    for now in range(30):
        come = data.draw(st.lists(st.integers(0, 9), max_size=3, unique=True))
        decoding = [turn for turn in decoding if data.draw(st.integers(0, 9))]
        decoding += [turn for turn in come if turn not in decoding]
        seated = seats.seat(decoding, rows, lambda turn: turn % 2 == 0, lambda _: False)
        assert seated <= {*decoding}
        assert len(seated) == min(rows, len(decoding))
        for turn in {*since} - seated:
            assert turn not in decoding or now - since[turn] >= steps
        since = {turn: since.get(turn, now) for turn in seated}


def test_who_needs_only_one_step_more_keeps_its_seat_for_it() -> None:
    seats: Seats[str] = Seats(1)
    assert seats.seat(["x", "y"], 1, lambda _: False, lambda _: False) == {"x"}
    assert seats.seat(["x", "y"], 1, lambda _: False, lambda turn: turn == "x") == {"x"}
    assert seats.seat(["x", "y"], 1, lambda _: False, lambda _: False) == {"y"}


def test_urgent_rows_are_seated_first() -> None:
    seats: Seats[str] = Seats(1)
    assert seats.seat(["background", "person"], 1, lambda turn: turn == "person", lambda _: False) == {"person"}


def test_when_there_are_fewer_seats_so_many_get_up_at_once() -> None:
    seats: Seats[int] = Seats(9)
    assert len(seats.seat(range(8), 8, lambda _: False, lambda _: False)) == 8
    assert len(seats.seat(range(8), 2, lambda _: False, lambda _: False)) == 2


def leave(world: World, visitor: Job) -> float:
    """Step until a turn of another namespace has ended. Returns when its last step began."""
    while visitor not in world.ended:
        began_s = world.now
        world.step()
        rows = sum(job.namespace != visitor.namespace for job in world.decoded[-1])
        assert rows <= world.rules.beside_others.rows, "rows are not taken back at once"
    return began_s


@pytest.mark.long(3)
@given(
    st.integers(1, 48),
    st.lists(st.tuples(st.floats(0.0, 1.5), st.integers(1, 6)), min_size=1, max_size=4),
    st.floats(0.004, 0.02),
    st.floats(0.0, 0.02),
)
@settings(max_examples=sampled(16, of=80), deadline=None)
def test_a_namespace_that_comes_back_waits_for_few_rows_or_a_quarter_of_its_absence(
    crowd: int, visits: list[tuple[float, int]], token_s: float, row_s: float
) -> None:
    """However often it comes, and for however long the others have been so many."""
    world = World(token_s=token_s, row_s=row_s, cell_s=0.001)
    few = world.rules.beside_others.rows
    visitor = Job(1, 1, namespace="b")
    world.submit(*of("a", crowd, 16, 3_000), visitor)
    for away_s, tokens in visits:
        left_s = leave(world, visitor)
        while world.now < left_s + away_s:
            began_s = world.now
            world.step()
            rows = len(world.decoded[-1])
            assert rows <= few or world.step_s(rows) <= (began_s - left_s) / 4 + 1e-9
        visitor = Job(1, tokens, namespace="b")
        world.submit(visitor)


@pytest.mark.parametrize(("token_s", "row_s"), [(0.01, 0.0), (0.001, 0.001)])
def test_a_single_turn_of_anybody_costs_a_crowd_only_a_moment(token_s: float, row_s: float) -> None:
    world = World(token_s=token_s, row_s=row_s, cell_s=0.001)
    mine = of("a", 16, 16, 3_000)
    visitor = Job(1, 2, namespace="b")
    world.submit(*mine, visitor)
    left_s = leave(world, visitor)
    while any(job.is_prefilling for job in mine):
        world.step()
    while len(world.decoded[-1]) < len(mine):
        world.step()
    assert world.now - left_s <= 20 * world.step_s(len(mine))
    for _ in range(40):
        world.step()
        assert len(world.decoded[-1]) == len(mine)


def test_a_crowd_that_is_alone_again_comes_back_to_all_its_rows_by_doubling() -> None:
    """Each row that joins the batch costs time."""
    world = World(token_s=0.001, row_s=0.001, cell_s=0.001)
    visitor = Job(1, 80, namespace="b")
    world.submit(visitor, *of("a", 30, 16, 3_000))
    leave(world, visitor)
    before = len(world.decoded)
    while len(world.decoded[-1]) < 30:
        world.step()
    counts = [len(decoded) for decoded in world.decoded[before:]]
    assert list(dict.fromkeys(counts)) == [4, 8, 16, 30]
