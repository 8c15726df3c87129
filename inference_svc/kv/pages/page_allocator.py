"""Which pages are free, and how many tables hold each other one; only a single holder may write a page. No tensors."""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from kvasir.errors import ResourceExhausted
from kvasir.waits import RETRY_S


class PageAllocator:
    """Pages 0 to `total` - 1. The lowest free page is given out first, so that the highest ones can be given back."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._holders: dict[int, int] = {}
        self._returned: list[int] = []
        self.touched = 0  # pages 0 to this one, without it, were given out, and lie in memory

    @property
    def used(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def shared(self) -> int:
        return sum(holders > 1 for holders in self._holders.values())

    def holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def take(self, count: int) -> list[int]:
        """Give out free pages, each private. Raises ResourceExhausted, and takes none, if there are not so many."""
        if count > self.free:
            raise ResourceExhausted(
                f"KV memory: {count} pages are needed, {self.free} of {self.total} are free",
                reason="MEMORY_BUSY",
                retry_after_s=RETRY_S,
                metadata={"needed_pages": str(count), "free_pages": str(self.free)},
            )
        again = [heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        new = range(self.touched, self.touched + count - len(again))
        self.touched = new.stop
        taken = [*again, *new]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more table holds each of these pages, which must be in use."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One table less holds each of these pages. A page without a holder is free."""
        for page in pages:
            holders = self._holders[page] - 1
            if holders:
                self._holders[page] = holders
            else:
                del self._holders[page]
                heappush(self._returned, page)

    def forget_free_end(self) -> None:
        """Count the free pages behind the last one in use as never given out."""
        self.touched = self.end_without(())
        self._returned = [page for page in self._returned if page < self.touched]
        heapify(self._returned)

    def freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """How many pages would become free if these tables were released together. Changes nothing."""
        held = _holders_among(tables)
        return sum(holders == self._holders.get(page) for page, holders in held.items())

    def end_without(self, tables: Iterable[Sequence[int]]) -> int:
        """Pages up to the last one in use, if these tables were released together. Changes nothing."""
        gone = _holders_among(tables)
        return max((page for page, holders in self._holders.items() if holders > gone[page]), default=-1) + 1


def _holders_among(tables: Iterable[Sequence[int]]) -> Counter[int]:
    return Counter(page for table in tables for page in table)
