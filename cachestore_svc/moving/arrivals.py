"""Brings an agent here from a peer, until all of it is durable and only the source's decision is missing."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from kvasir.clients import AioStoreClient
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError, PermissionDenied, Unavailable
from kvasir.formats.digest import Digest
from kvasir.formats.manifest import MAX_MANIFEST_BYTES
from kvasir.waits import ANSWER_S, SOON_S

from cachestore_svc.facts import ownership
from cachestore_svc.facts.limits import check_all_labels, check_label_texts, check_range
from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import MAX_RETAINED_VERSIONS, SnapshotVersion
from cachestore_svc.moving.bringing import Bringing
from cachestore_svc.moving.copying import LineCopies, LineOrder, Offered, Progress, came_from, check_owns
from cachestore_svc.moving.peering.peers import answers_of_peer
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.move_steps import ArrivingAgent, ArrivingLine


@dataclass(frozen=True, slots=True)
class MoveOrder:
    namespace: str
    peer: str
    agent_id: str
    is_dry_run: bool = False
    is_given: bool = False  # the peer wanted it, and not somebody here
    move_id: str = ""  # empty: a new one


@dataclass(frozen=True, slots=True)
class MoveAttempt:
    order: MoveOrder
    known: Ownership  # of the agent's owner, at this store; nobody else changes it meanwhile
    move_id: str
    giver: Sequence[str]  # the peer's names, the earlier ones too


@dataclass(frozen=True, slots=True)
class Receiving:
    store: AioStore
    copies: LineCopies
    bringing: Bringing


@dataclass(frozen=True, slots=True)
class Waiting:
    """An engine of the source has the agent's lease."""

    lease_owner: str


class Arrival:
    """One try. A failure before `receive` undoes the move at its source."""

    def __init__(
        self, receiving: Receiving, remote: AioStoreClient, attempt: MoveAttempt, room: AsyncExitStack
    ) -> None:
        self._store = receiving.store
        self._copies = receiving.copies
        self._bringing = receiving.bringing
        self._remote = remote
        self._order = order = attempt.order
        self._known = attempt.known
        self._move_id = attempt.move_id
        self._generation = attempt.known.generation  # the newest of the agent's that is known here or there
        self._giver = attempt.giver
        self._room = room
        self._heads: dict[str, SnapshotVersion] = {}
        self._labels: Mapping[str, str] = {}
        self._offered: dict[str, Offered] = {}
        self._named: list[Digest] = []  # by the offer; nothing here names it yet
        self._progress: dict[str, Progress] = {}
        self._coming = room.enter_context(
            self._bringing.counted(order.namespace, order.peer, order.agent_id, is_given=order.is_given)
        )

    async def steps(self) -> AsyncGenerator[Progress | Waiting, None]:
        """Copy, have the source stop, copy the rest, receive. A dry run ends with its first progress."""
        order = self._order
        await self._look_here()
        with answers_of_peer(order.peer):
            there = await self._remote.get_agent(order.agent_id)
        if ownership.are_two(self._labels, there.labels):
            raise ownership.owned_here(order.agent_id)
        check_owns(order.peer, there)
        self._generation = max(self._generation, there.ownership.generation)
        await self._room.enter_async_context(self._copies.kept(order.namespace, self._named))
        async with aclosing(self._copied(there)) as ahead:
            async for progress in ahead:
                yield progress
        if order.is_dry_run:
            return
        offer: Any = None
        try:
            while offer is None:
                try:
                    offer = await self._ask()
                except Unavailable as error:
                    if error.reason != "LEASE_HELD":
                        raise
                    yield Waiting(error.metadata.get("owner", ""))
            async with self._beating() as check, aclosing(self._copied(offer.agent)) as rest:
                async for progress in rest:
                    check()
                    yield progress
                check()
                await self._receive(offer)
        except BaseException:
            await self._undo()
            raise

    async def _look_here(self) -> None:
        """What there is of the agent here. Raises AlreadyExists, FailedPrecondition when a peer may not replace it."""
        order, known = self._order, self._known
        agent = await self._store.agent(order.namespace, order.agent_id)
        self._heads = {line.kv_identity_hash: line for line in agent.lines} if agent is not None else {}
        self._labels = agent.labels if agent is not None else {}
        if not order.is_given:
            return
        if known.state is OwnerState.MOVED and known.peer != order.peer:
            ownership.check_writable(order.agent_id, known)
        if known.is_owned and not all(came_from(line, self._giver) for line in self._heads.values()):
            raise ownership.owned_here(order.agent_id)

    async def _copied(self, there: Any) -> AsyncGenerator[Progress, None]:
        """Copy every line of the agent as it is there, but for those that were copied already."""
        for line in there.lines:
            known = self._offered.get(line.kv_identity_hash)
            if known is not None and known.manifest.hash == line.manifest.hash:
                continue
            async with aclosing(self._copied_line(line)) as steps:
                async for _ in steps:
                    yield _sum(self._progress.values())
                    if self._order.is_dry_run:
                        break

    async def _copied_line(self, line: Any) -> AsyncGenerator[None, None]:
        order = self._order
        wanted = LineOrder(order.namespace, order.peer, order.agent_id, line.kv_identity_hash, line.version)
        async with self._copies.manifests.parsing(order.namespace, MAX_MANIFEST_BYTES):
            offered = await self._copies.take_offer(self._remote, wanted, self._room)
        ours = max(self._heads.values(), key=lambda each: each.version, default=None)
        is_newer = ours is not None and ours.manifest.hash in (offered.manifest.hash, offered.parent_manifest)
        # A copy that nobody has extended may be replaced, also where its source does not keep that version any more.
        is_copy = ours is not None and came_from(ours, self._giver, order.agent_id)
        if self._known.is_owned and ours is not None and not is_newer and not is_copy:
            await self._copies.check_ancestor(self._remote, wanted, ours)
        self._named += offered.everything
        async with aclosing(self._copies.fetch(self._remote, wanted, offered)) as steps:
            async for progress in steps:
                await self._bringing.check_room(self._coming, offered, progress, is_dry_run=order.is_dry_run)
                self._progress[line.kv_identity_hash] = progress
                yield None
        self._offered[line.kv_identity_hash] = offered

    async def _ask(self) -> Any:
        order = self._order
        with answers_of_peer(order.peer):
            return await self._remote.offer_agent(order.agent_id, self._move_id, self._generation, timeout_s=ANSWER_S)

    @contextlib.asynccontextmanager
    async def _beating(self) -> AsyncGenerator[Callable[[], None], None]:
        """Let the source hear of the move meanwhile; FailedPrecondition (MOVE_UNKNOWN) once it has undone it."""
        refusals: list[FailedPrecondition] = []

        async def beat() -> None:
            while not refusals:
                await asyncio.sleep(ANSWER_S)
                try:
                    await self._ask()
                except FailedPrecondition as error:
                    refusals.append(error)
                except KvasirError:
                    continue  # the hand-over tells

        def check() -> None:
            if refusals:
                raise refusals[0]

        task = asyncio.create_task(beat())
        try:
            yield check
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _receive(self, offer: Any) -> None:
        order, agent = self._order, offer.agent
        try:
            check_range("retained_versions", agent.retained_versions, 1, MAX_RETAINED_VERSIONS)
            check_label_texts(agent.labels)
            check_all_labels(agent.labels)
        except InvalidArgument as error:
            about = {"agent_id": order.agent_id}
            raise PermissionDenied(
                f"peer {order.peer}: {error.message}", reason="PEER_MAY_NOT", metadata=about
            ) from None
        arriving = ArrivingAgent(
            agent_id=order.agent_id,
            peer=order.peer,
            move_id=self._move_id,
            generation=offer.generation,
            lines=[self._arriving(line) for line in sorted(agent.lines, key=lambda each: int(each.version))],
            labels=dict(agent.labels),
            is_pinned=agent.is_pinned,
            retained_versions=agent.retained_versions,
        )
        async with self._copies.manifests.parsing(order.namespace, MAX_MANIFEST_BYTES):
            agent = order.namespace, order.agent_id
            await self._store.run_once_free(*agent, None, self._store.moves.receive, arriving)
        self._coming.has_come = True

    def _arriving(self, line: Any) -> ArrivingLine:
        order, offered = self._order, self._offered[line.kv_identity_hash]
        return ArrivingLine(
            offered.kv_identity_hash,
            offered.manifest,
            f"{order.peer}/{order.agent_id}@{offered.version}",
            line.is_text_own or not line.is_brought,
            self._heads.get(offered.kv_identity_hash),
        )

    async def _undo(self) -> None:
        """Best effort: a source that does not hear of it undoes the move itself, after a while."""
        undoing = asyncio.ensure_future(self._remote.undo_move(self._order.agent_id, self._move_id, timeout_s=SOON_S))
        with contextlib.suppress(KvasirError):
            try:
                await asyncio.shield(undoing)
            except asyncio.CancelledError:
                await asyncio.wait({undoing})
                undoing.exception()
                raise


def _sum(parts: Iterable[Progress]) -> Progress:
    total = Progress(0, 0)
    for part in parts:
        total.blobs_total += part.blobs_total
        total.bytes_total += part.bytes_total
        total.blobs_done += part.blobs_done
        total.bytes_done += part.bytes_done
        total.blobs_skipped += part.blobs_skipped
    return total
