"""Blobs on their way out: each is verified before its first byte leaves, and the next are read while one is sent.

All readers together hold at most a budget of bytes, of which each namespace has its share. A stalled reader drops its
buffered blobs when another reader needs the memory, and keeps only the piece being sent. Otherwise it keeps the blobs,
because dropping them means reading and verifying them again. A digest is looked up before its bytes are budgeted, so a
size that a caller only claims takes no memory from others.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from cachestore_svc.facts.records import MAX_FRAME_BYTES
from cachestore_svc.index.catalog import SLICE
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads

# What one reader has read, or is reading, behind the blob that is sent: one blob, and more while they are small.
_AHEAD, _AHEAD_BYTES = 8, 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a blob, whose memory they keep; `is_first` says that it is the first of this blob that is sent."""

    digest: Digest
    offset: int
    data: memoryview
    is_first: bool


class BlobReader:
    """Reads blobs of the store for all callers, within one budget."""

    def __init__(self, store: Store, threads: StoreThreads, budget: SharedRoom) -> None:
        self._store = store
        self._threads = threads
        self._budget = budget

    def open(self, namespace: str, digests: Sequence[Digest], first_offset: int = 0) -> "BlobSource":
        """The blobs as pieces, in the order asked; the first from `first_offset` on. Use as an `async with`."""
        return BlobSource(self._store, self._threads, self._budget, namespace, digests, first_offset)


class BlobSource:
    """One reader's blobs. It holds the one that is being sent and, when there is room, the next few."""

    def __init__(
        self,
        store: Store,
        threads: StoreThreads,
        budget: SharedRoom,
        namespace: str,
        digests: Sequence[Digest],
        first_offset: int,
    ) -> None:
        self._store = store
        self._threads = threads
        self._budget = budget
        self._namespace = namespace
        self._waiting = deque(digests)
        # Of the next in line, which were looked up together: whether each is whole.
        self._found: deque[bool] = deque()
        self._offset = first_offset
        self._is_first = True
        self._data: memoryview | None = None
        self._ahead: deque[asyncio.Task[memoryview]] = deque()
        self._held_bytes = 0

    async def next_piece(self) -> Piece | None:
        """The next at most 1 MiB; None after the last. Raises NotFound, DataLoss."""
        if not self._waiting:
            return None
        digest = self._waiting[0]
        if self._data is None:
            self._data = await self._load(digest)
        data = memoryview(self._data)[self._offset : self._offset + MAX_FRAME_BYTES]
        piece = Piece(digest, self._offset, data, self._is_first)
        self._offset += len(data)
        self._is_first = self._offset >= digest.size_bytes
        if self._is_first:
            self._waiting.popleft()
            self._found.popleft()
            self._offset = 0
            self._data = None
            self._give_back(digest.size_bytes)
        return piece

    async def wanted(self) -> None:
        """Return when another waits for bytes that this reader may hold."""
        await self._budget.wanted_from(self._namespace)

    async def let_go(self) -> None:
        """Hold nothing. What is needed later is read, and verified, again."""
        self._data = None
        ahead, self._ahead = self._ahead, deque()
        for reading in ahead:
            reading.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
        self._give_back(self._held_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.let_go()

    async def _load(self, digest: Digest) -> memoryview:
        """The blob's bytes; begins to read those behind it. Raises NotFound, DataLoss."""
        if not self._found:
            some = [*islice(self._waiting, SLICE)]
            self._found += await self._threads.run(
                self._namespace, self._store.blobs.leading_stored, self._namespace, some
            )
        if self._ahead:
            reading = self._ahead.popleft()
        else:
            await self._budget.wait_for(self._namespace, digest.size_bytes)
            self._held_bytes += digest.size_bytes
            reading = asyncio.create_task(self._read(digest, self._found[0]))
        self._read_ahead()
        return await reading

    def _read_ahead(self) -> None:
        """Begin to read the blobs behind the present one, while the budget has room now."""
        behind = list(islice(zip(self._waiting, self._found, strict=False), 1, _AHEAD + 1))
        known = sum(digest.size_bytes for digest, _ in behind[: len(self._ahead)])
        for digest, is_whole in behind[len(self._ahead) :]:
            known += digest.size_bytes
            is_much = self._ahead and known > _AHEAD_BYTES
            if is_much or not self._budget.take_if_fits(self._namespace, digest.size_bytes):
                return
            self._held_bytes += digest.size_bytes
            self._ahead.append(asyncio.create_task(self._read(digest, is_whole)))

    async def _read(self, digest: Digest, is_whole: bool) -> memoryview:
        read = self._store.blobs.read_found if is_whole else self._store.blobs.read
        return await self._threads.run(self._namespace, read, self._namespace, digest)

    def _give_back(self, count: int) -> None:
        self._held_bytes -= count
        self._budget.give_back(self._namespace, count)
