"""A lock for each key, kept while somebody holds it or waits for it."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class Locks(Generic[KeyT]):
    def __init__(self) -> None:
        self._locks: dict[KeyT, asyncio.Lock] = {}
        self._users: Counter[KeyT] = Counter()

    def __contains__(self, key: KeyT) -> bool:
        """Whether somebody holds this key's lock or waits for it."""
        return key in self._locks

    def __len__(self) -> int:
        return len(self._locks)

    @contextlib.asynccontextmanager
    async def held(self, key: KeyT) -> AsyncIterator[None]:
        """One holder at a time, in order of arrival."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]
