"""An upload to a store on this host: blobs are handed over as files, and what cannot be is sent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients.aio.blob_transfers import AioBlobTransfers
from kvasir.clients.handed_files import HandedFiles
from kvasir.clients.store_client_transfers import OnProgress, Upload
from kvasir.errors import InvalidArgument
from kvasir.formats.digest import Buffer, Digest
from kvasir.formats.frames import FRAME_BYTES

# A store takes them only for an engine, and where nothing has to be encrypted.
FEATURE = "handed"
# Handed over and not acknowledged, of one upload.
_MAX_HANDED_BYTES = 64 << 20
_LEAST_BYTES = FRAME_BYTES // 2  # smaller ones are sent as fast, several in a message


class HandedFile:
    """A file that is being written for a store to take."""

    def __init__(self, files: HandedFiles, data: Buffer) -> None:
        self.token = files.new_token()
        self.writing = asyncio.ensure_future(
            asyncio.to_thread(files.write, self.token, data)
        )  # whether that is possible


@contextlib.contextmanager
def begun_ahead(files: HandedFiles | None, data: Sequence[Buffer]) -> Iterator[HandedFile | None]:
    """The file of one large blob that is being hashed: a turn waits for its last. Else, or without `files`, None."""
    if files is None or len(data) != 1 or memoryview(data[0]).nbytes < _LEAST_BYTES:
        yield None
        return
    file = HandedFile(files, data[0])
    try:
        yield file
    finally:
        file.writing.add_done_callback(lambda _: files.forget(file.token))  # if the store has not taken it


class HandedUpload(Upload):
    """The tensor files that a store still lacks, as files for it to take."""

    def __init__(
        self,
        blobs: Mapping[Digest, Buffer],
        missing: list[Digest],
        files: HandedFiles,
        on_progress: OnProgress | None,
        ahead: HandedFile | None = None,
    ) -> None:
        """`ahead`: the file of the only blob, where it was begun before."""
        super().__init__(blobs, pb.BLOB_KIND_TENSORS, missing, on_progress)
        self._files = files
        self._ahead = ahead
        self._is_refused = False
        self._writing: asyncio.Future[bool] | None = None
        self._handed: dict[Digest, str] = {}  # and their tokens: no answer has come for these
        self._answered = asyncio.Event()
        self._stream = 0  # gRPC does not end the requests of a stream that the store has ended

    def may_resume(self, digest: Digest) -> bool:
        return self._stream > 0 and super().may_resume(digest)

    def parts(self, streams: int) -> Sequence[Sequence[Digest]]:  # noqa: ARG002
        """The bytes do not go through a stream: one is enough."""
        return [self.pending]

    async def requests(  # type: ignore[override]
        self, part: Sequence[Digest], first_offset: int, *, in_groups: bool
    ) -> AsyncIterator[bytes]:
        """The requests, serialized, that send a manifest, that hand these blobs over, and then those that send the
        others. A blob of which bytes have arrived is sent from there on. The store makes the manifest, which comes
        whole, durable with the file behind it."""
        self._stream += 1
        stream = self._stream
        await self.take_back()
        others = [*part[:1]] if first_offset else []
        manifests = [digest for digest in part[len(others) :] if digest == self._manifest]
        for message in super().requests(manifests, 0, in_groups=False):
            yield message
        for digest in part[len(others) :]:
            if digest in manifests:
                continue
            token = await self._hand(digest, self._blobs[digest], stream)
            if stream != self._stream:
                return
            if token:
                frame = pb.BlobFrame(digest=digest.to_proto(), kind=self._kind)
                yield pb.WriteBlobsRequest(frame=frame, handed=token).SerializeToString()
            else:
                others.append(digest)
        for message in super().requests(others, first_offset, in_groups=in_groups):
            yield message

    def acknowledge(self, response: pb.WriteBlobsResponse) -> None:
        super().acknowledge(response)
        for named in (response.digest, *response.more):
            self._forget(Digest.from_proto(named))
        self._answered.set()

    def goes_on_after(self, error: InvalidArgument) -> bool:
        """If the store refuses a file, its bytes are sent, and the store reports what is wrong with them."""
        self._is_refused = self._is_refused or error.field == "handed"
        return error.field == "handed" or super().goes_on_after(error)

    async def take_back(self) -> None:
        """Remove files that the store has not taken. A thread that still writes one is waited for."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        for digest in list(self._handed):
            self._forget(digest)
        self._answered.set()

    async def _hand(self, digest: Digest, data: Buffer, stream: int) -> str:
        """The token of the blob's file; "" if its bytes have to be sent, or another stream sends them."""
        if self._is_refused or digest.size_bytes < _LEAST_BYTES:
            return ""
        while self._handed and sum(each.size_bytes for each in self._handed) + digest.size_bytes > _MAX_HANDED_BYTES:
            self._answered.clear()
            await self._answered.wait()
            if stream != self._stream:
                return ""
        file, self._ahead = self._ahead or HandedFile(self._files, data), None
        token, self._writing = file.token, file.writing
        self._handed[digest] = token
        if not await asyncio.shield(self._writing):
            self._forget(digest)
        return token if self._handed.get(digest) == token else ""

    def _forget(self, digest: Digest) -> None:
        if token := self._handed.pop(digest, ""):
            self._files.forget(token)


def upload_of(
    blobs: Mapping[Digest, Buffer],
    missing: list[Digest],
    files: HandedFiles | None,
    on_progress: OnProgress | None = None,
    ahead: HandedFile | None = None,
) -> Upload:
    """An upload of tensor files into `files`, where the store takes them; `missing`: those that it lacks. `ahead`: from
    `begun_ahead`."""
    if files is not None and any(digest.size_bytes >= _LEAST_BYTES for digest in missing):
        return HandedUpload(blobs, missing, files, on_progress, ahead)
    return Upload(blobs, pb.BLOB_KIND_TENSORS, missing, on_progress)  # their bytes may go by several streams


async def send_by_files(
    client: AioBlobTransfers, upload: Upload, *, stall_timeout_s: float | None = None
) -> pb.TransferProgress:
    """As `send_all`, of an upload from `upload_of`."""
    try:
        return await client.send_all(upload, stall_timeout_s=stall_timeout_s)
    finally:
        if isinstance(upload, HandedUpload):
            await upload.take_back()


async def put_by_files(
    client: AioBlobTransfers, blobs: Mapping[Digest, Buffer], missing: list[Digest], files: HandedFiles
) -> pb.TransferProgress:
    """As `put_blobs`, of tensor files of which the store lacks these, into `files`."""
    return await send_by_files(client, upload_of(blobs, missing, files))
