"""The RPCs about agents and their versions, which engines serve, too; the table in `roles` names their callers."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.names import check_agent_id
from kvasir.server.answers import written
from kvasir.server.interceptors import current_principal

from cachestore_svc.edge import messages
from cachestore_svc.edge.store_calls import StoreCalls, caller_namespace
from cachestore_svc.facts.limits import check_hash, wrong
from cachestore_svc.facts.records import MAX_PAGE_SIZE, AgentRecord, SnapshotVersion
from cachestore_svc.moving.arrivals import MoveOrder, Waiting
from cachestore_svc.moving.copying import Progress
from cachestore_svc.moving.moves import Moves
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.moving.streams import Streams
from cachestore_svc.moving.transfer import PullOrder, Transfers
from cachestore_svc.store.aio_store import AioStore

# A manifest that fits is answered with its version; a longer one is read like any blob.
_MAX_INLINE_MANIFEST_BYTES = 2 << 20


class AgentService(StoreCalls, cachestore_pb2_grpc.AgentServiceServicer):
    def __init__(
        self, store: AioStore, transfers: Transfers, moves: Moves, peers: Peers, *, stall_timeout_s: float
    ) -> None:
        super().__init__(store)
        self._moves = moves
        self._peers = peers
        self._transfers = transfers
        self._streams = Streams(stall_timeout_s)

    async def ListAgents(self, request: pb.ListAgentsRequest, context: Any) -> pb.ListAgentsResponse:
        namespace, labels = caller_namespace(), dict(request.labels)

        def answer() -> pb.ListAgentsResponse:
            page = self._store.agents.page(
                namespace, request.page_size, request.page_token, request.name_prefix, labels
            )
            listed = [messages.write_agent(agent) for agent in page.agents]
            return pb.ListAgentsResponse(agents=listed, next_page_token=page.next_page_token)

        # Agents without the labels are read, too.
        return await self._looked_up(MAX_PAGE_SIZE if labels else request.page_size, answer)

    async def GetAgent(self, request: pb.GetAgentRequest, context: Any) -> pb.GetAgentResponse:
        agent = await self._run(self._store.agents.get, request.agent_id)
        return pb.GetAgentResponse(agent=messages.write_agent(agent))

    async def UpdateAgent(self, request: pb.UpdateAgentRequest, context: Any) -> pb.UpdateAgentResponse:
        agent_id = check_agent_id(request.agent.agent_id, "agent.agent_id")
        agent = await self._run(self._store.agents.update, agent_id, **messages.read_agent_changes(request))
        return pb.UpdateAgentResponse(agent=messages.write_agent(agent))

    async def ForkAgent(self, request: pb.ForkAgentRequest, context: Any) -> pb.ForkAgentResponse:
        agent = await self._run_once_free(
            context,
            request.agent_id,
            self._store.agents.fork,
            check_agent_id(request.source_agent_id, "source_agent_id"),
            request.agent_id,
            request.kv_identity_hash or None,
            messages.read_optional_version(request),
        )
        return pb.ForkAgentResponse(agent=messages.write_agent(agent))

    async def RollbackAgent(self, request: pb.RollbackAgentRequest, context: Any) -> pb.RollbackAgentResponse:
        snapshot = await self._run_once_free(
            context,
            request.agent_id,
            self._store.agents.roll_back,
            request.agent_id,
            messages.read_version(request.version, least=1),
            request.kv_identity_hash or None,
            messages.read_optional_version(request, "expected_version"),
        )
        return written(pb.RollbackAgentResponse, snapshot=snapshot)

    async def DeleteAgent(self, request: pb.DeleteAgentRequest, context: Any) -> pb.DeleteAgentResponse:
        about, delete = (request.agent_id, request.force), self._store.agents.delete
        deletion = await self._run_once_free(context, request.agent_id, delete, *about)
        return written(pb.DeleteAgentResponse, deletion)

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Any) -> pb.ListSnapshotsResponse:
        snapshots, namespace, agent_id = self._store.snapshots, caller_namespace(), request.agent_id
        kv_hash, asked = request.kv_identity_hash or None, request.has_had and check_hash(request.has_had, "has_had")

        def answer() -> pb.ListSnapshotsResponse:
            page = snapshots.page(namespace, agent_id, kv_hash, request.page_size, request.page_token)
            has_had = bool(asked) and snapshots.has_had(namespace, agent_id, asked)
            return written(pb.ListSnapshotsResponse, page, has_had=has_had)

        return await self._looked_up(request.page_size, answer)

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> pb.GetSnapshotResponse:
        about = request.agent_id, request.kv_identity_hash or None, messages.read_optional_version(request)
        snapshot = await self._run(self._store.snapshots.get, *about)
        response = written(pb.GetSnapshotResponse, snapshot=snapshot)
        if snapshot.manifest.size_bytes <= _MAX_INLINE_MANIFEST_BYTES:
            async with self._transfers.manifests.answering(caller_namespace(), snapshot.manifest.size_bytes):
                response.manifest_bytes = bytes(await self._run(self._store.blobs.read, snapshot.manifest))
        return response

    async def GetUsage(self, request: pb.GetUsageRequest, context: Any) -> pb.GetUsageResponse:
        if request.agent_id:
            usage = await self._run(self._store.agents.usage, request.agent_id)
            return written(pb.GetUsageResponse, usage, agent_count=1)
        return written(pb.GetUsageResponse, await self._run(self._store.statistics.of))

    async def PullAgent(self, request: pb.PullAgentRequest, context: Any) -> None:
        agent_id = check_agent_id(request.agent_id)
        local = check_agent_id(request.local_agent_id, "local_agent_id") if request.local_agent_id else agent_id
        kv_hash = request.kv_identity_hash and check_hash(request.kv_identity_hash)
        caller = current_principal()
        is_given = caller.is_peer
        if is_given and (request.peer or request.to_peer):
            raise wrong("peer", "a peer gives an agent of its own and names no peer")
        if request.to_peer:
            namespace, to_peer = caller_namespace(), request.to_peer
            pulled = self._moves.copied_there(
                namespace, to_peer, agent_id, kv_hash, is_dry_run=request.dry_run, only_bytes=request.only_bytes
            )
            await self._streams.send_all(context, pulled)
            return
        peer = self._peers.calling(caller) if is_given else request.peer
        order = PullOrder(
            caller_namespace(), peer, agent_id, local, kv_hash, request.dry_run, is_given, request.only_bytes
        )
        await self._streams.send_all(context, self._transfers.pull(order), _pull_response)

    async def MoveAgent(self, request: pb.MoveAgentRequest, context: Any) -> None:
        agent_id, caller = check_agent_id(request.agent_id), current_principal()
        direction = request.WhichOneof("direction")
        is_given = caller.is_peer
        if is_given and direction is not None:
            raise wrong("direction", "a peer gives an agent of its own and names no peer")
        if not is_given and direction is None:
            raise wrong("direction", "expected from_peer or to_peer")
        move_id = messages.read_move_id(request.move_id) if request.move_id else ""
        if direction == "to_peer":
            namespace, to_peer = caller_namespace(), request.to_peer
            moved = self._moves.there(namespace, to_peer, agent_id, move_id, is_dry_run=request.dry_run)
            await self._streams.send_all(context, moved)
            return
        peer = self._peers.calling(caller) if is_given else request.from_peer
        order = MoveOrder(caller_namespace(), peer, agent_id, request.dry_run, is_given, move_id)
        await self._streams.send_all(context, self._moves.here(order), _move_response)

    async def ClaimAgent(self, request: pb.ClaimAgentRequest, context: Any) -> pb.ClaimAgentResponse:
        await self._moves.claim(caller_namespace(), request.agent_id, force=request.force)
        agent = await self._run(self._store.agents.get, request.agent_id)
        return pb.ClaimAgentResponse(agent=messages.write_agent(agent))

    async def ExportAgent(self, request: pb.ExportAgentRequest, context: Any) -> None:
        about = request.agent_id, request.kv_identity_hash or None, messages.read_optional_version(request)
        async with self._transfers.export(caller_namespace(), *about) as archive:
            archive_size_bytes = archive.size_bytes
            async for data in archive.pieces:
                response = pb.ExportAgentResponse(data=data, archive_size_bytes=archive_size_bytes)
                await self._streams.send(context, response, archive.source)
                archive_size_bytes = 0

    async def ImportAgent(
        self, request_iterator: AsyncIterator[pb.ImportAgentRequest], context: Any
    ) -> pb.ImportAgentResponse:
        async with aclosing(self._streams.unstalled(request_iterator)) as requests:
            first = await anext(requests, None)
            if first is None or not first.HasField("header"):
                raise wrong("header", "expected in the first message")
            agent_id = check_agent_id(first.header.agent_id, "header.agent_id")
            pieces = _archive_pieces(first, requests)
            async with aclosing(pieces):
                snapshot = await self._transfers.import_archive(
                    caller_namespace(), agent_id, first.header.replace, pieces
                )
        return written(pb.ImportAgentResponse, snapshot=snapshot)


def _pull_response(step: Progress | SnapshotVersion) -> pb.PullAgentResponse:
    return written(pb.PullAgentResponse, **{"progress" if isinstance(step, Progress) else "done": step})


def _move_response(step: Progress | Waiting | AgentRecord) -> pb.MoveAgentResponse:
    if isinstance(step, AgentRecord):
        return pb.MoveAgentResponse(done=messages.write_agent(step))
    return written(pb.MoveAgentResponse, **{"waiting" if isinstance(step, Waiting) else "progress": step})


async def _archive_pieces(
    first: pb.ImportAgentRequest, rest: AsyncIterator[pb.ImportAgentRequest]
) -> AsyncGenerator[bytes, None]:
    yield first.data
    async for request in rest:
        if request.HasField("header"):
            raise wrong("header", "expected in the first message only")
        yield request.data
