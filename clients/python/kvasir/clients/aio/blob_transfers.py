"""Blobs to and from a cache store, asynchronously: only missing blobs are sent, and a transfer resumes after a cut."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients.aio.service_client import AioServiceClient
from kvasir.clients.aio.stall_limit import AioStallLimit, no_progress
from kvasir.clients.blob_memory import BlobMemory
from kvasir.clients.store_client_transfers import SEVERAL, STREAMS, OnProgress, Upload, batches
from kvasir.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from kvasir.formats.digest import Buffer, Digest
from kvasir.formats.frame_messages import CarriedFrame
from kvasir.formats.frames import FrameAssembler
from kvasir.waits import HANGS_S, PATIENCE_S, PAUSE_S

_TENSORS, _MANIFEST = pb.BLOB_KIND_TENSORS, pb.BLOB_KIND_MANIFEST
# How long to wait for a blob that another writer sends. A store drops a silent writer sooner.
_MAX_WAITS = round(HANGS_S / PAUSE_S)
_memory = BlobMemory(64 << 20)


class AioBlobTransfers(AioServiceClient):
    """The part of a store's client that moves blobs."""

    _streams = STREAMS

    def __init__(
        self, channel: grpc.aio.Channel, stub: Any, token: str | None, timeout_s: float, max_cuts: int
    ) -> None:
        super().__init__(channel, stub, token, timeout_s)
        self._max_cuts = max_cuts
        self._takes_groups: bool | None = None  # whether the store takes several frames in a message, if that is known

    async def find_missing(self, digests: Sequence[Digest], *, timeout_s: float | None = None) -> list[Digest]:
        """The blobs that the store lacks, in the given order. Extends the lifetime of the others."""
        missing: list[Digest] = []
        for batch in batches(digests):
            request = pb.FindMissingBlobsRequest()
            for digest in batch:  # by its attributes a message is made in half of the time
                named = request.digests.add()
                named.hash, named.size_bytes = digest.hash, digest.size_bytes
            response = await self._call(pb.FindMissingBlobsResponse, request, timeout_s)
            asked = {digest.hash: digest for digest in batch}
            missing += [asked.get(digest.hash) or Digest.from_proto(digest) for digest in response.missing]
        return missing

    async def put_blobs(
        self,
        blobs: Mapping[Digest, Buffer],
        *,
        kind: "pb.BlobKind" = _TENSORS,
        on_progress: OnProgress | None = None,
        stall_timeout_s: float | None = None,
    ) -> pb.TransferProgress:
        """Send the blobs that the store lacks; on return all are durable. Resumes after a cut.

        However long it takes, it is given up only after `stall_timeout_s` without progress: no frame was taken, and no
        blob acknowledged. Raises ResourceExhausted (quota, disk), InvalidArgument (bytes or header refused),
        Unavailable (cut too often), DeadlineExceeded (no progress)."""
        try:
            missing = await self.find_missing(list(blobs), timeout_s=stall_timeout_s)
        except DeadlineExceeded as error:
            raise error if stall_timeout_s is None else no_progress(stall_timeout_s) from error
        return await self.send_all(Upload(blobs, kind, missing, on_progress), stall_timeout_s=stall_timeout_s)

    async def send_all(self, upload: Upload, *, stall_timeout_s: float | None = None) -> pb.TransferProgress:
        """Send an upload's blobs. Raises as `put_blobs`."""
        cuts = waits = 0
        while upload.pending:
            before = len(upload.pending)
            try:
                await self._send(upload, stall_timeout_s)
            except (Unavailable, InvalidArgument) as error:
                if isinstance(error, InvalidArgument) and not upload.goes_on_after(error):
                    raise
                self._takes_groups = None  # an older store may have taken its place
                cuts = cuts + 1 if len(upload.pending) == before else 0
                if cuts >= self._max_cuts or (error.retry_after_s or 0) > PATIENCE_S:
                    raise
                await self._pause(PAUSE_S * (cuts + 1))
            except FailedPrecondition as error:
                # Another writer sends the same blob. When that ends, the store has the blob, or we send it.
                waits = waits + 1 if len(upload.pending) == before else 0
                if error.reason != "WRITE_IN_PROGRESS" or waits == _MAX_WAITS:
                    raise
                await self._pause(PAUSE_S)
        return upload.progress

    async def put_manifest(self, data: bytes, *, stall_timeout_s: float | None = None) -> Digest:
        """Store a manifest's bytes. They are new nearly always: no question goes first."""
        digest = Digest.of(data)
        upload = Upload({digest: data}, _MANIFEST, [digest], None)
        await self.send_all(upload, stall_timeout_s=stall_timeout_s)
        return digest

    async def write_status(self, digest: Digest) -> pb.QueryWriteStatusResponse:
        """How much of a blob has arrived."""
        return await self._call(pb.QueryWriteStatusResponse, pb.QueryWriteStatusRequest(digest=digest.to_proto()))

    async def get_blobs(
        self, digests: Sequence[Digest], *, timeout_s: float | None = None
    ) -> AsyncGenerator[tuple[Digest, memoryview], None]:
        """The blobs in the given order, each verified here too. Resumes after a cut.

        Raises NotFound and DataLoss (metadata "digest"), Unavailable (cut too often)."""
        assembler = FrameAssembler(digests, _memory.take)
        cuts = 0
        while assembler.remaining:
            before = (len(assembler.remaining), assembler.received_bytes)
            try:
                async with aclosing(self._receive(assembler, timeout_s)) as blobs:
                    async for digest, data in blobs:
                        yield digest, data
            except Unavailable:
                cuts = cuts + 1 if (len(assembler.remaining), assembler.received_bytes) == before else 0
                if cuts >= self._max_cuts:
                    raise
                await self._pause(PAUSE_S * (cuts + 1))

    async def get_blob(self, digest: Digest, *, timeout_s: float | None = None) -> memoryview:
        """One blob's bytes."""
        async with aclosing(self.get_blobs([digest], timeout_s=timeout_s)) as blobs:
            async for _, data in blobs:
                return data
        raise NotFound(f"blob {digest}", reason="BLOB_NOT_FOUND", metadata={"digest": digest.hash})

    async def read_frames(
        self, digests: Sequence[Digest], first_offset: int = 0, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Sequence[CarriedFrame], None]:
        """One stream of frames as they come, those of a message together, unverified, for a caller that passes them on:
        at most 10,000 blobs."""
        named = [digest.to_proto() for digest in digests]
        request = pb.ReadBlobsRequest(digests=named, first_offset=first_offset, takes_several=True)
        async with aclosing(self._responses(self._stub.ReadBlobs, request, timeout_s)) as responses:
            async for response in responses:
                yield response.frames

    async def _send(self, upload: Upload, stall_timeout_s: float | None) -> None:
        """Send the pending blobs, in one stream or in several. Raises when one is cut; acknowledged blobs are not
        pending any more."""
        in_groups = upload.has_small and await self._has_groups()
        parts = [(part, await self._arrived(upload, part[0])) for part in upload.parts(self._streams)]
        async with self._stall_limit(stall_timeout_s) as limit:
            write = limit.watched(self._stub.WriteBlobs)
            requests = [upload.requests(*part, in_groups=in_groups) for part in parts]
            streams = [self._responses(write, limit.counting(each), None) for each in requests]
            async with aclosing(side_by_side(streams)) as responses:
                async for response in responses:
                    limit.progress()
                    upload.acknowledge(response)
        if upload.pending:
            raise Unavailable("the store ended the stream before every blob was stored")

    async def _arrived(self, upload: Upload, digest: Digest) -> int:
        """Where the first blob of a stream goes on."""
        if not upload.may_resume(digest):
            return 0
        status = await self.write_status(digest)
        return 0 if status.is_complete else status.received_bytes

    async def _has_groups(self) -> bool:
        if self._takes_groups is None:
            capabilities = await self._call(pb.GetCapabilitiesResponse, pb.GetCapabilitiesRequest())
            self._takes_groups = SEVERAL in capabilities.features
        return self._takes_groups

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _stall_limit(self, seconds: float | None) -> AioStallLimit:
        return AioStallLimit(seconds)

    async def _receive(
        self, assembler: FrameAssembler, timeout_s: float | None
    ) -> AsyncGenerator[tuple[Digest, memoryview], None]:
        """Read the remaining blobs in one stream. Raises when it is cut; the assembler keeps the bytes that arrived."""
        wanted = next(batches(assembler.remaining))
        messages = self.read_frames(wanted, assembler.received_bytes, timeout_s=timeout_s)
        assembler.resume()
        received = 0
        async with aclosing(messages):
            async for frames in messages:
                for blob in filter(None, map(assembler.add, frames)):
                    received += 1
                    yield blob
        if received < len(wanted):
            raise Unavailable("the store ended the stream before every blob was sent")


_Item = TypeVar("_Item")
_END: Any = object()


async def side_by_side(sources: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[_Item, None]:
    """What all of these give, as it comes. Raises the first failure, and ends the others."""
    if len(sources) == 1:  # also where nothing may wait (`kvasir.clients.blocking`)
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    coming = {asyncio.create_task(_next(source)): source for source in sources}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                item, source = task.result(), coming.pop(task)
                if item is not _END:
                    coming[asyncio.create_task(_next(source))] = source
                    yield item
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[_Item, None]) -> _Item:
    return await anext(source, _END)
