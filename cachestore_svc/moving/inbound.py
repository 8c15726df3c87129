"""Blobs on their way in, frame by frame: from a client's stream, a peer, or an archive.

Three things overlap: while one frame is hashed and written, the next is received; while blobs are synced and listed,
the next are written. Whole blobs are made durable in groups, of as many as wait: a small blob then costs little more
than its bytes. A blob is reported only when it is durable.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError
from kvasir.formats.digest import Digest

from cachestore_svc.records import MAX_FRAME_BYTES, BlobKind
from cachestore_svc.store import BlobWriter, NewBlob, Store, finish_all
from cachestore_svc.threads import StoreThreads, ended

# What one group has at most. Two groups of a sender are made durable at once, and more while what waits fills one.
_GROUP_BLOBS, _GROUP_BYTES = 32, 8 << 20
_GROUPS, _MAX_GROUPS = 2, 8
# Whole blobs that are not durable yet, and those of their bytes that wait in memory.
_MAX_WHOLE, _MAX_HELD_BYTES = 64, 4 << 20
_MAX_OUTCOMES = 256


@dataclass(frozen=True, slots=True)
class Stored:
    """A blob is durable; `existed` when it was before."""

    digest: Digest
    existed: bool


@dataclass(slots=True)
class _Current:
    """The blob whose frames are arriving."""

    blob: NewBlob
    writer: BlobWriter
    exits: contextlib.ExitStack
    next_offset: int  # where the sender's next frame begins
    received_bytes: int  # what the writer has, or will have when `writing` is done
    writing: "asyncio.Future[None] | None" = None

    @property
    def is_asked_only(self) -> bool:
        """An empty first frame asked whether the blob is there, and nothing followed."""
        return self.writing is None and self.next_offset < self.blob.digest.size_bytes


@dataclass(slots=True)
class _Whole:
    """A blob that can be made durable: its bytes are in its part, or here, or in a handed file."""

    blob: NewBlob
    data: bytes | memoryview = b""
    current: _Current | None = None  # None: it is not open yet
    writer: BlobWriter | None = None
    problem: Exception | None = None

    @property
    def outcome(self) -> Stored | Exception:
        return self.problem or Stored(self.blob.digest, existed=self.writer is not None and self.writer.is_stored)

    def write(self, writer: BlobWriter) -> None:
        """Write the bytes that are here."""
        self.writer = writer
        try:
            if self.data:
                writer.write(writer.received_bytes, memoryview(self.data)[writer.received_bytes :])
        except KvasirError as error:
            self.problem = error


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
        self._whole: deque[_Whole] = deque()
        self._held_bytes = 0
        self._groups = 0  # that are being made durable
        self._finishing: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MAX_WHOLE)
        self._is_freed = asyncio.Event()

    async def begin(self, digest: Digest, kind: BlobKind, offset: int, data: bytes | memoryview) -> None:
        """Begin the next blob with its first bytes, which lie at `offset`. Raises what Store.open_writer and `write`
        do, and InvalidArgument (offset)."""
        await self._leave_current()
        if offset == 0 and 0 < len(data) == digest.size_bytes <= MAX_FRAME_BYTES:
            await self._place(len(data))
            self._finish_later(_Whole(NewBlob(digest, kind), data))
            return
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
        await self.write(offset, data)

    async def take(self, digest: Digest, kind: BlobKind, token: str) -> None:
        """The next blob lies whole in the file of this token. Why it could not be taken is one of the outcomes."""
        await self._leave_current()
        await self._place(0)
        self._finish_later(_Whole(NewBlob(digest, kind, token)))

    async def resume(self, digest: Digest, kind: BlobKind) -> int:
        """Begin the next blob where an earlier writer ended; returns that offset, which nobody else changes from now
        on. Raises what Store.open_writer does, and FailedPrecondition (WRITE_IN_PROGRESS) for one that needs no
        bytes."""
        await self._leave_current()
        writer = await self._open(digest, kind)
        if self._is_skipping:
            raise FailedPrecondition(f"another writer has sent {digest}", reason="WRITE_IN_PROGRESS")
        return writer.received_bytes

    async def _open(self, digest: Digest, kind: BlobKind) -> BlobWriter:
        exits = contextlib.ExitStack()
        try:
            writer = await self._threads.run(
                self._namespace, lambda: exits.enter_context(self._store.open_writer(self._namespace, digest, kind))
            )
        except BaseException:
            # A cancel may come while the writer is being opened: left open, it would keep this blob from all others.
            await self._threads.run(self._namespace, exits.close)
            raise
        self._current = _Current(NewBlob(digest, kind), writer, exits, writer.received_bytes, writer.received_bytes)
        self._is_skipping = writer.received_bytes == digest.size_bytes
        return writer

    async def write(self, offset: int, data: bytes | memoryview) -> None:
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
        if current.received_bytes >= current.blob.digest.size_bytes:
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
        self._has_begun, self._is_skipping = True, False
        current = self._current
        if current is None:
            return
        if not current.writer.is_stored and not current.is_asked_only:
            raise InvalidArgument(
                f"blob {current.blob.digest}: {current.received_bytes} bytes arrived",
                reason="BYTES_MISSING",
                field="frame.data",
                metadata={"digest": current.blob.digest.hash, "received_bytes": str(current.received_bytes)},
            )
        self._current = None
        await self._threads.run(self._namespace, current.exits.close)

    async def _finish_current(self) -> None:
        await self._place(0)  # the blob is still the current one: a sender that leaves now ends its writer
        current, self._current = self._current, None
        assert current is not None
        self._finish_later(_Whole(current.blob, current=current, writer=current.writer))

    async def _place(self, size_bytes: int) -> None:
        """Wait while too many blobs wait to be made durable, or too many bytes of them."""
        await self._room.acquire()
        while self._held_bytes and self._held_bytes + size_bytes > _MAX_HELD_BYTES:
            self._is_freed.clear()
            await self._is_freed.wait()

    def _finish_later(self, whole: _Whole) -> None:
        """Let the blob, which has its place, be made durable with those that wait."""
        self._held_bytes += len(whole.data)
        self._whole.append(whole)
        is_much = sum(each.blob.digest.size_bytes for each in self._whole) >= _GROUP_BYTES
        if self._groups < (_MAX_GROUPS if is_much else _GROUPS):
            self._groups += 1
            task = asyncio.create_task(self._finish_groups())
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)

    async def _finish_groups(self) -> None:
        """Make blobs durable until none waits."""
        while group := self._next_group():
            await self._finish(group)
            for whole in group:
                await self.outcomes.put(whole.outcome)
                self._room.release()
            self._held_bytes -= sum(len(whole.data) for whole in group)
            self._is_freed.set()
        # At once with finding that none waits: the next blob begins another group.
        self._groups -= 1

    def _next_group(self) -> list[_Whole]:
        group: list[_Whole] = []
        left_bytes = _GROUP_BYTES
        while self._whole and len(group) < _GROUP_BLOBS and left_bytes > 0:
            group.append(self._whole.popleft())
            left_bytes -= group[-1].blob.digest.size_bytes
        return group

    async def _finish(self, group: Sequence[_Whole]) -> None:
        for whole in group:
            if whole.current is not None:
                try:
                    await self._settle(whole.current)
                except Exception as error:  # noqa: BLE001  it goes to the reader of outcomes
                    whole.problem = error
        try:
            await self._threads.run(self._namespace, self._finish_group, group)
        except Exception as error:  # noqa: BLE001  it goes to the reader of outcomes
            for whole in group:
                whole.problem = whole.problem or error

    def _finish_group(self, group: Sequence[_Whole]) -> None:
        """Write what is not written yet, and make all durable. On a thread."""
        with contextlib.ExitStack() as exits:
            for whole in group:
                if whole.current is not None:
                    exits.push(whole.current.exits)
            new = [whole for whole in group if whole.current is None]
            opened = self._store.open_writers(self._namespace, [whole.blob for whole in new]) if new else ()
            for whole, writer in zip(new, opened, strict=True):
                if isinstance(writer, KvasirError):
                    whole.problem = writer
                else:
                    whole.write(exits.enter_context(writer))
            ready = [(whole, whole.writer) for whole in group if whole.problem is None and whole.writer is not None]
            for (whole, _), problem in zip(ready, finish_all([writer for _, writer in ready]), strict=True):
                whole.problem = problem

    async def _settle(self, current: _Current) -> None:
        """Wait for the frame that is being written; one thread at a time uses a writer."""
        if current.writing is not None:
            writing = current.writing
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await ended(writing)
                raise
