"""Blobs on their way in, frame by frame: from a client's stream, a peer, or an archive.

Three things overlap: while one frame is hashed and written, the next is received; while one blob is synced and
listed, the next is written. A blob is reported only when it is durable.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.formats.digest import Digest

from cachestore_svc.records import MAX_FRAME_BYTES, BlobKind
from cachestore_svc.store import BlobWriter, Store
from cachestore_svc.threads import StoreThreads, ended

# Blobs that are being made durable at once: they share one commit of the index.
_MAX_FINISHING = 8
_MAX_OUTCOMES = 256


@dataclass(frozen=True, slots=True)
class Stored:
    """A blob is durable; `existed` when it was before."""

    digest: Digest
    existed: bool


@dataclass(slots=True)
class _Current:
    """The blob whose frames are arriving."""

    digest: Digest
    writer: BlobWriter
    exits: contextlib.ExitStack
    next_offset: int  # where the sender's next frame begins
    received_bytes: int  # what the writer has, or will have when `writing` is done
    writing: "asyncio.Future[None] | None" = None

    @property
    def is_asked_only(self) -> bool:
        """An empty first frame asked whether the blob is there, and nothing followed."""
        return self.writing is None and self.next_offset < self.digest.size_bytes


class BlobIntake:
    """One sender's blobs, one after the other. An `async with`; leaving it keeps an unfinished part for resumption.

    `outcomes` gets each blob that became durable, and the failure of a blob that was sent whole; errors of the present
    frame are raised. The queue is bounded: if nobody reads it, no more frames are taken. The user may put None there as
    a mark.
    """

    def __init__(self, store: Store, threads: StoreThreads, namespace: str) -> None:
        self.outcomes: asyncio.Queue[Stored | Exception | None] = asyncio.Queue(_MAX_OUTCOMES)
        self._store = store
        self._threads = threads
        self._namespace = namespace
        self._current: _Current | None = None
        # The last blob that began needs no bytes: it is stored, or had all arrived before a cut.
        self._is_skipping = False
        self._has_begun = False
        self._finishing: set[asyncio.Task[None]] = set()
        self._free_finishers = asyncio.Semaphore(_MAX_FINISHING)

    async def begin(self, digest: Digest, kind: BlobKind, offset: int = 0) -> None:
        """Begin the next blob, at `offset`. Raises what Store.open_writer does, and InvalidArgument (offset)."""
        writer = await self._open(digest, kind)
        if writer.is_stored:
            await self.outcomes.put(Stored(digest, existed=True))
        elif not 0 <= offset <= writer.received_bytes:
            raise InvalidArgument(
                f"frame.offset: expected at most {writer.received_bytes}, which is what has arrived; got {offset}",
                field="frame.offset",
                reason="OFFSET_UNEXPECTED",
                metadata={"received_bytes": str(writer.received_bytes)},
            )
        elif writer.received_bytes == digest.size_bytes:
            await self._finish_current()
        else:
            assert self._current is not None
            self._current.next_offset = offset

    async def resume(self, digest: Digest, kind: BlobKind) -> int:
        """Begin the next blob where an earlier writer ended; returns that offset, which nobody else changes from now
        on. Raises what Store.open_writer does, and FailedPrecondition (WRITE_IN_PROGRESS) for one that needs no
        bytes."""
        writer = await self._open(digest, kind)
        if self._is_skipping:
            raise FailedPrecondition(f"another writer has sent {digest}", reason="WRITE_IN_PROGRESS")
        return writer.received_bytes

    async def _open(self, digest: Digest, kind: BlobKind) -> BlobWriter:
        await self._leave_current()
        exits = contextlib.ExitStack()
        try:
            writer = await self._threads.run(
                self._namespace, lambda: exits.enter_context(self._store.open_writer(self._namespace, digest, kind))
            )
        except BaseException:
            # A cancel may come while the writer is being opened: left open, it would keep this blob from all others.
            await self._threads.run(self._namespace, exits.close)
            raise
        self._current = _Current(digest, writer, exits, writer.received_bytes, writer.received_bytes)
        self._has_begun = True
        self._is_skipping = writer.received_bytes == digest.size_bytes
        return writer

    async def write(self, offset: int, data: bytes) -> None:
        """The blob's next bytes. What arrived before a cut is skipped. Raises InvalidArgument, ResourceExhausted."""
        current = self._current
        if self._is_skipping:
            return
        if current is None:
            problem = (
                "more bytes than the blob has" if self._has_begun else "expected a blob's first frame, with its digest"
            )
            raise InvalidArgument(f"frame.digest: {problem}", field="frame.digest")
        if offset != current.next_offset:
            raise InvalidArgument(
                f"frame.offset: expected {current.next_offset}, got {offset}",
                field="frame.offset",
                reason="OFFSET_UNEXPECTED",
            )
        if len(data) > MAX_FRAME_BYTES:
            raise InvalidArgument(
                f"frame.data: expected at most {MAX_FRAME_BYTES} bytes, got {len(data)}", field="frame.data"
            )
        current.next_offset += len(data)
        fresh = memoryview(data)[max(0, current.received_bytes - offset) :]
        if fresh:
            await self._settle(current)
            current.writing = self._threads.start(self._namespace, current.writer.write, current.received_bytes, fresh)
            current.received_bytes += len(fresh)
        if current.received_bytes >= current.digest.size_bytes:
            await self._finish_current()

    async def end(self) -> None:
        """The sender is done: wait until all is durable. Raises InvalidArgument when the last blob is not whole."""
        await self._leave_current()
        if self._finishing:
            await asyncio.wait(self._finishing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._current is not None:
            current, self._current = self._current, None
            with contextlib.suppress(Exception):
                # Its error is another's doing, or is being raised already.
                await self._settle(current)
            await self._threads.run(self._namespace, current.exits.close)
        while self._finishing:
            # Their blobs are whole, but their outcomes have no reader any more.
            while not self.outcomes.empty():
                self.outcomes.get_nowait()
            await asyncio.wait(self._finishing, return_when=asyncio.FIRST_COMPLETED)

    async def _leave_current(self) -> None:
        """Nothing more comes of the current blob. Raises InvalidArgument when bytes are missing."""
        current = self._current
        if current is None:
            return
        if not current.writer.is_stored and not current.is_asked_only:
            raise InvalidArgument(
                f"blob {current.digest}: {current.received_bytes} bytes arrived",
                reason="BYTES_MISSING",
                field="frame.data",
                metadata={"digest": current.digest.hash, "received_bytes": str(current.received_bytes)},
            )
        self._current = None
        await self._threads.run(self._namespace, current.exits.close)

    async def _finish_current(self) -> None:
        await self._free_finishers.acquire()
        current, self._current = self._current, None
        assert current is not None
        task = asyncio.create_task(self._finish(current))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, current: _Current) -> None:
        outcome: Stored | Exception = Stored(current.digest, existed=False)
        try:
            await self._settle(current)
            await self._threads.run(self._namespace, current.writer.finish)
        except Exception as error:  # noqa: BLE001  it goes to the reader of outcomes
            outcome = error
        finally:
            await self._threads.run(self._namespace, current.exits.close)
            self._free_finishers.release()
        await self.outcomes.put(outcome)

    async def _settle(self, current: _Current) -> None:
        """Wait for the frame that is being written; one thread at a time uses a writer."""
        if current.writing is not None:
            writing = current.writing
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await ended(writing)
                raise
