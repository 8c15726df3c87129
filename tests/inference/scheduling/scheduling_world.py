"""A worker without tensors: it does what the scheduler says, on a clock of its own, and writes down what happened.

A token's KV is one page of one byte, so that bytes can be counted by hand. What it checks itself, it checks at every
step.
"""

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

from inference_svc.engine.api import AgentKey, Priority
from inference_svc.engine.grid import Cells
from inference_svc.engine.scheduling.hot_memories import HotMemories, ResidentMemory
from inference_svc.engine.scheduling.memory_ledger import Reservation
from inference_svc.engine.scheduling.pacing import most_tokens
from inference_svc.engine.scheduling.prefix_sharing import prefix_source_of
from inference_svc.engine.scheduling.schedulable import Rules, ScheduleRecord, Status
from inference_svc.engine.scheduling.scheduler import Admit, Blocked, Preempt, Scheduler
from inference_svc.engine.scheduling.step_schedule import Grant, TurnCell
from inference_svc.kv.pages.page_allocator import PageAllocator
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds

CELL = 256
INTERACTIVE, BACKGROUND = Priority.INTERACTIVE, Priority.BACKGROUND


def key_of(name: object) -> AgentKey:
    return AgentKey("home", str(name))


def chain_of(*blocks: object) -> tuple[str, ...]:
    """Chain hashes of blocks, each named by what is in it: a hash covers all blocks before its own."""
    return tuple("/".join(map(str, blocks[: count + 1])) for count in range(len(blocks)))


@dataclass(eq=False)
class Job:
    """A turn, as far as the scheduler sees one."""

    prompt_tokens: int = CELL
    reply_tokens: int = 1
    key: AgentKey | None = None
    priority: Priority = INTERACTIVE
    longest_gap_s: float | None = None
    reusable_tokens: int = 0  # 0: the plan is cold
    extra_bytes: int = 0
    namespace: str | None = None
    chain: tuple[str, ...] = ()
    generated: int = 0
    is_cancelled: bool = False
    submitted_s: float = 0.0
    begun_s: float | None = None
    ended_s: float | None = None
    preemptions: int = 0
    can_be_preempted: bool = True
    shares_passes: bool = True
    restore_s: float = 0.0  # how long its KV takes to come back after it was preempted
    restored_s: float = 0.0  # when it has come back
    is_restoring: bool = False
    files: int = 0  # that become its KV before its first cell
    awaits_bytes: bool = False
    there_s: float = 0.0  # when the files that were sent are there, if they come by themselves
    cell_tokens: int = CELL
    kv: "Kv | None" = None
    reservation: Reservation | None = None
    schedule: ScheduleRecord = field(default_factory=ScheduleRecord)
    lost_memory: bool = False  # it was planned with a hot memory that was dropped before it began
    began_from: object = None
    cells_s: list[float] = field(default_factory=list)  # when each of its cells was computed

    def __post_init__(self) -> None:
        self.cells = Cells(self.prompt_tokens, self.cell_tokens)

    @property
    def agent_key(self) -> Hashable | None:
        return self.key

    @property
    def memory_key(self) -> AgentKey | None:
        return self.key if self.reusable_tokens else None

    @property
    def needed_bytes(self) -> int:
        return self.prompt_tokens + self.reply_tokens + self.extra_bytes

    @property
    def is_prefilling(self) -> bool:
        return self.cells.rest_tokens > 0

    @property
    def status(self) -> Status:
        if self.ended_s is not None:
            return Status.FINISHED
        if self.reservation is None:
            return Status.PREEMPTED if self.preemptions else Status.WAITING
        if self.is_restoring:
            return Status.RESTORING
        if self.files:
            return Status.LOADING
        return Status.PREFILLING if self.is_prefilling else Status.DECODING

    @property
    def is_ending(self) -> bool:
        return False

    @property
    def next_files(self) -> int:
        return min(32, self.files)


class Kv:
    """Pages, one for each token."""

    state_bytes = 0

    def __init__(self, allocator: PageAllocator, size: int = 0) -> None:
        self.allocator = allocator
        self.pages = allocator.take(size)

    def grow_to(self, size: int) -> None:
        self.pages += self.allocator.take(max(0, size - len(self.pages)))

    def fork(self, size: int) -> "Kv":
        forked = Kv(self.allocator)
        forked.pages = self.pages[:size]
        self.allocator.share(forked.pages)
        return forked

    def release(self) -> None:
        self.allocator.release(self.pages)
        self.pages = []


def memory(kv: Kv, priority: Priority = INTERACTIVE, chain: tuple[str, ...] = ()) -> ResidentMemory:
    return ResidentMemory(kv, SequenceState(TokenIds(), TokenChars(), len(chain) * CELL), chain, priority=priority)


class Hot(HotMemories):
    """Memories of pages of one byte."""

    def __init__(self, budget_bytes: int) -> None:
        self.allocator = PageAllocator(budget_bytes)
        super().__init__(self.allocator, 1, budget_bytes)

    def hold(
        self,
        size: int,
        protected: Collection[Hashable] | None = (),
        extends: Hashable | None = None,
        namespace: str | None = None,
    ) -> Reservation | None:
        """A running turn's reservation; None if there is no room."""
        reservation = Reservation(namespace, size, extends=extends)
        return reservation if self.reserve(reservation, protected) else None

    def remember(self, key: AgentKey, size: int, priority: Priority = INTERACTIVE, chain: tuple[str, ...] = ()) -> bool:
        """A turn of the key that begins, takes its pages and leaves them; False if there was no room for it."""
        reservation = self.hold(size, namespace=key.namespace)
        if reservation is None:
            return False
        self.put(key, memory(Kv(self.allocator, size), priority, chain))
        self.ledger.release(reservation)
        return True


@dataclass
class World:
    """`cell_s`, `token_s` and `file_s`: how long a cell, a step's decoding and the load of a file take, `row_s` each
    row besides and `deep_s` each token behind one, `load_s` a load of any number of files besides, and `load_end_s`
    the last of a turn's; `sent_s`: how long a file's bytes are on their way, which are granted then and come by
    themselves. `at_once`: the most turns that find room together. `is_behind`: cells are granted behind a step.
    """

    budget_bytes: int = 1 << 40
    rules: Rules = field(default_factory=Rules)
    cell_s: float = 0.03
    token_s: float = 0.01
    row_s: float = 0.0
    deep_s: float = 0.0
    file_s: float = 0.0
    load_s: float = 0.0
    load_end_s: float = 0.0
    sent_s: float = 0.0
    at_once: int = 1 << 40
    is_behind: bool = False
    cost_s: Callable[[int, int], float] | None = None  # of a cell, by its position and tokens; else `cell_s`
    now: float = 0.0
    steps: int = 0
    gaps: list[float] = field(default_factory=list)  # from one token to the next, of every turn that decodes
    ended: list[Job] = field(default_factory=list)
    prefilled: list[Job] = field(default_factory=list)  # who got a cell, in order
    passes: list[tuple[TurnCell[Job], ...]] = field(default_factory=list)  # the cells of each
    chunks: list[int] = field(default_factory=list)  # tokens prefilled by each step
    decoded: list[tuple[Job, ...]] = field(default_factory=list)  # by step
    begun: list[Job] = field(default_factory=list)  # in order, again after each preemption
    refused: set[Job] = field(default_factory=set)  # that found no room at some time
    namespaces: set[str | None] = field(default_factory=set)  # that ever had a turn
    when_begun: Callable[[], object] = lambda: None  # in every step, once all have begun that could
    arrivals: dict[int, list[Job]] = field(default_factory=dict)  # submitted after so many cells of all

    def __post_init__(self) -> None:
        self.memories = Hot(self.budget_bytes)
        self.scheduler: Scheduler[Job] = Scheduler(self, self.rules, [])
        self._last_token_s: dict[Job, float] = {}

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            job.submitted_s = self.now
            self.namespaces.add(job.namespace)
            self.scheduler.submit(job, self.now)

    def turn(self, name: object, tokens: int, reply: int = 1, **fields: object) -> Job:
        """A turn of an agent that goes on where its hot memory ends, if it has one."""
        self.memories.expect_use(key_of(name))
        known = self.memories.sizes().get(key_of(name), 0)
        plan = {"prompt_tokens": known + tokens, "reply_tokens": reply, "reusable_tokens": known, "key": key_of(name)}
        job = Job(**(plan | fields))  # type: ignore[arg-type]
        self.submit(job)
        return job

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 3_000, "somebody waits for ever"
        for job in self.scheduler.cancelled():
            self._end(job, leaves=False)
        self.admit()
        self._restore()
        self._decode()
        self._prefill()
        for job in [job for job in self.scheduler.running if job.generated >= job.reply_tokens]:
            self._end(job, leaves=True)
        self.check()

    def admit(self) -> None:
        """Carry out what the scheduler decides until it decides no more."""
        may_preempt = True
        while True:
            match self.scheduler.admit(self.now, may_preempt=may_preempt):
                case Admit(job, protected):
                    self._begin(job, protected)
                case Preempt(jobs, blocked):
                    self.when_begun()
                    self._preempt(jobs, blocked)
                    may_preempt = False
                case Blocked():
                    if may_preempt:
                        self.when_begun()
                    return

    def run(self, most_steps: int = 3_000) -> None:
        """Until nobody is left."""
        while self.scheduler.waiting or self.scheduler.running:
            assert self.steps < most_steps, "somebody waits for ever"
            self.step()

    def check(self) -> None:
        ledger, running = self.memories.ledger, self.scheduler.running
        assert ledger.free_bytes + ledger.used_bytes + ledger.promised_bytes == ledger.total_bytes
        assert min(ledger.free_bytes, ledger.used_bytes, ledger.promised_bytes) >= 0
        held = self.memories.pages.union(*(job.kv.pages for job in running if job.kv is not None))
        assert ledger.used_pages == len(held), "a page is nobody's"
        for job in running:
            assert job.reservation is not None
            assert job.kv is None or len(job.kv.pages) <= job.reservation.most_pages
        assert len(ledger.reservations) == len(running)
        agents = [job.agent_key for job in self.scheduler.running if job.agent_key is not None]
        assert len(agents) == len(set(agents)), "two turns of one agent run"

    @property
    def share_bytes(self) -> int:
        """Of each namespace that has turns, while there are several."""
        kept = self.budget_bytes // self.rules.beside_others.kept_part
        present = {job.namespace for job in (*self.scheduler.running, *self.scheduler.waiting)}
        return (self.budget_bytes - kept) // max(1, len(present))

    def held_by(self, namespace: str | None) -> int:
        mine = [job for job in self.scheduler.running if job.namespace == namespace]
        return sum(map(self.held_bytes, mine))

    # --- the scheduler's room ---

    @property
    def total_bytes(self) -> int:
        return self.budget_bytes

    def held_bytes(self, job: Job) -> int:
        return self.memories.ledger.reserved_bytes(job.reservation)

    def needed_bytes(self, job: Job) -> int:
        memory = self.memories.get(job.key) if job.memory_key is not None else None
        shared = 0 if memory is None else min(job.reusable_tokens, job.prompt_tokens - 1, len(memory.kv.pages))
        return job.needed_bytes - shared

    def missing_bytes(self, job: Job, protected: Collection[Hashable] | None) -> int:
        missing = self.memories.missing_bytes(self.needed_bytes(job), self._protected(job, protected))
        missing = max(missing, int(len(self.scheduler.running) >= self.at_once))
        if missing:
            self.refused.add(job)
        return missing

    def freed_bytes(self, job: Job) -> int:
        memory = self.memories.get(job.key) if job.reservation is not None and job.reservation.extends else None
        pages = [held.pages for held in (job.kv, memory and memory.kv) if held is not None]
        return self.memories.ledger.freed_bytes(pages) + self.memories.ledger.promised_to(job.reservation)

    def can_swap_out(self, _jobs: Collection[Job]) -> bool:
        return True

    # --- what it does ---

    def _protected(self, job: Job, protected: Collection[Hashable] | None) -> Collection[Hashable] | None:
        return None if protected is None else {*protected, job.memory_key}

    def _begin(self, job: Job, protected: Collection[Hashable] | None) -> None:
        memory = self.memories.get(job.memory_key)
        if job.memory_key is not None and memory is None:
            job.lost_memory = True
            self._end(job, leaves=False)
            return
        is_back = job.preemptions and job.restore_s
        kv = Kv(self.memories.allocator)
        if memory is not None:
            kv = memory.kv.fork(min(job.reusable_tokens, job.prompt_tokens - 1))
        hot = self.memories.of_namespace(job.namespace)
        computing = [other for other in self.scheduler.running if other.kv is not None]
        prefix = None if is_back else prefix_source_of(job, computing, hot)
        if prefix is not None:
            kv.release()
            source = prefix.source
            assert prefix.shared_tokens <= (
                source.cells.shareable if isinstance(source, Job) else source.state.shareable_tokens
            )
            job.began_from = source
            kv = source.kv.fork(prefix.shared_tokens)
        job.reservation = Reservation(
            job.namespace,
            job.prompt_tokens + job.reply_tokens,
            job.extra_bytes,
            job.memory_key if prefix is None else None,
            lambda: len((job.kv or kv).pages),
        )
        assert self.memories.reserve(job.reservation, self._protected(job, protected))
        job.begun_s = self.now if job.begun_s is None else job.begun_s
        self.begun.append(job)
        if is_back:
            job.is_restoring, job.restored_s = True, self.now + job.restore_s
        else:
            job.kv = kv
            job.cells.begin(len(kv.pages), 0 if prefix is None else prefix.shared_tokens)

    def _preempt(self, jobs: Sequence[Job], blocked: Job) -> None:
        for job in jobs:
            if job.namespace == blocked.namespace:
                assert job.priority is BACKGROUND
            else:
                assert self.held_by(blocked.namespace) < self.share_bytes < self.held_by(job.namespace)
            assert blocked.priority is INTERACTIVE
            assert job.can_be_preempted
            assert not job.is_restoring
            job.preemptions += 1
            job.reusable_tokens = 0
            job.cells.resume(job.cells.computed if job.restore_s else 0)
            if job.reservation.extends is not None:
                self.memories.drop(job.reservation.extends)
            job.kv.release()
            self.memories.ledger.release(job.reservation)
            job.kv = job.reservation = None

    def _restore(self) -> None:
        """KV that was on its way is there. While nobody computes, time passes until the first of it is."""
        waiting = [job for job in self.scheduler.running if job.is_restoring]
        if waiting and len(waiting) == len(self.scheduler.running):
            self.now = max(self.now, min(job.restored_s for job in waiting))
        for job in waiting:
            job.is_restoring = self.now < job.restored_s
            if not job.is_restoring:
                job.kv = Kv(self.memories.allocator, job.cells.computed)

    def _decode(self) -> None:
        decoding = self.scheduler.begin_step(self.now)
        able = [job for job in self.scheduler.running if not (job.is_cancelled or job.is_restoring or job.files)]
        could = [job for job in able if not job.is_prefilling]
        assert set(decoding) <= set(could)
        if len(self.namespaces) == 1:
            may_sit_out = {job for job in could if job.priority is BACKGROUND}
            may_sit_out = may_sit_out if len(may_sit_out) < len(could) else set()
            assert set(could) - set(decoding) <= may_sit_out, "somebody of a namespace alone sits out"
        self.decoded.append(decoding)
        self.now += self.step_s(len(decoding)) + self.deep_s * sum(job.cells.computed for job in decoding)
        for job in decoding:
            self._draw_token(job)

    def step_s(self, rows: int) -> float:
        """How long so many rows take to decode."""
        return self.token_s + rows * self.row_s if rows else 0.0

    def _draw_token(self, job: Job) -> None:
        job.generated += 1
        job.cells.computed += job.generated > 1
        job.kv.grow_to(job.cells.computed)
        if job in self._last_token_s:
            self.gaps.append(self.now - self._last_token_s[job])
        self._last_token_s[job] = self.now

    def _prefill(self) -> None:
        spent, tokens = 0.0, 0
        starts: dict[Job, int] = {}
        able = (Status.PREFILLING, Status.LOADING)
        self._look_for_bytes()
        waits = any(job.status in able and not (job.is_cancelled or job.awaits_bytes) for job in self.scheduler.running)
        is_first = True
        while (grant := self.scheduler.grant(spent, is_behind_step=self.is_behind)) is not None:
            job, loads = grant.turn, grant.turn.status is Status.LOADING
            assert job.status in able
            assert not job.is_cancelled
            decoding = [other for other in self.scheduler.running if other.status is Status.DECODING]
            decodes, gap_s = bool(decoding), min((self._gap_s(other, job) for other in decoding), default=math.inf)
            assert is_first or spent < gap_s, "more than the budget and one cell"
            assert not (decodes and job.awaits_bytes), "streams wait for bytes that come by themselves"
            assert job.priority is not BACKGROUND or not self._waits_for_people(job), "a person's prompt waits for it"
            took_s = self.load_s + grant.size * self.file_s if loads else self._pass_s(grant)
            took_s += max(0.0, job.there_s - self.now)
            took_s += self.load_end_s if loads and grant.size == job.files else 0.0
            spent, self.now, is_first = spent + took_s, self.now + took_s, False
            if loads:
                assert grant.size <= job.next_files
                job.files -= grant.size
                job.there_s = self.now + grant.size * self.sent_s
            else:
                for cell in grant.cells:
                    starts.setdefault(cell.turn, cell.turn.cells.computed)
                tokens += grant.tokens
                limit = min(most_tokens(start) for start in starts.values())
                assert tokens <= max(limit, job.cell_tokens), "more tokens than the table says"
                self._compute_pass(grant)
            self._look_for_bytes()
        assert not is_first or not waits or len(self.namespaces) > 1 or self._stand_aside(), "nobody prefilled"
        self.chunks.append(tokens)

    def _gap_s(self, decoding: Job, job: Job) -> float:
        gap_s, rules = self.rules.longest_gap_s, self.rules
        gap_s = gap_s if decoding.priority is not BACKGROUND else max(gap_s, rules.background_gap_s)
        own_s = gap_s if decoding.longest_gap_s is None else decoding.longest_gap_s
        return own_s if decoding.namespace == job.namespace else max(own_s, gap_s)

    def _waits_for_people(self, job: Job) -> bool:
        """Whether a person of another namespace waits for a prompt that could go on."""
        prompts = [other for other in self.scheduler.running if other.status in (Status.PREFILLING, Status.LOADING)]
        people = [other for other in prompts if other.priority is INTERACTIVE and other.namespace != job.namespace]
        return any(not (other.is_cancelled or other.awaits_bytes) for other in people)

    def _stand_aside(self) -> bool:
        """Whether all prompts are background ones, and a turn decodes for which somebody waits."""
        prompts = [job for job in self.scheduler.running if job.status in (Status.PREFILLING, Status.LOADING)]
        streams = [job for job in self.scheduler.running if job.status is Status.DECODING]
        return any(job.priority is BACKGROUND for job in prompts) and any(
            job.priority is INTERACTIVE for job in streams
        )

    def _look_for_bytes(self) -> None:
        for job in self.scheduler.running:
            job.awaits_bytes = bool(job.files) and self.now < job.there_s

    def _compute_pass(self, grant: Grant[Job]) -> None:
        """A pass, whose time has passed."""
        rules, jobs, first = self.rules, [cell.turn for cell in grant.cells], grant.cells[0]
        assert len({*jobs}) == len(jobs), "two cells of a turn in one pass"
        assert (first.turn, first.size) == (grant.turn, grant.size)
        for cell in grant.cells:
            assert (cell.turn.cells.computed, cell.turn.status) == (cell.position, Status.PREFILLING)
            assert not cell.turn.is_cancelled
            if len(jobs) > 1:
                assert rules.shared_pass is not None
                assert cell.turn.shares_passes
                assert 0 < cell.size <= min(rules.shared_pass.most_tokens, cell.turn.cells.rest_tokens)
                end = cell.position + cell.size
                assert end == cell.turn.prompt_tokens or not end % rules.least_tokens, "cut beside the grid"
        if len(jobs) > 1:
            assert grant.tokens <= rules.cell_tokens, "more tokens than a cell's"
        self.passes.append(grant.cells)
        for cell in grant.cells:
            self._compute(cell.turn, cell.size)

    def _compute(self, job: Job, tokens: int) -> None:
        job.cells.prefilled(tokens)
        job.kv.grow_to(job.cells.computed)
        job.cells_s.append(self.now)
        self.prefilled.append(job)
        if not job.is_prefilling and not job.generated:
            self._draw_token(job)
        self.submit(*self.arrivals.pop(len(self.prefilled), ()))

    def _pass_s(self, grant: Grant[Job]) -> float:
        deepest = max(cell.position for cell in grant.cells)
        return self.cell_s if self.cost_s is None else self.cost_s(deepest, grant.tokens)

    def _end(self, job: Job, *, leaves: bool) -> None:
        job.ended_s = self.now
        self.ended.append(job)
        self._last_token_s.pop(job, None)
        self.scheduler.remove(job)
        if leaves and job.key is not None and job.kv is not None:
            self.memories.put(job.key, memory(job.kv, job.priority, job.chain))
        elif job.kv is not None:
            job.kv.release()
        if job.reservation is not None:
            self.memories.ledger.release(job.reservation)
        job.kv = job.reservation = None
