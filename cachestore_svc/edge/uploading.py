"""One call of WriteBlobs: its frames on their way in, and the answers about blobs that became durable."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import groupby

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.credentials import ENGINE
from kvasir.errors import PermissionDenied
from kvasir.formats.digest import Digest
from kvasir.formats.frame_messages import CarriedFrame, Carrier
from kvasir.server.interceptors import current_principal

from cachestore_svc.edge import messages
from cachestore_svc.edge.manifests_ahead import Gathering, ManifestsAhead
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.moving.inbound import BlobIntake, Stored


class Uploading:
    """Takes a caller's requests, and makes the answers. `receive` runs beside the reader of `answers`."""

    def __init__(self, intake: BlobIntake, ahead: ManifestsAhead) -> None:
        """`ahead`: gets an engine's manifests, for their commits."""
        self._intake = intake
        self._ahead = ahead
        self._manifests: set[Digest] = set()  # of an engine, to be read once they are durable
        self._gathering: Gathering | None = None  # of the blob that is coming
        self._takes_groups = False  # whether the caller reads answers about several blobs

    async def receive(self, requests: AsyncGenerator[Carrier, None]) -> None:
        """Take every frame; the last outcome is None, or why no more are taken."""
        failure: Exception | None = None
        try:
            async with self._intake, aclosing(requests) as arriving:
                async for request in arriving:
                    token = messages.read_handed(request)
                    self._takes_groups = self._takes_groups or len(request.frames) > 1
                    for frame in request.frames:
                        await self._take(frame, token)
                await self._intake.end()
        except Exception as error:  # noqa: BLE001  raised where the RPC is answered
            failure = error
        finally:
            self._end_gathering()
        await self._intake.outcomes.put(failure)

    async def answers(self) -> AsyncGenerator[pb.WriteBlobsResponse, None]:
        """An answer for each blob, or for several, that became durable; ends with the requests. Raises why not."""
        outcomes = self._intake.outcomes
        while True:
            coming = [await outcomes.get()]
            while self._takes_groups and isinstance(coming[-1], Stored) and not outcomes.empty():
                coming.append(outcomes.get_nowait())
            stored = [each for each in coming if isinstance(each, Stored)]
            for existed, same in groupby(stored, lambda each: each.existed):
                first, *more = [each.digest.to_proto() for each in same]
                yield pb.WriteBlobsResponse(digest=first, existed=existed, more=more)
            for each in stored:
                if each.digest in self._manifests:
                    self._ahead.begin(current_principal().namespace, each.digest)
            if not isinstance(last := coming[-1], Stored):
                if last is not None:
                    raise last
                return

    async def _take(self, frame: CarriedFrame, token: str) -> None:
        if not frame.HasField("digest"):
            if self._gathering is not None:
                self._gathering.add(frame.data)
            await self._intake.write(frame.offset, frame.data)
            return
        self._end_gathering()
        digest = messages.read_digest(frame.digest, "frame.digest")
        kind, is_engine = messages.read_kind(frame.kind), ENGINE in current_principal().roles
        if token and not is_engine:  # it shares no directory with this store
            raise PermissionDenied.of("handed", "only an engine hands files over")
        if is_engine and kind is BlobKind.MANIFEST:
            self._read_ahead(digest, frame)
        if token:
            await self._intake.take(digest, kind, token)
        else:
            await self._intake.begin(digest, kind, frame.offset, frame.data)

    def _read_ahead(self, manifest: Digest, first: CarriedFrame) -> None:
        namespace = current_principal().namespace
        if first.offset == 0 and len(first.data) == manifest.size_bytes:
            self._ahead.begin(namespace, manifest, first.data)
            return
        if first.offset == 0 and first.data:
            self._gathering = self._ahead.gather(namespace, manifest)
        if self._gathering is not None:
            self._gathering.add(first.data)
        else:
            self._manifests.add(manifest)

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.end()
            self._gathering = None
