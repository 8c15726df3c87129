"""The calls about agents: of every engine, for the store that it uses, and of that store itself."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import cast

from google.protobuf import field_mask_pb2

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients.aio.service_client import AioServiceClient
from kvasir.clients.archive_file import new_file, pieces_of
from kvasir.clients.made_requests import MadeRequests
from kvasir.clients.store_client_transfers import OnProgress, import_requests

_PAGE = 1000


class AioAgentClient(AioServiceClient):
    """Agents by name: their versions, forks, rollbacks and archives. Part of the clients of engines and stores."""

    async def list_agents(
        self,
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
        page_size: int = 0,
        page_token: str = "",
    ) -> pb.ListAgentsResponse:
        """One page of agents by name, those that have all the labels."""
        request = pb.ListAgentsRequest(
            name_prefix=name_prefix, labels=labels, page_size=page_size, page_token=page_token
        )
        return await self._call(pb.ListAgentsResponse, request)

    async def every_agent(
        self, *, name_prefix: str = "", labels: Mapping[str, str] | None = None
    ) -> AsyncGenerator[pb.Agent, None]:
        """All agents by name, those that have all the labels, read a page at a time."""
        token = ""
        while True:
            page = await self.list_agents(name_prefix=name_prefix, labels=labels, page_size=_PAGE, page_token=token)
            for agent in page.agents:
                yield agent
            if not (token := page.next_page_token):
                return

    async def get_agent(self, agent_id: str) -> pb.Agent:
        """One agent with its lines. Raises NotFound."""
        return (await self._call(pb.GetAgentResponse, pb.GetAgentRequest(agent_id=agent_id))).agent

    async def update_agent(
        self,
        agent_id: str,
        *,
        labels: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
        retained_versions: int | None = None,
    ) -> pb.Agent:
        """Change the fields that are given; labels that are not named stay, an empty value removes one."""
        agent = pb.Agent(
            agent_id=agent_id,
            labels={name: value for name, value in (labels or {}).items() if value},
            is_pinned=bool(is_pinned),
            retained_versions=retained_versions or 0,
        )
        paths = [f"labels.{name}" for name in labels or ()]
        paths += ["is_pinned"] * (is_pinned is not None) + ["retained_versions"] * (retained_versions is not None)
        mask = field_mask_pb2.FieldMask(paths=paths)
        return (await self._call(pb.UpdateAgentResponse, pb.UpdateAgentRequest(agent=agent, update_mask=mask))).agent

    async def fork_agent(
        self, source_agent_id: str, agent_id: str, kv_identity_hash: str = "", version: int | None = None
    ) -> pb.Agent:
        """Start an agent with the memory of another agent. Copies no blob. Raises NotFound, AlreadyExists."""
        request = pb.ForkAgentRequest(
            source_agent_id=source_agent_id, agent_id=agent_id, kv_identity_hash=kv_identity_hash, version=version
        )
        return (await self._call(pb.ForkAgentResponse, request)).agent

    async def rollback_agent(
        self, agent_id: str, version: int, kv_identity_hash: str = "", *, expected_version: int | None = None
    ) -> pb.SnapshotVersion:
        """Commit an old version again, as the newest. Raises NotFound, Conflict."""
        request = pb.RollbackAgentRequest(
            agent_id=agent_id, kv_identity_hash=kv_identity_hash, version=version, expected_version=expected_version
        )
        return (await self._call(pb.RollbackAgentResponse, request)).snapshot

    async def delete_agent(self, agent_id: str, *, force: bool = False) -> pb.DeleteAgentResponse:
        """Delete an agent; a pinned one needs `force`. Raises NotFound and FailedPrecondition."""
        return await self._call(pb.DeleteAgentResponse, pb.DeleteAgentRequest(agent_id=agent_id, force=force))

    async def list_snapshots(
        self, agent_id: str, kv_identity_hash: str = "", *, page_size: int = 0, page_token: str = "", has_had: str = ""
    ) -> pb.ListSnapshotsResponse:
        """One page of an agent's versions, newest first; and whether one was the manifest of the hash `has_had`."""
        request = pb.ListSnapshotsRequest(
            agent_id=agent_id,
            kv_identity_hash=kv_identity_hash,
            page_size=page_size,
            page_token=page_token,
            has_had=has_had,
        )
        return await self._call(pb.ListSnapshotsResponse, request)

    async def every_snapshot(
        self, agent_id: str, kv_identity_hash: str = ""
    ) -> AsyncGenerator[pb.SnapshotVersion, None]:
        """All versions of an agent, newest first, read a page at a time. Raises NotFound."""
        token = ""
        while True:
            page = await self.list_snapshots(agent_id, kv_identity_hash, page_size=_PAGE, page_token=token)
            for version in page.snapshots:
                yield version
            if not (token := page.next_page_token):
                return

    async def get_snapshot(
        self, agent_id: str, kv_identity_hash: str = "", version: int | None = None, *, timeout_s: float | None = None
    ) -> tuple[pb.SnapshotVersion, bytes]:
        """A version (None: the newest) and its manifest's bytes, none above 2 MiB. Raises NotFound, DataLoss."""
        request = pb.GetSnapshotRequest(agent_id=agent_id, kv_identity_hash=kv_identity_hash, version=version)  # type: ignore[arg-type]
        response = await self._call(pb.GetSnapshotResponse, request, timeout_s)
        return response.snapshot, response.manifest_bytes

    async def get_usage(self, agent_id: str = "") -> pb.GetUsageResponse:
        """The bytes behind an agent, or behind all of the namespace. Raises NotFound."""
        return await self._call(pb.GetUsageResponse, pb.GetUsageRequest(agent_id=agent_id))

    async def pull_agent(
        self,
        peer: str,
        agent_id: str,
        *,
        local_agent_id: str = "",
        kv_identity_hash: str = "",
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> pb.SnapshotVersion:
        """Let the store copy an agent's line from a peer of its configuration. Safe to repeat.

        Raises NotFound (peer or agent), AlreadyExists (the line here is not an ancestor), Unavailable (peer), DataLoss.
        """
        steps = self.pulling_agent(
            peer, agent_id, local_agent_id=local_agent_id, kv_identity_hash=kv_identity_hash, timeout_s=timeout_s
        )
        return cast("pb.SnapshotVersion", await self._until_done("pull", steps, on_progress))

    def pulling_agent(
        self,
        peer: str,
        agent_id: str,
        *,
        local_agent_id: str = "",
        kv_identity_hash: str = "",
        dry_run: bool = False,
        only_bytes: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[pb.PullAgentResponse, None]:
        """As pull_agent, as a stream, `done` last. A dry run ends with the progress that counts what would be sent."""
        request = pb.PullAgentRequest(
            peer=peer,
            agent_id=agent_id,
            local_agent_id=local_agent_id,
            kv_identity_hash=kv_identity_hash,
            dry_run=dry_run,
            only_bytes=only_bytes,
        )
        return self._steps(self._stub.PullAgent, request, timeout_s)

    def copying_agent(
        self,
        to_peer: str,
        agent_id: str,
        *,
        kv_identity_hash: str = "",
        dry_run: bool = False,
        only_bytes: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[pb.PullAgentResponse, None]:
        """As `pulling_agent`, the other way: a peer copies the agent from here."""
        request = pb.PullAgentRequest(
            agent_id=agent_id,
            kv_identity_hash=kv_identity_hash,
            to_peer=to_peer,
            dry_run=dry_run,
            only_bytes=only_bytes,
        )
        return self._steps(self._stub.PullAgent, request, timeout_s)

    def moving_agent(
        self,
        agent_id: str,
        *,
        from_peer: str = "",
        to_peer: str = "",
        dry_run: bool = False,
        move_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[pb.MoveAgentResponse, None]:
        """Move an agent here from a peer, or from here to one; the destination owns it then. A stream, `done` last.

        Leaving early undoes a move that was not handed over. Repeated after a cut, it goes on where it was.
        Raises NotFound, AlreadyExists (another agent of that name is there), FailedPrecondition (AGENT_MOVED with
        "owner", AGENT_MOVING, MOVE_UNKNOWN), Unavailable (peer), DataLoss.

        `move_id`: of a new move, 16 to 64 lower-case hex digits that nobody can guess; empty: the destination makes it.
        """
        request = pb.MoveAgentRequest(
            agent_id=agent_id, from_peer=from_peer or None, to_peer=to_peer or None, dry_run=dry_run, move_id=move_id
        )
        return self._steps(self._stub.MoveAgent, request, timeout_s)

    async def move_agent(
        self,
        agent_id: str,
        *,
        from_peer: str = "",
        to_peer: str = "",
        move_id: str = "",
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> pb.Agent:
        """As moving_agent, in one call: the agent as its new owner has it."""
        steps = self.moving_agent(agent_id, from_peer=from_peer, to_peer=to_peer, move_id=move_id, timeout_s=timeout_s)
        return cast("pb.Agent", await self._until_done("move", steps, on_progress))

    async def claim_agent(self, agent_id: str, *, force: bool = False, timeout_s: float | None = None) -> pb.Agent:
        """Declare that this store owns an agent: `force` for one whose owner is gone. Raises NotFound,
        FailedPrecondition (AGENT_MOVED, AGENT_MOVING), Unavailable."""
        request = pb.ClaimAgentRequest(agent_id=agent_id, force=force)
        return (await self._call(pb.ClaimAgentResponse, request, timeout_s)).agent

    async def export_agent(
        self, agent_id: str, kv_identity_hash: str = "", version: int | None = None, *, timeout_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The archive of one version, in pieces. Raises NotFound, DataLoss."""
        request = pb.ExportAgentRequest(agent_id=agent_id, kv_identity_hash=kv_identity_hash, version=version)
        async with aclosing(self._responses(self._stub.ExportAgent, request, timeout_s)) as responses:
            async for response in responses:
                yield response.data

    async def export_to_file(
        self, agent_id: str, path: Path, kv_identity_hash: str = "", version: int | None = None
    ) -> int:
        """Save the archive of one version; returns its size in bytes. The file appears whole or not at all."""
        with new_file(path) as file:
            async with aclosing(self.export_agent(agent_id, kv_identity_hash, version)) as pieces:
                async for piece in pieces:
                    file.write(piece)
            return file.tell()

    async def import_agent(
        self, agent_id: str, archive: Iterable[bytes], *, replace: bool = False, timeout_s: float | None = None
    ) -> pb.SnapshotVersion:
        """Read an archive into a new version of a line. Raises InvalidArgument, AlreadyExists, ResourceExhausted, and
        what reading the archive raises."""
        made = MadeRequests()
        requests = made.of(import_requests(agent_id, replace, archive))
        with made.told():
            return (await self._call(pb.ImportAgentResponse, requests, timeout_s, has_deadline=False)).snapshot

    async def import_from_file(self, agent_id: str, path: Path, *, replace: bool = False) -> pb.SnapshotVersion:
        """Send an archive that export_to_file saved."""
        return await self.import_agent(agent_id, pieces_of(path), replace=replace)
