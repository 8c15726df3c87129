"""The newest compiled formats of each namespace. None is shared: a fast answer would show another's format. Pure."""

from collections import OrderedDict
from typing import Generic, TypeVar

from kvasir.server.fair_shares import Shares

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class FormatCache(Generic[KeyT, ValueT]):
    """At most `most` formats. A namespace with its share drops its own oldest, else the largest holder's goes."""

    def __init__(self, most: int) -> None:
        self._shares = Shares(most)
        self._kept: dict[str, OrderedDict[KeyT, ValueT]] = {}

    def __len__(self) -> int:
        return self._shares.held_by_all

    def has(self, namespace: str, key: KeyT) -> bool:
        return key in self._kept.get(namespace, ())

    def get(self, namespace: str, key: KeyT) -> ValueT | None:
        """The value, which becomes the namespace's newest."""
        if not self.has(namespace, key):
            return None
        self._kept[namespace].move_to_end(key)
        return self._kept[namespace][key]

    def put(self, namespace: str, key: KeyT, value: ValueT) -> None:
        if not self.has(namespace, key):
            while not self._shares.has_room(namespace, 1):
                has_some = self._shares.held(namespace) > 0
                self._drop_oldest(namespace if has_some else max(self._kept, key=self._shares.held))
            self._shares.hold(namespace, 1)
        self._kept.setdefault(namespace, OrderedDict())[key] = value
        self._kept[namespace].move_to_end(key)

    def _drop_oldest(self, namespace: str) -> None:
        self._kept[namespace].popitem(last=False)
        self._shares.give_back(namespace, 1)
        if not self._kept[namespace]:
            del self._kept[namespace]
