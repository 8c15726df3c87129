"""One agent's line under this engine's KV identity: its lease, and which hot memory may be used under it."""

import contextlib
from collections.abc import Iterator

from inference_svc.engine.api import AgentKey
from inference_svc.memory.lines.known_versions import KnownVersions
from inference_svc.memory.lines.line_lease import LineLease, Spawn
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.lines.line_states import Standing, Use
from inference_svc.memory.lines.publications import Publications
from inference_svc.memory.store.answers import Head, Version
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache


class Line:
    """It lives while the agent's memory is hot or the line is used (`Lines.beat`)."""

    def __init__(self, key: AgentKey, store: RemoteCache, parts: LineParts, spawn: Spawn, known: KnownVersions) -> None:
        self.key = key
        self.store = store
        self.known = known
        self.lease = LineLease(key, store, parts, spawn)
        self.publications = Publications(key, store, parts, self.lease, known, self.in_use)
        self._parts = parts
        self._users = 0  # running turns and publications

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the lease while a turn or a publication runs: no other engine gets it by asking."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self.lease.is_wanted:
                self._let_go_if_idle()

    @property
    def is_used(self) -> bool:
        return bool(self._users) or self.lease.is_requested

    async def may_use(self, standing: Standing, newest: Version, budget: Budget) -> bool:
        """Whether a turn may use a hot memory, given the store's newest version. Raises StoreMiss."""
        if not standing.is_current(newest):
            return False
        if standing.itself != newest:
            await self.lease.answered(budget)
        use = standing.use(newest, self.lease.held, self._parts.lease_clock())
        if use is not Use.UNLESS_TAKEN_BACK:
            return use is Use.YES
        return not await self.store.events.was_taken_back_within(budget, self.key.agent_id, standing.event_cursor)

    def proves(self, standing: Standing) -> bool:
        return standing.use(None, self.lease.held, self._parts.lease_clock()) is Use.YES

    def wanted(self, *, takes_back: bool) -> None:
        """Another caller waits for the lease. `takes_back`: no turn may use the hot memory from now on."""
        if not takes_back:
            self.lease.is_wanted = True
            self._let_go_if_idle()
            return
        if not self._users:
            self._parts.engine.memories.drop(self.key)
        self.lease.give_back()

    def moved(self, newest: Head | None) -> None:
        """The agent has another newest version, or is gone (None). Drops a hot memory that no turn can use any more."""
        memory = self._parts.hot(self.key)
        if memory is not None and not self._users and memory.publication.standing.is_outdated_by(newest):
            self._parts.engine.memories.drop(self.key)

    def shut(self, *, is_erased: bool) -> None:
        """The store lacks the namespace's key. Drops the hot memory, if the store has it; any, behind a running turn,
        if the key was destroyed: then it is one of those that nobody may read again.
        """
        if is_erased:
            self.publications.close()
            self._parts.engine.memories.drop(self.key)
            return
        memory = self._parts.hot(self.key)
        if memory is not None and not self._users and memory.publication.standing.is_safe:
            self._parts.engine.memories.drop(self.key)

    def _let_go_if_idle(self) -> None:
        """Give the line to another engine, unless it is used here. The hot memory goes; the store has it."""
        if self.is_used or self.lease.held is None:
            return
        memory = self._parts.hot(self.key)
        if memory is not None and memory.publication.standing.is_owed:
            return  # the memory is nowhere else: the line goes with the agent's next turn
        self.lease.is_wanted = False
        self._parts.engine.memories.drop(self.key)
        self.lease.give_back()
