"""The source's side of moves: an agent is offered, kept unchanged while its destination reports, and handed over. That
is decided here alone, so before it a move may be undone at any time, as when the destination is silent for too long;
time counts from when this process first heard of the move.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvasir.errors import FailedPrecondition, PermissionDenied

from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import AgentRecord
from cachestore_svc.moving.orders import Orders
from cachestore_svc.moving.peering.peer_limits import PeerLimits
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.pairing.rights import Verb
from cachestore_svc.store.aio_store import AioStore

_Agent = tuple[str, str, str]  # namespace, agent, peer
_SLOWEST_BYTES_PER_S = 1 << 20


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last word about a move. `since_unix_ms`: of the agent's fact, which another store over the catalog renews."""

    since_unix_ms: int
    at_s: float
    size_bytes: int


class HandingOver:
    def __init__(
        self, store: AioStore, peers: Peers, limits: PeerLimits, *, patience_s: float, steady: Callable[[], float]
    ) -> None:
        """`patience_s`: a destination that is silent for longer loses its move; ten times as long, and the time that
        the agent's bytes take at a mebibyte a second, is all that a move may last. `steady` gives seconds, monotonic.
        """
        self._store = store
        self._peers = peers
        self._limits = limits
        self._patience_s = patience_s
        self._steady = steady
        self._heard: dict[_Agent, _Heard] = {}
        self.orders = Orders(store)

    async def offer(
        self, namespace: str, agent_id: str, peer: str, move_id: str, generation: int, left_s: float | None
    ) -> tuple[AgentRecord, Ownership]:
        """See Store.offer. Waits for an engine's lease. A peer that knows of a newer owner is believed first, if it may
        say so; if not, this store's owner may still order that it gets the agent. Raises FailedPrecondition
        (PEER_CONFIGURATION) for one that this store does not know, PermissionDenied (PEER_MAY_NOT), ResourceExhausted
        (PEER_LIMIT)."""
        self._check_known(namespace, peer)
        agent = namespace, agent_id, peer
        known = await self._store.owner(namespace, agent_id)
        is_ordered, is_new = await self.orders.has(*agent), known.state is not OwnerState.MOVING
        may = self._peers.may(Verb.OFFER, namespace, peer, agent_id, is_ordered=is_ordered)
        may(known)
        self._limits.word(peer)
        if is_new and not is_ordered:
            self._limits.check_try(agent)

        if generation > known.generation:
            try:
                await self.fence(namespace, agent_id, peer, generation, left_s)
            except PermissionDenied:
                if not is_ordered:
                    raise
        about = agent_id, peer, move_id, generation, may, not is_ordered
        offer = self._store.moves.offer
        record, known = await self._store.run_once_free(namespace, agent_id, left_s, offer, *about)
        if known.state is OwnerState.MOVING:
            self._limits.began(agent, is_new=is_new)
            self._heard[agent] = _Heard(known.since_unix_ms, self._steady(), _bytes_of(record))
        return record, known

    async def hand_over(self, namespace: str, agent_id: str, peer: str, move_id: str, generation: int) -> None:
        """See Store.hand_over. Raises NotFound (PEER_UNKNOWN) of a peer that was removed since it began the move, and
        PermissionDenied (PEER_MAY_NOT) of one whose right to it was lowered since."""
        may = self._peers.may(Verb.HAND_OVER, namespace, peer, agent_id)
        self._limits.word(peer)
        await self._store.run(namespace, self._store.moves.hand_over, agent_id, peer, move_id, generation, may)
        self._heard.pop((namespace, agent_id, peer), None)
        self._limits.ended((namespace, agent_id, peer))

    async def undo(self, namespace: str, agent_id: str, peer: str, move_id: str) -> None:
        """See Store.undo. Raises NotFound (PEER_UNKNOWN)."""
        self._peers.settings(peer, namespace)
        self._limits.word(peer)
        await self._undo(namespace, agent_id, peer, move_id)

    async def fence(self, namespace: str, agent_id: str, peer: str, generation: int, left_s: float | None) -> None:
        """See Store.fence. Waits for a lease. Raises FailedPrecondition, PermissionDenied, ResourceExhausted."""
        self._check_known(namespace, peer)
        may = self._peers.may(Verb.FENCE, namespace, peer, agent_id)
        self._limits.word(peer)
        about = agent_id, peer, generation, may
        await self._store.run_once_free(namespace, agent_id, left_s, self._store.owners.fence, *about)

    def _check_known(self, namespace: str, peer: str) -> None:
        """Agents change hands only between stores that know each other, so that an owner's name can be resolved."""
        if peer not in self._peers.names(namespace):
            raise FailedPrecondition(
                f"this store has no peer {peer!r}, which is the name of the caller's credential: agents move between "
                "stores that know each other, as `kvasir pair` makes them",
                reason="PEER_CONFIGURATION",
            )

    async def undo_if_silent(self, namespace: str, agent_id: str, known: Ownership) -> None:
        """Undo a move whose destination is silent for too long, or does not end it. One to nobody waits for a claim."""
        if known.state is not OwnerState.MOVING or not known.peer:
            return
        agent = namespace, agent_id, known.peer
        before = self._heard.get(agent)
        size_bytes = before.size_bytes if before else _bytes_of(await self._store.agent(namespace, agent_id))
        is_same = before is not None and before.since_unix_ms == known.since_unix_ms
        heard = before if before and is_same else _Heard(known.since_unix_ms, self._steady(), size_bytes)
        self._heard[agent] = heard
        self._limits.began(agent, is_new=before is None)
        longest_s = 10 * self._patience_s + heard.size_bytes / _SLOWEST_BYTES_PER_S
        if self._steady() - heard.at_s >= self._patience_s or self._limits.lasts_s(agent) >= longest_s:
            await self._undo(namespace, agent_id, known.peer, known.move_id)

    def forget_all_but(self, moving: Collection[_Agent]) -> None:
        """Another store over the catalog may have ended the others."""
        self._heard = {agent: heard for agent, heard in self._heard.items() if agent in moving}

    async def _undo(self, namespace: str, agent_id: str, peer: str, move_id: str) -> None:
        undo = self._store.moves.undo
        known = await self._store.run(namespace, undo, agent_id, peer, move_id)
        if known.state is not OwnerState.MOVING:
            self._heard.pop((namespace, agent_id, peer), None)
            self._limits.failed((namespace, agent_id, peer))


def _bytes_of(agent: AgentRecord | None) -> int:
    return sum(line.total_bytes for line in agent.lines) if agent is not None else 0
