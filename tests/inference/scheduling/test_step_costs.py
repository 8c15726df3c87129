"""How long running streams wait beside a prompt or a restore: as long as they may, because what it costs is learned."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_svc.engine.grid import cut_cell
from inference_svc.engine.scheduling.schedulable import Rules
from inference_svc.engine.scheduling.step_costs import StepCosts
from tests.inference.scheduling.scheduling_world import BACKGROUND, Job, World
from tests.made_models.sampling import sampled

STEP_S = 0.005
LONG = 32_768
CELL = 2_048
CELLS = [(at, CELL) for at in range(0, LONG, CELL)]
DEEP_CELLS = [(4 * LONG + at, CELL) for at, _ in CELLS]
GAP_S = 2.25 * STEP_S
GPU = Rules(cell_tokens=CELL, least_tokens=256, longest_gap_s=GAP_S)


def prefill_s(position: int, tokens: int) -> float:
    """Somewhat as an 8B model's cells on an H200: 83 ms for 2,048 tokens at 32 K, 67 at 8 K."""
    return 0.001 + tokens * 17.5e-6 * (1 + position / LONG)


def streaming(rules: Rules = GPU, **costs: object) -> World:
    """Four streams that run for a while already."""
    world = World(rules=rules, token_s=STEP_S, cost_s=prefill_s, **costs)  # type: ignore[arg-type]
    world.submit(*(Job(1, 1_000) for _ in range(4)))
    for _ in range(10):
        world.step()
    return world


def longest_cell(*streams: Job) -> int:
    """Tokens of the longest cell of a long prompt beside these."""
    world = World(rules=replace(GPU, longest_gap_s=0.03), token_s=STEP_S, cost_s=prefill_s)
    world.submit(*streams)
    for _ in range(10):
        world.step()
    before, late = len(world.passes), Job(8 * CELL, cell_tokens=CELL)
    world.submit(late)
    while late.is_prefilling:
        world.step()
    assert max(world.gaps) <= min(stream.longest_gap_s or 0.03 for stream in streams) + 2 * STEP_S
    return max(cell.size for cells in world.passes[before:] for cell in cells)


def test_a_stream_with_a_longer_gap_has_longer_cells_beside_it_and_one_with_a_shorter_gap_shorter_ones() -> None:
    usual = longest_cell(Job(1, 1_000))
    assert longest_cell(Job(1, 1_000, longest_gap_s=0.015)) <= usual / 2
    assert longest_cell(Job(1, 1_000, longest_gap_s=0.2)) == CELL > usual


def test_the_shortest_gap_of_all_streams_holds() -> None:
    usual = longest_cell(Job(1, 1_000))
    assert longest_cell(Job(1, 1_000), Job(1, 1_000, longest_gap_s=1.0)) == usual
    short = longest_cell(Job(1, 1_000), Job(1, 1_000, longest_gap_s=0.015))
    assert short == longest_cell(Job(1, 1_000, longest_gap_s=0.015)) < usual
    assert longest_cell(Job(1, 1_000, longest_gap_s=0.015, priority=BACKGROUND)) == short, "its own, also if none reads"


@given(st.lists(st.floats(0.02, 0.2), min_size=1, max_size=3), st.integers(1, 3))
@settings(max_examples=sampled(6, of=60), deadline=None)
def test_a_namespaces_short_gap_does_not_slow_the_prompts_of_others(gaps_s: list[float], prompts: int) -> None:
    """Each of their cells would be shorter, and costs what a step costs and more."""

    def ended_s(gaps_s: Sequence[float | None]) -> float:
        rules = replace(GPU, longest_gap_s=0.05)
        world = World(rules=rules, token_s=STEP_S, cost_s=lambda at, tokens: STEP_S + prefill_s(at, tokens))
        world.submit(*(Job(1, 3_000, longest_gap_s=gap_s, namespace="a") for gap_s in gaps_s))
        world.submit(Job(1, 3_000, namespace="b"))
        for _ in range(10):
            world.step()
        theirs = [Job(4 * CELL, cell_tokens=CELL, namespace="b") for _ in range(prompts)]
        world.submit(*theirs)
        while any(job.is_prefilling for job in theirs):
            world.step()
        return world.now

    assert ended_s(gaps_s) <= ended_s([None] * len(gaps_s)) * 1.05


def longest_stall(world: World, late: Job) -> float:
    """The longest gap of the streams while a turn comes to its first token, in steps more than one."""
    before = len(world.gaps)
    world.submit(late)
    while not late.generated:
        world.step()
    return max(world.gaps[before:]) / STEP_S - 1


@pytest.mark.parametrize("late", [{"prompt_tokens": LONG}, {"files": 128}, {"files": 3}])
def test_a_long_agent_stalls_streams_by_their_gap_or_a_rest_that_takes_a_step_more(
    late: dict[str, int],
) -> None:
    job = Job(cell_tokens=CELL, **late)  # type: ignore[arg-type]
    assert longest_stall(streaming(file_s=0.0012), job) <= GAP_S / STEP_S
    assert job.files == 0


def test_cells_may_be_short_from_the_beginning() -> None:
    world = World(
        rules=Rules(cell_tokens=CELL, least_tokens=64, longest_gap_s=GAP_S),
        token_s=STEP_S,
        cost_s=lambda at, tokens: 0.1,
    )
    world.submit(Job(1, 1_000))
    for _ in range(10):
        world.step()
    late = Job(LONG, cell_tokens=CELL)
    world.submit(late)
    ends = set()
    while late.cells.computed < 256:
        world.step()
        ends.add(late.cells.computed)
    assert sorted(ends - {0}) == [64, 128, 192, 256]


def test_a_pass_over_one_token_costs_a_step_and_does_not_follow_files_in_theirs() -> None:
    """What a token of a long prompt costs says nothing of it."""
    world = World(
        rules=GPU, token_s=STEP_S, file_s=0.0012, cost_s=lambda at, tokens: max(STEP_S, prefill_s(at, tokens))
    )
    world.submit(*(Job(600, 1_000) for _ in range(4)))
    for _ in range(30):
        world.step()
    assert max(longest_stall(world, Job(1, files=files, cell_tokens=CELL)) for files in (6, 7, 10)) <= 1.5


def test_nobody_waits_longer_for_it_than_the_streams_make_it_wait() -> None:
    """Files and cells are as many as fit, not one a step."""
    world = streaming(file_s=0.0012)
    began_s, job = world.now, Job(CELL, files=128, cell_tokens=CELL)
    longest_stall(world, job)
    assert world.now - began_s <= 2.2 * (128 * 0.0012 + prefill_s(0, CELL))


def test_files_are_loaded_together_where_most_of_the_time_is_a_loads_own() -> None:
    """As on an H200: 5 ms for one file, 7 ms for eight."""
    world = streaming(load_s=0.0047, file_s=0.0003)
    steps, job = world.steps, Job(1, files=128)
    assert longest_stall(world, job) <= 1.6
    assert world.steps - steps <= 128 / 4


def test_streams_do_not_wait_for_files_that_come_by_themselves() -> None:
    """As on an H200: 2 ms for the writes of a layer each, and 150 MB, 32 files, on their way for three steps."""
    world = streaming(load_s=0.002, sent_s=3 * STEP_S / 32)
    steps, job = world.steps, Job(1, files=128)
    assert longest_stall(world, job) == pytest.approx(0.002 / STEP_S), "what a load takes, and once a step"
    assert world.steps - steps <= 24
    alone = World(rules=GPU, load_s=0.002, sent_s=3 * STEP_S / 32)
    alone.submit(Job(1, files=128))
    alone.run()
    assert alone.now == pytest.approx(4 * (0.002 + 3 * STEP_S) + alone.cell_s), "who is alone waits for bytes"


def test_what_the_end_of_a_load_takes_does_not_make_the_next_one_slow() -> None:
    """1 ms for a piece, and 12 ms to wait for all of them at the end."""
    world, took = streaming(load_s=0.001, load_end_s=0.012, sent_s=STEP_S / 64), []
    for _ in range(2):
        before = world.steps
        longest_stall(world, Job(1, files=128))
        took.append(world.steps - before)
    assert took[1] <= took[0] - 3, "it need not learn again that many files go at once"


def test_a_cell_goes_on_beside_files_that_are_on_their_way() -> None:
    world = streaming(load_s=0.001, sent_s=10.0)
    loading, cold = Job(1, files=128), Job(2_000, cell_tokens=CELL)
    world.submit(loading, cold)
    while not cold.generated:
        world.step()
    assert loading.files == 127


@given(
    st.floats(0, 0.01),
    st.floats(1e-5, 0.01),
    st.lists(st.floats(0.5, 2), min_size=40, max_size=40),
    st.floats(0.001, 0.05),
)
def test_loads_come_near_to_the_time_they_have_and_stay_there(
    load_s: float, file_s: float, noise: list[float], seconds: float
) -> None:
    costs, files = StepCosts(), 1
    for times in (*noise, *[1.0] * 40):
        costs.learn(None, files, (load_s + files * file_s) * times)
        files = max(1, costs.files_within(seconds) or 0)
    right = (seconds - load_s) / file_s
    assert files <= max(2, right + 1)
    assert files >= min(right / 2 - 1, 40)


def test_a_cell_is_whole_while_no_turn_decodes_and_never_where_it_must_be() -> None:
    alone = World(rules=GPU, cost_s=prefill_s)
    alone.submit(Job(LONG, cell_tokens=CELL))
    alone.run()
    assert len(alone.prefilled) == LONG // CELL
    bound = streaming(Rules(cell_tokens=CELL, least_tokens=CELL, longest_gap_s=GAP_S))
    assert longest_stall(bound, Job(LONG, cell_tokens=CELL)) > 10
    assert len(bound.prefilled) == 4 + LONG // CELL


@pytest.mark.parametrize(("token_s", "size"), [(0.003, 128), (0.0012, 384), (0.0004, 1_024)])
def test_a_slow_device_computes_cells_of_half_a_second_while_no_turn_decodes(token_s: float, size: int) -> None:
    """As laptops: after the first cell its time is known. The cells of a device that must not cut them stay whole."""
    for least, expected in ((128, size), (1_024, 1_024)):
        rules = Rules(cell_tokens=1_024, least_tokens=least)
        world = World(rules=rules, cost_s=lambda at, tokens: token_s * tokens)
        world.submit(Job(4 * 1_024, cell_tokens=1_024))
        world.run()
        sizes = [cell.size for cells in world.passes for cell in cells]
        assert sizes[0] == 1_024
        assert max(sizes[1:]) == expected
        assert {sum(sizes[:count]) % least for count in range(len(sizes) + 1)} == {0}


def test_a_file_that_takes_long_is_the_only_one_of_its_step() -> None:
    world = streaming(file_s=0.02)
    assert longest_stall(world, Job(files=40)) == pytest.approx(0.02 / STEP_S)


@given(st.integers(0, 100_000), st.integers(1, 2_048), st.integers(256, 4_096), st.sampled_from([128, 256]))
@settings(deadline=None)
def test_a_cut_cell_ends_at_an_edge_within_its_limit(position: int, tokens: int, most: int, edge: int) -> None:
    cut = cut_cell(position, tokens, most, edge)
    assert 0 < cut <= min(tokens, most)
    assert cut == tokens or ((position + cut) % edge == 0 and cut + edge > most)


def test_what_is_not_known_is_reported_to_be_unknown_and_deep_tokens_cost_more() -> None:
    costs = StepCosts()
    assert (costs.step_s, costs.tokens_within(1, 0), costs.files_within(1)) == (None, None, None)
    costs.learn(0, 256, 0.0256)
    costs.learn(30_000, 256, 0.0512)
    costs.learn(0, 1_024, 0.1024)
    costs.learn(None, 4, 0.04)
    assert [round(costs.tokens_within(0.1, at) or 0) for at in (3, 20_000, 90_000)] == [1_000, 500, 500]
    assert costs.files_within(0.03) == 3
    assert costs.files_within(0.05) == 5, "one more than the last time"
    assert costs.files_within(0.1) == 8, "twice as many"
    assert costs.tokens_within(-1, 0) == 0
    costs.learn(0, 256, 3.0)  # kernels were compiled meanwhile
    assert costs.tokens_within(0.1, 0) == 1_000
    for took_s in (0.005, 0.005, 0.3, 0.005):
        costs.stepped(took_s, 1)
    assert costs.step_s == 0.005


def test_one_pass_that_waited_for_kernels_changes_no_line() -> None:
    costs = StepCosts()
    for tokens, took_s in ((128, 0.0145), (256, 0.0175), (1_024, 0.3), (128, 0.0145), (256, 0.0175)):
        costs.learn(0, tokens, took_s)
    costs.learn(0, 128, 0.0145)
    costs.learn(0, 256, 0.0175)
    assert 1_200 <= (costs.tokens_within(0.043, 0) or 0) <= 1_344


@example([1.04, 0.93] * 3 + [1.04])  # the flattest line
@given(st.lists(st.floats(0.93, 1.07), min_size=7, max_size=7))
def test_passes_of_nearly_one_length_are_no_line_to_much_longer_ones(noise: list[float]) -> None:
    """As measured: 1,024 and 1,152 tokens took as long as each other, and 1,664 in a pass for 44 ms took 77."""
    costs = StepCosts()
    for tokens, times in zip((1_024, 1_152) * 4, noise, strict=False):
        costs.learn(0, tokens, (0.001 + tokens * 35e-6) * times)
    assert (costs.tokens_within(0.048, 0) or 0) <= 1.5 * 1_152


def test_rows_are_counted_on_to_more_at_the_cost_of_each_and_never_to_fewer_for_less() -> None:
    costs = StepCosts()
    assert costs.rows_within(1.0) == 0
    for _ in range(9):
        costs.stepped(0.008, 4)
    assert [costs.rows_within(seconds) for seconds in (0.0, 0.007, 0.008, 0.017, 0.08)] == [0, 0, 4, 8, 40]
    costs.stepped(1e-6, 4)
    costs.stepped(5.0, 4)
    assert costs.rows_within(0.008) == 4, "one strange step changes nothing"


def test_a_deep_prompts_first_passes_are_too_long_once() -> None:
    """Lengths that its depth has not seen are known from prompts that were not deep, where they cost a sixth: four
    passes of 130 to 240 ms came one behind another.
    """
    costs, took = StepCosts(), list[float]()

    def learn(position: int, tokens: int) -> None:
        took.append(0.003 + tokens * (25e-6 + 2e-9 * position))
        costs.learn(position, tokens, took[-1])

    for tokens in (128, 512, 1_024, 2_048):
        learn(0, tokens)
    del took[:]
    for _ in range(10):
        learn(65_536, max(128, costs.tokens_within(0.043, 65_536) or 0))
    assert sum(each > 0.1 for each in took) == 1
    assert sum(took[:5]) < 0.46
    assert 0.03 < min(took[-5:]) <= max(took[-5:]) < 0.05


@pytest.mark.parametrize(
    ("fixed_s", "each_s", "fewest"), [(0.026, 30e-6, 384), (0.0, 0.03 / 128, 128), (0.05, 0.0, 128)]
)
def test_a_prompt_that_is_deep_from_its_first_pass_on_does_not_stay_at_short_ones(
    fixed_s: float, each_s: float, fewest: int
) -> None:
    """An agent was restored, and nothing computed before: 128 tokens take most of a gap, nearly all of it fixed."""
    costs, took, sizes = StepCosts(), list[float](), list[int]()
    for _ in range(40):
        sizes.append(max(128, costs.tokens_within(0.043, 120_000) or 0) // 128 * 128)
        took.append(fixed_s + sizes[-1] * each_s)
        costs.learn(120_000, sizes[-1], took[-1])
    assert min(sizes[-8:]) >= fewest
    assert sum(each > 0.046 and size > 128 for each, size in zip(took, sizes, strict=True)) <= 1


@example((0.007, 12.5e-6, 1.7e-9), DEEP_CELLS, 2_048, Random(0))
@example((0.0195, 5e-6, 1e-9), DEEP_CELLS, LONG, Random(0))
@given(
    st.tuples(st.floats(0, 0.02), st.floats(5e-6, 40e-6), st.floats(1e-10, 2e-9)),
    st.sampled_from([[(0, 128), (0, 512), (0, 1_024), CELLS[0]], CELLS, DEEP_CELLS]),
    st.sampled_from([2_048, LONG, 65_536, 100_000, 131_072]),
    st.builds(Random, st.integers(0, 1 << 32)),
)
@settings(max_examples=sampled(60, of=2_000), deadline=None)
def test_passes_soon_take_the_time_they_have_whatever_other_depths_know(
    seconds: tuple[float, float, float], known: list[tuple[int, int]], position: int, noise: Random
) -> None:
    """By passes of other depths, as many times as long, sizes swung between 128 and 512 tokens at 128 K, and every
    third pass took 60 ms and more.
    """
    costs, (fixed_s, each_s, deeper_s) = StepCosts(), seconds

    def took_s(at: int, tokens: int) -> float:
        return (fixed_s + tokens * (each_s + deeper_s * at)) * noise.uniform(0.96, 1.04)

    for at, tokens in known:
        costs.learn(at, tokens, took_s(at, tokens))
    passes = []
    for _ in range(24):
        tokens = max(128, min(CELL, costs.tokens_within(0.043, position) or 0) // 128 * 128)
        passes.append((tokens, took_s(position, tokens)))
        costs.learn(position, *passes[-1])
        position += tokens
    assert sum(took > 0.06 and tokens > 128 for tokens, took in passes[8:]) <= 2
    right = min(CELL, (0.043 - fixed_s) / (each_s + deeper_s * position))
    assert median(tokens for tokens, _ in passes[8:]) >= right / 4
