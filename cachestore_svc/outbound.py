"""Blobs on their way out: each is verified before its first byte leaves, and the next is read while one is sent.

All readers together hold at most a budget of bytes: who reads slowly slows itself down, and a thousand who do not
read at all cost no more memory than a few.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvasir.digest import Digest

from cachestore_svc.store import Store
from cachestore_svc.threads import StoreThreads


class ByteBudget:
    """So many bytes, shared by all readers. One who holds nothing always gets its turn, however large its blob."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._held_bytes = 0
        self._changed = asyncio.Condition()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    async def take(self, count: int) -> None:
        """Wait until there is room. A blob larger than the budget has room when nothing is held."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._held_bytes or self._has_room(count))
            self._held_bytes += count

    def take_if_free(self, count: int) -> bool:
        """Take at once or not at all."""
        if self._has_room(count):
            self._held_bytes += count
            return True
        return False

    async def give_back(self, count: int) -> None:
        async with self._changed:
            self._held_bytes -= count
            self._changed.notify_all()

    def _has_room(self, count: int) -> bool:
        return self._held_bytes + count <= self._size_bytes


class BlobReader:
    """Reads blobs of the store in the order asked."""

    def __init__(self, store: Store, threads: StoreThreads, budget: ByteBudget) -> None:
        self._store = store
        self._threads = threads
        self._budget = budget

    async def read(self, namespace: str, digests: Sequence[Digest]) -> AsyncGenerator[tuple[Digest, memoryview], None]:
        """Each blob's bytes, verified. They count as held until the next is asked for. Raises NotFound, DataLoss."""
        ahead: asyncio.Task[memoryview] | None = None
        held_bytes = 0
        try:
            for index, digest in enumerate(digests):
                if ahead is None:
                    await self._budget.take(digest.size_bytes)
                    held_bytes += digest.size_bytes
                    data = await self._threads.run(self._store.read_blob, namespace, digest)
                else:
                    data, ahead = await ahead, None
                following = digests[index + 1] if index + 1 < len(digests) else None
                if following is not None and self._budget.take_if_free(following.size_bytes):
                    held_bytes += following.size_bytes
                    ahead = asyncio.create_task(self._threads.run(self._store.read_blob, namespace, following))
                yield digest, data
                del data
                held_bytes -= digest.size_bytes
                await self._budget.give_back(digest.size_bytes)
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
            await self._budget.give_back(held_bytes)

    async def frames(
        self, namespace: str, digests: Sequence[Digest], first_offset: int, frame_bytes: int
    ) -> AsyncGenerator[tuple[Digest, int, bytes], None]:
        """The same as pieces: (digest, offset, bytes). The first blob begins at `first_offset`."""
        async with aclosing(self.read(namespace, digests)) as blobs:
            async for digest, data in blobs:
                for offset in range(first_offset, max(len(data), first_offset + 1), frame_bytes):
                    yield digest, offset, bytes(data[offset : offset + frame_bytes])
                first_offset = 0
                del data
