"""The bookkeeping of uploads, for the blocking and the asynchronous client. Knows no channel."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients.channel import repeatable
from kvasir.errors import DataLoss, InvalidArgument
from kvasir.formats.digest import Buffer, Digest
from kvasir.formats.frames import FRAME_BYTES, frame_messages
from kvasir.formats.manifest import MAX_MANIFEST_BYTES

OnProgress = Callable[[pb.TransferProgress], None]

_SERVICES = pb.DESCRIPTOR.services_by_name
READS = repeatable(_SERVICES["AgentService"], _SERVICES["CacheStoreService"])
MAX_DIGESTS = 10_000


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
        self.progress = pb.TransferProgress(
            blobs_total=len(blobs),
            bytes_total=sum(digest.size_bytes for digest in blobs),
            blobs_done=len(blobs) - len(self._pending),
            blobs_skipped=len(blobs) - len(self._pending),
        )
        self.progress.bytes_done = self.progress.bytes_total - sum(digest.size_bytes for digest in self._pending)
        self._report()

    @property
    def may_resume(self) -> bool:
        """Whether the store may have bytes of the first blob, so that it is asked for their number."""
        return self.pending[0].size_bytes > FRAME_BYTES  # of a smaller one all has arrived, or nothing

    @property
    def pending(self) -> Sequence[Digest]:
        """Blobs without an acknowledgement, in the order in which they are sent."""
        return tuple(self._pending)

    def requests(self, first_offset: int) -> Iterator[bytes]:
        """The requests, serialized, that send all pending blobs, the first blob from `first_offset` on."""
        for digest in self.pending:
            yield from frame_messages(digest, self._blobs[digest], self._kind, first_offset)
            first_offset = 0

    def acknowledge(self, response: pb.WriteBlobsResponse) -> None:
        """Note that the store has a blob durably."""
        digest = Digest.from_proto(response.digest)
        if digest in self._pending:
            del self._pending[digest]
            self.progress.blobs_done += 1
            self.progress.blobs_skipped += response.existed
            self.progress.bytes_done += digest.size_bytes
            self._report()

    def goes_on_after(self, error: InvalidArgument) -> bool:
        """Whether the next stream may succeed. The store may drop a part for other callers' blobs after it reported the
        part's size."""
        return error.reason == "OFFSET_UNEXPECTED"

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress)


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
