"""KV bytes: what pages and states hold now, and what running turns may still take. Numbers only, nothing is allocated.

used + promised + free = total, always. Before a turn begins it gets a reservation for all that it may come to take
beyond the full blocks that it shares. What it has taken of it is used; the rest is promised, and nobody else's.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol


class Pages(Protocol):
    """The pool's count of pages (`PageAllocator`)."""

    @property
    def used(self) -> int: ...

    def freed_by(self, tables: Iterable[list[int]]) -> int:
        """Pages that would be free if these were released together."""
        ...


@dataclass(eq=False)
class Reservation:
    """What one running turn may take. `extends`: key of the hot memory that stays as it is until the turn is over."""

    namespace: str | None
    pages: int
    state_bytes: int = 0
    extends: Hashable | None = None
    taken_pages: Callable[[], int] = lambda: 0  # of these pages, the ones that the turn has by now


class MemoryLedger:
    """Counts bytes for one pool."""

    def __init__(self, pages: Pages, page_bytes: int, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.reservations: list[Reservation] = []
        self.resident_state_bytes = 0  # states of idle memories
        self._pages = pages
        self._page_bytes = page_bytes

    @property
    def used_pages(self) -> int:
        return self._pages.used

    @property
    def used_bytes(self) -> int:
        return self.used_pages * self._page_bytes + self.resident_state_bytes

    @property
    def promised_bytes(self) -> int:
        """Pages that running turns have not taken yet, and all of their states."""
        return sum(self._promised_bytes(one) for one in self.reservations)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes - self.promised_bytes

    def size_bytes(self, pages: int, state_bytes: int) -> int:
        return pages * self._page_bytes + state_bytes

    def reserved_bytes(self, reservation: Reservation | None) -> int:
        """Bytes of a reservation, taken or not; 0 for none."""
        return 0 if reservation is None else self.size_bytes(reservation.pages, reservation.state_bytes)

    def freed_bytes(self, tables: Iterable[list[int]], reservation: Reservation | None = None) -> int:
        """Bytes that become free if these page lists are released together, and the reservation with them."""
        promised = 0 if reservation is None else self._promised_bytes(reservation)
        return self._pages.freed_by(tables) * self._page_bytes + promised

    def release(self, reservation: Reservation) -> None:
        """The turn is over or preempted. Without effect if it holds nothing."""
        if reservation in self.reservations:
            self.reservations.remove(reservation)

    def _promised_bytes(self, reservation: Reservation) -> int:
        return self.size_bytes(max(0, reservation.pages - reservation.taken_pages()), reservation.state_bytes)
