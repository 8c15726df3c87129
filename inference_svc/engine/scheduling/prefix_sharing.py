"""Prefills a prefix that several turns share only once: which turn waits, and which KV a turn begins with. Pure.

Two prompts share what the chain hashes of their blocks share, in whole blocks: equal hashes mean equal KV identity and
equal tokens from position 0. Only rows that were computed on the grid are given away, so that a sibling begins with
rows that it would have computed itself. While a sibling prefills what a turn needs too, the turn waits for a limited
time.
"""

from collections.abc import Collection, Iterable
from typing import Generic

from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.engine.api import Priority
from inference_svc.engine.scheduling.hot_memories import ResidentMemory
from inference_svc.engine.scheduling.schedulable import (
    RUNNING,
    WITH_KV,
    PrefixSource,
    Rules,
    Schedulable,
    SourceT,
    Status,
    TurnT,
)
from inference_svc.text.prefix_matching import common_prefix_length


class PrefixWaits(Generic[TurnT]):
    def __init__(self, rules: Rules) -> None:
        self.awaited: set[TurnT] = set()  # running turns that an interactive turn waits for
        self._wait_s = rules.prefix_wait_s

    def look(self, turn: TurnT, turns: Collection[TurnT], now: float) -> bool:
        """Note which of these turns prefills what this one needs; returns whether it waits for that. While it waits,
        look for another one only when that is over.
        """
        record = turn.schedule
        # A turn that stopped, here or in another engine, goes on with its own KV.
        if self._wait_s <= 0 or record.prefix_wait_is_over or turn.status is Status.PREEMPTED:
            return False
        awaited = record.awaits
        if awaited is None or awaited.source.status not in RUNNING or _is_computed(awaited):
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
        served = [turn for turn in waiting if turn.schedule.awaits is not None and _is_computed(turn.schedule.awaits)]
        for turn in served:
            turn.schedule.awaits = None
        return bool(served)

    def forget(self, turn: TurnT) -> None:
        """The turn was preempted, or is over: it waits for none, and none for it."""
        record = turn.schedule
        record.awaits = record.prefix_wait_since_s = None
        record.prefix_wait_is_over = False
        self.awaited.discard(turn)


def prefix_source_of(
    turn: TurnT, running: Iterable[TurnT], hot: Iterable[ResidentMemory] = (), least_tokens: int | None = None
) -> PrefixSource[TurnT | ResidentMemory] | None:
    """The computed KV that shares the longest prefix with `turn`; None when none shares `least_tokens`, which are a
    block more than the turn's plan reuses unless given. `hot`: idle memories of its namespace. Of equals a running turn
    is preferred.
    """
    least = turn.reusable_tokens + BLOCK_TOKENS if least_tokens is None else least_tokens
    sources: list[tuple[TurnT | ResidentMemory, int]] = [(one, one.cells.shareable) for one in _siblings(turn, running)]
    sources += [(memory, memory.state.shareable_tokens) for memory in hot]
    ready = [PrefixSource(one, _shared(turn, one, shareable, least)) for one, shareable in sources]
    return _best(ready, least)


def awaited_by(turn: TurnT, running: Collection[TurnT]) -> PrefixSource[TurnT] | None:
    """The running turn that is prefilling a block or more which `turn` needs and no turn has computed yet, and what
    they share once it is computed.
    """
    now = prefix_source_of(turn, running)
    least = max(turn.reusable_tokens, now.shared_tokens if now else 0) + BLOCK_TOKENS
    coming = _siblings(turn, running)
    return _best([PrefixSource(one, _shared(turn, one, one.cells.final_shareable, least)) for one in coming], least)


def _is_computed(awaited: PrefixSource[Schedulable]) -> bool:
    return awaited.source.cells.shareable >= awaited.shared_tokens


def _best(prefixes: Iterable[PrefixSource[SourceT]], least: int) -> PrefixSource[SourceT] | None:
    """The longest, if it has at least so many tokens."""
    best = max(prefixes, key=lambda prefix: prefix.shared_tokens, default=None)
    return best if best is not None and best.shared_tokens >= least else None


def _shared(turn: Schedulable, source: Schedulable | ResidentMemory, shareable: int, least: int) -> int:
    """Leading tokens, in whole blocks, that `turn` could begin with. It always computes its last token itself. 0
    without hashing a prompt where they cannot be `least`.
    """
    most = min(shareable, turn.cells.prompt_tokens - 1) // BLOCK_TOKENS
    if turn.namespace is None or most * BLOCK_TOKENS < least:
        return 0
    return min(most, common_prefix_length(turn.chain, source.chain)) * BLOCK_TOKENS


def _siblings(turn: TurnT, running: Iterable[TurnT]) -> list[TurnT]:
    return [other for other in running if other.namespace == turn.namespace]
