"""Blobs as frames and back: pieces of at most 1 MiB, in offset order, verified when the last one is in.

A default gRPC peer refuses a message of 4 MiB, and 1 MiB was the fastest size measured. So a blob of any size travels
as pieces of 1 MiB, and an interrupted transfer continues at the offset where it stopped.
"""

from collections.abc import Iterator, Sequence

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.errors import DataLoss
from kvasir.formats.digest import Digest, Hasher

FRAME_BYTES = 1 << 20


def frames_of(
    digest: Digest, data: bytes | bytearray | memoryview, kind: int = pb.BLOB_KIND_UNSPECIFIED, first_offset: int = 0
) -> Iterator[pb.BlobFrame]:
    """The frames of one blob from `first_offset` on. Digest and kind are in the first; there is always a first."""
    view = memoryview(data).cast("B")
    end = min(first_offset + FRAME_BYTES, len(view))
    first = pb.BlobFrame(digest=digest.to_proto(), offset=first_offset, data=bytes(view[first_offset:end]))
    first.kind = kind  # type: ignore[assignment]
    yield first
    for offset in range(first_offset + FRAME_BYTES, len(view), FRAME_BYTES):
        yield pb.BlobFrame(offset=offset, data=bytes(view[offset : offset + FRAME_BYTES]))


class FrameAssembler:
    """Joins the frames of expected blobs, in the order expected, over one stream or several.

    It holds the bytes that have arrived of one blob, and reserves none for the size that a digest claims. After a cut,
    ask for `remaining` from `received_bytes` on, call `resume()`, and go on adding.
    """

    def __init__(self, expected: Sequence[Digest]) -> None:
        self._expected = tuple(expected)
        self._done = 0
        self._begin()

    @property
    def remaining(self) -> Sequence[Digest]:
        """Blobs that are not whole yet, in order."""
        return self._expected[self._done :]

    @property
    def received_bytes(self) -> int:
        """Bytes of the first of `remaining` that have arrived."""
        return self._hasher.size_bytes

    def resume(self) -> None:
        """A new stream begins: its first frame names its blob again."""
        self._is_named = False

    def add(self, frame: pb.BlobFrame) -> tuple[Digest, memoryview] | None:
        """Take the next frame. Returns the blob with its last frame.

        Raises DataLoss for a frame that does not fit, and for bytes of another digest; the blob then begins again.
        """
        if self._done == len(self._expected):
            raise DataLoss("a frame arrived after the last blob", reason="FRAME_UNEXPECTED")
        digest = self._expected[self._done]
        self._check(frame, digest)
        self._buffer += frame.data
        self._hasher.update(frame.data)
        self._is_named = True
        if self.received_bytes < digest.size_bytes:
            return None
        data, found = self._buffer, self._hasher.digest()
        if found != digest:
            self._begin()
            raise DataLoss(f"blob {digest}: its bytes are those of {found}", metadata={"digest": digest.hash})
        self._done += 1
        self._begin()
        return digest, memoryview(data).toreadonly()

    def _begin(self) -> None:
        self._buffer = bytearray()
        self._hasher = Hasher()
        self._is_named = False

    def _check(self, frame: pb.BlobFrame, digest: Digest) -> None:
        named = frame.digest.hash if frame.HasField("digest") else None
        problem = None
        if (named is None) != self._is_named or named not in (None, digest.hash):
            problem = f"expected {digest.hash[:12]}…, got {str(named)[:12]}…"
        elif frame.offset != self.received_bytes:
            problem = f"expected offset {self.received_bytes}, got {frame.offset}"
        elif not frame.data and digest.size_bytes:
            problem = f"it is empty at offset {frame.offset} of {digest.size_bytes}"
        elif len(frame.data) > min(FRAME_BYTES, digest.size_bytes - self.received_bytes):
            problem = f"it has {len(frame.data)} bytes at offset {frame.offset} of {digest.size_bytes}"
        if problem:
            self._begin()
            raise DataLoss(f"frame: {problem}", reason="FRAME_UNEXPECTED", metadata={"digest": digest.hash})
