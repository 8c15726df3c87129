"""What a step does: which rows decode, and which cells and files go beside them. Pure.

- Rows: see `step_rows`.
- Order of cells and files: urgent turns first, then the namespace whose cells and files took the least time, in it the
  shortest rest of a prompt.
  Turns that came later overtake one by no more tokens than its rest has.
- Size: `pacing` and `step_costs` say how many cells a step takes, how long they are, and how many files it loads.
- People: beside a stream that a person reads a background turn gets what its gap has room for, or an eighth of the time
  (`gaps`).
- Sharing: what a cell leaves of its pass the next turns in this order get, where cells may share one.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic

from inference_svc.engine.grid import cut_cell
from inference_svc.engine.scheduling.company import Company, Namespace
from inference_svc.engine.scheduling.gaps import Gaps, StandingAside
from inference_svc.engine.scheduling.pacing import SharedTime, StepPace
from inference_svc.engine.scheduling.schedulable import RUNNING, Rules, Schedulable, SharedPass, Status, TurnT
from inference_svc.engine.scheduling.step_costs import StepCosts
from inference_svc.engine.scheduling.step_rows import StepRows
from inference_svc.engine.scheduling.urgency import Urgency

_BETWEEN = 0.05  # of a gap: events and letters between two cells


@dataclass(frozen=True)
class TurnCell(Generic[TurnT]):
    """A turn's next `size` tokens, from `position` on."""

    turn: TurnT
    size: int
    position: int


@dataclass(frozen=True)
class Grant(Generic[TurnT]):
    """What the turn does next in this step: it computes a cell of so many tokens, or while its status is LOADING it
    loads at most so many files. `cells`: its cell and those that share its pass; none for files.
    """

    turn: TurnT
    size: int
    cells: tuple[TurnCell[TurnT], ...]
    tokens: int  # of the pass, with those that fill up rows
    began_s: float  # seconds of the step that were spent before
    behind_s: float  # seconds of a decoding step that the device computes before

    def took_s(self, spent_s: float) -> float:
        """Seconds that it took by itself when `spent_s` of the step are spent. Half of all is certainly its own."""
        all_s = spent_s - self.began_s
        return max(all_s - self.behind_s, all_s / 2)


class StepSchedule(Generic[TurnT]):
    def __init__(self, turns: Collection[TurnT], rules: Rules, company: Company) -> None:
        """`turns`: all that are not over, in the order in which they came; the caller adds and removes them."""
        self._turns = turns
        self._rules = rules
        self._company = company
        self._time = SharedTime()
        self.costs = self._costs = StepCosts()
        self._gaps: Gaps[TurnT] = Gaps(rules, self._costs)
        self._rows: StepRows[TurnT] = StepRows(rules, company, self._costs)
        self._aside = StandingAside(rules.ageing_s)
        self._exceeds = False  # the last grant's turn stood aside, and no gap has room for that
        self._is_background = False  # the last grant's turn
        self._pace = StepPace()
        self._began_s = 0.0
        self._granted: Grant[TurnT] | None = None  # the step's last one
        self._has_begun = False  # the last pass had the ends of prompts, whose streams no step decodes yet
        self._is_plain = False  # the step decodes, and nothing else was granted
        self._is_apart = False  # the step decodes, and nothing was granted behind that
        self._served = 0  # twice the number of cells that all turns have got

    def joins(self, turn: TurnT) -> None:
        """The turn begins: it is served before the turn that was served last, behind all others."""
        turn.schedule.served = self._served - 1
        self._time.joins(self._company.of(turn.namespace))

    def begin(self, now: float, urgency: Urgency[TurnT]) -> tuple[TurnT, ...]:
        """Begin a step. Returns the turns that decode one token now; other decoding turns sit out."""
        decode_s, may_exceed = now - self._began_s - self._time.cells_s, not self._exceeds
        self._rows.took(now, decode_s, is_plain=self._is_plain, is_apart=self._is_apart)
        self._began_s, self._exceeds = now, False
        self._has_begun = self._has_begun and not self._is_plain
        at_work = [turn for turn in self._turns if not turn.is_cancelled]
        decoding = [turn for turn in at_work if turn.status is Status.DECODING]
        self._pace = StepPace()
        self._is_plain = self._is_apart = bool(decoding)
        self._time.begin_step(now, len({turn.namespace for turn in decoding}), self._company.places)
        if len(decoding) == len(at_work) or all(map(urgency.is_pressing, filter(_is_prefilling, at_work))):
            self._aside.worked(now)
        return self._rows.choose(now, decoding, urgency, may_exceed=may_exceed)

    @property
    def has_begun(self) -> bool:
        return self._pace.has_begun

    def learn(self, spent_s: float) -> None:
        """The last grant was carried out, unless its turn is over. A prompt's few last tokens tell nothing: a pass
        costs something by itself. Nor does the end of a load, which waits for what the pieces before it enqueued.
        """
        last, self._granted = self._granted, None
        if last is None:
            return
        self._has_begun = any(_is_decoding(cell.turn) for cell in last.cells)
        took_s = last.took_s(spent_s)
        self._time.spent(took_s)
        if self._is_background:
            self._aside.worked(self._began_s + spent_s, took_s)
        if not last.cells and last.turn.status is Status.LOADING:
            self._costs.learn(None, last.size, took_s)
        if last.tokens >= self._rules.least_tokens and all(cell.turn.status in RUNNING for cell in last.cells):
            for position in {cell.position.bit_length(): cell.position for cell in last.cells}.values():
                self._costs.learn(position, last.tokens, took_s)

    def grant(self, spent_s: float, urgency: Urgency[TurnT], *, is_behind_step: bool) -> Grant[TurnT] | None:
        """The step's next cell, or the next files, for a turn that counts as served; None when that is over."""
        if not (prefilling := [turn for turn in self._turns if _is_prefilling(turn)]):
            return None
        decoding = [turn for turn in self._turns if _is_decoding(turn)]
        has_people = any(map(urgency.is_pressing, decoding))
        is_due = not has_people or self._aside.is_due(self._began_s + spent_s)
        able = self._most_urgent(prefilling, urgency, decodes=bool(decoding), ages=is_due)
        if not able:
            return None
        turn = self._next_of(able)
        budgets_s = {name: self._gaps.budget_s(decoding, name, urgency) for name in {each.namespace for each in able}}
        left_s = budgets_s[turn.namespace] - self._rows.beside_s - spent_s if decoding else None
        if left_s is not None and is_behind_step and self._has_begun:
            left_s -= self._costs.step_s or 0.0  # that step is without them, and they wait for the next one, too
        stands_aside = has_people and not urgency.is_pressing(turn)
        if stands_aside and self._rows.is_learning:
            left_s = 0.0
        must_go = not self._pace.has_begun and (not stands_aside or is_due)
        size, loads = self._size(turn, able, left_s, spent_s, must_go=must_go), turn.status is Status.LOADING
        position, tokens = (0, 0) if loads else (turn.cells.computed, size)
        if not size or not self._pace.allows(turn, position, tokens):
            return None
        self._pace.take(turn, position, tokens)
        self._serve(turn, tokens, spent_s)
        self._is_plain, self._exceeds = False, stands_aside and must_go
        self._is_apart = self._is_apart and not is_behind_step
        self._is_background = not urgency.is_pressing(turn)
        cells = [] if loads else [TurnCell(turn, size, position)]
        if cells and self._may_share(turn, size):
            able = [each for each in able if budgets_s[each.namespace] >= budgets_s[turn.namespace]]
            tokens = self._share(cells, able, left_s, spent_s)
        behind_s = (self._costs.step_s or 0.0) if is_behind_step else 0.0
        self._granted = Grant(turn, size, tuple(cells), tokens, spent_s, behind_s)
        return self._granted

    def _may_share(self, turn: TurnT, size: int) -> bool:
        """Whether other cells may be computed in the pass of this one."""
        rule = self._rules.shared_pass
        return rule is not None and turn.shares_passes and size <= rule.most_tokens

    def _share(
        self, cells: list[TurnCell[TurnT]], able: Collection[TurnT], left_s: float | None, spent_s: float
    ) -> int:
        """Add the cells of turns that share the first one's pass; returns its tokens. Each gets what those before it
        leave of the tokens of a cell, and of the seconds `left_s`; None: nobody waits for the pass.
        """
        rule, taken, fits = self._rules.shared_pass, 0, self._rules.cell_tokens
        assert rule is not None
        if left_s is not None or self._costs.knows_tokens:
            left_s = min(rule.longest_s, math.inf if left_s is None else left_s)
        while True:
            last = cells[-1]
            taken += rule.in_rows(last.size)
            fits = min(fits, self._fits(left_s, last.position))
            able = [turn for turn in able if turn is not last.turn]
            turn = self._next_of(able) if able else None
            size = self._shared_size(rule, turn, taken, fits, left_s) if turn is not None else 0
            filled = taken - last.size if len(cells) == 1 else 0  # alone, it filled up no row
            if (
                turn is None
                or not size
                or not self._pace.allows(turn, turn.cells.computed, rule.in_rows(size) + filled)
            ):
                return taken if len(cells) > 1 else last.size
            self._pace.take(turn, turn.cells.computed, rule.in_rows(size) + filled)
            self._serve(turn, size, spent_s, cells)
            cells.append(TurnCell(turn, size, turn.cells.computed))

    def _shared_size(self, rule: SharedPass, turn: TurnT, taken: int, fits: int, left_s: float | None) -> int:
        """How many of a turn's tokens a pass takes that has so many, and fits so many for these turns; 0: none."""
        if turn.status is Status.LOADING or not turn.shares_passes:
            return 0
        most = rule.even(min(fits, self._fits(left_s, turn.cells.computed))) - taken
        whole, least = self._cell_tokens(turn), self._rules.least_tokens
        size = cut_cell(turn.cells.computed, whole, min(most, rule.most_tokens), least)
        return size if size >= min(whole, least) else 0

    def _fits(self, left_s: float | None, position: int) -> int:
        """Tokens of a pass with a cell at `position` that has so many seconds; None: as many as a cell has."""
        if left_s is None:
            return self._rules.cell_tokens
        return self._costs.tokens_within(left_s, position) or 0

    def _size(
        self, turn: TurnT, able: Collection[TurnT], left_s: float | None, spent_s: float, *, must_go: bool
    ) -> int:
        """How many tokens or files the turn's next grant has; 0 if the step has no time for one. `left_s`: seconds that
        are left of the step, of which `spent_s` are gone; None: nobody waits for it. `must_go`: at least the fewest.
        """
        loads = turn.status is Status.LOADING
        least = 1 if loads else self._rules.least_tokens
        whole = turn.next_files if loads else self._cell_tokens(turn)
        if left_s is None:
            return whole if loads else self._within_longest(turn, whole)
        step_s = self._costs.step_s or 0.0
        if not loads and self._pace.has_begun and left_s < max(step_s, spent_s / 2):
            return 0  # however few its tokens, a pass costs as much as a step, or half of a longer one
        fits = self._costs.files_within(left_s) if loads else self._costs.tokens_within(left_s, turn.cells.computed)
        if fits is None:
            fits = least if left_s > 0 else 0
        if must_go:
            fits = max(fits, least)
        if fits < min(whole, least):
            return 0
        if loads:
            return min(whole, fits)
        if self._pace.has_begun and whole > fits:
            return 0  # the next step begins at once, and has time for a longer cell
        # For the same reason a rest that takes a step longer at most goes along, where no other cell fills its pass.
        mates = [each for each in able if each is not turn and each.status is not Status.LOADING]
        rest_s = 0.0 if self._may_share(turn, whole) and any(each.shares_passes for each in mates) else step_s
        with_rest = self._costs.tokens_within((left_s + rest_s) * (1 - _BETWEEN), turn.cells.computed) or 0
        if whole <= self._even(with_rest):
            return whole
        return cut_cell(turn.cells.computed, whole, self._even(fits), least)

    def _even(self, tokens: int) -> int:
        rule = self._rules.shared_pass
        return tokens if rule is None else rule.even(tokens)

    def _within_longest(self, turn: TurnT, whole: int) -> int:
        """So many of a turn's tokens, of which no stream waits for any; fewer on a slow device."""
        least, position = self._rules.least_tokens, turn.cells.computed
        fits = self._costs.tokens_within(self._rules.longest_cell_s, position)
        return whole if fits is None else cut_cell(position, whole, max(fits, least), least)

    def _cell_tokens(self, turn: TurnT) -> int:
        """The turn's next cell before it is cut. Where cells are cut, the last one goes over an edge of the grid."""
        is_cut = self._rules.least_tokens < self._rules.cell_tokens
        goes_over = is_cut and turn.cells.unbroken_tokens <= self._rules.cell_tokens
        return turn.cells.unbroken_tokens if goes_over else turn.cells.next_tokens

    def _most_urgent(
        self, prefilling: Collection[TurnT], urgency: Urgency[TurnT], *, decodes: bool, ages: bool
    ) -> Collection[TurnT]:
        """Turns of the most urgent class that may get a cell, or load files; while others decode, none that would only
        wait for its files. No less urgent one takes the place of one whose namespace owes: it owes decoding rows.
        `ages`: old background turns are urgent; else they would stand aside, and keep a person waiting.
        """
        prefilling = [turn for turn in prefilling if not (decodes and turn.awaits_bytes)]
        pressing = {turn.namespace for turn in prefilling if urgency.is_pressing(turn)}
        urgent = [
            each for each in prefilling if urgency.is_pressing(each) or (ages and urgency.is_urgent(each, pressing))
        ]
        owing = {name for name in {turn.namespace for turn in prefilling} if self._owes(name)}
        return [turn for turn in urgent or prefilling if turn.namespace not in owing]

    def _next_of(self, turns: Collection[TurnT]) -> TurnT:
        """Of the namespace that has taken the least time the turn with the shortest rest of a prompt, but first one
        that later ones have overtaken by as many tokens.
        """
        places = {turn.namespace: self._company.of(turn.namespace) for turn in turns}
        first = min(places, key=lambda namespace: (places[namespace].taken_s, places[namespace].served))
        turns = [turn for turn in turns if turn.namespace == first]
        return min(turns, key=self._order)

    def _order(self, turn: TurnT) -> tuple[bool, int, int]:
        rest = 0 if turn.status is Status.LOADING else turn.cells.rest_tokens
        is_passed_over = 0 < rest <= turn.schedule.overtaken_tokens
        return (False, 0, 0) if is_passed_over else (True, rest, turn.schedule.served)

    def _owes(self, namespace: Namespace) -> bool:
        """Whether it has taken more of others' time than it may, while they decode."""
        return self._company.of(namespace).owed_s > 0 and self._is_beside_others(namespace)

    def _is_beside_others(self, namespace: Namespace) -> bool:
        return any(other.namespace != namespace and _is_decoding(other) for other in self._turns)

    def _serve(self, turn: TurnT, size: int, spent_s: float, beside: Collection[TurnCell[TurnT]] = ()) -> None:
        """`beside`: cells that are computed in the same pass, so none of their turns overtakes another."""
        self._served += 2
        place = self._company.of(turn.namespace)
        place.served = self._served
        self._time.shares_next(place, max(1, size), owes=self._is_beside_others(turn.namespace))
        record, least = turn.schedule, self._rules.least_tokens
        for other in self._overtaken_by(turn) - {cell.turn for cell in beside}:
            other.schedule.overtaken_tokens += max(size, least)
        record.overtaken_tokens -= sum(
            max(each.size, least) for each in beside if turn in self._overtaken_by(each.turn)
        )
        record.served = self._served
        record.waits_since_s = self._began_s + spent_s

    def _overtaken_by(self, turn: TurnT) -> set[TurnT]:
        """Prompts of its namespace that came before it."""
        before = takewhile(lambda other: other is not turn, self._turns)
        return {other for other in before if other.namespace == turn.namespace and _is_prefilling(other)}


def _is_decoding(turn: Schedulable) -> bool:
    return turn.status is Status.DECODING and not turn.is_cancelled


def _is_prefilling(turn: Schedulable) -> bool:
    return turn.status in (Status.PREFILLING, Status.LOADING) and not turn.is_cancelled
