"""What peers bring of their own accord: whether they may, and how much of it a namespace holds at most."""

from collections.abc import Mapping

from kvasir.formats.digest import Digest

from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import MAX_PAGE_SIZE
from cachestore_svc.moving.copying import Progress, came_from
from cachestore_svc.moving.peer_limits import PeerLimits
from cachestore_svc.moving.peers import Peers
from cachestore_svc.pairing.rights import Verb, over_limit
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads

# So long is it known what a peer has brought: to look reads every agent of the namespace.
_KNOWN_S = 60.0


class Bringing:
    """Copies and agents that peers give to one store. On one event loop."""

    def __init__(self, store: Store, threads: StoreThreads, peers: Peers, limits: PeerLimits) -> None:
        self._store = store
        self._threads = threads
        self._peers = peers
        self._limits = limits
        self._brought: dict[tuple[str, str], tuple[float, dict[str, int]]] = {}

    def check(self, verb: Verb, namespace: str, peer: str, agent_id: str, known: Ownership) -> None:
        """Raises PermissionDenied (PEER_MAY_NOT), ResourceExhausted (PEER_LIMIT)."""
        self._peers.may(verb, namespace, peer, agent_id)(known)
        self._limits.word(peer)
        self._limits.sent(peer, 0, self._peers.settings(peer, namespace).max_bytes)

    async def check_room(
        self, namespace: str, peer: str, agent_id: str, manifest: Digest, progress: Progress, *, is_dry_run: bool
    ) -> None:
        """Whether what lacks of an agent may be sent, and all of it kept. The manifest came already, also in a dry run,
        after which nothing else does. Raises ResourceExhausted (PEER_LIMIT)."""
        settings = self._peers.settings(peer, namespace)
        self._limits.sent(peer, manifest.size_bytes, settings.max_bytes)
        brought = {**await self._of(namespace, peer), agent_id: progress.bytes_total}
        if len(brought) > settings.max_agents:
            raise over_limit(peer, f"agents that nobody here has extended ({settings.max_agents})")
        if sum(brought.values()) > settings.max_bytes:
            raise over_limit(peer, f"bytes of agents that nobody here has extended ({settings.max_bytes})")
        if is_dry_run:
            return
        self._limits.sent(peer, progress.bytes_total - progress.bytes_done, settings.max_bytes)
        self._brought[namespace, peer][1][agent_id] = progress.bytes_total

    async def _of(self, namespace: str, peer: str) -> Mapping[str, int]:
        """Agents that came from the peer and that nobody here has extended since, with their bytes."""
        now, key = self._limits.now(), (namespace, peer)
        if key not in self._brought or now - self._brought[key][0] > _KNOWN_S:
            found = await self._threads.run(namespace, self._look, namespace, peer)
            self._brought[key] = now, found
        return self._brought[key][1]

    def _look(self, namespace: str, peer: str) -> dict[str, int]:
        names, token, found = self._peers.all_names(peer), "", dict[str, int]()
        while True:
            page = self._store.list_agents(namespace, MAX_PAGE_SIZE, token)
            for agent in page.agents:
                if all(came_from(line, names) for line in agent.lines):
                    found[agent.agent_id] = sum(line.total_bytes for line in agent.lines)
            if not (token := page.next_page_token):
                return found
