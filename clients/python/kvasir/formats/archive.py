"""Archives of agents: a tar of `kvasir-archive.json`, the manifest and its blobs, the same for the same memory. A
stranger's is read as it arrives: only these members, in this order, as plain files.
"""

import json
import tarfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats import manifest as manifests
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest, Hasher
from kvasir.formats.frames import FRAME_BYTES
from kvasir.names import check_agent_id

FORMAT = 1
INDEX_NAME = "kvasir-archive.json"
MANIFEST_NAME = "manifest.pb"
BLOB_PREFIX = "blobs/"
END = bytes(2 * tarfile.BLOCKSIZE)
MAX_INDEX_BYTES = 64 << 10


def pack(manifest: manifest_pb2.Manifest, blobs: Mapping[Digest, bytes], *, agent_id: str) -> Iterator[bytes]:
    """Yield the archive of a memory, file by file. Raises KeyError when a blob that the manifest names is not given."""
    yield preamble(manifest.SerializeToString(deterministic=True), manifest, agent_id)
    for digest in manifests.digests(manifest):
        yield blob_header(digest)
        yield blobs[digest]
        yield padding(digest.size_bytes)
    yield END


def preamble(manifest_bytes: bytes, manifest: manifest_pb2.Manifest, agent_id: str) -> bytes:
    """Everything before the first blob."""
    digest = Digest.of(manifest_bytes)
    start = head(digest, kv_identity_hash(manifest.kv_identity), agent_id)
    return b"".join((start, manifest_bytes, padding(digest.size_bytes)))


def head(manifest: Digest, kv_hash: str, agent_id: str) -> bytes:
    """Everything before the manifest's bytes. Their padding follows them."""
    index = {"format": FORMAT, "agent_id": agent_id, "kv_identity_hash": kv_hash, "manifest": manifest.hash}
    index_bytes = json.dumps(index, ensure_ascii=False, sort_keys=True).encode()
    return _member(INDEX_NAME, index_bytes) + _header(MANIFEST_NAME, manifest.size_bytes)


def blob_header(digest: Digest) -> bytes:
    return _header(BLOB_PREFIX + digest.hash, digest.size_bytes)


def padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


def size_bytes(preamble_bytes: int, digests: Iterable[Digest]) -> int:
    """Size of a whole archive: `preamble_bytes`, these blobs, and the end."""
    blobs = sum(tarfile.BLOCKSIZE + digest.size_bytes + -digest.size_bytes % tarfile.BLOCKSIZE for digest in digests)
    return preamble_bytes + blobs + len(END)


def _member(name: str, data: bytes) -> bytes:
    return b"".join((_header(name, len(data)), data, padding(len(data))))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o600
    return info.tobuf(tarfile.USTAR_FORMAT)


@dataclass(frozen=True, slots=True)
class Described:
    """The archive's index and manifest, checked; it comes first."""

    agent_id: str
    manifest: manifest_pb2.Manifest
    manifest_bytes: bytes
    manifest_digest: Digest
    digests: Sequence[Digest]


@dataclass(frozen=True, slots=True)
class BlobPiece:
    """The next bytes of a blob, at most 1 MiB. A blob without bytes has one empty piece."""

    digest: Digest
    offset: int
    data: bytes


Part = Described | BlobPiece


class ArchiveReader:
    """Takes pieces and gives the parts that they complete. It holds the manifest and one piece in memory."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._steps = self._read()
        # Bytes that the next step needs; None: any number.
        self._wanted: int | None = next(self._steps)  # type: ignore[assignment]
        self._is_ended = False

    def feed(self, piece: bytes) -> Iterator[Part]:
        """The parts that this piece completes. Raises InvalidArgument."""
        self._buffer += piece
        while not self._is_ended and self._has_enough():
            try:
                step = next(self._steps)
            except StopIteration:
                self._is_ended = True
            else:
                if step is None or isinstance(step, int):
                    self._wanted = step
                else:
                    self._wanted = 0
                    yield step
        if self._is_ended:
            if any(self._buffer):
                raise _malformed("bytes follow its end")
            self._buffer.clear()

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the next step needs: while the manifest arrives, its size."""
        return self._wanted or 0

    def _has_enough(self) -> bool:
        return bool(self._buffer) if self._wanted is None else len(self._buffer) >= self._wanted

    def finish(self) -> None:
        """Call it after the last piece. Raises InvalidArgument if the archive is not whole."""
        if not self._is_ended:
            raise _malformed("it ends too early")

    def _read(self) -> Generator[int | Part | None, None, None]:
        """Yields how many bytes it needs next (None: any), and the parts."""
        index = yield from self._member(INDEX_NAME, MAX_INDEX_BYTES)
        manifest = yield from self._member(MANIFEST_NAME, manifests.MAX_MANIFEST_BYTES)
        described = _described(index, manifest)
        digests = described.digests
        yield described
        # Blobs may arrive slowly: what was parsed is freed before them.
        del index, manifest, described
        for digest in digests:
            yield from self._blob(digest)
        yield tarfile.BLOCKSIZE
        if any(self._take(tarfile.BLOCKSIZE)):
            raise _malformed("a member that the manifest does not name")

    def _member(self, name: str, max_bytes: int) -> Generator[int | Part | None, None, bytes]:
        yield tarfile.BLOCKSIZE
        size_bytes = _size_of(self._take(tarfile.BLOCKSIZE), name)
        if size_bytes > max_bytes:
            raise _malformed(f"{name}: expected at most {max_bytes} bytes, got {size_bytes}")
        padded_bytes = size_bytes + -size_bytes % tarfile.BLOCKSIZE
        yield padded_bytes
        return self._take(padded_bytes)[:size_bytes]

    def _blob(self, digest: Digest) -> Generator[int | Part | None, None, None]:
        yield tarfile.BLOCKSIZE
        name = BLOB_PREFIX + digest.hash
        size_bytes = _size_of(self._take(tarfile.BLOCKSIZE), name)
        if size_bytes != digest.size_bytes:
            raise _malformed(f"{name}: expected {digest.size_bytes} bytes, got {size_bytes}")
        if not size_bytes:
            yield BlobPiece(digest, 0, b"")
        hasher = Hasher()  # also for a reader that has the blob, and takes none of these bytes
        while (offset := hasher.size_bytes) < size_bytes:
            yield None
            data = self._take(min(size_bytes - offset, len(self._buffer), FRAME_BYTES))
            hasher.update(data)
            yield BlobPiece(digest, offset, data)
        if hasher.digest() != digest:
            raise _malformed(f"{name}: its bytes are not those of its digest")
        pad_bytes = -size_bytes % tarfile.BLOCKSIZE
        yield pad_bytes
        self._take(pad_bytes)

    def _take(self, count: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:count])
        del self._buffer[:count]
        return taken


def _size_of(block: bytes, name: str) -> int:
    """Size of this header's member. Raises InvalidArgument unless it is a plain file of that name."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.TarError, UnicodeDecodeError):
        raise _malformed(f"expected a tar header of {name}") from None
    if info.name != name or info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.linkname:
        raise _malformed(f"expected the plain file {name}, got {info.name[:80]!r}")
    if info.size < 0:
        raise _malformed(f"{name}: negative size")
    return info.size


def _described(index_bytes: bytes, manifest_bytes: bytes) -> Described:
    try:
        index = json.loads(index_bytes.decode("utf-8"))
    except (ValueError, RecursionError):
        raise _malformed(f"{INDEX_NAME}: not JSON") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _malformed(f"{INDEX_NAME}: expected format {FORMAT}")
    agent_id = index.get("agent_id")
    check_agent_id(agent_id if isinstance(agent_id, str) else "", "agent_id")
    manifest = manifests.parse(manifest_bytes)
    digest = Digest.of(manifest_bytes)
    if index.get("manifest") != digest.hash:
        raise _malformed(f"{MANIFEST_NAME}: its bytes are not those that {INDEX_NAME} names")
    if index.get("kv_identity_hash") != kv_identity_hash(manifest.kv_identity):
        raise _malformed(f"{INDEX_NAME}: kv_identity_hash is not the manifest's")
    return Described(str(agent_id), manifest, manifest_bytes, digest, manifests.digests(manifest))


def _malformed(problem: str) -> InvalidArgument:
    return InvalidArgument(f"archive: {problem}", reason="ARCHIVE_MALFORMED", field="data")
