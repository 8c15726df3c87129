"""Who runs in the next step: pure bookkeeping over turns, no tensors.

A step decodes one token for every turn that generates, then gives one cell to one turn whose prompt is not yet
computed, round robin. So nobody waits for another's whole prompt, and a prompt is computed by as many steps as it has
cells.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler must know of a turn."""

    @property
    def line(self) -> Hashable | None:
        """Turns of one line run one after another; None runs beside everything."""
        ...

    @property
    def is_prefilling(self) -> bool:
        """Prompt tokens are left to compute."""
        ...


TurnT = TypeVar("TurnT", bound=Schedulable)


@dataclass(frozen=True)
class Step(Generic[TurnT]):
    """One step's work: all that decode, and the one that prefills."""

    decode: tuple[TurnT, ...]
    prefill: TurnT | None

    @property
    def is_empty(self) -> bool:
        return not self.decode and self.prefill is None


@dataclass
class Scheduler(Generic[TurnT]):
    """Turns wait, run, and leave. Who asks for a step does what it says before asking again."""

    waiting: deque[TurnT] = field(default_factory=deque)
    running: list[TurnT] = field(default_factory=list)
    _last_prefilled: TurnT | None = None

    def add(self, turn: TurnT) -> None:
        self.waiting.append(turn)

    def admit(self, try_begin: Callable[[TurnT], bool]) -> None:
        """Let waiting turns begin, oldest first. `try_begin` says whether there is room; the first that finds none
        keeps all behind it waiting, so that no turn is overtaken for ever. A turn that ended in `try_begin` must be
        removed by it.
        """
        for turn in list(self.waiting):
            if turn.line is not None and any(other.line == turn.line for other in self._before(turn)):
                continue
            if not try_begin(turn):
                return
            if turn in self.waiting:
                self.waiting.remove(turn)
                self.running.append(turn)

    def next_step(self) -> Step[TurnT]:
        """The work of the next step. Moves the round robin on."""
        prefill = self._next_prefill()
        self._last_prefilled = prefill or self._last_prefilled
        return Step(tuple(turn for turn in self.running if not turn.is_prefilling), prefill)

    def remove(self, turn: TurnT) -> None:
        """The turn is over, wherever it was."""
        if turn in self.running:
            index = self.running.index(turn)
            if turn is self._last_prefilled:  # the turn before it was served last but one: the next in line stays next
                self._last_prefilled = self.running[index - 1] if index else None
            self.running.remove(turn)
        if turn in self.waiting:
            self.waiting.remove(turn)

    def _before(self, turn: TurnT) -> Iterator[TurnT]:
        yield from self.running
        for other in self.waiting:
            if other is turn:
                return
            yield other

    def _next_prefill(self) -> TurnT | None:
        start = self.running.index(self._last_prefilled) + 1 if self._last_prefilled in self.running else 0
        turns = self.running[start:] + self.running[:start]
        return next((turn for turn in turns if turn.is_prefilling), None)
