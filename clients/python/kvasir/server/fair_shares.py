"""Room that callers share, divided between namespaces: how much one may hold, and whose turn it is. Pure.

Whatever a service has only so much of (calls, threads, bytes, places in a queue) is given out by these two: `Shares`
says who may take more of it, `RoundRobin` whom to serve next among those that wait.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
GENEROSITY = 3


class Shares:
    """So many units for all namespaces. Whoever holds nothing always finds some.

    A namespace may hold at most `generosity` times what stays free beside it: of 100 units and a generosity of 3 one
    alone gets 75, two get 42 each, three get 30 each, and what is left waits for whoever comes (the dynamic thresholds
    of shared-memory switches: Choudhury and Hahne, 1998). So no number of greedy namespaces leaves nothing, and nobody
    has to say beforehand how many there will be. Who holds nothing may take anything that is free.
    """

    def __init__(self, total: int, generosity: float = GENEROSITY) -> None:
        self.total = total
        self._generosity = generosity
        self._held: Counter[str] = Counter()
        self._held_by_all = 0

    @property
    def held_by_all(self) -> int:
        return self._held_by_all

    def held(self, namespace: str) -> int:
        return self._held[namespace]

    def has_room(self, namespace: str, amount: int) -> bool:
        """Whether the namespace may take so many units more."""
        free = self.total - self._held_by_all - amount
        if free < 0:
            return False
        mine = self._held[namespace]
        return not mine or mine + amount <= self._generosity * free

    def take(self, namespace: str, amount: int) -> bool:
        """Take units; False, and nothing changed, if the namespace may not."""
        if not self.has_room(namespace, amount):
            return False
        self.hold(namespace, amount)
        return True

    def hold(self, namespace: str, amount: int) -> None:
        """Count units that are held already, or that nothing else is held beside: without asking."""
        self._held[namespace] += amount
        self._held_by_all += amount

    def give_back(self, namespace: str, amount: int) -> None:
        self._held[namespace] -= amount
        self._held_by_all -= amount
        if not self._held[namespace]:
            del self._held[namespace]  # else every namespace that ever called would be remembered


class RoundRobin(Generic[T]):
    """What waits, by namespace: namespaces in turn, the items of each in the order in which they came."""

    def __init__(self) -> None:
        # The namespace whose turn it is comes first.
        self._queues: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def waiting(self, namespace: str) -> int:
        return len(self._queues.get(namespace, ()))

    def firsts(self) -> Iterator[tuple[str, T]]:
        """Each namespace's first item, in the order of turns."""
        return ((namespace, queue[0]) for namespace, queue in self._queues.items())

    def put(self, namespace: str, item: T) -> None:
        self._queues.setdefault(namespace, deque()).append(item)

    def take(self, may: Callable[[str, T], bool] = lambda _namespace, _item: True) -> tuple[str, T] | None:
        """The next item, no longer waiting; its namespace is then the last in turn. None if nothing may be taken.

        A namespace whose first item `may` not be taken keeps its place, and holds up nobody else.
        """
        for namespace, queue in self._queues.items():
            if may(namespace, queue[0]):
                item = queue.popleft()
                del self._queues[namespace]
                if queue:
                    self._queues[namespace] = queue
                return namespace, item
        return None

    def remove(self, namespace: str, item: Hashable) -> bool:
        """Forget an item that waits no more; False if it was taken already."""
        queue = self._queues.get(namespace)
        if queue is None or item not in queue:
            return False
        queue.remove(item)  # type: ignore[arg-type]
        if not queue:
            del self._queues[namespace]
        return True
