"""Agents that change hands: the destination pulls, and owns what it pulled once the source has confirmed it.

    copy while the source goes on → offer (nobody extends it now) → copy the rest → receive (durable here)
        → hand over (the source decides) → arrive

After a crash or a cut anywhere `keep` does what is left: a store that received gets the source's decision; a
source whose destination is silent takes the agent back; a claim is reported to all that must know.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import structlog
from kvasir.clients import AioStoreClient
from kvasir.errors import FailedPrecondition, KvasirError, NotFound, PermissionDenied, Unavailable
from kvasir.server.locks import Locks
from kvasir.waits import ANSWER_S, PAUSE_S, RETRY_S

from cachestore_svc.facts import ownership
from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import AgentRecord
from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.moving.arrivals import Arrival, MoveAttempt, MoveOrder, Receiving, Waiting
from cachestore_svc.moving.copying import Progress
from cachestore_svc.moving.handing_over import HandingOver
from cachestore_svc.moving.peering.peers import Peers, answers_of_peer, errors_of_peer
from cachestore_svc.pairing.rights import Verb

_LOG = structlog.get_logger("moves")
_Unfinished = tuple[str, str, Ownership]  # namespace, agent, and its known owner
_TRIES = 3
_MOVE_ID_BYTES, _MAX_DIGITS = 16, 20


class Moves:
    def __init__(
        self, receiving: Receiving, peers: Peers, handing_over: HandingOver, token_hex: Callable[[int], str]
    ) -> None:
        self._receiving = receiving
        self._store = receiving.store
        self._peers = peers
        self._handing_over = handing_over
        self._token_hex = token_hex
        # One move of an agent at a time; the next finds the result of this one.
        self._locks = Locks[tuple[str, str]]()

    # --- an agent comes, or goes ---

    async def here(self, order: MoveOrder) -> AsyncGenerator[Progress | Waiting | AgentRecord, None]:
        """Bring an agent from a peer, and own it. Yields progress and last the agent. Cancelled or failed before all of
        it was here, the move is undone; later, `keep` brings it to its end. Raises NotFound, AlreadyExists,
        FailedPrecondition (MOVE_UNKNOWN, too, when it came by another move than the wanted one),
        Unavailable, DataLoss.
        """
        namespace, agent_id = order.namespace, order.agent_id
        async with self._locks.held((namespace, agent_id)), self._peers.connect(order.peer, namespace) as remote:
            known = await self._finished(namespace, agent_id)
            if order.is_given:
                self._receiving.bringing.check(Verb.MOVE, namespace, order.peer, agent_id, known)
            if known.state is OwnerState.MOVING:
                ownership.check_writable(agent_id, known)
            if not (known.is_owned and known.move_id and await self._has_left(remote, order, known)):
                move_id = order.move_id or self._token_hex(_MOVE_ID_BYTES)
                async with AsyncExitStack() as room:
                    attempt = MoveAttempt(order, known, move_id, self._peers.all_names(order.peer))
                    arrival = Arrival(self._receiving, remote, attempt, room)
                    async with aclosing(arrival.steps()) as steps:
                        async for step in steps:
                            yield step
                if order.is_dry_run:
                    return
                known = await self._store.owner(namespace, agent_id)
                if known.state is OwnerState.ARRIVING:
                    known = await self._decided(remote, namespace, agent_id, known)
                ownership.check_writable(agent_id, known)
            elif order.move_id:
                ownership.check_came_by(agent_id, known, order.move_id)
            yield await self._store.run(namespace, self._store.agents.get, agent_id)

    async def there(
        self, namespace: str, peer: str, agent_id: str, move_id: str, *, is_dry_run: bool
    ) -> AsyncGenerator[Any, None]:
        """Give an agent to a peer: it takes it, and its responses are passed on."""
        await self._store.run(namespace, self._store.agents.get, agent_id)  # else both peers would report none
        name, orders = self._peers.settings(peer, namespace).name, self._handing_over.orders
        async with (
            self._peers.connect(peer, namespace) as remote,
            orders.holding(namespace, agent_id, name, self._token_hex),
        ):
            moving = remote.moving_agent(agent_id, dry_run=is_dry_run, move_id=move_id)
            with answers_of_peer(peer):
                async with aclosing(moving) as responses:
                    async for response in responses:
                        yield response

    async def copied_there(
        self, namespace: str, peer: str, agent_id: str, kv_identity_hash: str, *, is_dry_run: bool, only_bytes: bool
    ) -> AsyncGenerator[Any, None]:
        await self._store.run(namespace, self._store.agents.get, agent_id)
        async with self._peers.connect(peer, namespace) as remote:
            pulling = remote.pulling_agent(
                "", agent_id, kv_identity_hash=kv_identity_hash, dry_run=is_dry_run, only_bytes=only_bytes
            )
            with answers_of_peer(peer):
                async with aclosing(pulling) as responses:
                    async for response in responses:
                        yield response

    async def claim(self, namespace: str, agent_id: str, *, force: bool) -> Ownership:
        """Own an agent. Raises NotFound, FailedPrecondition (AGENT_MOVED, AGENT_MOVING), Unavailable (peer)."""
        known = await self._store.owner(namespace, agent_id)
        if force or known.waits_for_claim:
            return await self._claimed(namespace, agent_id, known, force=force)
        if known.state is OwnerState.ARRIVING:
            async with self._locks.held((namespace, agent_id)):
                await self._finished(namespace, agent_id)
        known = await self._store.run(namespace, self._store.moves.take_back, agent_id)
        ownership.check_writable(agent_id, known)
        return known

    async def _claimed(self, namespace: str, agent_id: str, known: Ownership, *, force: bool) -> Ownership:
        """Own it, above every generation that this store or a peer that answers has heard of."""
        facts = await self._facts_of_peers(namespace, agent_id, known)
        if known.waits_for_claim and not force:
            for peer, there in facts.items():
                await self._give_way(namespace, agent_id, known, peer, there)
        above = max((there.generation for there in facts.values() if there is not None), default=0)
        chance = int(self._token_hex(8), 16)
        # Not forced, the claim rests on what is known: a peer's claim may have come meanwhile.
        expected = None if force else known
        claim = self._store.owners.claim
        known = await self._store.run(namespace, claim, agent_id, chance, above, list(facts), expected)
        with contextlib.suppress(KvasirError):  # `keep` tells it later
            await self._tell(namespace, agent_id, known)
        known = await self._store.owner(namespace, agent_id)
        ownership.check_writable(agent_id, known)
        return known

    async def _facts_of_peers(self, namespace: str, agent_id: str, known: Ownership) -> dict[str, Any]:
        """What each peer knows of the agent's owner, if it heard of a move of it; None: it cannot be reached now."""
        ours = await self._store.labels(namespace, agent_id)

        async def ask(peer: str) -> Any:
            try:
                async with asyncio.timeout(ANSWER_S), self._peers.connect(peer, namespace) as remote:
                    with errors_of_peer(peer):
                        there = await remote.get_agent(agent_id)
                    if ownership.are_two(ours, there.labels):
                        return ownership.HERE
                    return there.ownership if ownership.is_believable(known, there.ownership.generation) else None
            except NotFound:
                return ownership.HERE
            except (KvasirError, TimeoutError):
                return None

        names = self._peers.names(namespace)
        answers = zip(names, await asyncio.gather(*map(ask, names)), strict=True)
        return {peer: there for peer, there in answers if there is None or there.generation}

    async def _give_way(self, namespace: str, agent_id: str, known: Ownership, peer: str, there: Any) -> None:
        """Raises FailedPrecondition when a peer owns the agent, or has it half, in a newer generation; Unavailable."""
        gone = f"if it is gone for good, `kvasir agents claim {agent_id} --force` does not ask"
        if there is None:
            problem = f"peer {peer} may own agent {agent_id!r}, and does not answer; {gone}"
            raise Unavailable(problem, reason="PEER_UNAVAILABLE", retry_after_s=5)
        if int(there.state) == OwnerState.MOVED or there.generation <= known.generation:
            return
        if int(there.state) != OwnerState.OWNED:
            problem = f"agent {agent_id!r} is on its way at peer {peer}: wait for its end there; {gone}"
            raise FailedPrecondition(problem, reason="AGENT_MOVING", metadata={"agent_id": agent_id, "owner": peer})
        told, yield_to = known.generation, self._store.owners.yield_to
        # By order of this store's owner, who cannot know better.
        known = await self._store.run(namespace, yield_to, agent_id, peer, told, there.generation, lambda _: None)
        ownership.check_writable(agent_id, known)

    # --- what a crash, a cut, or another name left ---

    async def rename_peers(self) -> None:
        if names := self._peers.renamed():
            await self._store.threads.run(HOUSE, self._store.owners.rename_peers, names)

    async def keep(self) -> None:
        """Look after unfinished moves, for ever. Each set of peers has a task: a silent one delays only its agents."""
        going: dict[tuple[str, frozenset[str]], asyncio.Task[None]] = {}
        try:
            while True:
                try:
                    going = {key: task for key, task in going.items() if not task.done()}
                    for key, moves in (await self._unfinished()).items():
                        if key not in going:
                            going[key] = asyncio.create_task(self._go_on(moves))
                except KvasirError as error:
                    _LOG.warning("moves.not_looked_at", reason=error.reason)
                except Exception:  # noqa: BLE001  a bug of ours must not leave agents without an owner for good
                    _LOG.exception("moves.failed")
                await asyncio.sleep(RETRY_S)
        finally:
            for task in going.values():
                task.cancel()
            await asyncio.gather(*going.values(), return_exceptions=True)

    async def _unfinished(self) -> dict[tuple[str, frozenset[str]], list[_Unfinished]]:
        """Unfinished moves, by namespace and the peers to be called. Those that need no peer are done first."""
        found: dict[tuple[str, frozenset[str]], list[_Unfinished]] = {}
        unfinished = await self._store.threads.run(HOUSE, self._store.owners.unfinished)
        self._handing_over.forget_all_but(
            {(namespace, agent_id, known.peer) for namespace, agent_id, known in unfinished}
        )
        for namespace, agent_id, known in unfinished:
            try:
                await self._handing_over.undo_if_silent(namespace, agent_id, known)
            except KvasirError as error:
                _LOG.info("move.unfinished", peers=known.peer, reason=error.reason)
            today = ownership.renamed(known, self._peers.renamed())  # a move notes the name with which it began
            wanted = {*today.tells, *([today.peer] if today.state is OwnerState.ARRIVING else [])}
            if peers := wanted.intersection(self._peers.with_address(namespace)):
                found.setdefault((namespace, frozenset(peers)), []).append((namespace, agent_id, known))
        return found

    async def _go_on(self, moves: Sequence[_Unfinished]) -> None:
        for namespace, agent_id, known in moves:
            if (namespace, agent_id) in self._locks:
                continue  # a running move does it
            try:
                async with self._locks.held((namespace, agent_id)):
                    await self._finished(namespace, agent_id)
                    if known.tells:
                        await self._tell(namespace, agent_id, known)
            except KvasirError as error:
                _LOG.info("move.unfinished", peers=known.tells or known.peer, reason=error.reason)
            except Exception:  # noqa: BLE001  as in `keep`
                _LOG.exception("moves.failed")

    async def _finished(self, namespace: str, agent_id: str) -> Ownership:
        """What is known of the owner, once an earlier move to here is at its end. Raises Unavailable."""
        known = await self._store.owner(namespace, agent_id)
        if known.state is not OwnerState.ARRIVING:
            return known
        async with self._peers.connect(known.peer, namespace) as remote:
            return await self._decided(remote, namespace, agent_id, known)

    async def _decided(self, remote: AioStoreClient, namespace: str, agent_id: str, known: Ownership) -> Ownership:
        """Request the decision of the source of an agent that was received, and follow it. Raises Unavailable."""
        for tries_left in reversed(range(_TRIES)):
            try:
                with answers_of_peer(known.peer):
                    await remote.hand_over_agent(agent_id, known.move_id, known.generation, timeout_s=ANSWER_S)
            except FailedPrecondition as error:
                if error.reason != "MOVE_UNKNOWN":
                    raise
                done = self._store.moves.did_not_arrive
            except Unavailable:
                if not tries_left:
                    raise
                await asyncio.sleep(PAUSE_S)
                continue
            else:
                done = self._store.moves.arrive
            return await self._store.run(namespace, done, agent_id, known.move_id)
        raise AssertionError("the last try answers or raises")

    async def _has_left(self, remote: AioStoreClient, order: MoveOrder, known: Ownership) -> bool:
        """Whether the peer confirms that it gave this very agent away in this generation: an earlier call did it."""
        with answers_of_peer(order.peer):
            agent = await remote.get_agent(order.agent_id)
        if ownership.are_two(await self._store.labels(order.namespace, order.agent_id), agent.labels):
            return False
        there = agent.ownership
        return int(there.state) == OwnerState.MOVED and there.generation == known.generation

    async def _tell(self, namespace: str, agent_id: str, claim: Ownership) -> None:
        """Report an agent's owner to the peers that lack it. Raises Unavailable, NotFound (PEER_UNKNOWN)."""
        failures = list[KvasirError]()
        for peer in claim.tells:
            try:
                await self._report_to(namespace, agent_id, peer, claim.generation)
            except KvasirError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _report_to(self, namespace: str, agent_id: str, peer: str, generation: int) -> None:
        async with self._peers.connect(peer, namespace) as remote:
            if not await self._knows_of_moves(remote, namespace, agent_id, peer):
                await self._store.run(namespace, self._store.owners.told, agent_id, peer, generation)
                return
            try:
                with answers_of_peer(peer):
                    await remote.fence_agent(agent_id, generation, timeout_s=ANSWER_S)
            except FailedPrecondition as error:
                if error.reason == "PEER_MAY_NOT":
                    _LOG.warning("claim.not_believed", peer=peer)  # what it has is its own, until its owner lets it go
                elif await self._gave_way(namespace, agent_id, peer, generation, error):
                    return
        await self._store.run(namespace, self._store.owners.told, agent_id, peer, generation)

    async def _gave_way(
        self, namespace: str, agent_id: str, peer: str, generation: int, refused: FailedPrecondition
    ) -> bool:
        """Whether a peer answers a claim with a newer owner, and has the right to. Raises `refused` for all else."""
        if refused.reason != "OWNER_NEWER":
            raise refused
        newer, may = (
            _read_generation(refused.metadata.get("generation", "")),
            self._peers.may(Verb.FENCE, namespace, peer, agent_id),
        )

        about = agent_id, peer, generation, newer, may
        try:
            await self._store.run_once_free(namespace, agent_id, None, self._store.owners.yield_to, *about)
        except PermissionDenied:
            _LOG.warning("claim.contradicted", peer=peer)
            return False
        return True

    async def _knows_of_moves(self, remote: AioStoreClient, namespace: str, agent_id: str, peer: str) -> bool:
        """False of a peer whose agent of this name never moved, or first by another move: that is another one."""
        try:
            with answers_of_peer(peer):
                there = await remote.get_agent(agent_id)
        except NotFound:
            return True  # it may know of an owner all the same
        ours = await self._store.labels(namespace, agent_id)
        return there.HasField("ownership") and not ownership.are_two(ours, there.labels)


def _read_generation(text: str) -> int:
    """A generation as a refusal has it; -1, which nobody believes, where that is no number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS else -1
