"""The bookkeeping of uploads, for the blocking and the asynchronous client. Knows no channel."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients.channel import repeatable
from kvasir.errors import DataLoss, InvalidArgument
from kvasir.formats.digest import Buffer, Digest
from kvasir.formats.frame_messages import MAX_FRAMES
from kvasir.formats.frames import FRAME_BYTES, joined_messages
from kvasir.formats.manifest import MAX_MANIFEST_BYTES

OnProgress = Callable[[pb.TransferProgress], None]

_SERVICES = pb.DESCRIPTOR.services_by_name
READS = repeatable(_SERVICES["AgentService"], _SERVICES["CacheStoreService"])
MAX_DIGESTS = 10_000
# A service's feature: it takes several frames in a message.
SEVERAL = "several"
# One stream's steps do not overlap: each message is copied, crosses, and is copied again. Those of two streams do.
STREAMS, _LEAST_STREAM_BYTES = 2, 8 << 20


class Upload:
    """The blobs that a store still lacks, the requests that send them, and the progress. Survives a cut stream."""

    def __init__(
        self,
        blobs: Mapping[Digest, Buffer],
        kind: "pb.BlobKind",
        missing: Sequence[Digest],
        on_progress: OnProgress | None,
    ) -> None:
        self._blobs = blobs
        self._kind = kind
        self._on_progress = on_progress
        self._pending = dict.fromkeys(missing)
        self._begins_over = False
        self._manifest: Digest | None = None
        self.progress = pb.TransferProgress(
            blobs_total=len(blobs),
            bytes_total=sum(digest.size_bytes for digest in blobs),
            blobs_done=len(blobs) - len(self._pending),
            blobs_skipped=len(blobs) - len(self._pending),
        )
        self.progress.bytes_done = self.progress.bytes_total - sum(digest.size_bytes for digest in self._pending)
        self._report()

    def add_manifest(self, data: Buffer) -> None:
        """Send a manifest, too, which names the blobs: one stream for both. To be called before the first stream."""
        self._manifest = digest = Digest.of(data)
        self._blobs = {**self._blobs, digest: data}
        self._pending[digest] = None
        self.progress.blobs_total += 1
        self.progress.bytes_total += digest.size_bytes

    def may_resume(self, digest: Digest) -> bool:
        """Whether the store may have bytes of a stream's first blob, so that their number is requested."""
        # Of a smaller one all has arrived, or nothing.
        return digest.size_bytes > FRAME_BYTES and not self._begins_over

    @property
    def pending(self) -> Sequence[Digest]:
        """Blobs without an acknowledgement, in the order in which they are sent."""
        return tuple(self._pending)

    @property
    def has_small(self) -> bool:
        """Whether some of the blobs fit into a message together."""
        return sum(2 * digest.size_bytes <= FRAME_BYTES for digest in self._pending) > 1

    def parts(self, streams: int) -> Sequence[Sequence[Digest]]:
        """The pending blobs, by the streams that send them side by side: at most so many."""
        return striped(self.pending, streams)

    def requests(self, part: Sequence[Digest], first_offset: int, *, in_groups: bool) -> Iterator[bytes]:
        """The requests, serialized, that send these blobs, the first from `first_offset` on. `in_groups`: several in
        one where they are small."""
        most_frames = MAX_FRAMES if in_groups else 1
        for kind, blobs in groupby(part, self._kind_of):
            for message in joined_messages(blobs, self._blobs, kind, first_offset, most_frames=most_frames):
                yield message
                self._report()  # it was taken: bytes move, though large blobs of two streams are acknowledged late
            first_offset = 0

    def _kind_of(self, digest: Digest) -> "pb.BlobKind":
        return pb.BLOB_KIND_MANIFEST if digest == self._manifest else self._kind

    def acknowledge(self, response: pb.WriteBlobsResponse) -> None:
        for named in (response.digest, *response.more):
            digest = Digest.from_proto(named)
            if digest in self._pending:
                del self._pending[digest]
                self.progress.blobs_done += 1
                self.progress.blobs_skipped += response.existed
                self.progress.bytes_done += digest.size_bytes
                self._report()

    def goes_on_after(self, error: InvalidArgument) -> bool:
        """Whether the next stream may succeed; it then begins with a whole blob. The store may drop a part
        for other callers' blobs after it reported the part's size. Of several stores behind one address each has its
        own parts, and another one may have answered."""
        self._begins_over = error.reason == "OFFSET_UNEXPECTED"
        return self._begins_over

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress)


def striped(digests: Sequence[Digest], most: int = STREAMS) -> Sequence[Sequence[Digest]]:
    """The blobs, by the streams that move them side by side: at most so many, and fewer where there are few bytes."""
    size_bytes = sum(digest.size_bytes for digest in digests)
    streams = max(1, min(most, len(digests), size_bytes // _LEAST_STREAM_BYTES))
    return [digests[first::streams] for first in range(streams)]


def import_requests(agent_id: str, replace: bool, archive: Iterable[bytes]) -> Iterator[pb.ImportAgentRequest]:
    """The header, then the archive in pieces of at most 1 MiB."""
    yield pb.ImportAgentRequest(header=pb.ImportAgentHeader(agent_id=agent_id, replace=replace))
    for piece in archive:
        for offset in range(0, len(piece), FRAME_BYTES):
            yield pb.ImportAgentRequest(data=piece[offset : offset + FRAME_BYTES])


def batches(digests: Sequence[Digest]) -> Iterator[Sequence[Digest]]:
    """Groups of digests, each as large as one request may name."""
    for start in range(0, len(digests), MAX_DIGESTS):
        yield digests[start : start + MAX_DIGESTS]


def manifest_digest(snapshot: pb.SnapshotVersion) -> Digest:
    """The digest of a version's manifest. Raises DataLoss for a size that no manifest has."""
    digest = Digest.from_proto(snapshot.manifest)
    if digest.size_bytes > MAX_MANIFEST_BYTES:
        raise DataLoss(f"manifest {digest}: expected at most {MAX_MANIFEST_BYTES} bytes", reason="MANIFEST_REFUSED")
    return digest
