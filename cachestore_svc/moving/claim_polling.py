"""Polls the peers whether another store claimed agents of this one: at the start, every minute, after a sleep."""

import asyncio
from collections.abc import Callable, Sequence

import structlog
from kvasir.clients import AioStoreClient
from kvasir.errors import DataLoss, FailedPrecondition, KvasirError, NotFound, PermissionDenied, Unavailable
from kvasir.waits import LONGEST_RETRY_S, RETRY_S, SOON_S

from cachestore_svc.facts import ownership
from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import DEFAULT_LEASE_TTL_S
from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.moving.handing_over import HandingOver
from cachestore_svc.moving.peering.peers import Peers, answers_of_peer
from cachestore_svc.pairing.rights import Verb
from cachestore_svc.store.aio_store import AioStore

_LOG = structlog.get_logger("moves")
_Peer = tuple[str, str]  # namespace, name


class ClaimPolling:
    """On one event loop."""

    def __init__(
        self,
        store: AioStore,
        peers: Peers,
        handing_over: HandingOver,
        uptime: Callable[[], float],
        *,
        every_s: float = LONGEST_RETRY_S,
    ) -> None:
        """`uptime` gives seconds, monotonic, which pass while the machine sleeps, too."""
        self._store = store
        self._peers = peers
        self._handing_over = handing_over
        self._uptime = uptime
        self._every_s = every_s
        self._unsure: set[_Peer] = set()  # whose claims are not all known

    async def run(self) -> None:
        """Poll for as long as the store serves. A peer that does not answer delays a round by a call's deadline."""
        pause_s = RETRY_S  # after a sleep the network comes back a little later
        while True:
            try:
                await self.ask()
            except KvasirError as error:
                _LOG.warning("moves.claims_not_asked_for", reason=error.reason)
            except Exception:  # noqa: BLE001  a bug of ours must not leave agents with two owners for good
                _LOG.exception("moves.claims_not_asked_for")
            pause_s = min(2 * pause_s, self._every_s) if self._unsure else self._every_s
            if await self._stood_still_in(pause_s):
                pause_s = RETRY_S

    async def ask(self) -> None:
        """Poll every peer once about every agent that is owned here and ever changed hands."""
        owned: dict[str, list[tuple[str, Ownership]]] = {}
        for namespace, agent_id, known in await self._store.threads.run(HOUSE, self._store.owners.known):
            if known.is_owned:
                owned.setdefault(namespace, []).append((agent_id, known))
        asked = [(namespace, peer) for namespace in owned for peer in self._peers.with_address(namespace)]
        self._unsure.intersection_update(asked)
        await asyncio.gather(*(self._ask_peer(each, owned[each[0]]) for each in asked))

    async def _ask_peer(self, asked: _Peer, owned: Sequence[tuple[str, Ownership]]) -> None:
        namespace, peer = asked
        claims, why = dict[str, int](), ""
        try:
            async with self._peers.connect(peer, namespace) as remote:
                for agent_id, known in owned:
                    if not self._may_claim(namespace, peer, agent_id, known):
                        continue
                    try:
                        claims[agent_id] = await self._claimed_there(remote, peer, namespace, agent_id, known)
                    except (FailedPrecondition, DataLoss) as error:  # may be about this agent alone
                        why = error.reason
        except KvasirError as error:
            why = error.reason
        if not why:
            self._unsure.discard(asked)
        elif asked not in self._unsure:  # reported once, and not every minute of the days that a peer may be away
            _LOG.info("moves.not_asked", peer=peer, reason=why)
            self._unsure.add(asked)
        # Beside each other: each may wait for the end of a turn.
        await asyncio.gather(*(self._fence(asked, *claim) for claim in claims.items() if claim[1]))

    def _may_claim(self, namespace: str, peer: str, agent_id: str, known: Ownership) -> bool:
        try:
            self._peers.may(Verb.FENCE, namespace, peer, agent_id)(known)
        except PermissionDenied:
            return False
        return True

    async def _claimed_there(
        self, remote: AioStoreClient, peer: str, namespace: str, agent_id: str, known: Ownership
    ) -> int:
        """The generation in which a peer has claimed an agent; 0: it has not. Raises KvasirError."""
        try:
            with answers_of_peer(peer):
                agent = await remote.get_agent(agent_id)
        except NotFound:
            return 0
        there = agent.ownership
        # Without this store's word only a claim makes another one the owner: below, it is another agent's history.
        is_claim = there.generation >= ownership.CLAIM_STEP and ownership.is_believable(known, there.generation)
        if not is_claim or int(there.state) != OwnerState.OWNED or there.generation <= known.generation:
            return 0
        ours = await self._store.labels(namespace, agent_id)
        return 0 if ownership.are_two(ours, agent.labels) else int(there.generation)

    async def _fence(self, asked: _Peer, agent_id: str, generation: int) -> None:
        namespace, peer = asked
        try:
            await self._handing_over.fence(namespace, agent_id, peer, generation, DEFAULT_LEASE_TTL_S)
        except KvasirError as error:  # its lease, or a newer owner of which this store heard meanwhile
            _LOG.info("moves.not_heard", peer=peer, reason=error.reason)
            if isinstance(error, Unavailable):
                self._unsure.add(asked)

    async def _stood_still_in(self, seconds: float) -> bool:
        """Wait so long, and no longer than until the machine wakes from a sleep; whether it slept."""
        while seconds > 0:
            began, tick_s = self._uptime(), min(seconds, RETRY_S)
            await asyncio.sleep(tick_s)
            if self._uptime() - began > tick_s + SOON_S:
                return True
            seconds -= tick_s
        return False
