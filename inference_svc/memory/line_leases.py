"""The leases of the agents whose memory is hot, in one namespace and for one loaded model.

A turn asks for the lease when it begins, beside its other work; one heartbeat prolongs all leases. A lease is given
back when its agent's memory was dropped, or when another engine wants it and no turn runs; at once when a rollback, a
deletion or the like waits for it. `trust` says what a lease proves.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from kvasir import errors

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.store.answers import (
    AgentGone,
    EventsLost,
    Granted,
    Head,
    HeadMoved,
    LeaseWanted,
    Renewed,
    StoreEvent,
)
from inference_svc.memory.trust import LEASE_TTL_S, Lease, is_current

_LOG = structlog.get_logger(__name__)
_BEAT_S = LEASE_TTL_S / 3
_BEAT_TIMEOUT_S = 1.0
_ACQUIRE_TIMEOUT_S = 2.0
_MAX_PER_BEAT = 10_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1
_WATCH_PAUSE_S, _LONGEST_WATCH_PAUSE_S = 0.2, 5.0
_CLOSING_S = 1.0
_HELD = "LEASE_HELD"
MOVED = ("AGENT_MOVED", "AGENT_MOVING")
"""Why a store gives nobody a lease: the agent is another store's, or on its way."""


class LeaseCalls(Protocol):
    """The calls of the store that leases need."""

    @property
    def is_reachable(self) -> bool: ...

    async def acquire_lease(
        self, agent_id: str, kv_identity_hash: str, owner: str, *, begins_anew: bool, asks: bool, timeout_s: float
    ) -> Granted: ...

    async def renew_leases(
        self, owner: str, kv_identity_hash: str, generations: dict[str, int], timeout_s: float
    ) -> Renewed: ...

    async def release_lease(
        self, agent_id: str, kv_identity_hash: str, owner: str, generation: int, timeout_s: float
    ) -> None: ...

    def watch(self) -> AsyncGenerator[StoreEvent, None]: ...


@dataclass(slots=True)
class _Line:
    lease: Lease | None = None
    generation: int = 0  # of the last lease that this process had; 0: none yet, or it was given back
    epoch: int = 0  # rises whenever the lease is given back or taken back: answers to earlier requests are void
    acquiring: "asyncio.Task[None] | None" = None
    failure: errors.KvasirError | None = None  # why the last request failed
    users: int = 0  # running turns and publications
    is_wanted: bool = False

    @property
    def is_elsewhere(self) -> bool:
        return self.failure is not None and self.failure.reason in (_HELD, *MOVED)


@dataclass
class LineLeases:
    """The leases of one namespace, on one event loop. `start` it, and `close` it at the end."""

    namespace: str
    store: LeaseCalls
    engine: Engine
    owner: str
    clock: Callable[[], float]
    _lines: dict[str, _Line] = field(default_factory=dict)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def start(self) -> None:
        self._spawn(self._beat())
        self._spawn(self._follow())

    async def close(self) -> None:
        """Give back all leases. Those that the store does not take at once end by themselves."""
        for task in list(self._tasks):
            task.cancel()
        held = [(agent, line.lease) for agent, line in self._lines.items() if line.lease is not None]
        self._lines.clear()
        releasing = [asyncio.create_task(self._release(agent, lease.generation)) for agent, lease in held]
        if releasing:
            _, late = await asyncio.wait(releasing, timeout=_CLOSING_S)
            for task in late:
                task.cancel()

    # --- for turns and publications ---

    @contextlib.contextmanager
    def using(self, agent_id: str) -> Iterator[None]:
        """Keep the lease while a turn or a publication runs: no other engine gets it by asking."""
        line = self._lines.setdefault(agent_id, _Line())
        line.users += 1
        try:
            yield
        finally:
            line.users -= 1
            if line.is_wanted:
                self._let_go_if_idle(agent_id, line)

    def begin(self, agent_id: str) -> None:
        """Ask for the line's lease, unless this engine has it. The turn does not wait for the answer."""
        line = self._lines.setdefault(agent_id, _Line())
        is_held = line.lease is not None and line.lease.counts(self.clock())
        if not is_held and line.acquiring is None and self.store.is_reachable:
            line.acquiring = self._spawn(self._acquire(agent_id, line, asks=True))

    async def answered(self, agent_id: str, within_s: float) -> None:
        """Wait for the store's answer, if a request for the lease is under way."""
        line = self._lines.get(agent_id)
        if line is not None and line.acquiring is not None:
            await asyncio.wait({line.acquiring}, timeout=max(within_s, 0))

    def lease(self, agent_id: str) -> Lease | None:
        line = self._lines.get(agent_id)
        return line.lease if line is not None else None

    def generation(self, agent_id: str) -> int:
        """Generation of the lease that the line's next commit brings; 0 without a lease."""
        lease = self.lease(agent_id)
        return lease.generation if lease is not None else 0

    def is_elsewhere(self, agent_id: str) -> bool:
        """Whether another owner has the lease, as far as this engine knows."""
        line = self._lines.get(agent_id)
        return line is not None and line.is_elsewhere

    async def obtain(self, agent_id: str, patience_s: float) -> Lease:
        """The line's lease. Asks its holder to give it back, and waits `patience_s` for that. Raises Unavailable
        (AGENT_HELD_ELSEWHERE) when it takes longer, and the error that the store answers.
        """
        line = self._lines.setdefault(agent_id, _Line())
        give_up, pause_s = self.clock() + patience_s, _FIRST_PAUSE_S
        while True:
            if line.lease is not None and line.lease.counts(self.clock()):
                return line.lease
            if line.acquiring is None:
                line.acquiring = self._spawn(self._acquire(agent_id, line, asks=True))
            await asyncio.wait({line.acquiring})
            if line.lease is not None:
                return line.lease
            if line.failure is not None and line.failure.reason != _HELD:
                raise line.failure
            if self.clock() + pause_s > give_up:
                raise errors.Unavailable(
                    "another inference service, or a change of the agent, holds its line; retry, or ask that service",
                    reason="AGENT_HELD_ELSEWHERE",
                    metadata={"agent_id": agent_id},
                    retry_after_s=1.0,
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def hand_on(self, agent_id: str) -> None:
        """Give the lease back while a turn runs, because another engine goes on with the turn. Waits until the store
        has it back; if it cannot be reached, the lease ends by itself.
        """
        line = self._lines.get(agent_id)
        if line is None:
            return
        lease, line.lease, line.generation = line.lease, None, 0
        line.epoch += 1
        if lease is not None:
            await self._release(agent_id, lease.generation)

    def committed(self, agent_id: str, head: Head, generation: int) -> None:
        """This engine moved the head, under that generation. A repeated commit answers with the version that it made
        earlier; the lease may know a newer one, such as a rollback.
        """
        lease = self.lease(agent_id)
        if lease is not None and lease.generation == generation and head.version > lease.newest.number:
            lease.newest = head.identity

    # --- news from the store ---

    def wanted(self, agent_id: str, *, takes_back: bool) -> None:
        """Another caller waits for the lease. `takes_back`: it rolls the agent back or the like, so that no turn may
        use the hot memory from now on.
        """
        line = self._lines.get(agent_id)
        if line is None:
            return
        if takes_back:
            if not line.users:
                self.engine.drop_hot(self._key(agent_id))
            self._give_back(agent_id, line)
        else:
            line.is_wanted = True
            self._let_go_if_idle(agent_id, line)

    async def beat(self) -> None:
        """Prolong the leases of agents that are used or hot, and give back the others."""
        hot = {key.agent_id for key in self.engine.hot_keys() if key.namespace == self.namespace}
        kept: dict[str, Lease] = {}
        for agent_id, line in list(self._lines.items()):
            if line.users or line.acquiring is not None or agent_id in hot:
                if line.lease is not None:
                    kept[agent_id] = line.lease
                continue
            del self._lines[agent_id]
            if line.lease is not None:
                self._spawn(self._release(agent_id, line.lease.generation))
        agents = list(kept)
        for first in range(0, len(agents), _MAX_PER_BEAT):
            await self._prolong({agent: kept[agent] for agent in agents[first : first + _MAX_PER_BEAT]})

    # --- below ---

    def _key(self, agent_id: str) -> AgentKey:
        return AgentKey(self.namespace, agent_id)

    async def _acquire(self, agent_id: str, line: _Line, *, asks: bool) -> None:
        asked_at, epoch = self.clock(), line.epoch
        try:
            granted = await self.store.acquire_lease(
                agent_id,
                self.engine.model.kv_identity_hash,
                self.owner,
                begins_anew=not line.generation,
                asks=asks,
                timeout_s=_ACQUIRE_TIMEOUT_S,
            )
        except errors.KvasirError as error:
            line.lease, line.failure = None, error
        except Exception as error:  # noqa: BLE001 - an invalid answer: the turn goes on without a lease
            _LOG.warning("lease.answer_not_understood", error=type(error).__name__)
            line.lease, line.failure = None, errors.Unavailable("the store's answer was not understood")
        else:
            if line.epoch != epoch:  # taken back meanwhile: the granted head may be older than that
                line.failure = None
                self._spawn(self._release(agent_id, granted.generation))
                return
            line.lease = Lease.granted(granted.generation, granted.head.identity, asked_at)
            line.generation, line.failure, line.is_wanted = granted.generation, None, False
        finally:
            line.acquiring = None

    async def _prolong(self, leases: dict[str, Lease]) -> None:
        asked_at = self.clock()
        generations = {agent_id: lease.generation for agent_id, lease in leases.items()}
        renewed = await self.store.renew_leases(
            self.owner, self.engine.model.kv_identity_hash, generations, _BEAT_TIMEOUT_S
        )
        for agent_id, lease in leases.items():
            line = self._lines.get(agent_id)
            if line is None or line.lease is not lease:
                continue  # another lease was granted since: the answer is about the old one
            if agent_id not in renewed.lost:
                lease.prolonged(asked_at)
                continue
            # A lease that had not ended was taken back. The event that says so may come later, or not at all.
            if not lease.has_ended(self.clock()):
                self.wanted(agent_id, takes_back=True)
            line.lease = None
        for agent_id in renewed.wanted:
            self.wanted(agent_id, takes_back=False)

    def _let_go_if_idle(self, agent_id: str, line: _Line) -> None:
        """Give the line to another engine, unless it is used here. The hot memory goes; the store has it."""
        if line.users or line.acquiring is not None or line.lease is None:
            return
        memory = self._memory(agent_id)
        if memory is not None and not memory.publication.is_safe and not memory.publication.lost_to:
            return  # the memory is nowhere else: the line goes with the agent's next turn
        line.is_wanted = False
        self.engine.drop_hot(self._key(agent_id))
        self._give_back(agent_id, line)

    def _give_back(self, agent_id: str, line: _Line) -> None:
        """Release the lease. The release and a request for the next lease may arrive in any order. So the next request
        begins anew: its generation differs, and a release that arrives later is fenced.
        """
        lease, line.lease, line.generation = line.lease, None, 0
        line.epoch += 1
        if lease is not None:
            self._spawn(self._release(agent_id, lease.generation))

    async def _release(self, agent_id: str, generation: int) -> None:
        # After that time the lease has ended by itself. Until then a rollback or the like may be waiting for it.
        with contextlib.suppress(errors.KvasirError):
            await self.store.release_lease(
                agent_id, self.engine.model.kv_identity_hash, self.owner, generation, LEASE_TTL_S
            )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            try:
                await self.beat()
            except errors.KvasirError:
                continue  # leases count for a while without a heartbeat
            except Exception:  # noqa: BLE001 - it has no reader but the log
                _LOG.exception("lease.beat_failed", namespace=self.namespace)

    async def _follow(self) -> None:
        """Follow the namespace's events. After a cut they go on from the last cursor; heartbeats report lost leases."""
        pause_s = _WATCH_PAUSE_S
        while True:
            try:
                async for event in self.store.watch():
                    self._happened(event)
                    pause_s = _WATCH_PAUSE_S
            except (errors.Unavailable, errors.DeadlineExceeded):
                pause_s = _WATCH_PAUSE_S  # the store is away, or stops
            except errors.KvasirError:
                pause_s = min(2 * pause_s, _LONGEST_WATCH_PAUSE_S)  # the next answer is the same, most likely
            except Exception:  # noqa: BLE001 - it has no reader but the log
                _LOG.exception("lease.watch_failed", namespace=self.namespace)
            await asyncio.sleep(pause_s)

    def _happened(self, event: StoreEvent) -> None:
        ours = self.engine.model.kv_identity_hash
        match event:
            case LeaseWanted() if event.kv_identity_hash == ours:
                self.wanted(event.agent_id, takes_back=event.takes_back)
            case HeadMoved():  # under any KV identity: it is the agent's newest version
                self._drop_unless(event.agent_id, event.head)
            case AgentGone():
                self._drop_unless(event.agent_id, None)
            case EventsLost():
                for line in self._lines.values():
                    if line.lease is not None:
                        line.lease.unverified()
            case _:
                pass

    def _drop_unless(self, agent_id: str, newest: Head | None) -> None:
        """Drop a hot memory that no turn can use any more, now rather than at the next turn."""
        line, memory = self._lines.get(agent_id), self._memory(agent_id)
        if memory is None or (line is not None and line.users):
            return
        head = memory.publication.head
        was_stored = newest is None and (memory.publication.attempts or (head is not None and not head.version))
        if not memory.publication.is_safe and not was_stored:
            return
        is_old_news = newest is not None and (head is None or newest.version <= head.version)
        if not is_old_news and (newest is None or not is_current(memory.publication.claim, newest.identity)):
            self.engine.drop_hot(self._key(agent_id))

    def _memory(self, agent_id: str) -> AgentMemory | None:
        tag = self.engine.hot_tag(self._key(agent_id))
        return tag if isinstance(tag, AgentMemory) else None

    def _spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
