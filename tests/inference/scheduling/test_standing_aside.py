"""Background work beside streams that people read: it steps aside where their gaps have no room, and still goes on."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.scheduling.gaps import StandingAside
from inference_svc.engine.scheduling.schedulable import Rules
from inference_svc.engine.scheduling.step_costs import BesideCosts
from tests.inference.scheduling.scheduling_world import BACKGROUND, CELL, INTERACTIVE, Job, World
from tests.made_models.sampling import sampled

GAP_S = Rules.longest_gap_s
LEARNS = 24  # tokens of a stream, until costs are known
NAMES = st.sampled_from(["a", "b", "c"])


@dataclass
class Watched(World):
    """It also notes when each turn drew its tokens."""

    tokens_s: dict[Job, list[float]] = field(default_factory=dict)

    def _draw_token(self, job: Job) -> None:
        super()._draw_token(job)
        self.tokens_s.setdefault(job, []).append(self.now)

    def gaps_of(self, job: Job) -> list[float]:
        return [after - before for before, after in pairwise(self.tokens_s[job])]


def world_of(token_s: float, cell_s: float, deep_s: float) -> Watched:
    return Watched(token_s=token_s, cell_s=cell_s, row_s=256 * deep_s, deep_s=deep_s)


WORLDS = st.builds(world_of, st.floats(0.001, 0.04), st.floats(0.002, 0.4), st.floats(0.0, 2e-5))


def background(cells: int, reply: int, namespace: str) -> Job:
    return Job(cells * CELL, reply, namespace=namespace, priority=BACKGROUND)


BACKGROUND_JOBS = st.lists(st.builds(background, st.integers(1, 12), st.integers(1, 12), NAMES), min_size=1, max_size=8)


def decode_all(world: World) -> None:
    while any(job.is_prefilling for job in (*world.scheduler.waiting, *world.scheduler.running)):
        world.step()


def beside(world: Watched, jobs: list[Job], namespace: str, tokens: int) -> Job:
    """A stream that a person reads, from its first token on beside these turns, of which half decode by then."""
    world.submit(*jobs[: len(jobs) // 2])
    decode_all(world)
    stream = Job(1, tokens, namespace=namespace)
    world.submit(*jobs[len(jobs) // 2 :], stream)
    while stream not in world.ended:
        world.step()
    return stream


@given(WORLDS, BACKGROUND_JOBS, NAMES)
@settings(max_examples=sampled(4, of=40), deadline=None)
def test_a_persons_stream_waits_beyond_its_gap_for_an_eighth_of_the_time(
    world: Watched, jobs: list[Job], namespace: str
) -> None:
    stream = beside(world, [*jobs, *(background(12, 1_000, "a") for _ in range(2))], namespace, 150)
    own_s = world.step_s(1) + 150 * world.deep_s
    room_s = own_s + max(GAP_S - own_s, min(GAP_S, 1.25 * own_s))
    gaps = world.gaps_of(stream)[LEARNS:]
    beyond = [gap - own_s for gap in gaps if gap > 1.05 * room_s]
    row_s = world.row_s + 13 * CELL * world.deep_s
    dearest_s = max(world.cell_s, row_s)
    assert max(beyond, default=0.0) <= dearest_s + max(room_s - own_s, row_s), (
        "a row whose cost is not known goes along"
    )
    assert sum(beyond) <= sum(gaps) / 4 + 2 * dearest_s, "rows and cells have an eighth each"


@given(WORLDS, BACKGROUND_JOBS, NAMES)
@settings(max_examples=sampled(4, of=40), deadline=None)
def test_background_turns_end_though_somebody_reads_all_the_time(
    world: Watched, jobs: list[Job], namespace: str
) -> None:
    """For a tenth of the time at least they are computed."""
    jobs = jobs[:4]
    world.submit(stream := Job(1, 1 << 20, namespace=namespace), *jobs)
    while not {*jobs} <= {*world.ended}:
        world.steps = 0
        world.step()
    alone_s = sum(job.prompt_tokens // CELL * world.cell_s for job in jobs)
    alone_s += sum(job.reply_tokens * (world.row_s + 13 * CELL * world.deep_s) for job in jobs)
    assert world.now <= 10 * alone_s + sum(job.reply_tokens for job in jobs) * 20 * world.step_s(1) + 1
    assert stream not in world.ended


@pytest.mark.parametrize("namespace", ["a", "d"])
def test_every_one_of_many_background_rows_goes_on_beside_a_stream(namespace: str) -> None:
    """Each of them takes longer than a gap. The seats of a namespace are given up, its turn comes again."""
    world = Watched(row_s=0.02, deep_s=1e-4, token_s=0.01, cell_s=0.001, rules=Rules(ageing_s=0.1))
    crowd = [background(1, 10_000, name) for name in "aaaaaabc"]
    world.submit(*crowd)
    decode_all(world)
    world.submit(stream := Job(1, 1 << 20, namespace=namespace))
    while stream.generated < 3:
        world.step()
    drawn = {job: len(world.tokens_s[job]) for job in crowd}
    while not all(len(world.tokens_s[job]) > count for job, count in drawn.items()):
        world.step()
        assert sum(job.priority is BACKGROUND for job in world.decoded[-1]) <= 1


def test_short_turns_of_people_keep_no_background_row_from_its_seat() -> None:
    world = Watched(row_s=0.02, token_s=0.01, cell_s=0.001)
    world.submit(*(crowd := [background(1, 10_000, "a") for _ in range(8)]))
    for _ in range(30):
        world.submit(Job(1, 3, namespace="b"))
        for _ in range(8):
            world.step()
    drawn = sorted(len(world.tokens_s[job]) for job in crowd)
    assert drawn[0] > drawn[-1] / 2


def test_no_gap_has_both_a_row_and_a_cell_that_it_has_no_room_for() -> None:
    world = Watched(token_s=0.01, row_s=0.06, cell_s=0.15)
    stream = beside(world, [background(1, 1_000, "a"), background(60, 1, "a")], "a", 700)
    gaps = world.gaps_of(stream)[LEARNS:]
    own_s = world.step_s(1)
    assert max(gaps) <= own_s + 0.15 + 1e-9
    rows, cells = ([gap for gap in gaps if gap == pytest.approx(own_s + more_s)] for more_s in (0.06, 0.15))
    assert len(rows) * 0.06 == pytest.approx(sum(gaps) / 8, rel=0.3)
    assert len(cells) * 0.15 == pytest.approx(sum(gaps) / 8, rel=0.3)


def test_rows_and_cells_share_the_room_of_a_gap() -> None:
    world = Watched(token_s=0.01, row_s=0.012, cell_s=0.025)
    stream = beside(world, [background(1, 1_000, "a"), background(60, 1, "a")], "a", 200)
    gaps = world.gaps_of(stream)[LEARNS:]
    assert sum(0.025 for gap in gaps if gap > GAP_S) <= sum(gaps) / 8


def test_costs_of_rows_become_known_though_cells_fit_behind_each_step() -> None:
    """Where a step ends beside a cell, as on a GPU, it does not show the costs of its rows."""
    world = Watched(token_s=0.001, row_s=0.001, cell_s=0.02, is_behind=True)
    world.submit(*(background(1, 1_000, "a") for _ in range(4)))
    decode_all(world)
    world.submit(*(background(90, 1, "a") for _ in range(4)), Job(1, 60, namespace="a"))
    for _ in range(30):
        world.step()
    assert len(world.decoded[-1]) == 5
    assert world.prefilled[-1].is_prefilling


def test_a_cell_that_took_longer_than_was_thought_is_followed_by_a_longer_wait() -> None:
    world = Watched(token_s=0.01, cell_s=0.1)
    world.submit(Job(1, 2_000, namespace="a"), prompt := background(12, 1, "a"))
    while len(prompt.cells_s) < 8:
        world.step()
    world.cell_s = 0.5
    while len(prompt.cells_s) < 10:
        world.step()
    assert prompt.cells_s[9] - prompt.cells_s[8] >= 3.5


def test_a_persons_prompt_does_not_wait_behind_an_old_one_that_stands_aside() -> None:
    """An old background prompt of its namespace was next, stood aside, and so nothing was computed for seconds."""
    world = Watched(token_s=0.01, cell_s=0.2)
    world.submit(Job(1, 4_000, namespace="a"))
    for _ in range(5):
        world.step()
    world.submit(*(background(cells, 1, "a") for cells in (12, 13, 14)))
    while world.now < 13:
        world.step()
    world.submit(prompt := Job(30 * CELL, 1, namespace="a"))
    began_s = world.now
    while prompt not in world.ended:
        world.step()
    assert max(after - before for before, after in pairwise([began_s, *prompt.cells_s])) < 3 * 0.21


def test_rows_that_fit_into_the_gap_go_along_in_every_step() -> None:
    world = Watched(row_s=0.001, token_s=0.01, cell_s=0.001)
    crowd = [background(1, 300, "a") for _ in range(4)]
    world.submit(*crowd, Job(1, 300, namespace="b"))
    for _ in range(60):
        world.step()
    assert [len(rows) for rows in world.decoded[-40:]] == [5] * 40


@pytest.mark.parametrize("row_s", [0.001, 0.06], ids=["within the gap", "beyond it"])
def test_costs_of_rows_become_known_where_several_namespaces_have_some(row_s: float) -> None:
    """Their turns to go along changed with each step, and no step had the rows of the one before it."""
    world = Watched(row_s=row_s, token_s=0.01, cell_s=0.001)
    world.submit(*(background(1, 900, name) for name in "abab"), Job(1, 900, namespace="c"))
    for _ in range(150):
        world.step()
    assert not world.scheduler._steps._rows.is_learning
    if row_s < GAP_S:
        assert [len(rows) for rows in world.decoded[-40:]] == [5] * 40


def test_a_persons_step_that_takes_more_than_the_gap_keeps_no_cheap_row_out() -> None:
    """There is no gap left to be kept, and the row makes it hardly longer."""
    world = Watched(row_s=0.002, token_s=0.1, cell_s=0.001)
    world.submit(background(1, 300, "a"), Job(1, 300, namespace="a"))
    for _ in range(60):
        world.step()
    assert [len(rows) for rows in world.decoded[-40:]] == [2] * 40


@pytest.mark.parametrize(("own_gap_s", "namespace", "waits"), [(None, "a", True), (0.3, "a", False), (0.3, "b", False)])
def test_a_cell_waits_seven_times_as_long_as_it_takes_where_no_gap_has_room(
    own_gap_s: float | None, namespace: str, *, waits: bool
) -> None:
    world = Watched(token_s=0.01, cell_s=0.2)
    world.submit(Job(1, 2_000, namespace=namespace, longest_gap_s=own_gap_s))
    for _ in range(5):
        world.step()
    world.submit(prompt := background(8, 1, "a"))
    while prompt not in world.ended:
        world.step()
    between = [after - before for before, after in pairwise(prompt.cells_s[3:])]
    assert min(between) >= 1.4 if waits else max(between) <= 0.45
    assert max(between) <= 1.7


@given(st.lists(st.builds(background, st.integers(1, 12), st.integers(1, 30), NAMES), min_size=1, max_size=12))
@settings(max_examples=sampled(4, of=40), deadline=None)
def test_without_people_background_turns_have_all_rows_and_cells_of_their_longer_gap(jobs: list[Job]) -> None:
    """As people's turns have that have such a gap."""
    histories = []
    for priority, gap_s in ((BACKGROUND, GAP_S), (INTERACTIVE, Rules.background_gap_s)):
        rules = Rules(longest_gap_s=gap_s, ageing_s=1e9)
        world = Watched(rules=rules, row_s=0.01, deep_s=1e-5, cell_s=0.15)
        same = [Job(job.prompt_tokens, job.reply_tokens, namespace=job.namespace, priority=priority) for job in jobs]
        number = {job: place for place, job in enumerate(same)}
        world.submit(*same)
        world.run()
        rows = [[number[job] for job in step] for step in world.decoded]
        histories.append((rows, [number[job] for job in world.prefilled], world.now))
    assert histories[0] == histories[1]


def test_work_that_stands_aside_has_an_eighth_of_the_time_and_waits_no_longer_than_so() -> None:
    aside = StandingAside(5.0)
    aside.worked(10.0, 0.25)
    assert [aside.is_due(10.0 + waited) for waited in (0.0, 1.5, 1.75)] == [False, False, True]
    aside.worked(12.0)  # it takes as long as before
    assert [aside.is_due(12.0 + waited) for waited in (1.5, 1.75)] == [False, True]
    aside.worked(14.0, 60.0)
    assert [aside.is_due(14.0 + waited) for waited in (4.75, 5.0)] == [False, True]


def test_background_rows_cost_as_much_as_a_step_takes_longer_with_them() -> None:
    costs = BesideCosts()
    costs.stepped(0.5, 1_000)  # nothing to compare it with
    assert (costs.own_s, costs.row_s(1_000)) == (None, None)
    costs.stepped(0.1, 0)
    costs.stepped(0.3, 1_000)
    assert costs.own_s == 0.1
    assert costs.row_s(2_000) == pytest.approx(0.4)


def test_seats_of_rows_that_are_gone_are_not_remembered() -> None:
    world = Watched(row_s=0.002, token_s=0.01, cell_s=0.001)
    crowd = [background(1, 3, name) for name in "abcd" for _ in range(6)]
    world.submit(stream := Job(1, 1_000, namespace="people"), *crowd)
    while not {*crowd} <= {*world.ended}:
        world.step()
    world.step()
    assert stream not in world.ended
    assert world.scheduler._steps._rows._seats == {}
