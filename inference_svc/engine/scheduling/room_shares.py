"""How many KV bytes a namespace's turns may take while other namespaces want some too. Pure.

A namespace's share is the KV divided by the namespaces that have turns. Within its share a turn waits for no other
namespace's turn. Beyond it a namespace may use what is free, but not

- while a turn of another namespace, which holds less than its share, was refused for want of room: so what the others
  give back comes to that turn in the end, if it fits its share, and does not go to the namespace that has most already;
- the part that is kept for namespaces that hold no bytes: a new namespace finds room at once, even if no turn can be
  preempted. A namespace that holds nothing may take whatever is free, or its largest turn would never begin.

A turn larger than its namespace's share begins when others leave the room: as long as they use their own, it waits.

A namespace that is alone has all of it.
"""

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Generic, Protocol, TypeVar

from inference_svc.engine.scheduling.company import Namespace
from inference_svc.engine.scheduling.schedulable import TurnT

ContraT = TypeVar("ContraT", contravariant=True)


class Room(Protocol[ContraT]):
    """What the scheduler may ask about the KV's bytes. To ask changes nothing."""

    total_bytes: int

    def held_bytes(self, turn: ContraT, /) -> int:
        """Bytes of a running turn's reservation."""

    def needed_bytes(self, turn: ContraT, /) -> int:
        """Bytes that a waiting turn must reserve."""

    def missing_bytes(self, turn: ContraT, protected: Collection[Hashable] | None, /) -> int:
        """Bytes that running turns would have to give up before the turn can begin, if no hot memory with one of these
        keys is dropped; None: any may be dropped. 0 if it can begin.
        """

    def freed_bytes(self, turn: ContraT, /) -> int:
        """Bytes that are free once a running turn is preempted."""

    def can_swap_out(self, turns: Collection[ContraT], /) -> bool:
        """Whether the files of these turns may be held while they are preempted."""


class RoomShares(Generic[TurnT]):
    """The bytes that each namespace holds at one moment, and whether it may take more."""

    def __init__(
        self,
        room: Room[TurnT],
        running: Collection[TurnT],
        waiting: Collection[TurnT],
        kept_part: int,
        *,
        is_shared: bool,
    ) -> None:
        self._room = room
        self._is_shared = is_shared
        self._held: Counter[Namespace] = Counter()
        for turn in running:
            self._held[turn.namespace] += room.held_bytes(turn)
        self._for_all_bytes = room.total_bytes - (room.total_bytes // kept_part if is_shared else 0)
        self.share_bytes = self._for_all_bytes // max(1, len({turn.namespace for turn in (*running, *waiting)}))

    def gives_up(self, turn: TurnT) -> None:
        self._held[turn.namespace] -= self._room.held_bytes(turn)

    def is_under(self, namespace: Namespace) -> bool:
        return self._held[namespace] < self.share_bytes

    def is_over(self, namespace: Namespace) -> bool:
        return self._is_shared and self._held[namespace] > self.share_bytes

    def exceeds(self, turn: TurnT) -> bool:
        """Whether its namespace would hold more than its share with the turn."""
        return self._is_shared and self._held[turn.namespace] + self._needed(turn) > self.share_bytes

    def lacks(self, turn: TurnT, claimed: Collection[Namespace]) -> int:
        """Bytes that must be given back before the turn may begin, however many are free; 0 if it may begin. `claimed`:
        namespaces with a turn that was refused for want of room.
        """
        if not self.exceeds(turn):
            return 0
        held, needed = self._held[turn.namespace], self._needed(turn)
        if any(other != turn.namespace and self.is_under(other) for other in claimed):
            return held + needed - self.share_bytes
        return max(0, self._held.total() + needed - self._for_all_bytes) if held else 0

    def is_up_to_others(self, turn: TurnT, claimed: Collection[Namespace]) -> bool:
        """Whether the turn could not begin even if its own namespace held no bytes and the others only their shares:
        keeping its own waiting would not help it.
        """
        if not self.exceeds(turn):
            return False
        needed = self._needed(turn)
        of_others = sum(min(held, self.share_bytes) for name, held in self._held.items() if name != turn.namespace)
        are_entitled = any(other != turn.namespace and self.is_under(other) for other in claimed)
        return of_others + needed > self._room.total_bytes or (are_entitled and needed > self.share_bytes)

    def _needed(self, turn: TurnT) -> int:
        return min(self._room.needed_bytes(turn), self._room.total_bytes)
