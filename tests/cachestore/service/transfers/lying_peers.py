"""A peer that sends what a test makes of the truth, and the lies that it tells."""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.formats.digest import Digest
from kvasir.formats.frames import frames_of

from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot


class LyingPeer(cachestore_pb2_grpc.CacheStoreServiceServicer, cachestore_pb2_grpc.AgentServiceServicer):
    """A peer whose manifest is true and whose frames are what a test makes of them."""

    def __init__(self, turn: SyntheticSnapshot, frames: Callable[[list[pb.BlobFrame]], list[pb.BlobFrame]]) -> None:
        self._turn = turn
        self._frames = frames
        self.manifest_bytes = turn.manifest_bytes
        self.manifest_digest: Digest | None = None
        self.pages = 0

    def GetAgent(self, request: Any, context: Any) -> pb.GetAgentResponse:  # noqa: N802
        return pb.GetAgentResponse(agent=pb.Agent(agent_id="ada"))

    def ListSnapshots(self, request: Any, context: Any) -> pb.ListSnapshotsResponse:  # noqa: N802
        self.pages += 1
        return pb.ListSnapshotsResponse(next_page_token=f"page {self.pages}")

    def GetSnapshot(self, request: Any, context: Any) -> pb.GetSnapshotResponse:  # noqa: N802
        digest = self.manifest_digest or self._turn.manifest_digest
        snapshot = pb.SnapshotVersion(agent_id="ada", version=1, manifest=digest.to_proto())
        return pb.GetSnapshotResponse(snapshot=snapshot, manifest_bytes=self.manifest_bytes)

    def ReadBlobs(self, request: pb.ReadBlobsRequest, context: Any) -> Iterator[pb.ReadBlobsResponse]:  # noqa: N802
        truth: list[pb.BlobFrame] = []
        for digest in self._turn.digests:
            truth += frames_of(digest, self._turn.new_blobs[digest])
        for frame in self._frames(truth):
            yield pb.ReadBlobsResponse(frame=frame)


class MovingPeer(LyingPeer, cachestore_pb2_grpc.MovingServiceServicer):
    """Gives its agent away, with what a test makes of its facts."""

    def __init__(self, turn: SyntheticSnapshot) -> None:
        super().__init__(turn, lambda frames: frames)
        self.facts: dict[str, Any] = {}

    def GetAgent(self, request: Any, context: Any) -> pb.GetAgentResponse:  # noqa: N802
        line = pb.SnapshotVersion(agent_id="ada", version=1, manifest=self._turn.manifest_digest.to_proto())
        return pb.GetAgentResponse(agent=pb.Agent(agent_id="ada", lines=[line], **self.facts))

    def OfferAgent(self, request: Any, context: Any) -> pb.OfferAgentResponse:  # noqa: N802
        agent = self.GetAgent(request, context).agent
        return pb.OfferAgentResponse(agent=agent, generation=request.generation + 1)

    def UndoMove(self, request: Any, context: Any) -> pb.UndoMoveResponse:  # noqa: N802
        return pb.UndoMoveResponse()

    def HandOverAgent(self, request: Any, context: Any) -> pb.HandOverAgentResponse:  # noqa: N802
        return pb.HandOverAgentResponse()


@contextmanager
def lying(peer: LyingPeer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    cachestore_pb2_grpc.add_CacheStoreServiceServicer_to_server(peer, server)  # type: ignore[no-untyped-call]
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(peer, server)  # type: ignore[no-untyped-call]
    if isinstance(peer, MovingPeer):
        cachestore_pb2_grpc.add_MovingServiceServicer_to_server(peer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


def _flip(frames: list[pb.BlobFrame]) -> list[pb.BlobFrame]:
    data = bytearray(frames[1].data)
    data[-1] ^= 1
    frames[1].data = bytes(data)
    return frames


LIES: dict[str, Callable[[list[pb.BlobFrame]], list[pb.BlobFrame]]] = {
    "a bit flipped": _flip,
    "another order": lambda frames: frames[::-1],
    "a blob twice": lambda frames: [frames[0], frames[0], *frames[1:]],
    "not asked for": lambda frames: list(frames_of(OTHER.digests[0], OTHER.new_blobs[OTHER.digests[0]])),
    "cut short": lambda frames: [pb.BlobFrame(digest=frames[0].digest, data=frames[0].data[:100]), *frames[1:]],
    "too long": lambda frames: [pb.BlobFrame(digest=frames[0].digest, data=frames[0].data + b"x"), *frames[1:]],
    "no digest": lambda frames: [pb.BlobFrame(data=frames[0].data)],
    "wrong offset": lambda frames: [pb.BlobFrame(digest=frames[0].digest, offset=7, data=frames[0].data)],
    "another's bytes": lambda frames: [
        pb.BlobFrame(digest=frames[0].digest, data=frames[1].data),
        pb.BlobFrame(digest=frames[1].digest, data=frames[0].data),
    ],
}
OTHER = SyntheticAgent(SMALL, 12).turn(256)
