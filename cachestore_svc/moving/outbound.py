"""Blobs on their way out: each is verified before its first byte leaves, and the next are read while one is sent. All
readers hold at most a budget of bytes, shared by namespace; a stalled one drops its blobs when another needs memory. A
digest is looked up before its bytes are budgeted, as a size is only a caller's claim.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from cachestore_svc.facts.records import MAX_FRAME_BYTES
from cachestore_svc.index.catalog import SLICE
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.threads import ended

_GROUP_BYTES = MAX_FRAME_BYTES
# In a message beyond one frame: a message of any size takes both sides a tenth of a millisecond. gRPC keeps the message
# of a stalled reader: so all readers share a part of the budget for it, and the others have smaller messages.
_MORE_BYTES, _MORE_PART = 2 * MAX_FRAME_BYTES, 8


@dataclass(frozen=True, slots=True)
class _Pace:
    """How much one reader reads beside each other. A group: one blob, and more while all are at most _GROUP_BYTES."""

    group_blobs: int
    # Groups that are read, or being read, behind the one that is sent: one, and more within `ahead_bytes`.
    least_ahead: int
    most_ahead: int
    ahead_bytes: int
    quick_s: float = 0.2  # of a group, behind which there is one more: an engine gives up a blob that takes longer


# A disk answers at once. A bucket takes a while for each object, and gives each request a small part of the link. Where
# the link itself is small they only share it, and the first comes late: then there are fewer.
_NEAR, _FAR = _Pace(16, 4, 4, 4 << 20), _Pace(4, 1, 8, 64 << 20)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a blob, whose memory they keep; `is_first`: it is the first of this blob that is sent."""

    digest: Digest
    offset: int
    data: memoryview
    is_first: bool


@dataclass(frozen=True, slots=True)
class _Group:
    """Blobs that a thread reads at once: the bytes of each, or why there are none, which ends the group; and in how
    many seconds."""

    digests: Sequence[Digest]
    size_bytes: int
    reading: asyncio.Task[tuple[list[memoryview | Exception], float]]


class BlobReader:
    def __init__(self, store: AioStore, budget: SharedRoom) -> None:
        self._store = store
        self._budget = budget
        self._more = SharedRoom(budget.max_units // _MORE_PART)

    def open(self, namespace: str, digests: Sequence[Digest], first_offset: int = 0) -> "BlobSource":
        """The blobs as pieces, in the wanted order; the first from `first_offset` on. Use as an `async with`."""
        return BlobSource(self._store, (self._budget, self._more), namespace, digests, first_offset)


class BlobSource:
    """One reader's blobs. It holds those that are being sent and, when there is room, the next few."""

    def __init__(
        self,
        store: AioStore,
        rooms: tuple[SharedRoom, SharedRoom],
        namespace: str,
        digests: Sequence[Digest],
        first_offset: int,
    ) -> None:
        """`rooms`: for bytes of blobs, and for those of messages beyond one frame."""
        self._store = store
        self._pace = _FAR if store.blobs.are_far else _NEAR
        self._most_ahead = self._pace.least_ahead
        self._budget, self._more = rooms
        self._more_bytes = 0  # of the message that is being sent
        self._namespace = namespace
        self._waiting = deque(digests)
        # Of the next in line, which were looked up together: whether each is whole.
        self._found: deque[bool] = deque()
        self._offset = first_offset
        self._is_first = True
        self._read: deque[memoryview | Exception] = deque()  # of the first that wait
        self._ahead: deque[_Group] = deque()
        self._held_bytes = 0

    async def next_piece(self) -> Piece | None:
        """The next at most 1 MiB; None after the last. Raises NotFound, DataLoss."""
        if not self._waiting:
            return None
        digest = self._waiting[0]
        if not self._read:
            await self._load()
        whole = self._read[0]
        if isinstance(whole, Exception):
            raise whole
        data = memoryview(whole)[self._offset : self._offset + MAX_FRAME_BYTES]
        piece = Piece(digest, self._offset, data, self._is_first)
        self._offset += len(data)
        self._is_first = self._offset >= digest.size_bytes
        if self._is_first:
            for row in (self._waiting, self._found, self._read):
                row.popleft()
            self._offset = 0
            self._give_back(digest.size_bytes)
        return piece

    async def next_pieces(self, most: int) -> list[Piece]:
        """The next piece, and those behind it that fit its message: the one before has been sent. None after the last.
        Raises as `next_piece`."""
        self._give_more_back()
        pieces: list[Piece] = []
        left_bytes = MAX_FRAME_BYTES
        while len(pieces) < most and (not pieces or (size_bytes := self._next_bytes())):
            if pieces and size_bytes > left_bytes:
                left_bytes += self._take_more()
                if size_bytes > left_bytes:
                    break
            if (piece := await self.next_piece()) is None:
                break
            pieces.append(piece)
            left_bytes -= len(piece.data)
        return pieces

    def _next_bytes(self) -> int:
        """Of the next piece, if it is read."""
        if not self._read or not isinstance(whole := self._read[0], memoryview):
            return 0
        return min(len(whole) - self._offset, MAX_FRAME_BYTES)

    def _take_more(self) -> int:
        """Bytes beyond one frame that this message may have; once."""
        if self._more_bytes or not self._more.take_if_fits(self._namespace, _MORE_BYTES):
            return 0
        self._more_bytes = _MORE_BYTES
        return _MORE_BYTES

    def _give_more_back(self) -> None:
        if self._more_bytes:
            self._more.give_back(self._namespace, self._more_bytes)
            self._more_bytes = 0

    async def wanted(self) -> None:
        """Return when another waits for bytes that this reader may hold."""
        await self._budget.wanted_from(self._namespace)

    async def let_go(self) -> None:
        """Hold nothing. Blobs that are needed later are read, and verified, again."""
        self._read.clear()
        ahead, self._ahead = self._ahead, deque()
        for group in ahead:
            group.reading.cancel()
        try:  # also if this is cancelled: until the threads end, the bytes are there
            await ended(asyncio.gather(*(group.reading for group in ahead), return_exceptions=True))
        finally:
            self._give_back(self._held_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._give_more_back()
        await self.let_go()

    async def _load(self) -> None:
        """Have the first that wait read; begins to read those behind them. Raises NotFound, DataLoss."""
        if not self._found:
            some = [*islice(self._waiting, SLICE)]
            self._found += await self._store.run(self._namespace, self._store.blobs.leading_stored, some)
        if self._ahead:
            group = self._ahead.popleft()
        else:
            digests = self._group_from(0)
            await self._budget.wait_for(self._namespace, _size_of(digests))
            group = self._begin(0, digests)
        self._read_ahead(len(group.digests))
        read, took_s = await group.reading
        self._read += read
        most_ahead = self._most_ahead + (1 if took_s < self._pace.quick_s else -1)
        self._most_ahead = min(max(most_ahead, self._pace.least_ahead), self._pace.most_ahead)

    def _read_ahead(self, first: int) -> None:
        """Begin to read what waits from here on, while the budget has room now."""
        first += sum(len(group.digests) for group in self._ahead)
        while len(self._ahead) < self._most_ahead and (digests := self._group_from(first)):
            size_bytes = _size_of(digests)
            known = size_bytes + sum(group.size_bytes for group in self._ahead)
            is_much = self._ahead and known > self._pace.ahead_bytes
            if is_much or not self._budget.take_if_fits(self._namespace, size_bytes):
                return
            self._ahead.append(self._begin(first, digests))
            first += len(digests)

    def _group_from(self, first: int) -> list[Digest]:
        """What is read at once of those that wait, and were found, from here on."""
        digests: list[Digest] = []
        size_bytes = 0
        for digest in islice(self._waiting, first, min(first + self._pace.group_blobs, len(self._found))):
            size_bytes += digest.size_bytes
            if digests and size_bytes > _GROUP_BYTES:
                break
            digests.append(digest)
        return digests

    def _begin(self, first: int, digests: Sequence[Digest]) -> _Group:
        size_bytes = _size_of(digests)
        self._held_bytes += size_bytes
        found = list(zip(digests, islice(self._found, first, None), strict=False))
        return _Group(digests, size_bytes, asyncio.create_task(self._timed(found)))

    async def _timed(self, found: Sequence[tuple[Digest, bool]]) -> tuple[list[memoryview | Exception], float]:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        read = await self._store.threads.run(self._namespace, self._read_all, found)
        return read, clock() - began_s

    def _read_all(self, found: Sequence[tuple[Digest, bool]]) -> list[memoryview | Exception]:
        read: list[memoryview | Exception] = []
        for digest, is_whole in found:
            try:
                read.append(self._store.blobs.read(self._namespace, digest, is_found=is_whole))
            except Exception as error:  # noqa: BLE001  it is raised when it is this blob's turn
                return [*read, error]
        return read

    def _give_back(self, count: int) -> None:
        self._held_bytes -= count
        self._budget.give_back(self._namespace, count)


def _size_of(digests: Sequence[Digest]) -> int:
    return sum(digest.size_bytes for digest in digests)
