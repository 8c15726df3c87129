"""Which rows of a namespace decode in a step beside others: so many, in turn, urgent ones first."""

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.scheduling.schedulable import Rules
from inference_svc.engine.scheduling.seats import Seats
from tests.inference.scheduling.scheduling_world import Job, World
from tests.inference.scheduling.test_scheduler_fairness import of
from tests.made_models.sampling import sampled


@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))
@settings(max_examples=sampled(12, of=60), deadline=None)
def test_in_company_a_namespace_has_so_many_rows_in_a_step_and_they_take_turns(
    crowd: int, others: int, rows: int, steps: int
) -> None:
    world = World(rules=Rules(rows_beside=rows, seat_steps=steps), token_s=0.001, cell_s=0.001)
    mine, theirs = of("a", crowd, 1, 120), of("b", others, 1, 200)
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


def test_a_crowd_whose_company_has_long_left_comes_back_to_all_its_rows_by_doubling() -> None:
    world = World(rules=Rules(company_s=1.0), token_s=0.01, cell_s=0.001)
    world.submit(*of("b", 1, 1, 40), *of("a", 30, 1, 250))
    while "b" in {job.namespace for job in world.scheduler.running} or not world.decoded:
        world.step()
    before = len(world.decoded)
    while len(world.decoded[-1]) < 30:
        world.step()
    counts = [len(decoded) for decoded in world.decoded[before:]]
    assert [after for count, after in pairwise(counts) if after != count] == [8, 16, 30]
    assert counts.count(4) > 80, "it is alone only after a while"
