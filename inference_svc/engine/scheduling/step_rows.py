"""Which rows a step decodes. Pure.

- Beside other namespaces each has a few, so many at a time, each for so many steps: a row that joins the batch has its
  whole context decoded into it. The longer others are away, the more.
- Beside rows that people read, background rows go along as far as their gaps have room; without any, one goes along for
  an eighth of the time (`gaps`), for two steps: in the second no row joins, so it shows the costs of a row.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from inference_svc.engine.scheduling.company import Company, Namespace
from inference_svc.engine.scheduling.gaps import Gaps, StandingAside
from inference_svc.engine.scheduling.schedulable import Rules, Schedulable, TurnT
from inference_svc.engine.scheduling.step_costs import StepCosts
from inference_svc.engine.scheduling.urgency import Urgency

_ABSENCE = 4  # a namespace that comes back waits for a step that takes so small a part of the time it was away
_ROW_TOKENS = 256  # a row costs as much as so many tokens behind it, besides these


RowT = TypeVar("RowT", bound=Hashable)


class Seats(Generic[RowT]):
    """Rows of a namespace, when not all may decode. A row gives its seat up only to a row that waits for it. Urgent
    rows are seated first, then those that have waited longest.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._now = 0
        self._seated: dict[RowT, int] = {}  # rows that have a seat: steps since they sat down
        self._waits_since: dict[RowT, int] = {}

    def seat(
        self,
        decoding: Sequence[RowT],
        seats: int,
        is_urgent: Callable[[RowT], bool],
        is_ending: Callable[[RowT], bool],
    ) -> set[RowT]:
        """The rows that decode in the next step. `is_ending`: the row needs one more step, then it is gone."""
        self._now += 1
        self._seated = {turn: steps for turn, steps in self._seated.items() if turn in decoding}
        self._waits_since = {
            turn: self._waits_since.get(turn, self._now) for turn in decoding if turn not in self._seated
        }
        # Fewer seats than before: the rows that have sat longest get up.
        for turn in sorted(self._seated, key=self._seated.__getitem__)[seats:]:
            if not is_ending(turn):
                self._rise(turn)
        done = [turn for turn, steps in self._seated.items() if steps >= self._steps and not is_ending(turn)]
        order = sorted(self._waits_since, key=lambda turn: (not is_urgent(turn), self._waits_since[turn]))
        chosen = order[: max(0, seats - len(self._seated) + len(done))]
        for turn in done[: max(0, len(self._seated) + len(chosen) - seats)]:
            self._rise(turn)
        for turn in chosen:
            del self._waits_since[turn]
            self._seated[turn] = 0
        for turn in self._seated:
            self._seated[turn] += 1
        return set(self._seated)

    def _rise(self, turn: RowT) -> None:
        del self._seated[turn]
        self._waits_since[turn] = self._now


class StepRows(Generic[TurnT]):
    def __init__(self, rules: Rules, company: Company, costs: StepCosts) -> None:
        self._rules = rules
        self._company = company
        self._costs = costs
        self._gaps: Gaps[TurnT] = Gaps(rules, costs)
        self._seats: dict[tuple[Namespace, bool], Seats[TurnT]] = {}  # of people's rows, and of background ones
        self._count = 0  # that the step decodes
        self._beside: frozenset[TurnT] = frozenset()  # background rows of the step, beside people's
        self.beside_s = 0.0  # that they are thought to take
        self.is_learning = False  # costs of background rows that decode are not known
        self._is_known = False  # the step before had the same of these
        self._aside = StandingAside(rules.ageing_s)
        self._exceeding = 0  # steps in a row, with this one, whose gap had no room for them
        self._exceeded_s = 0.0  # that they took in these
        self._goes_on = False  # the namespaces of the step before go along again before others
        self._went: dict[Namespace, int] = {}  # which namespace's went along last: a number that grows

    def took(self, now: float, decode_s: float, *, is_plain: bool, is_apart: bool) -> None:
        """The last step is over. `is_plain`: it did nothing but decode. `is_apart`: no cell was computed meanwhile."""
        own_s, beside_s = self._costs.beside.own_s, self.beside_s
        if is_plain:
            self._costs.stepped(decode_s, self._count)
        if is_apart:
            if self._is_known:
                self._costs.beside.stepped(decode_s, sum(map(_tokens, self._beside)))
            beside_s = beside_s if own_s is None else max(0.0, decode_s - own_s)
        if self._exceeding:
            self._exceeded_s += beside_s
            self._aside.worked(now, self._exceeded_s)
        elif self._beside:
            self._aside.worked(now)

    def choose(
        self, now: float, decoding: Collection[TurnT], urgency: Urgency[TurnT], *, may_exceed: bool
    ) -> tuple[TurnT, ...]:
        """The rows that decode in the step that begins. `may_exceed`: the gap that it ends was not exceeded yet."""
        pressing = [turn for turn in decoding if urgency.is_pressing(turn)]
        people = {*pressing}
        background = [turn for turn in decoding if turn not in people] if pressing else []
        most = self._most_rows(now, len(decoding))
        chosen = self._seated(pressing or decoding, most, urgency, is_pressing=bool(pressing))
        before = self._beside
        if background:
            self._beside = frozenset(
                self._going_along(now if may_exceed else None, background, pressing, most, urgency)
            )
        else:
            self._aside.worked(now)
            self._beside, self.beside_s = frozenset(), 0.0
            self._exceeding, self.is_learning = 0, False
        present = {(turn.namespace, turn in people) for turn in decoding} if self._seats else ()
        self._seats = {key: seats for key, seats in self._seats.items() if key in present}
        self._is_known = bool(pressing) and self._beside == before
        chosen |= self._beside
        self._count = len(chosen)
        if len(chosen) == len(decoding):
            return tuple(decoding)
        for turn in chosen:
            turn.schedule.waits_since_s = now
        return tuple(turn for turn in decoding if turn in chosen)

    def _seated(
        self, decoding: Collection[TurnT], most: int, urgency: Urgency[TurnT], *, is_pressing: bool
    ) -> set[TurnT]:
        """At most so many rows of each namespace. All of `decoding` are background rows, or none."""
        if most >= len(decoding):
            self._seats = {key: seats for key, seats in self._seats.items() if key[1] != is_pressing}
            return {*decoding}
        return self._take_seats(
            decoding, dict.fromkeys((turn.namespace for turn in decoding), most), urgency, is_pressing=is_pressing
        )

    def _take_seats(
        self, decoding: Collection[TurnT], most: Mapping[Namespace, int], urgency: Urgency[TurnT], *, is_pressing: bool
    ) -> set[TurnT]:
        chosen: set[TurnT] = set()
        for namespace, rows in most.items():
            seats = self._seats.setdefault((namespace, is_pressing), Seats(self._rules.beside_others.seat_steps))
            mine = [turn for turn in decoding if turn.namespace == namespace]
            chosen |= seats.seat(mine, rows, urgency.is_urgent, lambda turn: turn.is_ending)
        return chosen

    def _going_along(
        self,
        now: float | None,
        background: Collection[TurnT],
        pressing: Collection[TurnT],
        most: int,
        urgency: Urgency[TurnT],
    ) -> set[TurnT]:
        """Of the background rows those that decode beside people's. `now`: None if none may exceed a gap."""
        own_s, rows = self._costs.beside.own_s, Counter(turn.namespace for turn in background)
        if most < len(background) + len(pressing):
            people = Counter(turn.namespace for turn in pressing)
            rows = Counter({name: min(count, max(1, most - people[name])) for name, count in rows.items()})
        row_s, left_s = self._costs.beside.row_s(max(map(_tokens, background))), dict.fromkeys(rows, 0.0)
        self.is_learning = own_s is None or row_s is None
        if own_s is not None:
            left_s = {name: self._gaps.budget_s([*pressing, *background], name, urgency) for name in rows}
        if row_s is None:
            row_s = min(left_s.values()) or self._rules.longest_gap_s  # one row at most
        # Costs show in a step that has the rows of the one before it.
        self._goes_on = self._exceeding == 1 or (self.is_learning and not self._goes_on)
        again = {turn.namespace for turn in self._beside} if self._goes_on else ()
        order = sorted(rows, key=lambda name: (name not in again, self._went.get(name, 0)))
        counts = _counts(order, rows, left_s, row_s)
        is_due = not counts and now is not None and (self._exceeding == 1 or self._aside.is_due(now))
        if is_due:
            counts = {order[0]: 1}
        if self._exceeding != 1:
            self._exceeded_s = 0.0
        self._exceeding = self._exceeding % 2 + 1 if is_due else 0
        went = dict.fromkeys(counts, max(self._went.values(), default=0) + 1)
        self._went = {name: number for name, number in self._went.items() if name in rows} | went
        self.beside_s = sum(counts.values()) * row_s
        return self._take_seats(background, counts, urgency, is_pressing=False)

    def _most_rows(self, now: float, wanted: int) -> int:
        """Rows of one namespace in this step: few beside others. More rows are taken back at the next step, but a
        namespace that comes back waits for the step that runs: it may take a small part of the time for which others
        are away. At most twice as many as the last step had, because a row that joins the batch costs time.
        """
        most, alone_s = self._rules.beside_others.rows, self._company.alone_s(now)
        if math.isinf(alone_s):
            return wanted
        within = self._costs.rows_within(alone_s / _ABSENCE)
        while most < wanted and most <= self._count and 2 * most <= within:
            most *= 2
        return most


def _counts(
    order: Iterable[Namespace], rows: Mapping[Namespace, int], left_s: Mapping[Namespace, float], row_s: float
) -> dict[Namespace, int]:
    """How many rows of each namespace go along, one after the other, if each takes so long."""
    counts: Counter[Namespace] = Counter()
    names = deque(order)
    while names:
        name = names.popleft()
        if counts[name] < rows[name] and (counts.total() + 1) * row_s <= left_s[name]:
            counts[name] += 1
            names.append(name)
    return +counts


def _tokens(turn: Schedulable) -> int:
    return turn.cells.computed + _ROW_TOKENS
