"""A crowd on a GPU, played with the costs of an H100 and Llama 3.1 8B's shape: prompts come first, streams go on."""

from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_svc.engine.scheduling.schedulable import Rules, SharedPass, Status
from inference_svc.engine.scheduling.step_schedule import Grant
from tests.inference.scheduling.scheduling_world import Job, World
from tests.made_models.sampling import sampled

BUILD_S, ENQUEUE_S = 0.008, 0.010  # by the processor, of a cell that keeps no graph
KEPT_BUILD_S, KEPT_S = 0.004, 0.014  # of one that does, as all beside streams that may share a pass (an H200's host)
CELL = 2_048
GPU = Rules(cell_tokens=CELL, least_tokens=128, shared_pass=SharedPass(64, CELL))
LONGER = replace(GPU, longest_gap_s=0.055)  # 43 ms for a pass beside steps of 7, as much as 1,280 tokens take
EVEN_S = 0.016  # at most, between the times of two lengths of a pass, which are learned as a line
PASS_MS = (16.5, 23.0, 27.5, 35.0, 43.5, 51.0, 57.5, 64.0)  # of 256 tokens, 512 and so on, as measured


def cell_s(tokens: int) -> float:
    """By the device."""
    return PASS_MS[-(-tokens // 256) - 1] / 1000 if tokens <= CELL else 31.5e-6 * tokens


@dataclass
class Gpu(World):
    """It computes what is enqueued in order. As `EngineWorker.step`: a step that was enqueued behind a cell is read
    when the first layers of the next cell are enqueued."""

    launched: deque[tuple[tuple[Job, ...], float, bool]] = field(default_factory=deque)  # rows, end, is behind a cell
    free_s: float = 0.0
    step_s: float = 0.007
    compile_s: float = 0.0  # of each pass besides
    kept_s: float = KEPT_S
    more: float = 0.0  # by which every fifth pass takes longer

    def step(self) -> None:
        self.steps += 1
        self.admit()
        decoding = self.scheduler.begin_step(self.now)
        ahead = self.launched[-1] if self.launched else None
        has_behind = ahead is not None and ahead[2]
        if not (has_behind and self.cells(decoding)):
            before = len(self.launched)
            self.launch(decoding)
            self.read(before)
            self.cells(decoding)
        for job in [job for job in self.scheduler.running if job.generated >= job.reply_tokens]:
            self._end(job, leaves=False)

    def cells(self, decoding: tuple[Job, ...]) -> bool:
        began_s, grants = self.now, 0
        while grant := self.scheduler.grant(self.now - began_s, is_behind_step=bool(self.launched)):
            grants, is_kept = grants + 1, grant.tokens <= 256 or bool(self.rules.shared_pass and decoding)
            self.now += KEPT_BUILD_S if is_kept else BUILD_S
            longer = self.more if len(self.passes) % 5 == 4 else 0.0
            took_s = cell_s(grant.tokens) * (1 + longer) + self.compile_s
            self.free_s = max(self.free_s, self.now + 0.001) + took_s
            there_s = self.free_s
            enqueue_s = self.kept_s if is_kept else ENQUEUE_S
            self.now += enqueue_s / 8
            self.read(len(self.launched))
            self.now += enqueue_s * 7 / 8
            self.launch(tuple(each for each in decoding if each.status is Status.DECODING), is_behind=True)
            self.now = max(self.now, there_s) + 0.002
            self._compute_pass(grant)
        return grants > 0

    def launch(self, rows: tuple[Job, ...], *, is_behind: bool = False) -> None:
        rows = tuple(job for job in rows if job.generated < job.reply_tokens)
        if rows:
            self.now += 0.001
            self.free_s = max(self.free_s, self.now) + self.step_s
            self.launched.append((rows, self.free_s, is_behind))

    def read(self, steps: int) -> None:
        for _ in range(steps):
            rows, there_s, _ = self.launched.popleft()
            self.now = max(self.now, there_s)
            for job in rows:
                if job.generated < job.reply_tokens:
                    self._draw_token(job)


def crowd(
    count: int, tokens: int, reply: int = 256, rules: Rules = GPU, world: Gpu | None = None, **costs: float
) -> tuple[Gpu, float]:
    """The world after a crowd, and when its last first token came."""
    world = world or Gpu(rules=rules, **costs)  # type: ignore[arg-type]
    world.submit(Job(tokens, 24))
    world.run()
    world.gaps.clear()
    began_s, jobs = world.now, [Job(tokens, reply, cell_tokens=CELL) for _ in range(count)]
    world.submit(*jobs)
    while any(not job.generated for job in jobs):
        world.step()
    first_s = world.now - began_s
    world.run()
    return world, first_s


def test_a_first_crowd_is_as_quick_as_any_once_the_costs_of_a_start_are_forgotten() -> None:
    """With graphs and plans in them, they cut its prompts to 23 passes instead of 17 (an H200's costs)."""
    world, (later, later_s) = Gpu(rules=GPU), crowd(8, CELL)
    for tokens, took_s in ((CELL, 0.139), (300, 0.03)):
        world.scheduler.costs.learn(0, tokens, took_s)
    world.scheduler.costs.forget()
    assert world.scheduler.costs.step_s is None
    first, first_s = crowd(8, CELL, world=world)
    assert first_s == later_s
    assert first.gaps == later.gaps


@pytest.mark.parametrize("count", [8, 16])
def test_streams_make_a_crowds_prompts_take_half_longer_at_most(count: int) -> None:
    """The prompts' last tokens, a few behind an edge of the grid, are no pass of their own."""
    _, last_first_s = crowd(count, CELL + 20)
    assert last_first_s <= 1.49 * count * cell_s(CELL + 20)


def test_a_prompt_is_not_cut_to_the_rest_of_a_step() -> None:
    world, _ = crowd(8, 1_500, rules=replace(LONGER, shared_pass=None))
    sizes = [cell.size for each in world.passes[-4:] for cell in each]
    assert sizes[0] + sizes[1] == sizes[2] + sizes[3] == 1_500
    assert min(sizes) >= 476


def test_where_no_pass_is_shared_a_prompts_last_tokens_go_along() -> None:
    """They are 20 behind a pass that fits."""
    _, last_first_s = crowd(16, 1_044, rules=replace(LONGER, shared_pass=None))
    assert last_first_s <= 1.6 * 16 * cell_s(1_044)


def test_a_lone_prompts_last_tokens_go_along_beside_streams() -> None:
    """It has no other cell to share a pass with: two passes, of 768 tokens and of 32, took 16 ms longer."""
    world = Gpu(rules=LONGER)
    world.submit(Job(CELL, 24))
    world.run()
    streams, job = [Job(200, 60) for _ in range(4)], Job(800, 1, cell_tokens=CELL)
    world.submit(*streams)
    while any(stream.generated < 20 for stream in streams):
        world.step()
    world.submit(job)
    world.run()
    assert [cell.size for cells in world.passes for cell in cells if cell.turn is job] == [800]


def test_a_crowds_passes_cost_no_tokens_that_they_have_not() -> None:
    """896 tokens cost as much as 1,024, and 1,152 as much as 1,280."""
    world, last_first_s = crowd(16, CELL)
    sizes = {sum(cell.size for cell in cells) for cells in world.passes[1:]}
    assert {size % 256 for size in sizes} == {0}
    assert last_first_s <= 1.44
    assert max(world.gaps) <= GPU.longest_gap_s


@pytest.mark.parametrize("count", [8, 16, 32])
def test_a_pass_that_takes_longer_than_was_learned_keeps_its_streams_gap_and_a_step(count: int) -> None:
    world, _ = crowd(count, CELL, more=0.2, step_s=0.005)
    assert max(world.gaps) <= GPU.longest_gap_s + world.step_s


@example(3, 4_294, 0.003)
@example(16, 4_306, 0.012)
@given(st.integers(2, 16), st.integers(100, 6_000), st.sampled_from([0.003, 0.005, 0.007, 0.012, 0.02]))
@settings(max_examples=sampled(15, of=150), deadline=None)
def test_a_crowds_streams_wait_no_longer_than_their_gap_and_a_step(count: int, tokens: int, step_s: float) -> None:
    """But twice at most: a line through many passes of 768 tokens and one of 2,048 is too flat for a second one."""
    world, _ = crowd(count, tokens, 60, step_s=step_s)
    longest_s = GPU.longest_gap_s + step_s + EVEN_S
    assert sum(gap > longest_s for gap in world.gaps) <= 2
    assert max(world.gaps) <= longest_s + EVEN_S + 1e-9


def test_passes_of_second_cells_are_not_taken_for_cheaper_than_those_of_their_first() -> None:
    """Deeper tokens cost no less: a pass of 70 ms came of short ones that had been quick."""
    world, _ = crowd(16, 3_000)
    assert max(world.gaps) <= GPU.longest_gap_s + world.step_s


@dataclass
class _Replies(Gpu):
    times_s: dict[Job, list[float]] = field(default_factory=lambda: defaultdict(list))

    def _draw_token(self, job: Job) -> None:
        super()._draw_token(job)
        self.times_s[job].append(self.now)


@pytest.mark.parametrize("gap_s", [0.05, 0.056])
def test_a_replys_second_token_waits_for_one_pass_and_two_steps_within_its_gap(gap_s: float) -> None:
    """The step that has it runs behind the pass that followed the first, and that one behind a step without it."""
    world = _Replies(rules=replace(GPU, longest_gap_s=gap_s), kept_s=0.02)  # on a slow processor
    world.submit(Job(CELL, 24))
    world.run()
    jobs = [Job(CELL, 60, cell_tokens=CELL) for _ in range(16)]
    world.submit(*jobs)
    world.run()
    waits_s = [second_s - first_s for first_s, second_s, *_ in (world.times_s[job] for job in jobs)]
    assert max(waits_s) <= gap_s


class _Watched(Job):
    looks = 0

    @property
    def status(self) -> Status:
        _Watched.looks += 1
        return super().status


@pytest.mark.parametrize("namespace", [None, "a"])
def test_a_grant_in_a_crowd_looks_at_each_turn_a_few_times(namespace: str | None) -> None:
    """Streams wait for the processor, too: 64 turns were looked at so often that a grant took it 2 ms."""
    world, others = Gpu(rules=GPU), Job(CELL, 60, namespace="b")
    jobs = [_Watched(CELL, 60, cell_tokens=CELL, namespace=namespace) for _ in range(64)]
    world.submit(*jobs, *([others] if namespace else ()))
    while jobs[31].generated < 3:
        world.step()
    looks, scheduler = [], world.scheduler
    real = scheduler.grant

    def grant(spent_s: float, *, is_behind_step: bool) -> Grant[Job] | None:
        _Watched.looks = 0
        found = real(spent_s, is_behind_step=is_behind_step)
        looks.append(_Watched.looks)
        return found

    scheduler.grant = grant  # type: ignore[method-assign]
    for _ in range(4):
        world.step()
    assert max(looks) <= 8 * len(jobs)
