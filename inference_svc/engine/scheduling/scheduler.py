"""Who runs in the next step: pure bookkeeping over turns. No tensors, no clock of its own, no bytes.

The life of a turn is waiting → running → gone, and after a preemption waiting once more; then, running again, it is
restoring until its KV has been brought back. A step is what the worker does
between two looks at its mailbox:

    end what scheduler.cancelled() says                 # remove(turn) each
    blocked = scheduler.begin_waiting(now, try_begin)   # try_begin reserves bytes and gives the turn its KV
    for each of blocked: for each of scheduler.preemptions(blocked, missing_bytes):
        preempt it and free its rows; scheduler.preempted(turn, now)
    decode one token for all of scheduler.begin_step(now); the others sit out
    while (turn := scheduler.next_prefill(seconds since the first)) is not None:
        one cell of it; look at the mailbox: submit() and cancel end the loop before the next cell
    remove() what drew its last token

Rules within a namespace. Agents: turns of one agent run one after another. Priority: interactive before background, to
begin and to prefill; who has waited `ageing_s` counts as interactive, and so does who an interactive turn waits for.
Room: the first that finds none keeps all behind it waiting, so that nobody is overtaken for ever. Prefill: round robin;
a warm turn whose rest is one cell goes first, but never twice in a row before those who wait longer. Pace: `pacing`.
Siblings: a turn waits while another prefills a prefix that both need (`prefix_gate`), for `gate_s` at most.

Rules between namespaces. Order: one of each namespace after the other (`company`), in each class; no background turn,
however long it waits, goes before another namespace's interactive one. Room: by shares (`room_shares`); who finds none
keeps nobody else's turn waiting that stays within its namespace's share, and while it is up to others not even its
own namespace's. Time: rows by seats (`seats`), prefill by `pacing`. A namespace alone is bound by none of it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from inference_svc.engine.api import Priority
from inference_svc.engine.scheduling.company import Company, Namespace
from inference_svc.engine.scheduling.pacing import SharedTime, StepPace
from inference_svc.engine.scheduling.prefix_gate import Donor, HotPrefix, PrefixGate
from inference_svc.engine.scheduling.room_shares import Room, RoomShares
from inference_svc.engine.scheduling.schedulable import Rules, Schedulable
from inference_svc.engine.scheduling.seats import Seats

TurnT = TypeVar("TurnT", bound=Schedulable)


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
    found_no_room: bool = False  # when it was tried last


@dataclass
class Scheduler(Generic[TurnT]):
    """Turns wait, run, and leave. Seconds are any clock's that never goes back."""

    room: Room[TurnT]
    rules: Rules = field(default_factory=Rules)
    waiting: list[TurnT] = field(default_factory=list)
    running: list[TurnT] = field(default_factory=list)
    _entries: dict[TurnT, _Entry[TurnT]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)
    _awaited: set[TurnT] = field(default_factory=set)  # running turns that an urgent waiting turn waits for
    _served: int = 0
    _now: float = 0.0
    _pace: StepPace = field(default_factory=lambda: StepPace(0.0))
    _is_disturbed: bool = False  # somebody came during this step

    def __post_init__(self) -> None:
        self._gate: PrefixGate[TurnT] = PrefixGate(self.rules.cell_tokens)
        self._company = Company(self.rules.company_s)
        self._time = SharedTime()
        self._seats: dict[Namespace, Seats[TurnT]] = {}
        self._most_rows: int | None = None  # of one namespace in a step

    # --- coming and going ---

    def submit(self, turn: TurnT, now: float) -> None:
        """The turn waits. Its bytes must fit the budget with all else gone."""
        self._entries[turn] = _Entry(next(self._numbers), now)
        self._company.came(turn.namespace)
        self.waiting.append(turn)
        self._is_disturbed = True

    def remove(self, turn: TurnT) -> None:
        """The turn is over, wherever it was. Without effect if it is gone already."""
        if self._entries.pop(turn, None) is not None:
            self._company.went(turn.namespace, self._now)
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
    ) -> tuple[TurnT, ...]:
        """Let waiting turns begin, in order. Returns those that found no room: of each namespace the first, and the
        first that is up to others (`RoomShares.is_up_to_others`), which keeps none of its own namespace waiting.

        `try_begin(turn, spare)` says whether there is room, and if so has begun the turn. `spare`: keys of hot memories
        that it must not drop for it, because waiting turns extend them. A turn that ended in it must be removed by it.
        `has_time` is asked before each beginning but the first: one may restore a long memory while others decode.
        """
        self._now = now
        self._awaited = set()
        self._company.forget_absent(now)
        shares = self._shares()
        blocked: dict[Namespace, TurnT] = {}
        up_to_others: dict[Namespace, TurnT] = {}
        running_before = len(self.running)
        for turn in self._in_order():
            if turn.is_cancelled or turn not in self._entries:
                continue
            ahead = blocked.get(turn.namespace)
            # Who extends a memory that the one before it spares takes no room that it could have.
            if ahead is not None and (turn.memory_key is None or turn.memory_key not in self._spared_by(ahead, shares)):
                continue
            if self._waits_for_sibling(turn):
                self._entries[turn].found_no_room = False
                continue
            if self._is_full:
                return (*blocked.values(), *up_to_others.values(), turn)
            if len(self.running) > running_before and not has_time():
                break
            claimed = self._claimed()
            if shares.lacks(turn, claimed) or not self._begin(turn, shares, try_begin):
                waits = up_to_others if shares.is_up_to_others(turn, claimed) else blocked
                waits.setdefault(turn.namespace, turn)
        found_no_room = (*blocked.values(), *up_to_others.values())
        # While nobody runs, nobody will ever make room: then nothing is spared.
        for turn in found_no_room:
            if not self.running and self._begin(turn, None, try_begin):
                return ()
        return found_no_room

    def donor_of(
        self, turn: TurnT, hot: Iterable[tuple[Hashable, str, HotPrefix]] = ()
    ) -> Donor[TurnT | Hashable] | None:
        """Whose KV a turn should begin with instead of its plan's, if it would have a cell more: a running turn or the
        key of a hot memory (`HotMemories.idle`). To be asked in `try_begin`.
        """
        return self._gate.donor_of(turn, self._with_kv(), hot)

    def preemptions(self, blocked: TurnT, missing_bytes: int) -> tuple[Preempt[TurnT], ...]:
        """Whom to preempt so that `blocked` finds `missing_bytes` more: nobody if that is not enough, or if `blocked`
        is background itself. Background turns of its own namespace, the youngest first. If that holds less than its
        share: before them background turns, and after them interactive ones, of namespaces that hold more than theirs,
        as long as they do.
        """
        if blocked.priority is not Priority.INTERACTIVE:
            return ()
        shares = self._shares()
        lacking_bytes = shares.lacks(blocked, self._claimed())
        missing_bytes = max(missing_bytes, lacking_bytes)
        is_entitled = shares.is_under(blocked.namespace) and not lacking_bytes
        chosen: list[TurnT] = []
        for turn in self._preemptible_for(blocked):
            if missing_bytes <= 0 and (chosen or not self._is_full):
                break
            if turn.namespace == blocked.namespace or (is_entitled and shares.is_over(turn.namespace)):
                chosen.append(turn)
                shares.gives_up(turn)
                missing_bytes -= self.room.held_bytes(turn)
        return tuple(Preempt(turn, blocked) for turn in chosen) if missing_bytes <= 0 else ()

    # --- a step ---

    def begin_step(self, now: float) -> tuple[TurnT, ...]:
        """Who decodes one token now; who else decodes sits out this step. Then ask for prefills."""
        self._now = now
        self._pace = StepPace(self.rules.budget_s)
        self._is_disturbed = False
        decoding = [turn for turn in self.running if self._is_decoding(turn)]
        self._time.begin_step(now, len({turn.namespace for turn in decoding}), self._company.places)
        return tuple(self._seated(decoding))

    def next_prefill(self, spent_s: float) -> TurnT | None:
        """Who gets the step's next cell; None when its prefill is over. `spent_s`: what its prefill took so far.

        The first cell is always given if anybody prefills who owes nothing to others. More follow while the time
        lasts (if somebody decodes), the table allows, and nobody was submitted, was cancelled, or may begin with what a
        sibling has prefilled by now.
        """
        self._time.spent(spent_s)
        if self._pace.has_begun and self._is_disturbed_now():
            return None
        turn = self._next_in_round()
        if turn is None:
            return None
        size = turn.next_cell_tokens
        decodes = any(self._is_decoding(other) for other in self.running)
        if not self._pace.allows(turn, turn.computed, size, spent_s, somebody_decodes=decodes):
            return None
        self._pace.take(turn, turn.computed, size)
        self._serve(turn, spent_s)
        return turn

    # --- order ---

    def _in_order(self) -> list[TurnT]:
        """Waiting turns whose agent has no earlier one: urgent turns first, among them one of each namespace after the
        other; in a namespace by order of submission.
        """
        first: dict[Hashable, int] = {}
        for turn, entry in self._entries.items():
            if turn.agent_key is not None:
                first[turn.agent_key] = min(first.get(turn.agent_key, entry.number), entry.number)
        agents = self._urgent_agents()
        numbered = ((self._entries[turn].number, turn) for turn in self.waiting)
        able = [
            (number, turn) for number, turn in numbered if turn.agent_key is None or first[turn.agent_key] == number
        ]
        pressing = {
            turn.namespace
            for _, turn in able
            if self._is_pressing(turn, agents) and not self._entries[turn].found_no_room
        }
        by_class = sorted(
            ((not self._is_urgent(turn, agents, pressing), number, turn) for number, turn in able),
            key=lambda one: one[:2],
        )
        rounds: Counter[tuple[bool, Namespace]] = Counter()
        ordered = []
        for is_later, number, turn in by_class:
            place = (rounds[is_later, turn.namespace], self._company.of(turn.namespace).began)
            ordered.append((is_later, *place, number, turn))
            rounds[is_later, turn.namespace] += 1
        return [turn for *_, turn in sorted(ordered, key=lambda one: one[:-1])]

    def _is_pressing(self, turn: TurnT, urgent_agents: Collection[Hashable]) -> bool:
        """A person waits for it."""
        return turn.priority is Priority.INTERACTIVE or turn.agent_key in urgent_agents or turn in self._awaited

    def _is_urgent(
        self, turn: TurnT, urgent_agents: Collection[Hashable], pressing: Collection[Namespace] = ()
    ) -> bool:
        """`pressing`: namespaces that have a turn for which a person waits. Before others' age does not count."""
        is_aged = self._now - self._entries[turn].waits_since_s >= self.rules.ageing_s
        return self._is_pressing(turn, urgent_agents) or (is_aged and not {*pressing} - {turn.namespace})

    def _urgent_agents(self) -> set[Hashable]:
        """Agents of which an interactive turn waits: who is before it there is waited for."""
        return {
            turn.agent_key
            for turn in self.waiting
            if turn.priority is Priority.INTERACTIVE and turn.agent_key is not None
        }

    def _spared_by(self, turn: TurnT, shares: RoomShares[TurnT]) -> set[Hashable]:
        """Hot memories that waiting turns of at least its urgency extend. Agents that take turns would otherwise drop
        each other's memory just before it is used. Those of other namespaces only a turn beyond its share spares.
        """
        if self._now - self._entries[turn].waits_since_s >= self.rules.patience_s:
            return set()
        agents = self._urgent_agents()
        mine, exceeds = self._is_urgent(turn, agents), shares.exceeds(turn)
        return {
            other.memory_key
            for other in self.waiting
            if other is not turn
            and other.memory_key is not None
            and (exceeds or other.namespace == turn.namespace)
            and self._is_urgent(other, agents) >= mine
        }

    def _shares(self) -> RoomShares[TurnT]:
        is_shared = self._company.is_shared
        return RoomShares(self.room, self.running, self.waiting, self.rules.kept_part, is_shared=is_shared)

    def _claimed(self) -> set[Namespace]:
        """Namespaces with a turn that found no room."""
        return {turn.namespace for turn in self.waiting if self._entries[turn].found_no_room}

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
        self,
        turn: TurnT,
        shares: RoomShares[TurnT] | None,
        try_begin: Callable[[TurnT, Collection[Hashable]], bool],
    ) -> bool:
        """Without `shares` nothing is spared."""
        has_room = try_begin(turn, () if shares is None else self._spared_by(turn, shares))
        entry = self._entries.get(turn)
        if entry is None or turn not in self.waiting:
            return has_room
        entry.found_no_room = not has_room
        if has_room:
            entry.began_aged = self._now - entry.waits_since_s >= self.rules.ageing_s
            entry.waits_since_s = self._now
            entry.served = self._served - 1  # before who was served last, behind all others
            self.waiting.remove(turn)
            self.running.append(turn)
            self._company.began(turn.namespace)
            if shares is not None:
                shares.began(turn)
        return has_room

    @property
    def _is_full(self) -> bool:
        return self.rules.max_running is not None and len(self.running) >= self.rules.max_running

    def _preemptible_for(self, blocked: TurnT) -> list[TurnT]:
        """Whom to look at, in order, if `blocked` is to have room."""
        agents = self._urgent_agents()
        turns = [turn for turn in self.running if self._is_preemptible(turn)]
        turns.sort(key=lambda turn: self._entries[turn].number, reverse=True)
        own = [turn for turn in turns if turn.namespace == blocked.namespace and self._gives_way(turn, agents)]
        others = [turn for turn in turns if turn.namespace != blocked.namespace]
        background = [turn for turn in others if turn.priority is Priority.BACKGROUND]
        return [*background, *own, *(turn for turn in others if turn not in background)]

    def _is_preemptible(self, turn: TurnT) -> bool:
        return (
            turn.can_be_preempted
            and not turn.is_restoring
            and not turn.is_cancelled
            and self._entries[turn].preemptions < self.rules.max_preemptions
        )

    def _gives_way(self, turn: TurnT, urgent_agents: Collection[Hashable]) -> bool:
        """To interactive turns of its own namespace."""
        return (
            turn.priority is Priority.BACKGROUND
            and not self._entries[turn].began_aged
            and turn.agent_key not in urgent_agents
            and turn not in self._awaited
        )

    def _with_kv(self) -> list[TurnT]:
        return [turn for turn in self.running if not turn.is_restoring]

    @staticmethod
    def _is_decoding(turn: TurnT) -> bool:
        return not turn.is_prefilling and not turn.is_cancelled and not turn.is_restoring

    def _seated(self, decoding: Collection[TurnT]) -> list[TurnT]:
        """In company so many of each namespace; of one that is alone again twice as many in each step, then all."""
        rows = self.rules.rows_beside
        most = rows if self._company.is_shared else 2 * (self._most_rows or len(decoding))
        self._most_rows = most if self._company.is_shared or most < len(decoding) else None
        if self._most_rows is None:
            self._seats.clear()
            return [*decoding]
        agents = self._urgent_agents()
        chosen: set[TurnT] = set()
        for namespace in {turn.namespace for turn in decoding}:
            seats = self._seats.setdefault(namespace, Seats(self.rules.seat_steps))
            mine = [turn for turn in decoding if turn.namespace == namespace]
            chosen |= seats.seat(
                mine, self._most_rows, lambda turn: self._is_urgent(turn, agents), lambda turn: turn.is_ending
            )
        for turn in chosen:
            self._entries[turn].waits_since_s = self._now
        return [turn for turn in decoding if turn in chosen]

    def _next_in_round(self) -> TurnT | None:
        """Of the most urgent class the namespace that was served longest ago; of this its warm turn with one cell left,
        if its last cell was not given so, else its turn that was served longest ago.
        """
        agents = self._urgent_agents()
        prefilling = [turn for turn in self._with_kv() if turn.is_prefilling and not turn.is_cancelled]
        prefilling = [turn for turn in prefilling if not self._owes(turn)]
        pressing = {turn.namespace for turn in prefilling if self._is_pressing(turn, agents)}
        urgent = [turn for turn in prefilling if self._is_urgent(turn, agents, pressing)]
        if not prefilling:
            return None
        turns = urgent or prefilling
        first = min(turns, key=lambda turn: self._company.of(turn.namespace).served)
        turns = [turn for turn in turns if turn.namespace == first.namespace]
        warm = [turn for turn in turns if turn.is_warm and turn.rest_tokens <= self.rules.cell_tokens]
        cold = [turn for turn in turns if turn not in warm]
        lane = warm if warm and not (self._company.of(first.namespace).was_warm and cold) else cold
        return min(lane, key=lambda turn: self._entries[turn].served)

    def _owes(self, turn: TurnT) -> bool:
        """Its namespace has taken more of others' time than it may, and they decode."""
        return self._company.of(turn.namespace).owed_s > 0 and self._is_beside_others(turn)

    def _is_beside_others(self, turn: TurnT) -> bool:
        return any(self._is_decoding(other) and other.namespace != turn.namespace for other in self.running)

    def _serve(self, turn: TurnT, spent_s: float) -> None:
        self._served += 2
        place = self._company.of(turn.namespace)
        place.was_warm = turn.is_warm and turn.rest_tokens <= self.rules.cell_tokens
        place.served = self._served
        if self._is_beside_others(turn):
            self._time.owes_next(place)
        entry = self._entries[turn]
        entry.served = self._served
        entry.waits_since_s = self._now + spent_s
