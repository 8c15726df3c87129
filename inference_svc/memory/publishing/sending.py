"""Full blocks of one turn or memory on their way to the store: the next piece is copied while others are sent."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from kvasir.formats.block_file import FileBytes
from kvasir.formats.digest import Digest

from inference_svc.engine.api import Snapshot
from inference_svc.memory.publishing.copies import Copies, files_of
from inference_svc.memory.store.blobs import digests_of
from inference_svc.memory.store.remote_cache import RemoteCache

_MOST_PIECES, _MOST_BYTES = 4, 256 << 20  # of one sending, under way at once


@dataclass(frozen=True, slots=True)
class _PieceUnderWay:
    """One under way: how many of its digests are blocks'."""

    blocks: int
    digests: asyncio.Task[list[Digest]]
    task: asyncio.Task[list[Digest]]


class Sending:
    """Pieces in order: `stored` gets the digests of stored blocks, `rest` those of a last piece's other files."""

    def __init__(
        self,
        copies: Copies,
        namespace: str,
        store: RemoteCache,
        stored: Iterable[Digest],
        stall_timeout_s: float,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self.stored = list(stored)
        self.rest: list[Digest] = []
        self.next_block = len(self.stored)  # the first one that is not under way
        self.sent_bytes = 0
        self.waits_for_room = False
        self.ends_with_manifest = False
        self._manifest: asyncio.Future[bytes] | None = None  # for which the last piece waits
        self._copies = copies
        self._namespace = namespace
        self._store = store
        self._stall_timeout_s = stall_timeout_s
        self._progressed = progressed
        self._under_way: deque[_PieceUnderWay] = deque()
        self._failure: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a piece did not get there: a new sending goes on from what is stored."""
        return self._failure is not None

    async def put(self, copy: Callable[[int], Awaitable[Snapshot | None]], held_bytes: int = 0) -> bool:
        """Copy the piece from `next_block` on once there is room, and begin to send it. False if there is none."""
        self.waits_for_room = True
        held_bytes = held_bytes or self._copies.piece_bytes
        while len(self._under_way) >= max(1, min(_MOST_PIECES, _MOST_BYTES // held_bytes)):
            await self._first_ended()
        if self._failure is not None:
            raise self._failure
        await self._copies.held.wait_for(self._namespace, held_bytes)
        self.waits_for_room = False
        try:
            piece = await copy(self.next_block)
        except BaseException:
            self._copies.held.give_back(self._namespace, held_bytes)
            raise
        if piece is None or not files_of(piece):
            self._copies.held.give_back(self._namespace, held_bytes)
            return False
        self.begin(piece, held_bytes)
        return True

    def begin(self, piece: Snapshot, held_bytes: int) -> None:
        """Send a piece, for whose copies so much room is held. It is given back when they have gone."""
        self.next_block += len(piece.blocks)
        files = files_of(piece)
        digests = asyncio.create_task(digests_of(files))
        if self.ends_with_manifest and files and self._copies.is_whole(piece):
            self._manifest = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._send(files, digests, self._manifest))
        self._under_way.append(_PieceUnderWay(len(piece.blocks), digests, task))
        # A task that is cancelled before its first step runs no `finally` of its own.
        task.add_done_callback(lambda _: self._copies.held.give_back(self._namespace, held_bytes))
        task.add_done_callback(lambda _: self._take_in())

    async def named(self) -> tuple[list[Digest], list[Digest]]:
        """`stored` and `rest` as they will be, as soon as all is hashed. Raises why an earlier piece failed."""
        if self._failure is not None:
            raise self._failure
        blocks, rest = list(self.stored), self.rest
        for piece in list(self._under_way):
            digests = await piece.digests
            blocks += digests[: piece.blocks]
            rest = digests[piece.blocks :]
        return blocks, rest

    def take_along(self, manifest: bytes) -> bool:
        """Send the manifest with the last piece, if that waits for it; an empty one: it goes without."""
        if self._manifest is None or self._manifest.done():
            return False
        self._manifest.set_result(manifest)
        return True

    async def drain(self) -> None:
        """Wait for the pieces under way. `stored` ends before the first that failed."""
        self.take_along(b"")
        while self._under_way:
            await self._first_ended()

    async def ended(self) -> None:
        await self.drain()
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """No manifest will name these blocks."""
        for piece in self._under_way:
            piece.task.cancel()

    async def _first_ended(self) -> None:
        await asyncio.wait({self._under_way[0].task})
        self._take_in()

    def _take_in(self) -> None:
        """Note what ended, in order. Behind a piece that failed nothing counts, though it may have come."""
        while self._under_way and self._under_way[0].task.done():
            piece = self._under_way.popleft()
            blocks, task = piece.blocks, piece.task
            failure = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._failure = self._failure or failure
            if self._failure is None:
                self.stored += task.result()[:blocks]
                self.rest = task.result()[blocks:]

    async def _send(
        self, files: list[FileBytes], hashed: asyncio.Task[list[Digest]], naming: asyncio.Future[bytes] | None
    ) -> list[Digest]:
        if not files:
            return []
        digests, sent_bytes = await self._store.blobs.write_tensors(files, self._stall_timeout_s, hashed, naming)
        self.sent_bytes += sent_bytes
        self._progressed()
        return digests
