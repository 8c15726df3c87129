"""The engine's calls about agents: their newest versions, commits, moves."""

from collections.abc import Sequence

from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import Lineage
from kvasir.formats.digest import Digest

from inference_svc.memory.store import answers
from inference_svc.memory.store.connection import StoreConnection
from inference_svc.memory.store.patience import Budget

_PAGE = 1000


class StoredAgents:
    """The agents of one namespace. Reads with a budget raise StoreMiss; others raise a KvasirError."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    async def heads(self, agent_id: str, kv_identity_hash: str, budget: Budget) -> answers.AgentHeads:
        try:
            agent = await self._connection.read(lambda: self._connection.client.get_agent(agent_id), budget)
        except errors.NotFound:
            return answers.AgentHeads()
        with answers.answer_checked("the store's answer about the agent"):
            lines, made_unix_ms = [answers.head_of(line) for line in agent.lines], agent.created_at.ToMilliseconds()
        newest = max(lines, key=lambda line: line.version, default=answers.NO_HEAD)
        ours = next((line for line in lines if line.kv_identity_hash == kv_identity_hash), None)
        own_line = ours if ours != newest else None
        return answers.AgentHeads(newest, own_line, answers.settings_of(agent), made_unix_ms)

    async def page(self, page_token: str = "") -> tuple[list[answers.ListedAgent], str]:
        """Some agents by name, and the token of the next page; empty behind the last. Raises KvasirError."""
        page = await self._connection.client.list_agents(page_size=_PAGE, page_token=page_token)
        return [answers.listed_agent(agent) for agent in page.agents], page.next_page_token

    async def listed(self, agent_id: str) -> answers.ListedAgent:
        """One agent, as `page` has it. Raises NotFound and any other KvasirError."""
        return answers.listed_agent(await self._connection.client.get_agent(agent_id))

    async def last_move(self, agent_id: str, within_s: float) -> answers.LastMove:
        budget = Budget(within_s, 1.0, self._connection.clock)
        try:
            return answers.last_move_of(
                await self._connection.read(lambda: self._connection.client.get_agent(agent_id), budget)
            )
        except errors.NotFound:
            return answers.NEVER_MOVED

    async def version(self, agent_id: str, version: int, budget: Budget) -> answers.Head:
        """A version of the agent. Raises NotFound (VERSION_NOT_FOUND, AGENT_NOT_FOUND)."""
        snapshot, _ = await self._connection.read(
            lambda: self._connection.client.get_snapshot(agent_id, version=version, timeout_s=budget.remaining_s),
            budget,
        )
        with answers.answer_checked("the store's answer about the version"):
            return answers.head_of(snapshot)

    async def commit(
        self,
        agent_id: str,
        manifest: Digest,
        expected_version: int,
        *,
        lineage: Lineage,
        lease: tuple[str, int],
        awaited: Sequence[Digest],
        timeout_s: float,
    ) -> answers.Head:
        """Make a stored manifest the next version of the agent's line. `lease`: owner and generation. Blobs that are
        `awaited` are on their way, as the manifest may be. Raises Conflict when the head is not its parent, or when the
        lease is fenced.
        """
        owner, generation = lease
        making = self._connection.client.commit(
            agent_id,
            manifest,
            expected_version,
            lease=cachestore_pb2.LeaseToken(owner=owner, generation=generation),
            lineage=lineage,
            awaited=awaited,
            timeout_s=timeout_s,
        )
        return answers.head_of(await self._connection.noting(making))

    async def copy_agent(self, agent_id: str, peer: str, timeout_s: float) -> None:
        """Let a peer copy the agent's bytes ahead of its move; nothing can be seen of it there. Raises KvasirError."""
        async for _ in self._connection.client.copying_agent(peer, agent_id, only_bytes=True, timeout_s=timeout_s):
            pass

    async def move_agent(self, agent_id: str, peer: str, move_id: str, timeout_s: float) -> None:
        """Move the agent to a peer; returns once it owns it. After a KvasirError both stores find out who does."""
        await self._connection.client.move_agent(agent_id, to_peer=peer, move_id=move_id, timeout_s=timeout_s)

    async def has_moved(self, agent_id: str, peer: str, move_id: str) -> bool | None:
        """Whether the agent is this peer's by this move; None while one is under way. Raises KvasirError."""
        owned = (await self._connection.client.get_agent(agent_id)).ownership
        if owned.state == cachestore_pb2.OWNER_STATE_MOVING:
            return None
        has_moved = bool(owned.state == cachestore_pb2.OWNER_STATE_MOVED)
        return has_moved and (owned.peer, owned.move_id) == (peer, move_id)
