"""The blobs of sealed namespaces over any backend; one that is shut can be listed and swept, not read or written."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from kvasir.errors import FailedPrecondition
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import Aside, BlobBackend, Damaged, Listing, NamespaceBlobs, NotHanded, Part
from cachestore_svc.sealing.keys import NamespaceKey, sealed_error
from cachestore_svc.sealing.sealed_form import (
    HEADER_BYTES,
    OVERHEAD,
    SEALED_SEGMENT_BYTES,
    SEGMENT_BYTES,
    DoesNotOpen,
    FileSeal,
    RandomBytes,
    open_file,
    plain_size,
    sealed_size,
)
from cachestore_svc.sealing.seals import Seals


class SealedBackend:
    """Implements `BlobBackend` over another one: seals the blobs of sealed namespaces, and passes others unchanged."""

    def __init__(self, backend: BlobBackend, seals: Seals, random_bytes: RandomBytes) -> None:
        self.sealed = backend
        self.seals = seals
        self._random_bytes = random_bytes

    @property
    def where(self) -> str:
        return self.sealed.where

    @property
    def is_shared(self) -> bool:
        return self.sealed.is_shared

    def of(self, namespace: str) -> NamespaceBlobs:
        blobs, key = self.sealed.of(namespace), self.seals.key_of(namespace)
        if key is not None:
            return SealedBlobs(blobs, key, self._random_bytes)
        if self.seals.refusal(namespace) is not None:
            return ShutBlobs(blobs, namespace, self.seals)
        return blobs

    def all(self) -> Sequence[NamespaceBlobs]:
        """Blobs as they are stored, under their stored names."""
        return self.sealed.all()

    def remove_aside(self, aside: Aside) -> int:
        return self.sealed.remove_aside(aside)

    def drop_copies(self, listed: Callable[[str, Sequence[str]], Collection[str]]) -> None:
        self.sealed.drop_copies(listed)


class SealedBlobs:
    """The blobs of an open sealed namespace; see blobs.backend.NamespaceBlobs. Asides keep their sealed names."""

    def __init__(self, blobs: NamespaceBlobs, key: NamespaceKey, random_bytes: RandomBytes) -> None:
        self._blobs = blobs
        self._key = key
        self._random_bytes = random_bytes

    @property
    def place(self) -> str:
        return self._blobs.place

    def exists(self) -> bool:
        return self._blobs.exists()

    def expect(self) -> bool:
        return self._blobs.expect()

    def prepare(self, hashes: Sequence[str]) -> None:
        self._blobs.prepare([self._name(hash_) for hash_ in hashes])

    def begin(self, hash_: str) -> "SealedPart":
        return SealedPart(self._blobs.begin(self._name(hash_)), self._key.files, hash_, self._random_bytes)

    def receive_files(self) -> None:
        """Never: a file that a caller wrote would be plain."""

    def take(self, digest: Digest, token: str) -> Part:  # noqa: ARG002
        """Raises NotHanded."""
        raise NotHanded("the namespace is sealed")

    def handed(self) -> set[str]:
        return self._blobs.handed()

    def remove_handed(self, token: str) -> None:
        self._blobs.remove_handed(token)

    def publish(self, editions: Mapping[str, int]) -> None:
        self._blobs.publish({self._name(hash_): edition for hash_, edition in editions.items()})

    def read(self, digest: Digest, *, past_copies: bool = False) -> memoryview:
        data = self._opened(self.bytes_of(digest.hash, digest.size_bytes + 1, past_copies=past_copies), digest.hash)
        if Digest.of(data) != digest:
            raise Damaged("its bytes have another digest")
        return data

    def bytes_of(self, hash_: str, most_bytes: int, *, past_copies: bool = False) -> memoryview:
        return self._blobs.bytes_of(self._name(hash_), sealed_size(most_bytes), past_copies=past_copies)

    def unverified(self, hash_: str, most_bytes: int) -> Iterator[tuple[memoryview, Aside | None]]:
        """Bytes that do not open are left out."""
        for data, aside in self._blobs.unverified(self._name(hash_), sealed_size(most_bytes)):
            try:
                yield self._opened(data, hash_), aside
            except Damaged:
                continue

    def size_bytes(self, hash_: str) -> int | None:
        size = self._blobs.size_bytes(self._name(hash_))
        return None if size is None else plain_size(size)

    def remove(self, hash_: str, edition: int = 0) -> None:
        self._blobs.remove(self._name(hash_), edition)

    def remove_part(self, hash_: str) -> None:
        self._blobs.remove_part(self._name(hash_))

    def set_aside(self, hash_: str, now_unix_ms: int, edition: int = 0) -> Aside:
        return self._blobs.set_aside(self._name(hash_), now_unix_ms, edition)

    def restore(self, aside: Aside) -> None:
        self._blobs.restore(aside)

    def list(self) -> Listing:
        found, names = self._blobs.list(), self._key.names
        editions = dict(zip(names.open_hashes([*found.editions]), found.editions.values(), strict=True))
        blobs, parts = set(names.open_hashes(found.blobs)), set(names.open_hashes(found.parts))
        return Listing(blobs, parts, found.asides, found.strange, editions)

    def naming(self, *hashes: str) -> AbstractContextManager[object]:
        return self._blobs.naming(*map(self._name, hashes))

    def _name(self, hash_: str) -> str:
        return self._key.names.hash(hash_)

    def _opened(self, data: memoryview, hash_: str) -> memoryview:
        try:
            return open_file(self._key.files, data, hash_)
        except DoesNotOpen as error:
            raise Damaged(str(error)) from error


class ShutBlobs(SealedBlobs):
    """The blobs of a sealed namespace without its key, by their sealed names: listed, measured, removed."""

    def __init__(self, blobs: NamespaceBlobs, namespace: str, seals: Seals) -> None:
        self._blobs = blobs
        self._namespace = namespace
        self._seals = seals

    def prepare(self, hashes: Sequence[str]) -> None:  # noqa: ARG002
        """Raises FailedPrecondition (NAMESPACE_SEALED)."""
        raise self._refusal()

    def begin(self, hash_: str) -> "SealedPart":  # noqa: ARG002
        """Raises FailedPrecondition (NAMESPACE_SEALED)."""
        raise self._refusal()

    def list(self) -> Listing:
        return self._blobs.list()

    def _name(self, hash_: str) -> str:
        return hash_

    def _opened(self, data: memoryview, hash_: str) -> memoryview:  # noqa: ARG002
        raise self._refusal()

    def _refusal(self) -> FailedPrecondition:
        return self._seals.refusal(self._namespace) or sealed_error(self._namespace, "it is shut")


class SealedPart:
    """A part that is sealed while it is written; see cachestore_svc.blobs.backend.Part. The last segment waits in
    memory until more bytes come: only then is it known that it was not the last. A segment that waits when the part is
    closed is written as if more came; the next writer of the part seals it again.
    """

    def __init__(self, part: Part, files_key: bytes, hash_: str, random_bytes: RandomBytes) -> None:
        self._part = part
        self._files_key = files_key
        self._hash = hash_
        self._random_bytes = random_bytes
        self._seal = FileSeal.begin(files_key, random_bytes)
        self._has_header = False
        self._segments = 0  # that are written, and full
        self._waiting = b""
        self._is_whole = False

    def pieces(self) -> Iterator[memoryview]:
        """Ends at the first segment that does not open; the rest is cut off."""
        stored = _Pieces(self._part.pieces())
        try:
            self._seal = FileSeal.of_header(self._files_key, stored.take(HEADER_BYTES), self._hash)
            self._has_header = True
            while sealed := stored.take(SEALED_SEGMENT_BYTES):
                number = self._segments + bool(self._waiting)
                plain = self._seal.open_piece(sealed, number)
                self._segments, self._waiting = number, plain
                yield memoryview(plain)
        except DoesNotOpen:
            pass
        self._cut()

    def append(self, data: bytes | memoryview) -> None:
        """The caller has exhausted `pieces` before."""
        view = memoryview(data)
        full = max(0, len(self._waiting) + len(view) - 1) // SEGMENT_BYTES
        if not full:
            self._waiting += view
            return
        rest = SEGMENT_BYTES - len(self._waiting)
        plain: list[bytes | memoryview] = [self._waiting + view[:rest] if self._waiting else view[:rest]]
        plain += [view[at : at + SEGMENT_BYTES] for at in range(rest, rest + (full - 1) * SEGMENT_BYTES, SEGMENT_BYTES)]
        self._write([(each, False) for each in plain])
        self._segments += full
        self._waiting = bytes(view[rest + (full - 1) * SEGMENT_BYTES :])

    def cut(self, size_bytes: int) -> None:
        """Bytes of a failed `append` are not counted yet."""
        assert size_bytes == self._segments * SEGMENT_BYTES + len(self._waiting)
        self._cut()

    def begin_sync(self) -> None:
        """`sync` does all of it."""

    def sync(self) -> None:
        """After this nothing can be appended."""
        self._write([(self._waiting, True)])
        self._is_whole = True
        self._part.sync()

    def close(self) -> int:
        """If waiting bytes find no room on the disk, they are lost, and the part is shorter."""
        kept = self._segments * SEGMENT_BYTES
        if not self._is_whole and self._waiting:
            try:
                self._write([(self._waiting, False)])
                kept += len(self._waiting)
            except OSError:
                pass
        self._part.close()
        return kept

    def _write(self, segments: Sequence[tuple[bytes | memoryview, bool]]) -> None:
        header = b"" if self._has_header else self._seal.header(self._hash, self._random_bytes)
        sealed = memoryview(bytearray(len(header) + sum(len(plain) + OVERHEAD for plain, _ in segments)))
        sealed[: len(header)] = header
        at = len(header)
        for number, (plain, is_last) in enumerate(segments, start=self._segments):
            end = at + len(plain) + OVERHEAD
            self._seal.seal(plain, number, is_last, sealed[at:end], self._random_bytes)
            at = end
        self._part.append(sealed)
        self._has_header = True

    def _cut(self) -> None:
        self._part.cut(HEADER_BYTES + self._segments * SEALED_SEGMENT_BYTES if self._has_header else 0)


class _Pieces:
    """Bytes that come in pieces of any size, taken in others."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._left = b""

    def take(self, size_bytes: int) -> bytes:
        while len(self._left) < size_bytes and (piece := next(self._pieces, None)):
            self._left += piece
        taken, self._left = self._left[:size_bytes], self._left[size_bytes:]
        return taken
