"""One blob on its way in: reserve, write and verify, sync, rename, sync the directory, list; those that are whole at
the same time as a group. Where a caller on this host handed a file over, the group's bytes are synced while it is read,
and while the names are: the list comes behind both. A crash anywhere leaves a part or an unlisted file, never a row
without bytes. A part is read again before its write goes on, as is a handed file.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError
from kvasir.formats.digest import Digest, Hasher

from cachestore_svc.blobs.backend import BlobBackend, NotHanded, Part
from cachestore_svc.blobs.blob_checks import BlobFacts, check_for, check_size
from cachestore_svc.blobs.disk import READ_BACK_BYTES, refusal
from cachestore_svc.blobs.space import Space
from cachestore_svc.facts.records import BlobKind

_Error = TypeVar("_Error", bound=Exception)
_TRIES_TO_NAME = 20  # each sees a removal that began within the one before


class NameTaken(Exception):
    """An object that was just written has a name that is being removed: write it under another one."""


class BlobWriter(Protocol):
    """One blob on its way in. Used as a context manager; leaving it without `finish` keeps the part for resumption."""

    @property
    def is_stored(self) -> bool:
        """The store had it already: `write` and `finish` then do nothing."""

    @property
    def received_bytes(self) -> int:
        """Where the next `write` must begin; what an interrupted write left counts."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Append bytes. The tensor header is checked as soon as it is whole, before any further byte is kept. Raises
        InvalidArgument (offset is not `received_bytes`, more bytes than the digest has, header refused) and
        ResourceExhausted (disk full). After a refused header the part is gone.
        """

    def finish(self) -> None:
        """Verify, make durable, and list the blob. On return it survives a crash. Raises InvalidArgument
        (DIGEST_MISMATCH: bytes are missing or are not the digest's; the part is gone unless bytes are only missing) and
        ResourceExhausted.
        """

    def abandon(self) -> None:
        """Remove the part: its bytes are not to be trusted."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class BlobRegister(Protocol):
    def editions(self, namespace: str, digests: Sequence[Digest]) -> Mapping[str, int]:
        """The edition, by hash, under which each blob is to be written."""

    def add(self, namespace: str, blobs: Sequence[tuple[Digest, BlobFacts]], editions: Mapping[str, int]) -> list[bool]:
        """List the blobs, all or none. False for each that was listed before. Raises NameTaken."""

    def withdraw(self, namespace: str, digests: Sequence[Digest], editions: Mapping[str, int]) -> None:
        """Remove blobs that were written, and are not listed."""


@dataclass(frozen=True, slots=True)
class NewBlob:
    """A blob that somebody wants to write. `handed`: the token of the file in which it lies; "": its bytes come.
    `comes_whole`: all of them, so that none is taken from an interrupted write: those may be wrong. `data`: they are
    here, and written at once."""

    digest: Digest
    kind: BlobKind
    handed: str = ""
    comes_whole: bool = False
    data: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class _LeftPart:
    """Bytes that an interrupted write left. They stay reserved."""

    size_bytes: int
    left_unix_ms: int


class Writers:
    """Every blob being written or interrupted, so that each has one writer at a time. Used from any thread."""

    def __init__(self, backend: BlobBackend, space: Space, now_unix_ms: Callable[[], int]) -> None:
        self.backend = backend
        self._space = space
        self._now_unix_ms = now_unix_ms
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], PartWriter] = {}
        self._parts: dict[tuple[str, str], _LeftPart] = {}
        self._handed: dict[str, set[str]] = {}  # tokens that the last collection saw
        self._notes: list[set[tuple[str, str]]] = []  # see noting_ends

    def begin(
        self, namespace: str, blobs: Sequence[NewBlob], register: "BlobRegister"
    ) -> list["PartWriter | KvasirError"]:
        """Reserve and open as a group, each by itself: a writer, or why there is none."""
        with self._lock, self._space.reserving(namespace) as reserve:
            begun = [self._reserved(namespace, blob, register, reserve) for blob in blobs]
        reserved = [each for each in begun if isinstance(each, PartWriter)]
        try:
            with contextlib.suppress(FileExistsError):  # no directory lies there: that hinders its own blobs alone
                self.backend.of(namespace).prepare([writer.digest.hash for writer in reserved])
            syncs_early = any(writer.is_handed for writer in reserved)
            for is_handed in (False, True):  # which takes longest: others are synced meanwhile
                for number, each in enumerate(begun):
                    if isinstance(each, PartWriter) and each.is_handed is is_handed:
                        begun[number] = _resumed(each, syncs_early=syncs_early)
            return begun
        except BaseException as error:
            for writer in reserved:
                writer.abandon()
            if isinstance(error, OSError):
                return [_in_words(error, each) if isinstance(each, PartWriter) else each for each in begun]
            raise

    def _reserved(
        self, namespace: str, blob: NewBlob, register: "BlobRegister", reserve: Callable[[int], None]
    ) -> "PartWriter | KvasirError":
        digest = blob.digest
        key = (namespace, digest.hash)
        try:
            check_size(blob.kind, digest.size_bytes)
            if key in self._open:
                raise FailedPrecondition(f"another writer has {digest} open", reason="WRITE_IN_PROGRESS")
            left_bytes = self._parts[key].size_bytes if key in self._parts else 0
            reserve(digest.size_bytes - left_bytes)
        except KvasirError as error:
            return error
        self._parts.pop(key, None)
        self._open[key] = writer = PartWriter(self, namespace, blob, register, left_bytes)
        return writer

    def end(self, writer: "PartWriter", stored_bytes: int, left_bytes: int) -> None:
        key = (writer.namespace, writer.digest.hash)
        with self._lock:
            del self._open[key]
            for ended in self._notes:
                ended.add(key)
            if left_bytes:
                self._parts[key] = _LeftPart(left_bytes, self._now_unix_ms())
            self._space.settle(writer.namespace, stored_bytes)
            self._space.release(writer.namespace, writer.digest.size_bytes - stored_bytes - left_bytes)

    @contextlib.contextmanager
    def noting_ends(self) -> Iterator[set[tuple[str, str]]]:
        """Namespaces and hashes of blobs whose writers end during the block: only such a blob can become listed."""
        ended: set[tuple[str, str]] = set()
        with self._lock:
            self._notes.append(ended)
        try:
            yield ended
        finally:
            with self._lock:
                self._notes = [each for each in self._notes if each is not ended]

    def received_bytes(self, namespace: str, digest: Digest) -> int:
        key = (namespace, digest.hash)
        with self._lock:
            if key in self._open:
                return self._open[key].received_bytes
            return self._parts[key].size_bytes if key in self._parts else 0

    def left_bytes(self, namespace: str, digest: Digest) -> int:
        """Bytes that an interrupted write left of a blob; they are reserved already."""
        with self._lock:
            part = self._parts.get((namespace, digest.hash))
            return part.size_bytes if part else 0

    def drop_handed(self, namespace: str) -> None:
        """Remove files that were handed over before the last call of this and not taken since: their writer died."""
        blobs = self.backend.of(namespace)
        waiting = blobs.handed()
        with self._lock:
            left = waiting & self._handed.get(namespace, set())
            self._handed[namespace] = waiting - left
        for token in left:
            with contextlib.suppress(OSError):
                blobs.remove_handed(token)

    def namespaces(self) -> set[str]:
        """Namespaces that have parts. One whose first blob never became whole is not in the catalog."""
        with self._lock:
            return {namespace for namespace, _ in self._parts}

    def drop_parts(self, namespace: str, left_before_unix_ms: int, but: Digest | None = None) -> int:
        """Remove interrupted parts, but for one; how many bytes that gave back."""
        with self._lock:
            old = [
                key
                for key, part in self._parts.items()
                if key[0] == namespace and part.left_unix_ms <= left_before_unix_ms and not (but and key[1] == but.hash)
            ]
            freed = 0
            for key in old:
                # A part that cannot be removed stays counted.
                with contextlib.suppress(OSError):
                    self.backend.of(namespace).remove_part(key[1])
                    freed += self._parts.pop(key).size_bytes
            self._space.release(namespace, freed)
        return freed


class StoredBlob:
    """A writer for a blob that the store has: it takes nothing and does nothing."""

    is_stored = True

    def __init__(self, digest: Digest) -> None:
        self.received_bytes = digest.size_bytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        pass

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PartWriter:
    is_stored = False

    def __init__(
        self, writers: Writers, namespace: str, blob: NewBlob, register: "BlobRegister", left_bytes: int
    ) -> None:
        self.namespace = namespace
        self.digest = digest = blob.digest
        self.received_bytes = 0
        self._left_bytes = left_bytes  # by an interrupted write
        self._writers = writers
        self._blobs = writers.backend.of(namespace)
        self._register = register
        self._handed = blob.handed
        self._comes_whole = blob.comes_whole
        self._data = blob.data
        self._syncs_early = False
        self._check = check_for(blob.kind, digest.size_bytes)
        self._hasher = Hasher(min(digest.size_bytes, READ_BACK_BYTES) if blob.handed else 0)
        self._part: Part | None = None
        self._is_ended = False

    @property
    def is_handed(self) -> bool:
        return bool(self._handed)

    def resume(self, *, syncs_early: bool = False) -> None:
        """Open the part, read again what it holds, and write bytes that are here. `syncs_early`: begin to sync a part
        that is whole then. Raises OSError; InvalidArgument when it is of another kind.
        """
        taken = self._blobs.take(self.digest, self._handed) if self._handed else None
        if self._comes_whole and self._left_bytes:
            self._blobs.remove_part(self.digest.hash)
        self._part = taken or self._blobs.begin(self.digest.hash)
        for piece in self._part.pieces():
            self._check.feed(piece)
            self._hasher.update(piece)
            self.received_bytes += len(piece)
        if self.received_bytes > self.digest.size_bytes:
            raise InvalidArgument(f"{self.digest}: its part is too long; begin again", reason="DIGEST_MISMATCH")
        data, self._data = self._data, b""
        if data:
            self.write(0, data)
        self._syncs_early = syncs_early and self.received_bytes == self.digest.size_bytes
        if self._syncs_early:
            self._part.begin_sync()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self._check_open()
        if offset != self.received_bytes:
            raise InvalidArgument.of("offset", f"expected {self.received_bytes}, got {offset}")
        if offset + len(data) > self.digest.size_bytes:
            self.abandon()
            raise InvalidArgument(
                f"{self.digest}: {offset + len(data)} bytes are more than its digest has",
                reason="DIGEST_MISMATCH",
                field="data",
            )
        try:
            self._check.feed(data)
            self._append(data)
        except KvasirError:
            self.abandon()
            raise
        self._hasher.update(data)
        self.received_bytes += len(data)

    def finish(self) -> None:
        [problem] = finish_all([self])
        if problem is not None:
            raise problem

    def make_durable(self) -> BlobFacts:
        """Verify and sync the part; publishing it is left, and the end of a sync that began early. Raises as `finish`,
        and the part is gone then.
        """
        self._check_open()
        if self.received_bytes != self.digest.size_bytes:
            raise InvalidArgument(
                f"{self.digest}: {self.received_bytes} bytes arrived",
                reason="BYTES_MISSING",
                field="data",
                metadata={"received_bytes": str(self.received_bytes)},
            )
        assert self._part is not None
        try:
            facts = self._verified()
            if not self._syncs_early:
                self.end_sync()
        except BaseException:
            self.abandon()
            raise
        return facts

    def end_sync(self) -> None:
        """Sync the part, unless that was done, and let go of it. Raises OSError."""
        if self._part is not None:
            self._part.sync()
            self._close()

    def publish(self, facts: Sequence[BlobFacts], others: Sequence["PartWriter"]) -> None:
        """Rename and list durable parts together, this writer's and others' of its namespace."""
        digests = [writer.digest for writer in (self, *others)]
        with self._blobs.naming(*(digest.hash for digest in digests)):
            for is_last in (False,) * _TRIES_TO_NAME + (True,):
                editions = self._register.editions(self.namespace, digests)
                try:
                    self._blobs.publish(editions)
                    for writer in (self, *others):
                        writer.end_sync()
                    are_new = self._register.add(self.namespace, list(zip(digests, facts, strict=True)), editions)
                    break
                except NameTaken:  # another process began to remove it since
                    if is_last:
                        raise
                except BaseException:
                    # Unlisted, they would only wait for the next sweep. But another writer may have listed one before.
                    self._register.withdraw(self.namespace, digests, editions)
                    raise
            for digest in digests if self._writers.backend.is_shared else ():
                with contextlib.suppress(OSError):
                    self._blobs.remove_part(digest.hash)
        for writer, is_new in zip((self, *others), are_new, strict=True):
            writer._end(stored_bytes=writer.digest.size_bytes if is_new else 0, left_bytes=0)

    def abandon(self) -> None:
        """Remove the part and give its bytes back. Nothing happens to a writer that ended."""
        if not self._is_ended:
            self._close()
            # A part that cannot be removed goes at the next start, or is read again by the next writer of this blob.
            with contextlib.suppress(OSError):
                self._blobs.remove_part(self.digest.hash)
            self._end(stored_bytes=0, left_bytes=0)

    def leave(self) -> None:
        """End a writer that did not touch what an interrupted write left."""
        self._end(stored_bytes=0, left_bytes=self._left_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.received_bytes == 0:
            self.abandon()
        elif not self._is_ended:
            self._end(stored_bytes=0, left_bytes=self._close())

    def _check_open(self) -> None:
        if self._is_ended:
            raise FailedPrecondition(f"the writer of {self.digest} has ended; open another", reason="WRITER_ENDED")

    def _append(self, data: bytes | memoryview) -> None:
        assert self._part is not None
        try:
            self._part.append(data)
        except OSError as error:
            # Some of it may have been written: the part must be as long as what was accepted.
            try:
                self._part.cut(self.received_bytes)
            except OSError:
                self.abandon()
            else:
                self.__exit__()
            raise refusal(error, f"{self.digest}") from error

    def _verified(self) -> BlobFacts:
        found = self._hasher.digest()
        if found != self.digest:
            raise InvalidArgument(
                f"bytes do not match the digest: expected {self.digest}, got {found}",
                reason="DIGEST_MISMATCH",
                field="data",
                metadata={"digest": self.digest.hash},
            )
        return self._check.finish()

    def _close(self) -> int:
        part, self._part = self._part, None
        return 0 if part is None else part.close()

    def _end(self, stored_bytes: int, left_bytes: int) -> None:
        self._is_ended = True
        self._writers.end(self, stored_bytes, left_bytes)


def _resumed(writer: PartWriter, *, syncs_early: bool) -> PartWriter | KvasirError:
    """The writer, with its part open, or why that is not possible: then it has ended."""
    try:
        writer.resume(syncs_early=syncs_early)
    except NotHanded as error:
        writer.leave()
        return error
    except (KvasirError, OSError) as error:
        writer.abandon()
        return _in_words(error, writer)
    return writer


def finish_all(writers: Sequence[BlobWriter]) -> list[Exception | None]:
    """Finish writers of one namespace as a group: each as `finish`. What hindered each of them, in order."""
    problems: list[Exception | None] = [None] * len(writers)
    durable: list[tuple[int, PartWriter, BlobFacts]] = []
    for number, writer in enumerate(writers):
        if isinstance(writer, PartWriter):
            try:
                durable.append((number, writer, writer.make_durable()))
            except (KvasirError, OSError) as error:
                problems[number] = _in_words(error, writer)
    group = [writer for _, writer, _ in durable]
    try:
        if group:
            group[0].publish([facts for _, _, facts in durable], group[1:])
    except BaseException as error:
        for number, writer, _ in durable:
            writer.abandon()
            problems[number] = _in_words(error, writer) if isinstance(error, Exception) else None
        if not isinstance(error, Exception):
            raise
    return problems


def _in_words(error: _Error | OSError, writer: PartWriter) -> _Error | KvasirError:
    return refusal(error, f"{writer.digest}") if isinstance(error, OSError) else error
