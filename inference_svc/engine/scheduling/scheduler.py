"""Which turns begin, wait and give way. Pure bookkeeping over turns: no tensors, no clock, no bytes.

A turn's status says where it is; the scheduler reads it and never sets it. It returns decisions and calls nobody.
`EngineWorker.step` shows the order of calls: `cancelled`, `admit` until it is `Blocked`, `begin_step`, and `grant`
until there is none. What a step does is in `step_schedule`.

Rules within a namespace:

- Agents: turns of one agent run one after another.
- Priority: interactive turns begin and prefill before background turns. A turn counts as interactive after waiting
  `ageing_s`, or when an interactive turn depends on it (`urgency`).
- Room: admission is head-of-line. If the first turn does not fit in memory, no turn behind it is admitted, so that
  large turns cannot starve.
- Siblings: a turn waits while another prefills a prefix that both need (`prefix_sharing`), for `prefix_wait_s` at most.

Rules between namespaces:

- Order: in each class, one turn of each namespace after the other (`company`). No background turn, however long it
  waits, goes before another namespace's interactive turn.
- Room: by shares (`room_shares`). A turn that does not fit never keeps another namespace's turn waiting that stays
  within its share. While the room must come from other namespaces, it does not even keep its own namespace's waiting.

A namespace that is alone is bound by none of the second list.
"""

from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeAlias

from inference_svc.engine.api import Priority
from inference_svc.engine.scheduling.company import Company, Namespace
from inference_svc.engine.scheduling.prefix_sharing import PrefixWaits
from inference_svc.engine.scheduling.room_shares import Room, RoomShares
from inference_svc.engine.scheduling.schedulable import NOT_BEGUN, RUNNING, WITH_KV, Rules, Status, TurnT
from inference_svc.engine.scheduling.step_schedule import Grant, StepSchedule
from inference_svc.engine.scheduling.urgency import Urgency


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


Decision: TypeAlias = Admit[TurnT] | Preempt[TurnT] | Blocked


class Scheduler(Generic[TurnT]):
    """Turns wait, run, and leave. Seconds come from any clock that never goes back."""

    def __init__(self, room: Room[TurnT], rules: Rules, turns: list[TurnT]) -> None:
        """`turns`: all that are not over, in the order of submission; it adds and removes them."""
        self.room = room
        self.rules = rules
        self.turns = turns
        self._company = Company(rules.beside_others.company_s)
        self._waits: PrefixWaits[TurnT] = PrefixWaits(rules)
        self._steps = StepSchedule(turns, rules, self._company)
        self.costs = self._steps.costs
        self._now = 0.0
        self._is_disturbed = False  # a turn came during this step, or may begin now

    @property
    def waiting(self) -> list[TurnT]:
        return [turn for turn in self.turns if turn.status in NOT_BEGUN]

    @property
    def running(self) -> list[TurnT]:
        return [turn for turn in self.turns if turn.status in RUNNING]

    @property
    def has_prompts(self) -> bool:
        """Whether a turn's prompt is computed, or its KV is loaded."""
        return any(turn.status in (Status.PREFILLING, Status.LOADING) for turn in self.turns)

    @property
    def is_alone(self) -> bool:
        """Whether no two namespaces have turns now."""
        return sum(place.turns > 0 for place in self._company.places) <= 1

    # --- coming and going ---

    def submit(self, turn: TurnT, now: float) -> None:
        """The turn waits. Its bytes must fit the empty budget."""
        turn.schedule.waits_since_s = now
        self._company.came(turn.namespace)
        self.turns.append(turn)
        self._is_disturbed = True

    def remove(self, turn: TurnT) -> None:
        """The turn is over, whether it waited or ran. Without effect if it is gone already."""
        if turn in self.turns:
            self.turns.remove(turn)
            self._company.went(turn.namespace, self._now)
        self._waits.forget(turn)

    def cancelled(self) -> list[TurnT]:
        """Cancelled turns, waiting or running: they must end now."""
        return [turn for turn in self.turns if turn.is_cancelled]

    # --- beginning ---

    def admit(self, now: float, *, may_preempt: bool = True) -> Decision[TurnT]:
        """Decide which waiting turn begins next, or which running turns make room for one, and note the decision. The
        caller carries it out before it asks again.
        """
        self._now = now
        self._waits.awaited.clear()
        self._company.forget_absent(now)
        if not self.waiting:
            return Blocked()
        shares, urgency = self._shares(), self._urgency()
        # The first turn without room of each namespace, with the memories that were protected from it; and the first of
        # each whose room is up to others (`RoomShares.is_up_to_others`), which keeps no other waiting.
        blocked: dict[Namespace, tuple[TurnT, Collection[Hashable]]] = {}
        up_to_others: dict[Namespace, tuple[TurnT, Collection[Hashable]]] = {}
        for turn in self._in_order(urgency):
            ahead = blocked.get(turn.namespace)
            # A turn that extends a memory which the turn ahead protects takes no room from that turn.
            if turn.is_cancelled or (ahead is not None and self._takes_room_from(ahead[0], turn, shares, urgency)):
                continue
            if self._waits.look(turn, self.turns, self._now):
                turn.schedule.found_no_room = False
                continue
            claimed, protected = self._claimed(), frozenset[Hashable]()
            has_room = not shares.lacks(turn, claimed)
            if has_room:
                protected = self._protected_from(turn, shares, urgency)
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
                for gives_way in chosen:
                    # At its old place in the order, but it ages from now on, so that it does not take back at once the
                    # room that it gave up.
                    gives_way.schedule.preemptions += 1
                    gives_way.schedule.waits_since_s = self._now
                    self._waits.forget(gives_way)
                return Preempt(chosen, turn)
        return Blocked()

    def _admitted(self, turn: TurnT, protected: frozenset[Hashable] | None) -> Admit[TurnT]:
        record = turn.schedule
        record.found_no_room = False
        record.began_aged = self._now - record.waits_since_s >= self.rules.ageing_s
        record.waits_since_s = self._now
        self._steps.joins(turn)
        self._company.began(turn.namespace)
        return Admit(turn, protected)

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
        self._now, self._is_disturbed = now, False
        return self._steps.begin(now, self._urgency())

    def grant(self, spent_s: float, *, is_behind_step: bool = False) -> Grant[TurnT] | None:
        """Give the step's next cell, or the next files, to a turn, which counts as served; None when that is over.

        `spent_s`: seconds that the step's cells and files took so far. `is_behind_step`: the device decodes a step
        before it computes what is granted, and the caller waits for both. The first is always granted if there is a
        turn whose namespace owes nothing and that, while others decode, would not only wait for its files; beside a
        stream that a person reads a background turn's only if it has time, or for a share of the time. More follow
        while the time lasts (it binds only while turns decode), while the table allows, and while no turn was
        submitted, was cancelled, or may begin with a sibling's prefix.
        """
        self._steps.learn(spent_s)
        if self._steps.has_begun:
            self._is_disturbed |= self._waits.let_go(self.waiting)
            if self._is_disturbed or self.cancelled():
                return None
        return self._steps.grant(spent_s, self._urgency(), is_behind_step=is_behind_step)

    # --- order ---

    def _in_order(self, urgency: Urgency[TurnT]) -> list[TurnT]:
        """Waiting turns whose agent has no earlier one: urgent turns first, among them one of each namespace after the
        other; in a namespace by order of submission.
        """
        first: dict[Hashable, TurnT] = {}
        for turn in self.turns:
            first.setdefault(turn.agent_key, turn)
        able = [turn for turn in self.waiting if turn.agent_key is None or first[turn.agent_key] is turn]
        pressing = {turn.namespace for turn in able if urgency.is_pressing(turn) and not turn.schedule.found_no_room}
        rounds: Counter[tuple[bool, Namespace]] = Counter()
        places = {}
        for turn in able:
            is_later = not urgency.is_urgent(turn, pressing)
            places[turn] = is_later, rounds[is_later, turn.namespace], self._company.of(turn.namespace).began
            rounds[is_later, turn.namespace] += 1
        return sorted(able, key=places.__getitem__)

    # --- room ---

    def _takes_room_from(self, ahead: TurnT, turn: TurnT, shares: RoomShares[TurnT], urgency: Urgency[TurnT]) -> bool:
        return turn.memory_key is None or turn.memory_key not in self._protected_from(ahead, shares, urgency)

    def _protected_from(self, turn: TurnT, shares: RoomShares[TurnT], urgency: Urgency[TurnT]) -> frozenset[Hashable]:
        """Keys of the hot memories that the turn must not drop: waiting turns of at least its urgency extend them.
        Otherwise agents that take turns would drop each other's memory just before its use. A turn within its
        namespace's share may drop other namespaces' memories.
        """
        if self._now - turn.schedule.waits_since_s >= self.rules.patience_s:
            return frozenset()
        mine, exceeds = urgency.is_urgent(turn), shares.exceeds(turn)
        return frozenset(
            other.memory_key
            for other in self.waiting
            if other is not turn
            and other.memory_key is not None
            and (exceeds or other.namespace == turn.namespace)
            and urgency.is_urgent(other) >= mine
        )

    def _shares(self) -> RoomShares[TurnT]:
        is_shared = self._company.is_shared
        return RoomShares(
            self.room, self.running, self.waiting, self.rules.beside_others.kept_part, is_shared=is_shared
        )

    def _claimed(self) -> set[Namespace]:
        return {turn.namespace for turn in self.waiting if turn.schedule.found_no_room}

    def _preemptible_for(self, blocked: TurnT) -> list[TurnT]:
        """Turns that may give way to `blocked`, in the order in which they do."""
        urgency = self._urgency()
        turns = [turn for turn in reversed(self.running) if self._is_preemptible(turn)]
        own = [turn for turn in turns if turn.namespace == blocked.namespace and self._gives_way(turn, urgency)]
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

    def _gives_way(self, turn: TurnT, urgency: Urgency[TurnT]) -> bool:
        """Whether it gives way to interactive turns of its own namespace."""
        return not turn.schedule.began_aged and not urgency.is_pressing(turn)

    def _urgency(self) -> Urgency[TurnT]:
        return Urgency(self.turns, self._waits.awaited, self.rules, self._now)
