"""Turns that wait, for a limited time, while a sibling prefills what they need too (`prefix_sharing`). Pure."""

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from inference_svc.engine.api import Priority
from inference_svc.engine.scheduling.prefix_sharing import awaited_by
from inference_svc.engine.scheduling.schedulable import RUNNING, WITH_KV, Rules, Schedulable

TurnT = TypeVar("TurnT", bound=Schedulable)


class PrefixWaits(Generic[TurnT]):
    """Who waits for whom."""

    def __init__(self, rules: Rules) -> None:
        self.awaited: set[TurnT] = set()  # running turns that an interactive turn waits for
        self._wait_s = rules.prefix_wait_s

    def look(self, turn: TurnT, turns: Collection[TurnT], now: float) -> bool:
        """Note which of these turns prefills what this one needs; returns whether it waits for that. While it waits,
        look for another one only when that is over.
        """
        record = turn.schedule
        # A preempted turn goes on with its own KV.
        if self._wait_s <= 0 or record.prefix_wait_is_over or record.preemptions:
            return False
        awaited = record.awaits
        if awaited is None or awaited.source.status not in RUNNING or awaited.source.shareable >= awaited.shared_tokens:
            awaited = record.awaits = awaited_by(turn, [each for each in turns if each.status in WITH_KV])
        if awaited is None:
            return False
        record.prefix_wait_since_s = now if record.prefix_wait_since_s is None else record.prefix_wait_since_s
        record.prefix_wait_is_over = now - record.prefix_wait_since_s >= self._wait_s
        if turn.priority is Priority.INTERACTIVE and not record.prefix_wait_is_over:
            self.awaited.add(awaited.source)
        return not record.prefix_wait_is_over

    def let_go(self, waiting: Iterable[TurnT]) -> bool:
        """Let turns begin whose awaited prefix is there now. Returns whether there is one."""
        served = [
            turn
            for turn in waiting
            if (awaited := turn.schedule.awaits) is not None and awaited.source.shareable >= awaited.shared_tokens
        ]
        for turn in served:
            turn.schedule.awaits = None
        return bool(served)

    def forget(self, turn: TurnT) -> None:
        """The turn was preempted, or is over: it waits for none, and none for it."""
        record = turn.schedule
        record.awaits = record.prefix_wait_since_s = None
        record.prefix_wait_is_over = False
        self.awaited.discard(turn)
