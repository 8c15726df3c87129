"""Who is served next, and how much of a step is prefill: a worker without tensors does what the scheduler says."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.scheduling.pacing import most_tokens
from inference_svc.engine.scheduling.schedulable import Rules
from tests.inference.scheduling.scheduling_world import BACKGROUND, CELL, Job, World, key_of
from tests.made_models.sampling import sampled

seconds = st.floats(0.001, 0.5)


# --- the pace of a step ---


@given(seconds, seconds, seconds, st.lists(st.integers(1, 20 * CELL), min_size=1, max_size=4), st.integers(1, 3))
@settings(max_examples=sampled(20, of=60), deadline=None)
def test_a_long_prompt_never_holds_others_tokens_up_longer_than_budget_and_one_cell(
    budget_s: float, cell_s: float, token_s: float, prompts: list[int], decoding: int
) -> None:
    """(LESSONS 21) Whatever the prompts and however slow a cell."""
    world = World(rules=Rules(longest_gap_s=budget_s), cell_s=cell_s, token_s=token_s)
    world.submit(*(Job(1, 60) for _ in range(decoding)))
    world.step()
    world.submit(*(Job(tokens, 5) for tokens in prompts))
    world.run()
    assert len(world.gaps) == decoding * 59 + 4 * len(prompts)
    assert max(world.gaps) <= budget_s + cell_s + token_s + 1e-9


@given(seconds, seconds, st.floats(0.0001, 0.1), st.lists(st.integers(1, 200), min_size=1, max_size=9))
@settings(max_examples=sampled(13, of=40), deadline=None)
def test_memories_that_are_brought_back_hold_others_tokens_up_no_longer_than_budget_and_a_file_or_a_cell(
    budget_s: float, cell_s: float, file_s: float, restored: list[int]
) -> None:
    """(LESSONS 21) However many come at once."""
    world = World(rules=Rules(longest_gap_s=budget_s), cell_s=cell_s, file_s=file_s)
    world.submit(Job(1, 60))
    world.step()
    world.submit(*(Job(CELL, 5, files=files) for files in restored))
    world.run()
    assert max(world.gaps) <= budget_s + max(file_s, cell_s) + world.token_s + 1e-9


def test_prefill_goes_on_by_a_cell_however_short_the_budget() -> None:
    world = World(rules=Rules(longest_gap_s=0.0), cell_s=9.0)
    decoding, reading = Job(1, 100), Job(10 * CELL)
    world.submit(decoding, reading)
    world.run()
    assert world.chunks[:11] == [1, *[CELL] * 10]


def test_a_step_prefills_no_more_than_the_table_says_of_where_a_prompt_stands() -> None:
    """Also if no turn decodes and time does not bind: 4096 tokens below 2 k, 2048 below 8 k, 1024 below 20 k, then
    512.
    """
    world = World(rules=Rules(longest_gap_s=0.0, background_gap_s=0.0))
    world.submit(Job(22 * 1024))
    world.run()
    assert world.chunks == [4096, *[2048] * 2, *[1024] * 12, *[512] * 4]
    assert [most_tokens(at) for at in (0, 2047, 2048, 8191, 8192, 20479, 20480)] == [
        4096,
        4096,
        2048,
        2048,
        1024,
        1024,
        512,
    ]


def test_of_several_prompts_the_deepest_sets_the_steps_limit() -> None:
    world = World()
    world.submit(Job(12 * 1024))
    while world.scheduler.running == [] or world.scheduler.running[0].cells.computed < 8192:
        world.step()
    world.submit(Job(8192))
    world.step()
    assert world.chunks[-1] == 1024


def test_a_prompt_that_stands_deep_goes_on_beside_a_shallow_one_only_within_its_own_limit() -> None:
    """The shorter rest is computed first, to its end: then the step has more tokens than the deep one allows."""
    world = World(rules=Rules(longest_gap_s=1e9))
    world.submit(Job(12 * 1024))
    while world.scheduler.running == [] or world.scheduler.running[0].cells.computed < 8192:
        world.step()
    world.submit(Job(1024))
    world.step()
    assert world.chunks[-1] == 1024


def test_the_time_binds_as_soon_as_somebody_decodes() -> None:
    """The short prompt decodes after its cell: the long one gets no more than the budget from there on."""
    world = World(rules=Rules(longest_gap_s=0.05), cell_s=0.03)
    world.submit(Job(10, 5), Job(16 * CELL))
    world.step()
    assert len(world.prefilled) == 2


def test_who_comes_while_a_long_prompt_is_computed_is_looked_at_after_its_cell() -> None:
    world = World()
    long, late = Job(16 * CELL), Job(CELL)
    world.arrivals = {3: [late]}
    world.submit(long)
    world.step()
    assert world.prefilled == [long] * 3
    world.step()
    assert late in world.prefilled


def test_a_cancel_ends_a_step_after_the_cell() -> None:
    world = World()
    long, other = Job(16 * CELL), Job(16 * CELL)
    world.submit(long, other)
    world.admit()
    world.scheduler.begin_step(0.0)
    assert granted(world, 0.0) is long
    long.is_cancelled = True
    assert granted(world, 0.1) is None
    assert world.scheduler.cancelled() == [long]


def test_who_is_cancelled_while_others_decode_gets_no_cell_and_no_token() -> None:
    """A cancel comes from another thread, at any moment; the turn is removed only before the next step."""
    world = World(rules=Rules(longest_gap_s=0.0))
    decoding, doomed, other = Job(1, 9), Job(16 * CELL), Job(16 * CELL)
    world.submit(decoding, doomed, other)
    world.step()
    doomed.is_cancelled = True
    assert world.scheduler.begin_step(world.now) == (decoding,)
    assert granted(world, 0.0) is other
    decoding.is_cancelled = True
    assert world.scheduler.begin_step(world.now) == ()


def granted(world: World, spent_s: float) -> Job | None:
    grant = world.scheduler.grant(spent_s)
    return grant and grant.turn


# --- taking turns ---


@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=6),
    st.dictionaries(st.integers(1, 30), st.integers(1, 4), max_size=5),
)
@settings(max_examples=sampled(20, of=60), deadline=None)
def test_later_prompts_overtake_one_for_no_longer_than_its_rest_takes(
    prompts: list[int], later: dict[int, int]
) -> None:
    """However short they are; all lengths are in cells."""
    world = World(rules=Rules(ageing_s=1e9))
    jobs = [Job(cells * CELL) for cells in (*prompts, *(later[after] for after in sorted(later)))]
    world.arrivals = {after: [job] for after, job in zip(sorted(later), jobs[len(prompts) :], strict=True)}
    world.submit(*jobs[: len(prompts)])
    world.run()
    for number, job in enumerate(jobs):
        cells = [index for index, served in enumerate(world.prefilled) if served is job]
        overtaking = [other for other in world.prefilled[: max(cells, default=0)] if other in jobs[number + 1 :]]
        assert len(overtaking) <= len(cells) + 1


def test_a_memory_that_comes_from_files_waits_for_no_prompt() -> None:
    """However long it is, and however many short prompts come."""
    world = World(rules=Rules(ageing_s=1e9), file_s=0.001)
    world.arrivals = {after: [Job(CELL)] for after in range(1, 60)}
    world.submit(Job(CELL))
    world.step()
    warm = Job(CELL, files=100)
    world.submit(warm)
    began = len(world.prefilled)
    while warm.files:
        world.step()
    assert len(world.prefilled) - began <= 2


def test_memories_that_come_from_files_load_in_turn_and_a_new_one_behind_those_that_waited() -> None:
    world = World()
    first, second, late = (Job(CELL, files=1000) for _ in range(3))
    world.submit(first, second)
    world.admit()
    world.scheduler.begin_step(0.0)
    assert [granted(world, 0.0) for _ in range(3)] == [first, second, first]
    world.submit(late)
    world.admit()
    world.scheduler.begin_step(0.0)
    assert [granted(world, 0.0) for _ in range(5)] == [second, late, first, second, late]


def test_the_prompt_that_is_soonest_computed_comes_first() -> None:
    """So the first of equal ones comes to its end before the next begins, and a short one goes between."""
    world = World(rules=Rules(ageing_s=1e9))
    first, second, short = Job(6 * CELL), Job(6 * CELL), Job(CELL)
    world.submit(first, second)
    world.arrivals = {3: [short]}
    world.run()
    assert world.prefilled == [first, first, first, short, first, first, first, *[second] * 6]


def test_newcomers_do_not_come_before_those_who_wait_already() -> None:
    """A new prompt after every cell is more than can be served; an old one goes on all the same."""
    world = World(rules=Rules(ageing_s=1e9))
    long = Job(4 * CELL)
    world.submit(long)
    world.arrivals = {after: [Job(CELL)] for after in range(1, 60)}
    world.run()
    given_at = [index for index, served in enumerate(world.prefilled) if served is long]
    assert given_at[-1] <= 1 + 2 + 4 + 8


def test_every_generating_turn_decodes_in_every_step() -> None:
    world = World()
    decoding = [Job(1, 9), Job(1, 9)]
    world.submit(*decoding, Job(20 * CELL))
    world.step()
    for step in range(5):
        assert [job.generated for job in decoding] == [step + 1, step + 1]
        world.step()


def test_a_warm_turn_with_one_cell_left_goes_before_longer_prompts() -> None:
    world = World(rules=Rules(longest_gap_s=0.0))
    world.turn("warm", CELL)
    world.run()
    decoding, cold = Job(1, 100), [Job(9 * CELL) for _ in range(3)]
    world.submit(decoding, *cold)
    for _ in range(4):
        world.step()
    warm = world.turn("warm", CELL - 2)
    begun = len(world.prefilled)
    world.run()
    assert world.prefilled[begun] is warm


# --- who comes first ---


def test_an_interactive_turn_begins_before_background_turns_that_waited_longer() -> None:
    world = World(at_once=1)
    first, background, person = Job(), Job(priority=BACKGROUND), Job()
    world.submit(first, background, person)
    world.run()
    assert world.ended == [first, person, background]


def test_an_interactive_prompt_is_computed_before_background_ones() -> None:
    world = World(rules=Rules(ageing_s=1e9))
    background = [Job(4 * CELL, priority=BACKGROUND) for _ in range(2)]
    person = Job(4 * CELL)
    world.submit(*background)
    world.arrivals = {3: [person]}
    world.run()
    assert world.prefilled[3:7] == [person] * 4


@pytest.mark.long(2)
@given(st.floats(0.5, 5.0), st.integers(1, 3))
@settings(max_examples=sampled(10, of=20), deadline=None)
def test_background_work_begins_and_goes_on_though_people_never_stop_asking(ageing_s: float, at_once: int) -> None:
    """It counts as interactive once it has waited `ageing_s`, to begin and for each of its cells."""
    world = World(rules=Rules(ageing_s=ageing_s), at_once=3)
    background = Job(4 * CELL, 3, priority=BACKGROUND)
    world.submit(*(Job(CELL, 5) for _ in range(6)), background)
    while background not in world.ended:
        people = [job for job in (*world.scheduler.waiting, *world.scheduler.running) if job is not background]
        world.submit(*(Job(CELL, 5) for _ in range(max(0, 5 + at_once - len(people)))))
        world.step()
        assert world.now < 20 * ageing_s + 60, "it starves"
    assert background.begun_s is not None
    assert background.begun_s <= ageing_s + 2.0
    assert max(after - before for before, after in pairwise(background.cells_s)) <= ageing_s + 2.0


def test_background_work_that_an_interactive_turn_of_its_agent_follows_is_not_put_off() -> None:
    world = World(rules=Rules(ageing_s=1e9), at_once=1)
    running, before = Job(), Job(key=key_of("a"), priority=BACKGROUND)
    other, person = Job(priority=BACKGROUND), Job(key=key_of("a"))
    world.submit(running, other, before, person)
    world.run()
    assert world.ended == [running, before, person, other]


def test_turns_of_one_agent_wait_for_each_other_and_for_nobody_else() -> None:
    world = World()
    first, second, other = (
        Job(reply_tokens=5, key=key_of("a")),
        Job(key=key_of("a")),
        Job(reply_tokens=9, key=key_of("b")),
    )
    world.submit(first, second, other)
    world.step()
    assert world.scheduler.running == [first, other]
    world.run()
    assert world.ended == [first, second, other]


def test_a_turn_without_room_is_not_overtaken() -> None:
    world = World(budget_bytes=1000)
    running, large, small = Job(500, 100), Job(500, 100), Job(10, 10)
    world.submit(running, large, small)
    world.step()
    assert world.scheduler.waiting == [large, small]
    world.run()
    assert small.begun_s == large.begun_s == running.ended_s


@given(
    st.lists(
        st.builds(Job, st.integers(1, 2000), st.integers(1, 9), st.none() | st.builds(key_of, st.integers(0, 2))),
        max_size=9,
    )
)
@settings(max_examples=sampled(16, of=50), deadline=None)
def test_every_turn_is_served_to_its_end(work: list[Job]) -> None:
    world = World(budget_bytes=2100)
    world.submit(*work)
    world.run(sum(job.prompt_tokens // CELL + job.reply_tokens + 1 for job in work) + 1)
    assert len(world.ended) == len(work)


# --- cancel ---


@given(st.integers(0, 12), st.integers(0, 3))
@settings(max_examples=sampled(16, of=50), deadline=None)
def test_a_cancelled_turn_frees_its_bytes_and_its_row_within_one_step(steps: int, other: int) -> None:
    """(LESSONS 25) While it waits, while its prompt is computed, and while it decodes."""
    world = World(budget_bytes=4000, rules=Rules(longest_gap_s=0.0), at_once=2)
    world.submit(*(Job(100, 50) for _ in range(other)))
    job = Job(4 * CELL, 4, key=key_of("a"))
    world.submit(job)
    for _ in range(steps):
        world.step()
    job.is_cancelled = True
    before = (job.cells.computed, job.generated)
    world.step()
    assert (job.cells.computed, job.generated) == before, "it was served after the cancel"
    assert job in world.ended
    assert job not in world.scheduler.running
    assert job not in world.scheduler.waiting
    assert job.reservation is None
