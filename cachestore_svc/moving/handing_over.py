"""The source's side of moves: an agent is offered, kept unchanged while its destination reports, and handed over.

Whether it is handed over is decided here and nowhere else, so this store may undo a move at any time before that. It
does so when the destination has been silent for too long. The time is counted on a monotonic clock from when this
process first heard of the move; a restart counts from 0.
"""

from collections.abc import Callable

from kvasir.errors import FailedPrecondition

from cachestore_svc.moving.lease_waiting import once_free
from cachestore_svc.moving.peers import Peers
from cachestore_svc.ownership import Ownership, OwnerState
from cachestore_svc.records import AgentRecord
from cachestore_svc.store import Store
from cachestore_svc.threads import StoreThreads

_Move = tuple[str, str, str]  # namespace, agent, move id


class HandingOver:
    """What peers may ask of one store's agents. On one event loop."""

    def __init__(
        self, store: Store, threads: StoreThreads, peers: Peers, *, patience_s: float, steady: Callable[[], float]
    ) -> None:
        """`patience_s`: a destination that is silent for longer loses its move. `steady` gives seconds, monotonic."""
        self._store = store
        self._threads = threads
        self._peers = peers
        self._patience_s = patience_s
        self._steady = steady
        self._heard: dict[_Move, float] = {}

    async def offer(
        self, namespace: str, agent_id: str, peer: str, move_id: str, generation: int, left_s: float | None
    ) -> tuple[AgentRecord, Ownership]:
        """See Store.offer. Waits for an engine's lease. A peer that knows of a newer owner is believed first. Raises
        FailedPrecondition (PEER_CONFIGURATION) for one that this store does not know."""
        self._check_known(namespace, peer)

        async def ask() -> tuple[AgentRecord, Ownership]:
            return await self._threads.run(namespace, self._store.offer, namespace, agent_id, peer, move_id, generation)

        known = await self._threads.run(namespace, self._store.ownership, namespace, agent_id)
        if generation > known.generation:
            await self.fence(namespace, agent_id, peer, generation, left_s)
        agent, known = await once_free(ask, left_s)
        self._heard[namespace, agent_id, move_id] = self._steady()
        return agent, known

    async def hand_over(self, namespace: str, agent_id: str, peer: str, move_id: str, generation: int) -> None:
        """See Store.hand_over."""
        await self._threads.run(namespace, self._store.hand_over, namespace, agent_id, peer, move_id, generation)
        self._heard.pop((namespace, agent_id, move_id), None)

    async def undo(self, namespace: str, agent_id: str, peer: str, move_id: str) -> None:
        """See Store.undo_move."""
        await self._threads.run(namespace, self._store.undo_move, namespace, agent_id, peer, move_id)
        self._heard.pop((namespace, agent_id, move_id), None)

    async def fence(self, namespace: str, agent_id: str, peer: str, generation: int, left_s: float | None) -> None:
        """See Store.fence. Waits for an engine's lease. Raises FailedPrecondition (PEER_CONFIGURATION)."""
        self._check_known(namespace, peer)

        async def tell() -> Ownership:
            return await self._threads.run(namespace, self._store.fence, namespace, agent_id, peer, generation)

        await once_free(tell, left_s)

    def _check_known(self, namespace: str, peer: str) -> None:
        """Agents change hands only between stores that know each other: a credential for pulls alone takes nothing, and
        the name that is noted for an agent's owner is one that can be asked."""
        if peer not in self._peers.names(namespace):
            raise FailedPrecondition(
                f"this store has no peer {peer!r}, which is the name of the caller's credential: agents move between "
                "stores that know each other, as `kvasir pair` makes them",
                reason="PEER_CONFIGURATION",
            )

    async def undo_if_silent(self, namespace: str, agent_id: str, known: Ownership) -> None:
        """Undo a move whose destination has not been heard of for too long. One to nobody waits for a claim."""
        if known.state is not OwnerState.MOVING or not known.peer:
            return
        heard = self._heard.setdefault((namespace, agent_id, known.move_id), self._steady())
        if self._steady() - heard >= self._patience_s:
            await self.undo(namespace, agent_id, known.peer, known.move_id)
