"""Who runs in the next step: pure bookkeeping over turns. No tensors, no clock of its own, no bytes.

The life of a turn is waiting → running → gone, and after a preemption waiting once more; then, running again, it is
restoring until its KV has been brought back. A step is what the worker does
between two looks at its mailbox:

    end what scheduler.cancelled() says                 # remove(turn) each
    blocked = scheduler.begin_waiting(now, try_begin)   # try_begin reserves bytes and gives the turn its KV
    if blocked: for each of scheduler.preemptions(blocked, missing_bytes, held_bytes):
        put it aside and free its rows; scheduler.preempted(turn, now)
    decode one token for all of scheduler.begin_step(now)
    while (turn := scheduler.next_prefill(seconds since the first)) is not None:
        one cell of it; look at the mailbox: submit() and cancel end the loop before the next cell
    remove() what spoke its last token

Rules. Lines: turns of one line run one after another. Priority: interactive before background, to begin and to prefill;
who has waited `ageing_s` counts as interactive, and so does who an interactive turn waits for. Room: the first that
finds none keeps all behind it waiting, so that nobody is overtaken for ever. Prefill: round robin; a warm turn whose
rest is one cell goes first, but never twice in a row before those who wait longer. Pace: `pacing`. Siblings: a turn
waits while another prefills a prefix that both need (`prefix_gate`), for `gate_s` at most.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

from inference_svc.pacing import StepPace
from inference_svc.plan import Priority
from inference_svc.prefix_gate import Donor, HotPrefix, PrefixGate, Sharing


class Schedulable(Sharing, Hashable, Protocol):
    """What the scheduler must know of a turn."""

    @property
    def line(self) -> Hashable | None:
        """Turns of one line run one after another; None runs beside everything."""
        ...

    @property
    def priority(self) -> Priority: ...

    @property
    def memory_key(self) -> Hashable | None:
        """The hot memory that the turn's plan extends."""
        ...

    @property
    def is_cancelled(self) -> bool:
        """It is to end: it gets nothing more."""
        ...

    @property
    def can_be_put_aside(self) -> bool:
        """It may be asked to give up its rows: they can be kept elsewhere meanwhile."""
        ...

    @property
    def is_restoring(self) -> bool:
        """It was put aside, has room again, and waits for its KV: it neither speaks nor prefills."""
        ...

    @property
    def is_prefilling(self) -> bool:
        """Prompt tokens are left to compute (or to restore, if the worker restores in cells)."""
        ...

    @property
    def is_warm(self) -> bool:
        """It began with a memory."""
        ...

    @property
    def computed(self) -> int:
        """Position of the next cell."""
        ...

    @property
    def next_cell_tokens(self) -> int:
        """Size of the next cell."""
        ...

    @property
    def rest_tokens(self) -> int:
        """Prompt tokens left to compute."""
        ...


TurnT = TypeVar("TurnT", bound=Schedulable)


@dataclass(frozen=True)
class Rules:
    """The numbers of the schedule."""

    cell_tokens: int = 256
    budget_s: float = 0.1
    """Prefill of a step ends with the first cell that ends after this, while anybody speaks."""
    ageing_s: float = 5.0
    """Who has waited this long, to begin or for its next cell, counts as interactive."""
    gate_s: float = 10.0
    """A turn waits at most this long for siblings to prefill what it shares; 0 never waits."""
    patience_s: float = 5.0
    """A turn spares the hot memories that other waiting turns extend for this long; those may begin before it."""
    max_running: int | None = None
    max_preemptions: int = 2
    """No turn is preempted more often."""


@dataclass(frozen=True)
class Preempt(Generic[TurnT]):
    """`turn` is to give up its rows so that `for_turn` may begin."""

    turn: TurnT
    for_turn: TurnT


@dataclass
class _Entry(Generic[TurnT]):
    """What the scheduler remembers of a turn."""

    number: int  # order of submission
    waits_since_s: float  # for its beginning, or for its next cell
    served: int = 0  # when it was last served: twice the cells served to all
    awaits: Donor[TurnT] | None = None
    gated_since_s: float | None = None
    gate_is_over: bool = False
    began_aged: bool = False
    preemptions: int = 0


@dataclass
class Scheduler(Generic[TurnT]):
    """Turns wait, run, and leave. Seconds are any clock's that never goes back."""

    rules: Rules = Rules()
    waiting: list[TurnT] = field(default_factory=list)
    running: list[TurnT] = field(default_factory=list)
    _entries: dict[TurnT, _Entry[TurnT]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)
    _awaited: set[TurnT] = field(default_factory=set)  # running turns that an urgent waiting turn waits for
    _served: int = 0
    _was_warm: bool = False  # the last cell went to a warm turn out of order
    _now: float = 0.0
    _pace: StepPace = field(default_factory=lambda: StepPace(0.0))
    _is_disturbed: bool = False  # somebody came during this step

    def __post_init__(self) -> None:
        self._gate: PrefixGate[TurnT] = PrefixGate(self.rules.cell_tokens)

    # --- coming and going ---

    def submit(self, turn: TurnT, now: float) -> None:
        """The turn waits. Its bytes must fit the budget with all else gone."""
        self._entries[turn] = _Entry(next(self._numbers), now)
        self.waiting.append(turn)
        self._is_disturbed = True

    def remove(self, turn: TurnT) -> None:
        """The turn is over, wherever it was. Without effect if it is gone already."""
        self._entries.pop(turn, None)
        self._awaited.discard(turn)
        for turns in (self.waiting, self.running):
            if turn in turns:
                turns.remove(turn)

    def preempted(self, turn: TurnT, now: float) -> None:
        """A running turn gave up its rows. It waits at its old place in the order, but ages anew, so that it does not
        take back what it was asked for.
        """
        self.running.remove(turn)
        self._awaited.discard(turn)
        self.waiting.append(turn)
        entry = self._entries[turn]
        entry.preemptions += 1
        entry.waits_since_s = now
        entry.awaits = entry.gated_since_s = None
        entry.gate_is_over = False

    def cancelled(self) -> list[TurnT]:
        """Turns that are to end now, waiting and running."""
        return [turn for turn in (*self.running, *self.waiting) if turn.is_cancelled]

    # --- beginning ---

    def begin_waiting(
        self,
        now: float,
        try_begin: Callable[[TurnT, Collection[Hashable]], bool],
        has_time: Callable[[], bool] = lambda: True,
    ) -> TurnT | None:
        """Let waiting turns begin, in order; returns the one that found no room, if any.

        `try_begin(turn, spare)` says whether there is room, and if so has begun the turn. `spare`: keys of hot memories
        that it must not drop for it, because waiting turns extend them. A turn that ended in it must be removed by it.
        `has_time` is asked before each beginning but the first: one may restore a long memory while others speak.
        """
        self._now = now
        self._awaited = set()
        blocked: TurnT | None = None
        spared: Collection[Hashable] = ()  # by `blocked`: who extends one of them takes no room that it could have
        running_before = len(self.running)
        for turn in self._first_of_lines():
            if turn.is_cancelled or turn not in self._entries:
                continue
            if blocked is not None and (turn.memory_key is None or turn.memory_key not in spared):
                continue
            if self._waits_for_sibling(turn):
                continue
            if self._is_full:
                return blocked or turn
            if len(self.running) > running_before and not has_time():
                return blocked
            if not self._begin(turn, self._spared_by(turn), try_begin) and blocked is None:
                blocked, spared = turn, self._spared_by(turn)
        # While nobody runs, nobody will ever make room: then nothing is spared.
        if blocked is not None and not self.running and self._begin(blocked, (), try_begin):
            return None
        return blocked

    def donor_of(
        self, turn: TurnT, hot: Iterable[tuple[Hashable, str, HotPrefix]] = ()
    ) -> Donor[TurnT | Hashable] | None:
        """Whose KV a turn should begin with instead of its plan's, if it would have a cell more: a running turn or the
        key of a hot memory (`HotMemories.idle`). To be asked in `try_begin`.
        """
        return self._gate.donor_of(turn, self._with_kv(), hot)

    def preemptions(
        self, blocked: TurnT, missing_bytes: int, held_bytes: Callable[[TurnT], int]
    ) -> tuple[Preempt[TurnT], ...]:
        """Whom to preempt so that `blocked` finds `missing_bytes` more: background turns, the youngest first; nobody if
        that is not enough, or if `blocked` is background itself.
        """
        if blocked.priority is not Priority.INTERACTIVE:
            return ()
        urgent_lines = self._urgent_lines()
        candidates = [turn for turn in self.running if self._is_preemptible(turn, urgent_lines)]
        candidates.sort(key=lambda turn: self._entries[turn].number, reverse=True)
        chosen: list[TurnT] = []
        while candidates and (missing_bytes > 0 or (self._is_full and not chosen)):
            chosen.append(candidates.pop(0))
            missing_bytes -= held_bytes(chosen[-1])
        if missing_bytes > 0:
            return ()
        return tuple(Preempt(turn, blocked) for turn in chosen)

    # --- a step ---

    def begin_step(self, now: float) -> tuple[TurnT, ...]:
        """Who decodes one token now: all that speak. Then ask for prefills."""
        self._now = now
        self._pace = StepPace(self.rules.budget_s)
        self._is_disturbed = False
        return tuple(turn for turn in self.running if self._speaks(turn))

    def next_prefill(self, spent_s: float) -> TurnT | None:
        """Who gets the step's next cell; None when its prefill is over. `spent_s`: what its prefill took so far.

        The first cell is always given if anybody prefills. More follow while the time lasts (if somebody speaks), the
        table allows, and nobody was submitted, was cancelled, or may begin with what a sibling has prefilled by now.
        """
        if self._pace.has_begun and self._is_disturbed_now():
            return None
        turn = self._next_in_round()
        if turn is None:
            return None
        size = turn.next_cell_tokens
        speaks = any(self._speaks(other) for other in self.running)
        if not self._pace.allows(turn, turn.computed, size, spent_s, somebody_speaks=speaks):
            return None
        self._pace.take(turn, turn.computed, size)
        self._serve(turn, spent_s)
        return turn

    # --- order ---

    def _first_of_lines(self) -> list[TurnT]:
        """Waiting turns that follow no other of their line: urgent ones first, then in order of submission."""
        first: dict[Hashable, int] = {}
        for turn, entry in self._entries.items():
            if turn.line is not None:
                first[turn.line] = min(first.get(turn.line, entry.number), entry.number)
        lines = self._urgent_lines()
        numbered = ((self._entries[turn].number, turn) for turn in self.waiting)
        able = [(number, turn) for number, turn in numbered if turn.line is None or first[turn.line] == number]
        return [turn for _, turn in sorted(able, key=lambda one: (not self._is_urgent(one[1], lines), one[0]))]

    def _is_urgent(self, turn: TurnT, urgent_lines: Collection[Hashable]) -> bool:
        return (
            turn.priority is Priority.INTERACTIVE
            or self._now - self._entries[turn].waits_since_s >= self.rules.ageing_s
            or turn.line in urgent_lines
            or turn in self._awaited
        )

    def _urgent_lines(self) -> set[Hashable]:
        """Lines in which an interactive turn waits: who is before it there is waited for."""
        return {turn.line for turn in self.waiting if turn.priority is Priority.INTERACTIVE and turn.line is not None}

    def _spared_by(self, turn: TurnT) -> set[Hashable]:
        """Hot memories that waiting turns of at least its urgency extend. Agents that take turns would otherwise drop
        each other's memory just before it is used.
        """
        if self._now - self._entries[turn].waits_since_s >= self.rules.patience_s:
            return set()
        lines = self._urgent_lines()
        mine = self._is_urgent(turn, lines)
        return {
            other.memory_key
            for other in self.waiting
            if other is not turn and other.memory_key is not None and self._is_urgent(other, lines) >= mine
        }

    def _waits_for_sibling(self, turn: TurnT) -> bool:
        """Somebody is prefilling what it needs too. Once it waits, it looks again only when that is over."""
        entry = self._entries[turn]
        if self.rules.gate_s <= 0 or entry.gate_is_over or entry.preemptions:  # who goes on begins with its own
            return False
        awaited = entry.awaits
        if awaited is None or awaited.source not in self.running or awaited.source.shareable >= awaited.shared_tokens:
            awaited = entry.awaits = self._gate.awaited_by(turn, self._with_kv())
        if awaited is None:
            return False
        entry.gated_since_s = self._now if entry.gated_since_s is None else entry.gated_since_s
        entry.gate_is_over = self._now - entry.gated_since_s >= self.rules.gate_s
        if turn.priority is Priority.INTERACTIVE and not entry.gate_is_over:
            self._awaited.add(awaited.source)
        return not entry.gate_is_over

    def _is_disturbed_now(self) -> bool:
        is_cancelled = any(turn.is_cancelled for turn in self._entries)
        for entry in map(self._entries.__getitem__, self.waiting):
            if entry.awaits is not None and entry.awaits.source.shareable >= entry.awaits.shared_tokens:
                entry.awaits, self._is_disturbed = None, True
        return self._is_disturbed or is_cancelled

    def _begin(
        self, turn: TurnT, spare: Collection[Hashable], try_begin: Callable[[TurnT, Collection[Hashable]], bool]
    ) -> bool:
        if not try_begin(turn, spare):
            return False
        if turn in self._entries and turn in self.waiting:
            entry = self._entries[turn]
            entry.began_aged = self._now - entry.waits_since_s >= self.rules.ageing_s
            entry.waits_since_s = self._now
            entry.served = self._served - 1  # before who was served last, behind all others
            self.waiting.remove(turn)
            self.running.append(turn)
        return True

    @property
    def _is_full(self) -> bool:
        return self.rules.max_running is not None and len(self.running) >= self.rules.max_running

    def _is_preemptible(self, turn: TurnT, urgent_lines: Collection[Hashable]) -> bool:
        entry = self._entries[turn]
        return (
            turn.priority is Priority.BACKGROUND
            and turn.can_be_put_aside
            and not turn.is_restoring
            and not turn.is_cancelled
            and not entry.began_aged
            and entry.preemptions < self.rules.max_preemptions
            and turn.line not in urgent_lines
            and turn not in self._awaited
        )

    def _with_kv(self) -> list[TurnT]:
        return [turn for turn in self.running if not turn.is_restoring]

    @staticmethod
    def _speaks(turn: TurnT) -> bool:
        return not turn.is_prefilling and not turn.is_cancelled and not turn.is_restoring

    def _next_in_round(self) -> TurnT | None:
        """The most urgent class's warm turn with one cell left, if the last cell was not given so; else its turn that
        was served longest ago.
        """
        lines = self._urgent_lines()
        prefilling = [turn for turn in self._with_kv() if turn.is_prefilling and not turn.is_cancelled]
        urgent = [turn for turn in prefilling if self._is_urgent(turn, lines)]
        turns = urgent or prefilling
        warm = [turn for turn in turns if turn.is_warm and turn.rest_tokens <= self.rules.cell_tokens]
        cold = [turn for turn in turns if turn not in warm]
        lane = warm if warm and not (self._was_warm and cold) else cold
        return min(lane, key=lambda turn: self._entries[turn].served, default=None)

    def _serve(self, turn: TurnT, spent_s: float) -> None:
        self._was_warm = turn.is_warm and turn.rest_tokens <= self.rules.cell_tokens
        self._served += 2
        entry = self._entries[turn]
        entry.served = self._served
        entry.waits_since_s = self._now + spent_s
