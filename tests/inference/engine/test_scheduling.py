"""Who runs next, and where prefill is cut: bookkeeping without tensors."""

from collections.abc import Hashable
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.grid import cell_end, shareable_after
from inference_svc.hot_memories import HotMemories, Memory
from inference_svc.kv.capacity import capacity_rows
from inference_svc.plan import Priority, SequenceKey, SequenceState
from inference_svc.scheduler import Scheduler


@dataclass(eq=False)
class Job:
    """A turn, as far as the scheduler sees one."""

    line: Hashable | None = None
    cells: int = 1
    tokens: int = 1
    priority: Priority = Priority.INTERACTIVE
    is_cancelled: bool = False
    is_warm: bool = False
    memory_key: Hashable | None = None
    namespace: str | None = None
    chain: tuple[str, ...] = ()
    prompt_tokens: int = 0
    computed: int = 0
    reusable_tokens: int = 0
    shareable: int = 0
    final_shareable: int = 0
    next_cell_tokens: int = 256

    @property
    def rest_tokens(self) -> int:
        return self.cells * 256

    @property
    def is_prefilling(self) -> bool:
        return self.cells > 0


def do_step(scheduler: Scheduler[Job]) -> list[Job]:
    """Do what the scheduler says; returns who was served."""
    scheduler.admit(lambda _job: True)
    step = scheduler.next_step()
    for job in step.decode:
        job.tokens -= 1
        if job.tokens == 0:
            scheduler.remove(job)
    if step.prefill is not None:
        step.prefill.cells -= 1
    return [*step.decode, *([step.prefill] if step.prefill else [])]


jobs = st.builds(Job, st.none() | st.integers(0, 2), st.integers(1, 6), st.integers(1, 6))


@given(st.lists(jobs, max_size=8))
def test_every_turn_is_served_to_its_end(work: list[Job]) -> None:
    scheduler: Scheduler[Job] = Scheduler()
    for job in work:
        scheduler.add(job)
    limit = sum(job.cells + job.tokens for job in work)
    for _ in range(limit):
        do_step(scheduler)
    assert not scheduler.waiting
    assert not scheduler.running
    assert all(job.cells == job.tokens == 0 for job in work)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.data())
def test_prefills_take_turns_though_others_come_and_go(cells: list[int], data: st.DataObject) -> None:
    """Between two cells of one prompt, every other prompt that waited gets exactly one."""
    scheduler: Scheduler[Job] = Scheduler()
    work = [Job(cells=count, tokens=1) for count in cells]
    for job in work:
        scheduler.add(job)
    served: list[Job] = []
    scheduler.admit(lambda _job: True)
    while any(job.cells for job in work):
        step = scheduler.next_step()
        assert step.prefill is not None
        for other in work:
            if other.cells and other is not step.prefill:
                since = served[::-1].index(other) if other in served else len(served)
                assert since < len(work), "somebody was passed over"
        served.append(step.prefill)
        step.prefill.cells -= 1
        if data.draw(st.booleans()) and not step.prefill.cells:
            scheduler.remove(step.prefill)


def test_every_generating_turn_decodes_in_every_step() -> None:
    scheduler: Scheduler[Job] = Scheduler()
    speaking = [Job(cells=0, tokens=9), Job(cells=0, tokens=9)]
    reading = Job(cells=5)
    for job in (*speaking, reading):
        scheduler.add(job)
    for _ in range(4):
        assert do_step(scheduler) == [*speaking, reading]


def test_turns_of_one_line_wait_for_each_other_and_for_nobody_else() -> None:
    scheduler: Scheduler[Job] = Scheduler()
    first, second, other = Job("a"), Job("a"), Job("b")
    for job in (first, second, other):
        scheduler.add(job)
    scheduler.admit(lambda _job: True)
    assert scheduler.running == [first, other]
    scheduler.remove(first)
    scheduler.admit(lambda _job: True)
    assert scheduler.running == [other, second]


def test_a_turn_without_room_is_not_overtaken() -> None:
    scheduler: Scheduler[Job] = Scheduler()
    large, small = Job(), Job()
    scheduler.add(large)
    scheduler.add(small)
    scheduler.admit(lambda job: job is small)
    assert scheduler.running == []
    scheduler.admit(lambda _job: True)
    assert scheduler.running == [large, small]


@given(st.integers(0, 5000), st.integers(1, 5000), st.sampled_from([256, 512, 1024]))
def test_cells_meet_at_edges_that_only_position_decides(start: int, more: int, cell: int) -> None:
    prompt, edges, position = start + more, [], start
    while position < prompt:
        position = cell_end(position, prompt, cell)
        edges.append(position)
    assert edges == [*range((start // cell + 1) * cell, prompt, cell), prompt]


@given(st.integers(0, 3000), st.integers(1, 3000))
def test_only_whole_cells_from_the_beginning_are_shareable(cut: int, more: int) -> None:
    def prefill(shareable: int, start: int, stop: int) -> int:
        while start < stop:
            end = cell_end(start, stop, 256)
            shareable, start = shareable_after(shareable, start, end, 256), end
        return shareable

    once = prefill(0, 0, cut + more)
    assert once == (cut + more) // 256 * 256
    first = prefill(0, 0, cut)
    resumed = prefill(first, cut, cut + more)
    assert resumed == (once if cut % 256 == 0 else first)


@given(st.integers(1, 200_000))
def test_buffers_have_room_and_little_more(rows: int) -> None:
    capacity = capacity_rows(rows)
    assert rows <= capacity <= rows + 256 + rows / 32
    assert capacity % 256 == 0
    assert capacity_rows(rows + 1) >= capacity


@dataclass
class Kv:
    allocated_bytes: int


def memory(size: int) -> Memory[Kv]:
    return Memory(Kv(size), SequenceState((), (), 0), ())


def keys(count: int) -> list[SequenceKey]:
    return [SequenceKey("n", str(index)) for index in range(count)]


def test_the_longest_unused_memory_goes_first_and_a_busy_one_never() -> None:
    memories: HotMemories[Kv] = HotMemories(100)
    busy, old, young = keys(3)
    for key in (busy, old, young):
        memories.put(key, memory(30))
    memories.described(old)
    assert memories.make_room(needed_bytes=40, running_bytes=30, busy={busy})
    assert (memories.get(young), memories.get(busy) is not None, memories.get(old) is not None) == (None, True, True)


def test_nothing_is_dropped_for_what_cannot_fit_anyway() -> None:
    memories: HotMemories[Kv] = HotMemories(100)
    (key,) = keys(1)
    memories.put(key, memory(90))
    assert not memories.make_room(needed_bytes=60, running_bytes=50, busy=set())
    assert memories.get(key) is not None


def test_a_tag_belongs_to_one_memory() -> None:
    memories: HotMemories[Kv] = HotMemories(100)
    (key,) = keys(1)
    memories.tag(key, "of nobody")
    memories.put(key, memory(1))
    memories.tag(key, "version 1")
    described = memories.described(key)
    assert described is not None
    assert described.tag == "version 1"
    memories.put(key, memory(1))
    described = memories.described(key)
    assert described is not None
    assert described.tag is None
