"""Which prompts' cells share a pass: what one leaves of it, the next in order get. `World` checks each pass."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_svc.engine.scheduling.schedulable import Rules, SharedPass
from inference_svc.engine.scheduling.step_costs import StepCosts
from tests.inference.scheduling.scheduling_world import BACKGROUND, INTERACTIVE, Job, World
from tests.inference.scheduling.test_gpu_crowds import EVEN_S, Gpu, cell_s
from tests.made_models.sampling import sampled

CELL, ROW = 2_048, 64
SHARED = Rules(cell_tokens=CELL, least_tokens=128, shared_pass=SharedPass(ROW, CELL))
ALONE = replace(SHARED, shared_pass=None)


def prompt(tokens: int, **fields: object) -> Job:
    return Job(tokens, cell_tokens=CELL, **fields)  # type: ignore[arg-type]


def prefill_s(_position: int, tokens: int) -> float:
    return max(0.011, 0.001 + 35e-6 * tokens)


def passes(world: World, *jobs: Job) -> list[list[tuple[Job, int]]]:
    """The cells of each pass until all have drawn a token."""
    before = len(world.passes)
    world.submit(*jobs)
    while any(not job.generated for job in jobs):
        world.step()
    return [[(cell.turn, cell.size) for cell in each] for each in world.passes[before:]]


def test_short_prompts_are_packed_and_the_last_one_is_cut_where_cells_are() -> None:
    jobs = [prompt(tokens) for tokens in (700, 300, 900, 250)]
    found = passes(World(rules=SHARED), *jobs)
    # In rows: 256 + 320 + 704 leave 768.
    assert found == [[(jobs[3], 250), (jobs[1], 300), (jobs[0], 700), (jobs[2], 768)], [(jobs[2], 132)]]


def test_a_prompt_is_not_overtaken_by_those_in_whose_pass_it_is() -> None:
    """It counted against it, though it comes last into the pass because its rest is the longest."""
    world, jobs = World(rules=SHARED), [prompt(tokens) for tokens in (700, 300, 900, 250)]
    left_out = prompt(4_000)
    world.submit(left_out, *jobs)
    world.step()
    assert [cell.turn for cell in world.passes[0]] == [jobs[3], jobs[1], jobs[0], jobs[2]]
    assert [job.schedule.overtaken_tokens for job in jobs] == [0, 0, 0, 0]
    assert left_out.schedule.overtaken_tokens >= sum(cell.size for cell in world.passes[0])


def test_a_whole_cell_or_one_that_leaves_a_window_has_a_pass_of_its_own() -> None:
    long, short = prompt(3 * CELL), prompt(500)
    assert passes(World(rules=SHARED), long, short)[0] == [(short, 500), (long, 1_536)]
    windowed = replace(SHARED, shared_pass=SharedPass(ROW, 511))
    long, short = prompt(3 * CELL), prompt(500)
    assert passes(World(rules=windowed), long, short)[0] == [(short, 500), (long, 384)]
    short = prompt(512)
    assert passes(World(rules=windowed), short, prompt(513))[0] == [(short, 512)]


def test_a_step_takes_no_more_tokens_than_the_table_says_with_those_that_fill_up_rows() -> None:
    """Behind 3,926 tokens a cell of 10 takes 64, and one of 128 beside it would be too much."""
    world = World(rules=replace(SHARED, shared_pass=SharedPass(ROW, 255)), cost_s=prefill_s)
    passes(world, prompt(1, reply_tokens=1))
    jobs = [prompt(tokens, reply_tokens=1, priority=BACKGROUND) for tokens in (1_878, 2_058, 2_058)]
    assert [[size for _, size in cells] for cells in passes(world, *jobs)[:3]] == [[1_878], [2_048], [10]]


def test_a_turn_that_cannot_share_a_pass_has_its_own() -> None:
    one, other, own = prompt(100), prompt(200), prompt(150, shares_passes=False)
    found = passes(World(rules=SHARED), one, other, own)
    assert [len(cells) for cells in found if own in dict(cells)] == [1] * len(own.cells_s)


def test_nothing_is_shared_where_cells_must_not_be() -> None:
    found = passes(World(rules=ALONE), *(prompt(100) for _ in range(4)))
    assert [len(cells) for cells in found] == [1] * 4


def test_a_pass_for_people_takes_no_background_prompt_along() -> None:
    """They would wait for it."""
    urgent, later = [prompt(100) for _ in range(2)], [prompt(90, priority=BACKGROUND) for _ in range(2)]
    found = passes(World(rules=SHARED, cost_s=prefill_s), *later, *urgent)
    assert [[job for job, _ in cells] for cells in found] == [urgent, later]


def test_namespaces_take_turns_within_a_pass() -> None:
    crowd = [prompt(900, namespace="a") for _ in range(6)]
    other = prompt(1_000, namespace="b")
    first = passes(World(rules=SHARED), *crowd, other)[0]
    assert [job.namespace for job, _ in first] == ["a", "b"]


def test_each_namespace_owes_its_part_of_a_shared_pass() -> None:
    world = World(rules=SHARED, cost_s=prefill_s)
    passes(world, prompt(CELL, reply_tokens=500, namespace="stream"))
    for _ in range(20):
        world.step()
    one, other = prompt(128, namespace="a"), prompt(384, namespace="b")
    world.submit(one, other)
    world.step()
    owed = {name: world.scheduler._company.of(name).owed_s for name in "ab"}
    assert owed["b"] == pytest.approx(3 * owed["a"])
    assert owed["a"] + owed["b"] == pytest.approx(prefill_s(0, 512), rel=0.2)


def test_a_crowd_of_short_prompts_takes_as_many_passes_as_its_tokens_fill() -> None:
    world = World(rules=SHARED, cost_s=prefill_s)
    found = passes(world, *(prompt(250) for _ in range(32)))
    assert [len(cells) for cells in found] == [8] * 4


def test_a_slow_device_shares_no_pass_for_which_a_cancel_would_wait_long() -> None:
    """Once it is known to be slow: 0.2 s for 200 tokens."""
    world = World(rules=SHARED, cost_s=lambda _, tokens: tokens / 1_000)
    passes(world, prompt(200))
    assert [len(cells) for cells in passes(world, *(prompt(60) for _ in range(4)))] == [1] * 4
    world = World(rules=SHARED, cost_s=lambda _, tokens: tokens / 4_000)
    passes(world, prompt(200))
    assert [len(cells) for cells in passes(world, *(prompt(60) for _ in range(12)))] == [6, 6]


LENGTHS = st.lists(st.integers(1, 3_000), min_size=1, max_size=6)


@given(LENGTHS, LENGTHS, st.sampled_from([255, 1_023, CELL]), st.integers(1, 9))
@settings(max_examples=sampled(20, of=300), deadline=None)
def test_every_prompt_of_any_crowd_is_computed_once_and_ends(
    first: list[int], later: list[int], most: int, reply: int
) -> None:
    """Of two namespaces, some in the background, some while others decode."""
    world = World(rules=replace(SHARED, shared_pass=SharedPass(ROW, most)), cost_s=prefill_s)
    crowds = [
        [
            prompt(n, reply_tokens=reply, namespace="ab"[n % 2], priority=(INTERACTIVE, BACKGROUND)[n % 3 == 0])
            for n in each
        ]
        for each in (first, later)
    ]
    for crowd in crowds:
        world.submit(*crowd)
        for _ in range(3):
            world.step()
    world.run()
    for job in (*crowds[0], *crowds[1]):
        cells = sorted((cell.position, cell.size) for each in world.passes for cell in each if cell.turn is job)
        ends = [position + size for position, size in cells]
        assert [position for position, _ in cells] == [0, *ends[:-1]]
        assert ends[-1] == job.prompt_tokens
        assert job.ended_s is not None


def longest_gap_s(prompts: list[int], step_s: float) -> float:
    """Of streams beside a crowd, whose own prompts they are."""
    world = Gpu(rules=SHARED, step_s=step_s)
    world.submit(prompt(CELL, reply_tokens=24))
    world.run()
    world.gaps.clear()
    world.submit(*(prompt(tokens, reply_tokens=60) for tokens in prompts))
    world.run()
    return max(world.gaps)


@given(st.lists(st.integers(20, 4_000), min_size=2, max_size=16), st.sampled_from([0.003, 0.007, 0.02]))
@example([129, 1_089, 1_217, 2_433, 2_561, 3_265, 2_561, 2_561, 2_561], 0.02)
@settings(max_examples=sampled(15, of=150), deadline=None)
def test_streams_beside_shared_passes_wait_no_longer_than_their_gap_and_a_step(
    prompts: list[int], step_s: float
) -> None:
    """And no longer than a line through other passes may be wrong: of 3,000 crowds 5 waited for one row of blocks more,
    and none for more than two.
    """
    assert longest_gap_s(prompts, step_s) <= SHARED.longest_gap_s + step_s + 2 * EVEN_S + 1e-9


def test_no_second_pass_follows_where_only_a_short_time_is_left() -> None:
    """However few its tokens, it costs half of a pass of 769 and more."""
    assert longest_gap_s([20, 321, 2_817, 20, 20, 20, 20, 20, 129, 193, 449, 641, 961, 1_025], 0.003) <= 0.055


@pytest.mark.parametrize(("count", "tokens"), [(32, 256), (16, 600)])
def test_a_crowds_last_first_token_comes_sooner_with_shared_passes(count: int, tokens: int) -> None:
    def last_first_s(rules: Rules) -> float:
        world = Gpu(rules=rules)
        world.submit(prompt(CELL, reply_tokens=24))
        world.run()
        began_s = world.now
        passes(world, *(prompt(tokens, reply_tokens=100) for _ in range(count)))
        return world.now - began_s

    assert last_first_s(SHARED) <= 0.82 * last_first_s(ALONE)


def test_a_crowd_shares_passes_though_the_first_shared_one_waited_for_its_kernels() -> None:
    """As before an engine is ready: four prompts of 16 tokens, which took 82 ms on an H100."""

    def last_first_s(world: Gpu) -> float:
        began_s = world.now
        found = passes(world, *(prompt(1_500, reply_tokens=100) for _ in range(16)))
        assert any(len(cells) > 1 for cells in found)
        return world.now - began_s

    compiled, slow = Gpu(rules=SHARED), Gpu(rules=SHARED, compile_s=0.07)
    for world in (compiled, slow):
        world.submit(prompt(CELL, reply_tokens=24))
        world.run()
        passes(world, *(prompt(16) for _ in range(4)))
        world.compile_s = 0.0
    assert last_first_s(slow) <= 1.08 * last_first_s(compiled)


def test_a_crowds_passes_stay_long_after_a_few_short_ones_were_slow() -> None:
    """A prompt's rests, beside streams whose rows were new: 22 ms for 128 tokens, of which 1,024 take 37."""
    costs = StepCosts()
    for tokens, took_s in ((128, 0.022), (128, 0.024), (128, 0.022), (128, 0.023), (256, 0.026)):
        costs.learn(1_024, tokens, took_s)
    sizes = []
    for _ in range(8):
        sizes.append(max(128, (costs.tokens_within(0.043, 1_024) or 0) // 128 * 128))
        costs.learn(1_024, sizes[-1], cell_s(sizes[-1]))
    assert sizes[-1] == 1_024


def test_a_crowds_passes_do_not_stay_short_because_the_first_of_all_lengths_were_slow() -> None:
    """As measured before and behind *ready*, with 4-bit weights: 27 ms and 22 us a token, but all short passes had
    taken 57 to 69. Every pass of the crowd then had 128 tokens, at each depth for itself.
    """
    costs = StepCosts()
    for position, tokens, took_s in (
        (0, 2_048, 0.203),
        (0, 300, 0.057),
        (0, 128, 0.065),
        (0, 192, 0.069),
        (0, 256, 0.059),
        (0, 2_048, 0.068),
        (2_048, 1_931, 0.101),
        (0, 1_931, 0.101),
        (1_920, 139, 0.045),
    ):
        costs.learn(position, tokens, took_s)
    sizes: list[int] = []
    for _ in range(6):
        position = 0
        while position < CELL:
            fits = (costs.tokens_within(0.043, position) or 0) // 256 * 256
            sizes.append(min(max(128, fits), CELL - position))
            costs.learn(position, sizes[-1], 0.027 + 22e-6 * sizes[-1])
            position += sizes[-1]
    assert sizes[-4:] == [512] * 4
