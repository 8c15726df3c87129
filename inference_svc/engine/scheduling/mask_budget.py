"""Which turns with a reply format may decode in a step, so that one namespace's masks do not delay others. Pure.

A mask says which tokens a format allows next. Some take microseconds, some milliseconds, and the whole batch waits for
all of them. So while others decode or wait, the masks of all namespaces may take a part of each step. Each namespace
that wants masks has a purse: every step puts an equal share in, every mask takes its seconds out. The cost of a mask is
known after it was made, so a purse may be overdrawn; its namespace then sits out steps until they have paid for it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic

from inference_svc.engine.scheduling.schedulable import TurnT

# The part of a step's other time that the masks of all namespaces may take together.
PART = 0.25
_LEAST = 0.001  # seconds, where that is more


@dataclass
class _MaskRecord:
    billed_s: float = 0.0
    last_s: float | None = None  # seconds of its last mask
    decoded_in: int = 0  # the step


class MaskBudget(Generic[TurnT]):
    """The purses of the namespaces whose turns have formats."""

    def __init__(self) -> None:
        self._steps = 0
        self._rows: dict[TurnT, _MaskRecord] = {}
        self._purses: dict[str | None, float] = {}

    def begin_step(self, decoding: Sequence[TurnT], present: Collection[TurnT]) -> tuple[TurnT, ...]:
        """Turns of `decoding` that may decode now, in their order: all turns without a format, and of each namespace
        that has formats the turns that waited longest, as many as its purse pays for. `present`: all turns that decode,
        prefill or wait; masks of a namespace that is alone among them delay no other, and are not bounded.
        """
        self._steps += 1
        masked = [turn for turn in decoding if turn.is_masked]
        if not masked and not self._rows:  # most steps
            self._purses = {}
            return tuple(decoding)
        known = {turn: row for turn, row in self._rows.items() if turn in present}
        self._rows = {**known, **{turn: _MaskRecord() for turn in masked if turn not in known}}
        wanting = {turn.namespace for turn in masked}
        self._purses = {namespace: self._purses.get(namespace, _LEAST) for namespace in wanting}
        if len({turn.namespace for turn in present} | wanting) <= 1:
            self._purses = dict.fromkeys(wanting, _LEAST)
            may_decode = set(masked)
        else:
            may_decode = self._paid_for(masked)
        for turn in may_decode:
            self._rows[turn].decoded_in = self._steps
        sits_out = {*masked} - may_decode
        return tuple(turn for turn in decoding if turn not in sits_out)

    def end_step(self, step_s: float) -> None:
        """Bill what the masks took, and give each namespace its share of the step, which took so long with them."""
        taken = dict.fromkeys(self._purses, 0.0)
        for turn, row in self._rows.items():
            mask_s, row.billed_s = turn.masks_s - row.billed_s, turn.masks_s
            if row.decoded_in == self._steps:
                row.last_s = mask_s
            if turn.namespace in taken:
                taken[turn.namespace] += mask_s
        for namespace, taken_s in taken.items():
            share_s = max(PART * (step_s - sum(taken.values())), _LEAST) / len(taken)
            # Unspent time is not saved: others have used it already.
            self._purses[namespace] = min(self._purses[namespace] - taken_s + share_s, share_s)

    def _paid_for(self, masked: Sequence[TurnT]) -> set[TurnT]:
        left, chosen = dict(self._purses), set[TurnT]()
        for turn in sorted(masked, key=lambda turn: self._rows[turn].decoded_in):
            if left[turn.namespace] > 0:
                # For a new turn only the first mask's time is known, and that may be longer than those that follow.
                left[turn.namespace] -= self._rows[turn].last_s or turn.masks_s or _LEAST
                chosen.add(turn)
        return chosen
