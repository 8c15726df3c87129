"""Whether an agent's history has an order: each act takes effect at one moment between its call and its answer, and
each answer is what that order gives (linearizability). Pure: no service, no clock.

An agent is a row of memories, one a version. An act whose caller heard nothing may take effect at any later moment, or
never.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# A memory is a manifest's hash; of one that nobody was told, what a reader finds counts from then on.
UNKNOWN = ""
Versions = tuple[str, ...]
_MOST_STEPS = 200_000


@dataclass(frozen=True)
class Act(ABC):
    """One call about an agent. `ended`: when its answer came; infinite where none did."""

    began: float
    ended: float
    where: str  # who was called

    @property
    def may_be_undone(self) -> bool:
        """Whether it may have had no effect."""
        return math.isinf(self.ended)

    @abstractmethod
    def after(self, versions: Versions) -> Iterator[Versions]:
        """The versions behind it, if it may take effect on these. By each kind of act."""


@dataclass(frozen=True)
class Write(Act):
    """A commit, rollback, import or fork. `version`: 0 where its caller was not told."""

    version: int = 0
    memory: str = UNKNOWN

    def after(self, versions: Versions) -> Iterator[Versions]:
        if self.version in (0, len(versions) + 1):
            yield (*versions, self.memory)


@dataclass(frozen=True)
class Deletion(Act):
    def after(self, versions: Versions) -> Iterator[Versions]:
        if versions:
            yield ()


@dataclass(frozen=True)
class Read(Act):
    """Of a version. `is_newest`: it was said to be the newest. `version`: 0 for no agent of this name."""

    version: int = 0
    memory: str = UNKNOWN
    is_newest: bool = True

    def after(self, versions: Versions) -> Iterator[Versions]:
        at = self.version - 1
        if (self.version != len(versions)) if self.is_newest else (self.version > len(versions)):
            return
        if not self.version or versions[at] == self.memory:
            yield versions
        elif versions[at] == UNKNOWN:
            yield (*versions[:at], self.memory, *versions[at + 1 :])


@dataclass(frozen=True)
class Missing(Act):
    """A version that was asked for and not found: it is not the newest."""

    version: int = 0

    def after(self, versions: Versions) -> Iterator[Versions]:
        if self.version != len(versions):
            yield versions


class UndecidedError(Exception):
    """The history has too many orders."""


def unexplained(acts: Sequence[Act]) -> Act | None:
    """The first act that no order gets past; None if there is an order. Raises UndecidedError."""
    must = sorted((each for each in acts if not each.may_be_undone), key=lambda each: each.began)
    may = sorted((each for each in acts if each.may_be_undone), key=lambda each: each.began)
    waiting: list[tuple[int, int, Versions]] = [(0, 0, ())]  # bits of those that took effect
    seen, furthest, stuck = set(waiting), -1, None
    while waiting:
        done, undone, versions = waiting.pop()
        left = [number for number in range(len(must)) if not done >> number & 1]
        if not left:
            return None
        if done.bit_count() > furthest:
            furthest, stuck = done.bit_count(), must[left[0]]
        if len(seen) > _MOST_STEPS:
            raise UndecidedError
        by = min(must[number].ended for number in left)
        steps = [(done, undone | bit, each) for bit, each in _next_of(may, undone, by)]
        steps += [(done | 1 << each, undone, must[each]) for each in reversed(left) if must[each].began <= by]
        for then, also, act in steps:
            for new in act.after(versions):
                if (step := (then, also, new)) not in seen:
                    seen.add(step)
                    waiting.append(step)
    return stuck


def _next_of(may: Sequence[Act], undone: int, by: float) -> Iterator[tuple[int, Act]]:
    """Acts without an answer that may take effect by then. Of alike ones the first: what it may, it may do earlier."""
    tried = set[tuple[type[Act], int, str]]()
    for number, act in enumerate(may):
        if act.began > by:
            return
        alike = type(act), getattr(act, "version", 0), getattr(act, "memory", UNKNOWN)
        if not undone >> number & 1 and alike not in tried:
            tried.add(alike)
            yield 1 << number, act


@dataclass(frozen=True)
class Span:
    """A time in which an owner surely had a lease: from the answer that gave it on, for as long as it was asked for
    behind the question, or until the owner began to give it back.
    """

    line: str
    owner: str
    since: float
    until: float


def with_two_owners(spans: Sequence[Span], margin_s: float) -> list[tuple[Span, Span]]:
    """Pairs of spans of a line that two owners had at one time, for more than the margin."""
    found, latest = list[tuple[Span, Span]](), dict[str, Span]()
    for span in sorted(spans, key=lambda each: each.since):
        before = latest.get(span.line)
        if before and before.owner != span.owner and min(before.until, span.until) - span.since > margin_s:
            found.append((before, span))
        if before is None or span.until > before.until:
            latest[span.line] = span
    return found
