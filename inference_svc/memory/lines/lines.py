"""The lines of one namespace that this engine extends: found by agent, kept by one heartbeat, informed by events. A
lease is given back when its agent's memory was dropped, or another engine wants it and no turn runs; at once for a
rollback, a deletion or the like.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping

import structlog
from kvasir import errors
from kvasir.waits import PAUSE_S, PROGRESS_S, SOON_S

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.lines.known_versions import KnownVersions
from inference_svc.memory.lines.line import Line
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.lines.line_states import COUNTS_S, Lease
from inference_svc.memory.store.answers import (
    LEASE_TTL_S,
    AgentGone,
    EventsLost,
    HeadMoved,
    LeaseWanted,
    StoreEvent,
)
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model.model_host import MemoriesLeft

_LOG = structlog.get_logger(__name__)
_BEAT_S = LEASE_TTL_S / 3
_BEAT_TIMEOUT_S = COUNTS_S - _BEAT_S  # a busy store answers late: then all leases still count
_MAX_PER_BEAT = 10_000
_MOST_AGENTS = 4_096  # whose versions are known


class Lines:
    """The lines of one namespace, on one event loop. `start` it, and `close` it at the end."""

    def __init__(self, namespace: str, store: RemoteCache, parts: LineParts) -> None:
        self.namespace = namespace
        self.store = store
        self._parts = parts
        self._lines: dict[str, Line] = {}
        self._known: OrderedDict[str, KnownVersions] = OrderedDict()  # by agent, those used last
        self._tasks: set[asyncio.Task[None]] = set()

    def line(self, agent_id: str) -> Line:
        """The agent's line. Get it for each use, or keep it in use: a line that nobody uses is forgotten."""
        if (line := self._lines.get(agent_id)) is None:
            key, known = AgentKey(self.namespace, agent_id), self._known.get(agent_id) or KnownVersions()
            line = self._lines[agent_id] = Line(key, self.store, self._parts, self._spawn, known)
        self._known[agent_id] = line.known
        self._known.move_to_end(agent_id)
        if len(self._known) > _MOST_AGENTS:
            self._known.popitem(last=False)
        return line

    def start(self) -> None:
        self._spawn(self._beats())
        self._spawn(self._follow())

    async def drain(self, patience_s: float) -> None:
        if running := {task for line in self._lines.values() for task in line.publications.running}:
            await asyncio.wait(running, timeout=patience_s)

    def end_retries(self) -> None:
        for line in self._lines.values():
            line.publications.close()

    async def close(self) -> None:
        """Give back all leases. Those that the store does not take at once end by themselves."""
        for task in list(self._tasks):
            task.cancel()
        held = [line.lease for line in self._lines.values() if line.lease.held is not None]
        self._lines.clear()
        releasing = [asyncio.create_task(lease.hand_on()) for lease in held]
        if releasing:
            _, late = await asyncio.wait(releasing, timeout=SOON_S)
            for task in late:
                task.cancel()

    async def beat(self) -> None:
        """Prolong the leases of agents that are used or hot, and give back the others."""
        hot = self._hot_agents()
        kept: dict[str, Lease] = {}
        for agent_id, line in list(self._lines.items()):
            if not line.is_used and agent_id not in hot:
                del self._lines[agent_id]
                line.publications.close()  # nothing is hot that could be tried again
                line.lease.give_back()
            elif line.lease.held is not None:
                kept[agent_id] = line.lease.held
        agents = list(kept)
        for first in range(0, len(agents), _MAX_PER_BEAT):
            await self._prolong({agent: kept[agent] for agent in agents[first : first + _MAX_PER_BEAT]})

    async def _prolong(self, leases: dict[str, Lease]) -> None:
        sent_at = self._parts.lease_clock()
        generations = {agent_id: lease.generation for agent_id, lease in leases.items()}
        renewed = await self.store.leases.renew(
            self._parts.owner, self._parts.engine.model.kv_identity_hash, generations, _BEAT_TIMEOUT_S
        )
        for agent_id, lease in leases.items():
            line = self._lines.get(agent_id)
            if line is None or line.lease.held is not lease:
                continue  # another lease was granted since: the answer is about the old one
            if agent_id not in renewed.lost:
                lease.prolonged(sent_at)
                continue
            # A lease that had not ended was taken back. The event that reports it may come later, or not at all.
            if not lease.has_ended(self._parts.lease_clock()):
                line.wanted(takes_back=True)
            line.lease.held = None
        for agent_id in renewed.wanted:
            if (line := self._lines.get(agent_id)) and line.lease.generation == generations.get(agent_id):
                line.wanted(takes_back=False)

    async def _beats(self) -> None:
        """Begin each in time, whether or not the last one was answered: then a store that answers all of them late
        keeps all leases, which count from the request on.
        """
        while True:
            await asyncio.sleep(_BEAT_S)
            self._spawn(self._beat())

    async def _beat(self) -> None:
        try:
            await self.beat()
        except errors.KvasirError:
            return  # leases count for a while without a heartbeat
        except Exception:  # noqa: BLE001 - it has no reader but the log
            _LOG.exception("lease.beat_failed", namespace=self.namespace)

    async def _follow(self) -> None:
        """Follow the namespace's events. After a cut they go on from the last cursor; heartbeats report lost leases."""
        pause_s = PAUSE_S
        while True:
            try:
                async for event in self.store.events.watch():
                    self._happened(event)
                    pause_s = PAUSE_S
            except (errors.Unavailable, errors.DeadlineExceeded):
                pause_s = PAUSE_S  # the store is away, or stops
            except errors.KvasirError as error:
                pause_s = min(2 * pause_s, LEASE_TTL_S)  # the next answer is the same, most likely
                if error.reason == "NAMESPACE_SEALED":  # perhaps its key was destroyed, so that nobody reads it again
                    self._shut(is_erased="erased_unix_ms" in error.metadata)
            except Exception:  # noqa: BLE001 - it has no reader but the log
                _LOG.exception("lease.watch_failed", namespace=self.namespace)
            await asyncio.sleep(pause_s)

    def _shut(self, *, is_erased: bool) -> None:
        self._parts.engine.memories.drop_begun(self.namespace)
        for agent_id in self._hot_agents():
            self.line(agent_id).shut(is_erased=is_erased)

    def _happened(self, event: StoreEvent) -> None:
        match event:
            case LeaseWanted(agent_id) if event.kv_identity_hash == self._parts.engine.model.kv_identity_hash:
                if (line := self._lines.get(agent_id)) is not None:
                    line.wanted(takes_back=event.takes_back)
            case HeadMoved(agent_id, head):
                if not head.is_of_turn and (known := self._known_of(agent_id)) is not None:
                    known.moved(head.identity)
                if self._is_hot(agent_id):
                    self.line(agent_id).moved(head)
            case AgentGone(agent_id):
                if (known := self._known_of(agent_id)) is not None:
                    known.gone()
                self._parts.on_deleted(AgentKey(self.namespace, agent_id))
                self._parts.engine.memories.drop_begun(AgentKey(self.namespace, agent_id))  # also if nothing is hot
                if self._is_hot(agent_id):
                    self.line(agent_id).moved(None)
            case EventsLost():
                self._parts.engine.memories.drop_begun(self.namespace)  # agents may have been deleted
                for line in self._lines.values():
                    line.lease.unverified()
            case _:
                pass

    def _known_of(self, agent_id: str) -> KnownVersions | None:
        line = self._lines.get(agent_id)
        return line.known if line is not None else self._known.get(agent_id)

    def _hot_agents(self) -> set[str]:
        return {key.agent_id for key in self._parts.engine.memories.sizes() if key.namespace == self.namespace}

    def _is_hot(self, agent_id: str) -> bool:
        return self._parts.engine.memories.tag_of(AgentKey(self.namespace, agent_id)) is not None

    def _spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def store_owed(
    engine: Engine, lines: Mapping[str, Lines], patience_s: float, clock: Callable[[], float]
) -> MemoriesLeft:
    """Store the hot memories that the store lacks, until nothing has moved for `patience_s`. No turn runs."""
    tags = [(key, engine.memories.tag_of(key)) for key in engine.memories.sizes()]
    memories = [(key, tag) for key, tag in tags if isinstance(tag, AgentMemory)]
    storing = [
        asyncio.create_task(lines[key.namespace].line(key.agent_id).publications.store_owed(memory))
        for key, memory in memories
        if key.namespace in lines and not memory.publication.standing.is_safe
    ]
    began = reported_at = clock()
    give_up = began + patience_s
    while (rest := [task for task in storing if not task.done()]) and clock() < give_up:
        await asyncio.wait(rest, timeout=min(PAUSE_S, patience_s))
        if any(each.store.connection.bulk.has_moved_within(SOON_S) for each in lines.values()):
            give_up = clock() + patience_s
            if clock() - reported_at >= PROGRESS_S:  # `kvasir up` and `down` wait for a service whose log grows
                reported_at = clock()
                _LOG.warning("engine.storing", memories_left=len(rest), since_s=round(reported_at - began))
    for task in storing:
        task.cancel()
    stored = sum(memory.publication.standing.is_safe for _, memory in memories)
    return MemoriesLeft(stored, len(memories) - stored)
