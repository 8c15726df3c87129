"""Blobs as frames and back: pieces of at most 1 MiB, in offset order, verified when the last one is in."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.errors import DataLoss
from kvasir.formats.digest import Buffer, Digest
from kvasir.formats.frame_messages import MAX_FRAMES, CarriedFrame, carrier_bytes

FRAME_BYTES = 1 << 20
_TRUSTED = 64  # memory is taken for so many times the bytes that have arrived


def frame_messages(
    digest: Digest, data: Buffer, kind: int = pb.BLOB_KIND_UNSPECIFIED, first_offset: int = 0
) -> Iterator[bytes]:
    """The frames of one blob from `first_offset` on, each a serialized WriteBlobsRequest (or ReadBlobsResponse, which
    has the same bytes). Digest and kind are in the first; there is always a first."""
    return joined_messages([digest], {digest: data}, kind, first_offset, most_frames=1)


def joined_messages(
    digests: Iterable[Digest],
    blobs: Mapping[Digest, Buffer],
    kind: int = pb.BLOB_KIND_UNSPECIFIED,
    first_offset: int = 0,
    *,
    most_frames: int = MAX_FRAMES,
) -> Iterator[bytes]:
    """The frames of these blobs, several in a message where they are small; the first blob's from `first_offset` on."""
    waiting: list[tuple[pb.BlobFrame, memoryview]] = []
    waiting_bytes = 0
    for digest in digests:
        for head, data in _frames(digest, blobs[digest], kind, first_offset):
            if waiting and (len(waiting) == most_frames or waiting_bytes + len(data) > FRAME_BYTES):
                yield carrier_bytes(waiting)
                waiting, waiting_bytes = [], 0
            waiting.append((head, data))
            waiting_bytes += len(data)
        first_offset = 0
    if waiting:
        yield carrier_bytes(waiting)


def _frames(digest: Digest, data: Buffer, kind: int, first_offset: int) -> Iterator[tuple[pb.BlobFrame, memoryview]]:
    view = memoryview(data).cast("B")
    first = pb.BlobFrame(digest=digest.to_proto(), offset=first_offset)
    first.kind = kind  # type: ignore[assignment]
    yield first, view[first_offset : first_offset + FRAME_BYTES]
    for offset in range(first_offset + FRAME_BYTES, len(view), FRAME_BYTES):
        yield pb.BlobFrame(offset=offset), view[offset : offset + FRAME_BYTES]


def frames_of(
    digest: Digest, data: Buffer, kind: int = pb.BLOB_KIND_UNSPECIFIED, first_offset: int = 0
) -> Iterator[pb.BlobFrame]:
    """The frames of one blob, parsed."""
    for message in frame_messages(digest, data, kind, first_offset):
        yield pb.WriteBlobsRequest.FromString(message).frame


def _new(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


class FrameAssembler:
    """Joins the frames of expected blobs, in their order. After a cut, request `remaining` from `received_bytes` on,
    call `resume()`, and go on adding."""

    def __init__(self, expected: Sequence[Digest], take: Callable[[int], memoryview] = _new) -> None:
        """`take` gives memory for so many bytes, of any value."""
        self._expected = tuple(expected)
        self._take = take
        self._done = 0
        self._room = _new(0)
        self._begin()

    @property
    def remaining(self) -> Sequence[Digest]:
        """Blobs that are not whole yet, in order."""
        return self._expected[self._done :]

    @property
    def received_bytes(self) -> int:
        """Bytes of the first of `remaining` that have arrived."""
        return self._received_bytes

    def resume(self) -> None:
        """A new stream begins: its first frame names its blob again."""
        self._is_named = False

    def add(self, frame: pb.BlobFrame | CarriedFrame) -> tuple[Digest, memoryview] | None:
        """Take the next frame; returns the blob with its last. Raises DataLoss; the blob then begins again."""
        if self._done == len(self._expected):
            raise DataLoss("a frame arrived after the last blob", reason="FRAME_UNEXPECTED")
        digest = self._expected[self._done]
        arrived = frame.data  # once: a message's field is copied each time
        self._check(frame, len(arrived), digest)
        begin, end = self.received_bytes, self.received_bytes + len(arrived)
        if end > len(self._room):
            room = self._take(min(digest.size_bytes, _TRUSTED * end))
            room[:begin] = self._room[:begin]
            self._room = room
        self._room[begin:end] = arrived
        self._received_bytes = end
        self._is_named = True
        if self.received_bytes < digest.size_bytes:
            return None
        data = self._room[: digest.size_bytes]
        # At once: where all cores hash it, the caller waits for them once.
        if (found := Digest.of(data)) != digest:
            self._begin()
            raise DataLoss(f"blob {digest}: its bytes are those of {found}", metadata={"digest": digest.hash})
        self._done += 1
        self._begin()
        return digest, data.toreadonly()

    def _begin(self) -> None:
        self._room = _new(0)
        self._received_bytes = 0
        self._is_named = False

    def _check(self, frame: pb.BlobFrame | CarriedFrame, size_bytes: int, digest: Digest) -> None:
        named = frame.digest.hash if frame.HasField("digest") else None
        problem = None
        if (named is None) != self._is_named or named not in (None, digest.hash):
            problem = f"expected {digest.hash[:12]}…, got {str(named)[:12]}…"
        elif frame.offset != self.received_bytes:
            problem = f"expected offset {self.received_bytes}, got {frame.offset}"
        elif not size_bytes and digest.size_bytes:
            problem = f"it is empty at offset {frame.offset} of {digest.size_bytes}"
        elif size_bytes > min(FRAME_BYTES, digest.size_bytes - self.received_bytes):
            problem = f"it has {size_bytes} bytes at offset {frame.offset} of {digest.size_bytes}"
        if problem:
            self._begin()
            raise DataLoss(f"frame: {problem}", reason="FRAME_UNEXPECTED", metadata={"digest": digest.hash})
