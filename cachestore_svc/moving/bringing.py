"""What peers bring of their own accord: whether they may, and how much of it a namespace holds at most."""

import contextlib
from collections.abc import Iterator, Mapping

from cachestore_svc.facts.limits import BELIEVED_S
from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import MAX_PAGE_SIZE
from cachestore_svc.moving.copying import Offered, Progress, came_from
from cachestore_svc.moving.peering.peer_limits import PeerLimits
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.pairing.rights import Verb, over_limit
from cachestore_svc.store.aio_store import AioStore


class Bringing:
    def __init__(self, store: AioStore, peers: Peers, limits: PeerLimits) -> None:
        self._store = store
        self._peers = peers
        self._limits = limits
        self._brought: dict[tuple[str, str], tuple[float, dict[str, int]]] = {}
        self._coming: set[Coming] = set()

    def check(self, verb: Verb, namespace: str, peer: str, agent_id: str, known: Ownership) -> None:
        self._peers.may(verb, namespace, peer, agent_id)(known)
        self._limits.word(peer)
        self._limits.sent(peer, 0, self._peers.settings(peer, namespace).max_bytes)

    @contextlib.contextmanager
    def counted(self, namespace: str, peer: str, agent_id: str, *, is_given: bool) -> Iterator["Coming"]:
        """An agent on its way here. Afterwards only bytes that came count, and the agent only if it `has_come`."""
        coming = Coming(namespace, peer, agent_id, is_given)
        self._coming.add(coming)
        try:
            yield coming
        finally:
            self._coming.discard(coming)
            self._limits.not_sent(peer, coming.announced_bytes - coming.came_bytes)
            if is_given and coming.has_come and (known := self._brought.get((namespace, peer))):
                known[1][agent_id] = coming.total_bytes

    async def check_room(self, coming: "Coming", offered: Offered, progress: Progress, *, is_dry_run: bool) -> None:
        """Whether the missing bytes of a line may be sent, and the whole agent kept; done once for each copy of a line.
        The manifest has been sent already, also in a dry run, after which nothing else is. Raises ResourceExhausted
        (PEER_LIMIT)."""
        if not coming.is_given or coming.knows(progress):
            return
        peer, settings = coming.peer, self._peers.settings(coming.peer, coming.namespace)
        self._limits.sent(peer, offered.manifest.size_bytes, settings.max_bytes)
        coming.add(offered.kv_identity_hash, progress)
        brought = await self._of(coming.namespace, peer)
        if len(brought) > settings.max_agents:
            raise over_limit(peer, f"agents that nobody here has extended ({settings.max_agents})")
        if sum(brought.values()) > settings.max_bytes:
            raise over_limit(peer, f"bytes of agents that nobody here has extended ({settings.max_bytes})")
        if not is_dry_run:
            lacking = progress.bytes_total - progress.bytes_done
            self._limits.sent(peer, lacking, settings.max_bytes)
            coming.announced_bytes += lacking

    async def _of(self, namespace: str, peer: str) -> Mapping[str, int]:
        """Agents that came from the peer and that nobody here has extended, or that are coming, with their bytes."""
        now, key = self._limits.now(), (namespace, peer)
        if key not in self._brought or now - self._brought[key][0] > BELIEVED_S:
            found = await self._store.threads.run(namespace, self._look, namespace, peer)
            self._brought[key] = now, found
        coming = [each for each in self._coming if (each.namespace, each.peer) == key and each.total_bytes]
        return {**self._brought[key][1], **{each.agent_id: each.total_bytes for each in coming}}

    def _look(self, namespace: str, peer: str) -> dict[str, int]:
        names, token, found = self._peers.all_names(peer), "", dict[str, int]()
        while True:
            page = self._store.agents.page(namespace, MAX_PAGE_SIZE, token)
            for agent in page.agents:
                if all(came_from(line, names) for line in agent.lines):
                    found[agent.agent_id] = sum(line.total_bytes for line in agent.lines)
            if not (token := page.next_page_token):
                return found


class Coming:
    def __init__(self, namespace: str, peer: str, agent_id: str, is_given: bool) -> None:
        self.namespace = namespace
        self.peer = peer
        self.agent_id = agent_id
        self.is_given = is_given
        self.announced_bytes = 0
        self.has_come = False
        self._lines: dict[str, Progress] = {}
        self._copies: list[Progress] = []

    def knows(self, progress: Progress) -> bool:
        return any(each is progress for each in self._copies)

    def add(self, line: str, progress: Progress) -> None:
        """A line is copied, perhaps once more after its agent went on there."""
        self._lines[line] = progress
        self._copies.append(progress)

    @property
    def total_bytes(self) -> int:
        """Of all its lines, also of blobs that were here before."""
        return sum(each.bytes_total for each in self._lines.values())

    @property
    def came_bytes(self) -> int:
        return sum(each.bytes_came for each in self._copies)
