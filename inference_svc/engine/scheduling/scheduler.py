"""Which turns run in the next step: pure bookkeeping over turns. No tensors, no clock of its own, no bytes.

A turn's status says where it is; the scheduler reads it and never sets it. It returns decisions and calls nobody.
`EngineWorker.step` shows the order in which it is asked: `cancelled`, `admit` until it is `Blocked`, `begin_step`, and
`grant` until there is none.

Rules within a namespace:

- Agents: turns of one agent run one after another.
- Priority: interactive turns begin and prefill before background turns. A turn counts as interactive after waiting
  `ageing_s`, or when an interactive turn depends on it.
- Room: admission is head-of-line. If the first turn does not fit in memory, no turn behind it is admitted, so that
  large turns cannot starve.
- Prefill: round robin. A warm turn with one cell left goes first, but never twice in a row before cold turns.
- Pace: `pacing` and `step_costs` say how many cells a step takes, how long they are, and how many files it loads.
- Siblings: a turn waits while another prefills a prefix that both need (`prefix_sharing`), for `prefix_wait_s` at most.

Rules between namespaces:

- Order: in each class, one turn of each namespace after the other (`company`). No background turn, however long it
  waits, goes before another namespace's interactive turn.
- Room: by shares (`room_shares`). A turn that does not fit never keeps another namespace's turn waiting that stays
  within its share. While the room must come from other namespaces, it does not even keep its own namespace's waiting.
- Time: rows by seats (`seats`), prefill by `pacing`.

A namespace that is alone is bound by none of the second list.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from inference_svc.engine.api import Priority
from inference_svc.engine.grid import cut_cell
from inference_svc.engine.scheduling.company import Company, Namespace
from inference_svc.engine.scheduling.pacing import SharedTime, StepPace
from inference_svc.engine.scheduling.prefix_sharing import awaited_by
from inference_svc.engine.scheduling.room_shares import Room, RoomShares
from inference_svc.engine.scheduling.schedulable import NOT_BEGUN, RUNNING, WITH_KV, Rules, Schedulable, Status
from inference_svc.engine.scheduling.seats import Seats
from inference_svc.engine.scheduling.step_costs import StepCosts

TurnT = TypeVar("TurnT", bound=Schedulable)


@dataclass(frozen=True)
class Admit(Generic[TurnT]):
    """The turn begins now: there is room. It must not drop the hot memories with the keys `protected`, because waiting
    turns extend them; None: while no turn runs, no memory is protected.
    """

    turn: TurnT
    protected: Collection[Hashable] | None


@dataclass(frozen=True)
class Preempt(Generic[TurnT]):
    """These turns give up their rows, so that `blocked` finds room."""

    turns: tuple[TurnT, ...]
    blocked: TurnT


@dataclass(frozen=True)
class Blocked:
    """No other turn begins now. `wants_preemption`: running turns would make room for one, if they might be preempted
    now.
    """

    wants_preemption: bool = False


@dataclass(frozen=True)
class Grant(Generic[TurnT]):
    """What the turn does next in this step: it computes a cell of so many tokens, or while its status is LOADING it
    loads at most so many files.
    """

    turn: TurnT
    size: int
    position: int | None  # of the cell; None for files
    began_s: float  # seconds of the step that were spent before


Decision: TypeAlias = Admit[TurnT] | Preempt[TurnT] | Blocked


@dataclass
class Scheduler(Generic[TurnT]):
    """Turns wait, run, and leave. Seconds come from any clock that never goes back."""

    room: Room[TurnT]
    rules: Rules = field(default_factory=Rules)
    turns: list[TurnT] = field(default_factory=list)  # all that are not over
    _numbers: Iterator[int] = field(default_factory=count)
    _awaited: set[TurnT] = field(default_factory=set)  # running turns that an urgent waiting turn waits for
    _served: int = 0
    _now: float = 0.0
    _pace: StepPace = field(default_factory=lambda: StepPace(0.0))
    _is_disturbed: bool = False  # a turn came during this step, or may begin now

    def __post_init__(self) -> None:
        self._company = Company(self.rules.company_s)
        self._time = SharedTime()
        self._costs = StepCosts()
        self._granted: Grant[TurnT] | None = None  # the step's last one
        self._is_plain = False  # the step decodes, and nothing else was granted
        self._began_s = 0.0  # when the step began
        self._seats: dict[Namespace, Seats[TurnT]] = {}
        self._most_rows: int | None = None  # rows of one namespace in a step; None: all

    @property
    def waiting(self) -> list[TurnT]:
        return [turn for turn in self.turns if turn.status in NOT_BEGUN]

    @property
    def running(self) -> list[TurnT]:
        return [turn for turn in self.turns if turn.status in RUNNING]

    # --- coming and going ---

    def submit(self, turn: TurnT, now: float) -> None:
        """The turn waits. Its bytes must fit the empty budget."""
        turn.schedule.number, turn.schedule.waits_since_s = next(self._numbers), now
        self._company.came(turn.namespace)
        self.turns.append(turn)
        self._is_disturbed = True

    def remove(self, turn: TurnT) -> None:
        """The turn is over, whether it waited or ran. Without effect if it is gone already."""
        if turn in self.turns:
            self.turns.remove(turn)
            self._company.went(turn.namespace, self._now)
        self._awaited.discard(turn)

    def cancelled(self) -> list[TurnT]:
        """Cancelled turns, waiting or running: they must end now."""
        return [turn for turn in self.turns if turn.is_cancelled]

    # --- beginning ---

    def admit(self, now: float, *, may_preempt: bool = True) -> Decision[TurnT]:
        """Decide which waiting turn begins next, or which running turns make room for one, and note the decision. The
        caller carries it out before it asks again.
        """
        self._now = now
        self._awaited = set()
        self._company.forget_absent(now)
        if not self.waiting:
            return Blocked()
        shares = self._shares()
        # The first turn without room of each namespace, with the memories that were protected from it; and the first of
        # each whose room is up to others (`RoomShares.is_up_to_others`), which keeps no other waiting.
        blocked: dict[Namespace, tuple[TurnT, Collection[Hashable]]] = {}
        up_to_others: dict[Namespace, tuple[TurnT, Collection[Hashable]]] = {}
        for turn in self._in_order():
            ahead = blocked.get(turn.namespace)
            # A turn that extends a memory which the turn ahead protects takes no room from that turn.
            if turn.is_cancelled or (ahead is not None and self._takes_room_from(ahead[0], turn, shares)):
                continue
            self._look_for_sibling(turn)
            if self._waits_for_sibling(turn):
                turn.schedule.found_no_room = False
                continue
            claimed, protected = self._claimed(), frozenset[Hashable]()
            has_room = not shares.lacks(turn, claimed)
            if has_room:
                protected = self._protected_from(turn, shares)
                has_room = not self.room.missing_bytes(turn, protected)
                turn.schedule.found_no_room = not has_room
            if has_room:
                return self._admitted(turn, protected)
            waits = up_to_others if shares.is_up_to_others(turn, claimed) else blocked
            waits.setdefault(turn.namespace, (turn, protected))
        return self._without_room((*blocked.values(), *up_to_others.values()), may_preempt=may_preempt)

    def _without_room(
        self, refused: Collection[tuple[TurnT, Collection[Hashable]]], *, may_preempt: bool
    ) -> Decision[TurnT]:
        """The decision when only these turns could begin, and none has room."""
        for turn, protected in refused:
            # While no turn runs, none will ever make room: then no memory is protected.
            if not self.running and not self.room.missing_bytes(turn, None):
                return self._admitted(turn, None)
            chosen = self._preemptions(turn, self.room.missing_bytes(turn, protected))
            if chosen and self.room.can_swap_out(chosen):
                if not may_preempt:
                    return Blocked(wants_preemption=True)
                self._note_preempted(chosen)
                return Preempt(chosen, turn)
        return Blocked()

    def _admitted(self, turn: TurnT, protected: frozenset[Hashable] | None) -> Admit[TurnT]:
        record = turn.schedule
        record.found_no_room = False
        record.began_aged = self._now - record.waits_since_s >= self.rules.ageing_s
        record.waits_since_s = self._now
        record.served = self._served - 1  # before the turn that was served last, behind all others
        self._company.began(turn.namespace)
        return Admit(turn, protected)

    def _note_preempted(self, turns: Iterable[TurnT]) -> None:
        """These turns wait at their old places in the order, but age from now on, so that they do not take back at once
        the room that they gave up.
        """
        for turn in turns:
            record = turn.schedule
            record.preemptions += 1
            record.waits_since_s = self._now
            record.awaits = record.prefix_wait_since_s = None
            record.prefix_wait_is_over = False
            self._awaited.discard(turn)

    def _preemptions(self, blocked: TurnT, missing_bytes: int) -> tuple[TurnT, ...]:
        """The turns to preempt so that `blocked` finds `missing_bytes` more. None if they would not give enough, or if
        `blocked` is a background turn.

        Background turns of its own namespace give way, the youngest first. If its namespace holds less than its share,
        namespaces that hold more than theirs give way too, as long as they do: their background turns before, their
        interactive turns after those of its own namespace.
        """
        if blocked.priority is not Priority.INTERACTIVE:
            return ()
        shares = self._shares()
        lacking_bytes = shares.lacks(blocked, self._claimed())
        missing_bytes = max(missing_bytes, lacking_bytes)
        is_entitled = shares.is_under(blocked.namespace) and not lacking_bytes
        chosen: list[TurnT] = []
        for turn in self._preemptible_for(blocked):
            if missing_bytes <= 0:
                break
            if turn.namespace == blocked.namespace or (is_entitled and shares.is_over(turn.namespace)):
                chosen.append(turn)
                shares.gives_up(turn)
                missing_bytes -= self.room.freed_bytes(turn)
        return tuple(chosen) if missing_bytes <= 0 else ()

    # --- a step ---

    def begin_step(self, now: float) -> tuple[TurnT, ...]:
        """Begin a step. Returns the turns that decode one token now; other decoding turns sit out. Then ask for
        grants.
        """
        if self._is_plain:
            self._costs.stepped(now - self._began_s)
        self._began_s = self._now = now
        step_s = self._costs.step_s
        most_s = self.rules.budget_s if step_s is None else self.rules.stalled_steps * step_s
        self._pace = StepPace(min(self.rules.budget_s, most_s))
        self._is_disturbed = False
        decoding = [turn for turn in self.running if self._is_decoding(turn)]
        self._is_plain = bool(decoding)
        self._time.begin_step(now, len({turn.namespace for turn in decoding}), self._company.places)
        return tuple(self._seated(decoding))

    def grant(self, spent_s: float) -> Grant[TurnT] | None:
        """Give the step's next cell, or the next files, to a turn, which counts as served; None when that is over.

        `spent_s`: seconds that the step's cells and files took so far. The first is always granted if there is a turn
        whose namespace owes nothing. More follow while the time lasts (it binds only while turns decode), while the
        table allows, and while no turn was submitted, was cancelled, or may begin with a sibling's prefix.
        """
        self._time.spent(spent_s)
        self._learn(spent_s)
        if self._pace.has_begun:
            self._end_prefix_waits()
            if self._must_look_up():
                return None
        turn = self._next_in_round()
        if turn is None:
            return None
        decodes = any(self._is_decoding(other) for other in self.running)
        size = self._size(turn, self._pace.budget_s - spent_s if decodes else None)
        loads = turn.status is Status.LOADING
        position, tokens = (0, 0) if loads else (turn.computed, size)
        if not size or not self._pace.allows(turn, position, tokens):
            return None
        self._pace.take(turn, position, tokens)
        self._serve(turn, spent_s)
        self._is_plain = False
        self._granted = Grant(turn, size, None if loads else position, spent_s)
        return self._granted

    def _size(self, turn: TurnT, left_s: float | None) -> int:
        """How many tokens or files the turn's next grant has; 0 if the step has no time for one. `left_s`: seconds that
        are left of the step; None: nobody waits for it.
        """
        loads = turn.status is Status.LOADING
        least = 1 if loads else self.rules.least_tokens
        whole = turn.next_files if loads else turn.next_cell_tokens
        if left_s is None:
            return whole
        if not loads and self._pace.has_begun and left_s < (self._costs.step_s or 0.0):
            return 0  # however few its tokens, a pass costs what a step costs
        fits = self._costs.files_within(left_s) if loads else self._costs.tokens_within(left_s, turn.computed)
        if fits is None:
            fits = least if left_s > 0 else 0
        if not self._pace.has_begun:
            fits = max(fits, least)
        if fits < min(whole, least):
            return 0
        return min(whole, fits) if loads else cut_cell(turn.computed, whole, fits, least)

    def _learn(self, spent_s: float) -> None:
        """The step's last grant was carried out, unless its turn is over. A prompt's few last tokens tell nothing: a
        pass costs something by itself.
        """
        last, self._granted = self._granted, None
        if last is None or last.turn.status not in RUNNING:
            return
        if last.position is None or last.size >= self.rules.least_tokens:
            self._costs.learn(last.position, last.size, spent_s - last.began_s)

    # --- order ---

    def _in_order(self) -> list[TurnT]:
        """Waiting turns whose agent has no earlier one: urgent turns first, among them one of each namespace after the
        other; in a namespace by order of submission.
        """
        first: dict[Hashable, int] = {}
        for turn in self.turns:
            if turn.agent_key is not None:
                number = turn.schedule.number
                first[turn.agent_key] = min(first.get(turn.agent_key, number), number)
        agents = self._urgent_agents()
        numbered = ((turn.schedule.number, turn) for turn in self.waiting)
        able = [
            (number, turn) for number, turn in numbered if turn.agent_key is None or first[turn.agent_key] == number
        ]
        pressing = {
            turn.namespace for _, turn in able if self._is_pressing(turn, agents) and not turn.schedule.found_no_room
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
        """Whether a person waits for the turn."""
        return turn.priority is Priority.INTERACTIVE or turn.agent_key in urgent_agents or turn in self._awaited

    def _is_urgent(
        self, turn: TurnT, urgent_agents: Collection[Hashable], pressing: Collection[Namespace] = ()
    ) -> bool:
        """`pressing`: namespaces that have a turn for which a person waits. Age does not count against such others."""
        is_aged = self._now - turn.schedule.waits_since_s >= self.rules.ageing_s
        return self._is_pressing(turn, urgent_agents) or (is_aged and not {*pressing} - {turn.namespace})

    def _urgent_agents(self) -> set[Hashable]:
        """Agents of which an interactive turn waits: their earlier turns are urgent too."""
        return {
            turn.agent_key
            for turn in self.waiting
            if turn.priority is Priority.INTERACTIVE and turn.agent_key is not None
        }

    def _takes_room_from(self, ahead: TurnT, turn: TurnT, shares: RoomShares[TurnT]) -> bool:
        return turn.memory_key is None or turn.memory_key not in self._protected_from(ahead, shares)

    def _protected_from(self, turn: TurnT, shares: RoomShares[TurnT]) -> frozenset[Hashable]:
        """Keys of the hot memories that the turn must not drop: waiting turns of at least its urgency extend them.
        Otherwise agents that take turns would drop each other's memory just before its use. A turn within its
        namespace's share may drop other namespaces' memories.
        """
        if self._now - turn.schedule.waits_since_s >= self.rules.patience_s:
            return frozenset()
        agents = self._urgent_agents()
        mine, exceeds = self._is_urgent(turn, agents), shares.exceeds(turn)
        return frozenset(
            other.memory_key
            for other in self.waiting
            if other is not turn
            and other.memory_key is not None
            and (exceeds or other.namespace == turn.namespace)
            and self._is_urgent(other, agents) >= mine
        )

    def _shares(self) -> RoomShares[TurnT]:
        is_shared = self._company.is_shared
        return RoomShares(self.room, self.running, self.waiting, self.rules.kept_part, is_shared=is_shared)

    def _claimed(self) -> set[Namespace]:
        """Namespaces that have a turn without room."""
        return {turn.namespace for turn in self.waiting if turn.schedule.found_no_room}

    def _waits_for_sibling(self, turn: TurnT) -> bool:
        """Whether another turn prefills what this one needs too, as `_look_for_sibling` found last."""
        record = turn.schedule
        return record.awaits is not None and not record.prefix_wait_is_over

    def _look_for_sibling(self, turn: TurnT) -> None:
        """Note whether another turn prefills what this one needs. While it waits, look again only when that is over."""
        record = turn.schedule
        # A preempted turn goes on with its own KV.
        if self.rules.prefix_wait_s <= 0 or record.prefix_wait_is_over or record.preemptions:
            return
        awaited = record.awaits
        if awaited is None or awaited.source.status not in RUNNING or awaited.source.shareable >= awaited.shared_tokens:
            awaited = record.awaits = awaited_by(turn, self._with_kv())
        if awaited is None:
            return
        record.prefix_wait_since_s = self._now if record.prefix_wait_since_s is None else record.prefix_wait_since_s
        record.prefix_wait_is_over = self._now - record.prefix_wait_since_s >= self.rules.prefix_wait_s
        if turn.priority is Priority.INTERACTIVE and not record.prefix_wait_is_over:
            self._awaited.add(awaited.source)

    def _end_prefix_waits(self) -> None:
        """Let turns begin whose awaited prefix is there now: they disturb the step."""
        for turn in self.waiting:
            awaited = turn.schedule.awaits
            if awaited is not None and awaited.source.shareable >= awaited.shared_tokens:
                turn.schedule.awaits, self._is_disturbed = None, True

    def _must_look_up(self) -> bool:
        """Whether a turn came, was cancelled, or may begin since the step began."""
        return self._is_disturbed or any(turn.is_cancelled for turn in self.turns)

    def _preemptible_for(self, blocked: TurnT) -> list[TurnT]:
        """Turns that may give way to `blocked`, in the order in which they do."""
        agents = self._urgent_agents()
        turns = [turn for turn in self.running if self._is_preemptible(turn)]
        turns.sort(key=lambda turn: turn.schedule.number, reverse=True)
        own = [turn for turn in turns if turn.namespace == blocked.namespace and self._gives_way(turn, agents)]
        others = [turn for turn in turns if turn.namespace != blocked.namespace]
        background = [turn for turn in others if turn.priority is Priority.BACKGROUND]
        return [*background, *own, *(turn for turn in others if turn not in background)]

    def _is_preemptible(self, turn: TurnT) -> bool:
        return (
            turn.can_be_preempted
            and turn.status in WITH_KV
            and not turn.is_cancelled
            and turn.schedule.preemptions < self.rules.max_preemptions
        )

    def _gives_way(self, turn: TurnT, urgent_agents: Collection[Hashable]) -> bool:
        """Whether it gives way to interactive turns of its own namespace."""
        return (
            turn.priority is Priority.BACKGROUND
            and not turn.schedule.began_aged
            and turn.agent_key not in urgent_agents
            and turn not in self._awaited
        )

    def _with_kv(self) -> list[TurnT]:
        return [turn for turn in self.turns if turn.status in WITH_KV]

    @staticmethod
    def _is_decoding(turn: TurnT) -> bool:
        return turn.status is Status.DECODING and not turn.is_cancelled

    def _seated(self, decoding: Collection[TurnT]) -> list[TurnT]:
        """The turns that decode in this step. Beside other namespaces each has `rows_beside` rows. A namespace that is
        alone again gets twice as many in each step, until all decode.
        """
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
            turn.schedule.waits_since_s = self._now
        return [turn for turn in decoding if turn in chosen]

    def _next_in_round(self) -> TurnT | None:
        """The turn that gets the next cell, or loads the next files. From the most urgent class choose the namespace
        that was served longest ago. Of its turns choose one that loads, or a warm one with one cell left, unless its
        last cell went to such a turn out of order; else the turn that was served longest ago.
        """
        agents, able = self._urgent_agents(), (Status.PREFILLING, Status.LOADING)
        prefilling = [turn for turn in self.turns if turn.status in able and not turn.is_cancelled]
        prefilling = [turn for turn in prefilling if not self._owes(turn)]
        pressing = {turn.namespace for turn in prefilling if self._is_pressing(turn, agents)}
        urgent = [turn for turn in prefilling if self._is_urgent(turn, agents, pressing)]
        if not prefilling:
            return None
        turns = urgent or prefilling
        first = min(turns, key=lambda turn: self._company.of(turn.namespace).served)
        turns = [turn for turn in turns if turn.namespace == first.namespace]
        warm = [turn for turn in turns if self._is_nearly_there(turn)]
        cold = [turn for turn in turns if turn not in warm]
        lane = warm if warm and not (self._company.of(first.namespace).was_warm and cold) else cold
        return min(lane, key=lambda turn: turn.schedule.served)

    def _is_nearly_there(self, turn: TurnT) -> bool:
        is_short = turn.is_warm and turn.rest_tokens <= self.rules.cell_tokens
        return is_short or turn.status is Status.LOADING

    def _owes(self, turn: TurnT) -> bool:
        """Whether its namespace has taken more of others' time than it may, while they decode."""
        return self._company.of(turn.namespace).owed_s > 0 and self._is_beside_others(turn)

    def _is_beside_others(self, turn: TurnT) -> bool:
        return any(self._is_decoding(other) and other.namespace != turn.namespace for other in self.running)

    def _serve(self, turn: TurnT, spent_s: float) -> None:
        self._served += 2
        place = self._company.of(turn.namespace)
        place.was_warm = self._is_nearly_there(turn)
        place.served = self._served
        if self._is_beside_others(turn):
            self._time.owes_next(place)
        record = turn.schedule
        record.served = self._served
        record.waits_since_s = self._now + spent_s
