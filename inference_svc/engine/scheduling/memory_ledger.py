"""KV bytes: what pages and states hold now, and what running turns may still take. Numbers only, nothing is allocated.

used + promised + free = total, always. Before a turn begins it gets a reservation for the most that it may ever hold.
What its KV keeps of that is used already, by it or by others; the rest is promised to it, and nobody else's.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from inference_svc.kv.pages.page_allocator import PageAllocator


@dataclass(eq=False)
class Reservation:
    """What one running turn may take. `extends`: key of the hot memory that stays as it is until the turn is over."""

    namespace: str | None
    most_pages: int  # that its KV ever holds
    state_bytes: int = 0
    extends: Hashable | None = None
    kept_pages: Callable[[], int] = lambda: 0  # pages that its KV has and will not replace by others
    pages: int = field(init=False)  # that it may take beyond what it began with

    def __post_init__(self) -> None:
        self.pages = self.left_pages

    @property
    def left_pages(self) -> int:
        """Pages that it may still take."""
        return max(0, self.most_pages - self.kept_pages())


class MemoryLedger:
    def __init__(self, pages: PageAllocator, page_bytes: int, total_bytes: int) -> None:
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
        return self.size_bytes(self.used_pages, self.resident_state_bytes)

    @property
    def promised_bytes(self) -> int:
        """Pages that running turns have not taken yet, and all of their states."""
        return sum(map(self.promised_to, self.reservations))

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes - self.promised_bytes

    def size_bytes(self, pages: int, state_bytes: int) -> int:
        return pages * self._page_bytes + state_bytes

    def promised_to(self, reservation: Reservation) -> int:
        return self.size_bytes(reservation.left_pages, reservation.state_bytes)

    def reserved_bytes(self, reservation: Reservation | None) -> int:
        """Bytes of a reservation, taken or not; 0 for none."""
        return 0 if reservation is None else self.size_bytes(reservation.pages, reservation.state_bytes)

    def freed_bytes(self, tables: Iterable[list[int]]) -> int:
        """Bytes that become free if these page lists are released together."""
        return self.size_bytes(self._pages.freed_by(tables), 0)

    def release(self, reservation: Reservation) -> None:
        """The turn is over or preempted. Without effect if it holds nothing."""
        if reservation in self.reservations:
            self.reservations.remove(reservation)
