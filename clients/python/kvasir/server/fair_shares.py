"""How namespaces share a limited resource: how much each may hold (`Shares`), and which is next (`RoundRobin`)."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
GENEROSITY = 3
QUARTER = 1 / 3
"""A generosity with which one namespace alone gets a quarter."""


class Shares:
    """A number of units for all namespaces; one that holds none may take any. Each may hold at most `generosity` times
    the units that stay free: of 100 and with 3, one alone gets 75, two get 42 each, three 30 (the dynamic thresholds of
    shared-memory switches: Choudhury and Hahne, 1998)."""

    def __init__(self, total: int, generosity: float = GENEROSITY) -> None:
        self.total = total
        self._generosity = generosity
        self._held: Counter[str] = Counter()
        self.held_by_all = 0

    def held(self, namespace: str) -> int:
        return self._held[namespace]

    def has_room(self, namespace: str, amount: int) -> bool:
        """Whether the namespace may take this many more units."""
        free = self.total - self.held_by_all - amount
        if free < 0:
            return False
        mine = self._held[namespace]
        return not mine or mine + amount <= self._generosity * free

    def take(self, namespace: str, amount: int) -> bool:
        """Take units. Returns False and changes nothing if the namespace may not take them."""
        if not self.has_room(namespace, amount):
            return False
        self.hold(namespace, amount)
        return True

    def hold(self, namespace: str, amount: int) -> None:
        """Count units without asking: the namespace has them already, or nothing else is held."""
        self._held[namespace] += amount
        self.held_by_all += amount

    def give_back(self, namespace: str, amount: int) -> None:
        self._held[namespace] -= amount
        self.held_by_all -= amount
        if not self._held[namespace]:
            del self._held[namespace]  # else every namespace that ever called would be remembered


class RoundRobin(Generic[T]):
    """Waiting items: namespaces take turns, and the items of one namespace keep their order."""

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
        """Remove and return the next item, its namespace then last in turn; None if `may` forbids all of them."""
        for namespace, queue in self._queues.items():
            if may(namespace, queue[0]):
                item = queue.popleft()
                del self._queues[namespace]
                if queue:
                    self._queues[namespace] = queue
                return namespace, item
        return None

    def remove(self, namespace: str, item: Hashable) -> bool:
        """Remove an item that does not wait any more. Returns False if it was taken already."""
        queue = self._queues.get(namespace)
        if queue is None or item not in queue:
            return False
        queue.remove(item)  # type: ignore[arg-type]
        if not queue:
            del self._queues[namespace]
        return True
