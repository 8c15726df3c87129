"""Blobs on their way in, frame by frame: from a client's stream, a peer, or an archive. Frames are received, written
and hashed, synced and listed at once, each step a few mebibytes ahead at most. A thread takes all that waits for it as
a group. A blob is reported only when it is durable.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError
from kvasir.formats.digest import Digest

from cachestore_svc.facts.limits import wrong
from cachestore_svc.facts.records import MAX_FRAME_BYTES, BlobKind
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.blobs import BlobWriter, NewBlob, finish_all
from cachestore_svc.store.threads import ended, to_its_end

# What one group has at most. Several groups of a sender are made durable at once, because a disk syncs several files as
# fast as one; but another begins only with so many blobs or bytes, because threads with little work hinder each other.
# Less waits until a group or the sender ends, and where no group is under way so long at most.
_GROUP_BLOBS, _GROUP_BYTES = 32, 8 << 20
_ENOUGH_BLOBS, _ENOUGH_BYTES, _COMPANY_S = 8, 2 << 20, 0.003
_MAX_GROUPS = 2
# Whole blobs that are not durable yet; bytes that wait in memory to be written.
_MAX_WHOLE, _MAX_HELD_BYTES = 64, (4 << 20) + (64 << 10)
_PIECE_BYTES = 1024  # of a piece beside its data, so that those of one byte are bounded too
# A manifest with more bytes, or in more pieces, is written as it comes.
_GATHERED_BYTES, _GATHERED_PIECES = 4 << 20, 8
_MAX_OUTCOMES = 256


@dataclass(frozen=True, slots=True)
class Stored:
    """A blob is durable; `existed` when it was before."""

    digest: Digest
    existed: bool


@dataclass(slots=True, eq=False)
class _Blob:
    """A blob on its way in. Its bytes are in a file that was handed over, came all at once, or come as pieces."""

    new: NewBlob
    data: bytes | memoryview = b""  # all of it, if it came at once, until that is written
    gathered: list[tuple[int, bytes | memoryview]] | None = None  # pieces of a manifest, to be written as one
    next_offset: int = 0  # where the sender's next frame begins
    has_bytes: bool = False  # more came than an empty first frame, which only checks whether the blob is there
    pieces: int = 0  # that are not written yet
    is_whole: bool = False  # no more pieces come
    writer: BlobWriter | None = None  # None: it is not open yet
    exits: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # end the writer
    problem: Exception | None = None

    @property
    def digest(self) -> Digest:
        return self.new.digest

    @property
    def is_stored(self) -> bool:
        return self.writer is not None and self.writer.is_stored

    @property
    def outcome(self) -> Stored | Exception:
        return self.problem or Stored(self.digest, existed=self.is_stored)


@dataclass(frozen=True, slots=True)
class _Piece:
    blob: _Blob
    offset: int
    data: bytes | memoryview

    def write(self) -> None:
        """Write what had not arrived before a cut. A stored blob takes nothing."""
        writer = self.blob.writer
        if writer is None or writer.is_stored or self.blob.problem:
            return
        try:
            if fresh := memoryview(self.data)[max(0, writer.received_bytes - self.offset) :]:
                writer.write(writer.received_bytes, fresh)
        except KvasirError as error:
            self.blob.problem = error


class BlobIntake:
    """One sender's blobs, one after the other. An `async with`; leaving it keeps an unfinished part for resumption.
    `outcomes` gets each blob that became durable, and the failure of a blob that was sent whole; what is wrong with the
    present blob is raised, by one of its frames or by the next blob. The queue is bounded: if nobody reads it, no more
    frames are taken. The user may put None there as a mark.
    """

    def __init__(self, store: AioStore, namespace: str) -> None:
        self.outcomes: asyncio.Queue[Stored | Exception | None] = asyncio.Queue(_MAX_OUTCOMES)
        self._store = store
        self._namespace = namespace
        self._loop = asyncio.get_running_loop()
        self._current: _Blob | None = None  # whose frames are arriving
        # The last blob that began needs no bytes: it is stored, or had all arrived before a cut.
        self._is_skipping = False
        self._has_begun = False
        self._pieces: deque[_Piece] = deque()
        self._held_bytes = 0
        self._is_freed = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._whole: deque[_Blob] = deque()
        self._groups = 0  # that are being made durable
        self._waiting: asyncio.TimerHandle | None = None  # for company of the whole blobs
        self._finishing: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MAX_WHOLE)

    async def begin(self, digest: Digest, kind: BlobKind, offset: int, data: bytes | memoryview) -> None:
        """Begin the next blob with its first bytes, at `offset`. Raises as `write`, and as Store.open_writer."""
        await self._leave_current()
        if offset == 0 and data and len(data) == digest.size_bytes <= MAX_FRAME_BYTES:
            await self._hold(len(data))
            await self._take_whole(_Blob(NewBlob(digest, kind, comes_whole=True), data=data))
            return
        if offset == 0 and data:
            is_gathered = kind is BlobKind.MANIFEST and digest.size_bytes <= _GATHERED_BYTES
            self._current = _Blob(NewBlob(digest, kind, comes_whole=True), gathered=[] if is_gathered else None)
        else:
            await self._begin_at(digest, kind, offset)
        await self.write(offset, data)

    async def take(self, digest: Digest, kind: BlobKind, token: str) -> None:
        """The next blob lies whole in the file of this token. Why it could not be taken is one of the outcomes."""
        await self._leave_current()
        await self._take_whole(_Blob(NewBlob(digest, kind, token)))

    async def resume(self, digest: Digest, kind: BlobKind) -> int:
        """Begin the next blob where an earlier writer ended, and nobody changes it now. Raises as Store.open_writer."""
        await self._leave_current()
        writer = await self._open(digest, kind)
        if self._is_skipping:
            raise FailedPrecondition(f"another writer has sent {digest}", reason="WRITE_IN_PROGRESS")
        return writer.received_bytes

    async def _begin_at(self, digest: Digest, kind: BlobKind, offset: int) -> None:
        writer = await self._open(digest, kind)
        if writer.is_stored:
            await self.outcomes.put(Stored(digest, existed=True))
        elif not 0 <= offset <= writer.received_bytes:
            received_bytes = writer.received_bytes
            problem = f"expected at most {received_bytes}, which is what has arrived; got {offset}"
            raise wrong("frame.offset", problem, reason="OFFSET_UNEXPECTED", received_bytes=received_bytes)
        elif writer.received_bytes == digest.size_bytes:
            await self._finish_current()
        elif self._current is not None:
            self._current.next_offset = offset

    async def _open(self, digest: Digest, kind: BlobKind) -> BlobWriter:
        exits = contextlib.ExitStack()
        try:
            writer = await self._store.threads.run(
                self._namespace,
                lambda: exits.enter_context(self._store.blobs.open_writer(self._namespace, digest, kind)),
            )
        except BaseException:
            # A cancel may come while the writer is being opened: left open, it would keep this blob from all others.
            await self._store.threads.run(self._namespace, exits.close)
            raise
        self._current = _Blob(NewBlob(digest, kind), next_offset=writer.received_bytes, writer=writer, exits=exits)
        self._is_skipping = writer.received_bytes == digest.size_bytes
        return writer

    async def write(self, offset: int, data: bytes | memoryview) -> None:
        """The blob's next bytes. Bytes from before a cut are skipped. Raises the fault of these or others."""
        current = self._current
        if self._is_skipping:
            return
        if current is None:
            first = "expected a blob's first frame, with its digest"
            raise wrong("frame.digest", "more bytes than the blob has" if self._has_begun else first)
        if offset != current.next_offset:
            raise wrong("frame.offset", f"expected {current.next_offset}, got {offset}", reason="OFFSET_UNEXPECTED")
        if len(data) > MAX_FRAME_BYTES:
            raise wrong("frame.data", f"expected at most {MAX_FRAME_BYTES} bytes, got {len(data)}")
        if current.problem:
            raise current.problem
        current.next_offset += len(data)
        if data:
            current.has_bytes = True
            if len(current.gathered or ()) == _GATHERED_PIECES or current.next_offset > current.digest.size_bytes:
                self._write_gathered(current)
            await self._hold(len(data))
            if current.gathered is None:
                self._write_later(_Piece(current, offset, data))
            else:
                current.gathered.append((offset, data))
        if current.next_offset >= current.digest.size_bytes:
            await self._finish_current()

    async def end(self) -> None:
        """The sender is done: wait until all is durable. Raises InvalidArgument when the last blob is not whole."""
        await self._leave_current()
        await self._written()
        self._finish_whole()
        if self._finishing:
            await asyncio.wait(self._finishing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Also if it is cancelled again: a writer that stays open keeps its blob from all others.
        await to_its_end(asyncio.create_task(self._end_all()))

    async def _end_all(self) -> None:
        current, self._current = self._current, None
        try:
            if current is not None:
                self._write_gathered(current)
            await self._written()
        finally:
            if current is not None:
                await self._store.threads.run(self._namespace, current.exits.close)
        self._finish_whole()
        while self._finishing:
            # Their blobs are whole, but their outcomes have no reader any more.
            while not self.outcomes.empty():
                self.outcomes.get_nowait()
            await asyncio.wait(self._finishing, return_when=asyncio.FIRST_COMPLETED)

    async def _leave_current(self) -> None:
        """Nothing more comes of the current blob. Raises what is wrong with it: InvalidArgument for missing bytes."""
        was_skipping, self._is_skipping, self._has_begun = self._is_skipping, False, True
        current = self._current
        if current is None:
            return
        self._write_gathered(current)
        await self._written()
        if current.problem:
            raise current.problem
        if not current.is_stored and current.has_bytes:
            received_bytes = current.writer.received_bytes if current.writer else 0
            raise InvalidArgument(
                f"blob {current.digest}: {received_bytes} bytes arrived",
                reason="BYTES_MISSING",
                field="frame.data",
                metadata={"digest": current.digest.hash, "received_bytes": str(received_bytes)},
            )
        if current.is_stored and not was_skipping:  # that was found when its bytes were to be written
            await self.outcomes.put(current.outcome)
        self._current = None
        await self._store.threads.run(self._namespace, current.exits.close)

    async def _take_whole(self, blob: _Blob) -> None:
        await self._room.acquire()
        self._finish_later(blob)

    async def _finish_current(self) -> None:
        await self._room.acquire()  # the blob is still the current one: a sender that leaves now ends its writer
        current, self._current = self._current, None
        assert current is not None
        current.is_whole = True
        if current.gathered:
            current.data = b"".join(data for _, data in current.gathered)
        if not current.pieces:
            self._finish_later(current)

    # --- writing ---

    def _write_gathered(self, blob: _Blob) -> None:
        gathered, blob.gathered = blob.gathered, None
        for offset, data in gathered or ():
            self._write_later(_Piece(blob, offset, data))

    def _write_later(self, piece: _Piece) -> None:
        """Its bytes are held."""
        piece.blob.pieces += 1
        self._pieces.append(piece)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_pieces())

    async def _hold(self, data_bytes: int) -> None:
        """Count a piece's bytes until `_let_go`. Waits while those that are held are too many."""
        while self._held_bytes and self._held_bytes + data_bytes + _PIECE_BYTES > _MAX_HELD_BYTES:
            self._is_freed.clear()
            await self._is_freed.wait()
        self._held_bytes += data_bytes + _PIECE_BYTES

    def _let_go(self, sizes: Iterable[int]) -> None:
        self._held_bytes -= sum(size_bytes + _PIECE_BYTES for size_bytes in sizes)
        self._is_freed.set()

    async def _write_pieces(self) -> None:
        """Write until nothing waits. One thread at a time uses a writer."""
        while self._pieces:
            pieces = [*self._pieces]
            self._pieces.clear()
            try:
                await self._store.threads.run(self._namespace, self._write_all, pieces)
            except Exception as error:  # noqa: BLE001  it is raised to the sender, or goes to the reader of outcomes
                for piece in pieces:
                    piece.blob.problem = piece.blob.problem or error
            for piece in pieces:
                piece.blob.pieces -= 1
                if piece.blob.is_whole and not piece.blob.pieces:
                    self._finish_later(piece.blob)
            self._let_go([len(piece.data) for piece in pieces])
        self._writing = None

    def _write_all(self, pieces: Sequence[_Piece]) -> None:
        self._open_all([piece.blob for piece in pieces])
        for piece in pieces:
            piece.write()

    def _open_all(self, blobs: Iterable[_Blob]) -> None:
        new = [blob for blob in dict.fromkeys(blobs) if blob.writer is None and blob.problem is None]
        wanted = [replace(blob.new, data=blob.data) if blob.data else blob.new for blob in new]
        opened = self._store.blobs.open_writers(self._namespace, wanted) if new else ()
        for blob, writer in zip(new, opened, strict=True):
            if isinstance(writer, KvasirError):
                blob.problem = writer
            else:
                blob.writer = blob.exits.enter_context(writer)

    async def _written(self) -> None:
        if self._writing is not None:
            await ended(self._writing)

    # --- making durable ---

    def _finish_later(self, blob: _Blob) -> None:
        """Let a whole blob, which has its room, be made durable with those that come soon after it."""
        self._whole.append(blob)
        if self._are_enough():
            self._finish_whole()
        elif self._waiting is None and not self._groups:
            self._waiting = self._loop.call_later(_COMPANY_S, self._finish_whole)

    def _are_enough(self) -> bool:
        # A manifest is sent before the last of the blobs that it names, and waits for that.
        size_bytes = sum(blob.digest.size_bytes for blob in self._whole if blob.new.kind is not BlobKind.MANIFEST)
        return len(self._whole) >= _ENOUGH_BLOBS or size_bytes >= _ENOUGH_BYTES

    def _finish_whole(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._whole and self._groups < _MAX_GROUPS:
            self._groups += 1
            task = asyncio.create_task(self._finish_groups())
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)

    async def _finish_groups(self) -> None:
        """Make blobs durable until none waits, or only for company."""
        while self._waiting is None or self._are_enough():
            group = self._next_group()
            if not group:
                break
            try:
                await self._store.threads.run(self._namespace, self._finish_group, group)
            except Exception as error:  # noqa: BLE001  it goes to the reader of outcomes
                for blob in group:
                    blob.problem = blob.problem or error
            for blob in group:
                await self.outcomes.put(blob.outcome)
                self._room.release()
        # At once with finding that none waits: the next blob begins another group.
        self._groups -= 1

    def _next_group(self) -> list[_Blob]:
        group: list[_Blob] = []
        left_bytes = _GROUP_BYTES
        while self._whole and len(group) < _GROUP_BLOBS and left_bytes > 0:
            group.append(self._whole.popleft())
            left_bytes -= group[-1].digest.size_bytes
        return group

    def _finish_group(self, group: Sequence[_Blob]) -> None:
        """Open what is not open yet, write what came at once, and make all durable. On a thread."""
        with contextlib.ExitStack() as exits:
            for blob in group:
                exits.push(blob.exits)
            self._write_group(group)
            ready = [(blob, blob.writer) for blob in group if blob.problem is None and blob.writer is not None]
            for (blob, _), problem in zip(ready, finish_all([writer for _, writer in ready]), strict=True):
                blob.problem = problem

    def _write_group(self, group: Sequence[_Blob]) -> None:
        came = [blob for blob in group if blob.data]
        sizes = [len(data) for blob in came for _, data in blob.gathered or ((0, blob.data),)]
        try:
            self._open_all(group)
        finally:
            for blob in came:
                blob.data, blob.gathered = b"", None
            if came:
                self._loop.call_soon_threadsafe(self._let_go, sizes)
