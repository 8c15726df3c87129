"""Deletes agents that nobody used for longer than they may stay. Each sweep adds the time that has surely passed to
those that no turn, read of a version or change has used since. Pinned ones stay, and those with a live lease.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import structlog
from kvasir import expires_after
from kvasir.errors import InvalidArgument, KvasirError

from cachestore_svc.core.core import Core
from cachestore_svc.facts.records import AgentDeleted, AgentRecord, LineQuery, StoreConfig
from cachestore_svc.index.catalog import HOUSE, CatalogChange, CatalogView
from cachestore_svc.index.values import AgentFilter


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Both clocks at one moment. `run`: of which run of the store."""

    unix_s: float
    uptime_s: float
    run: str = ""

    def since(self, before: "ClockReading | None") -> float:
        """Seconds that have surely passed since an earlier reading; 0 if nothing is sure."""
        if before is None:
            return 0.0
        passed_s = self.uptime_s - before.uptime_s
        if self.run == before.run:
            return max(passed_s, 0.0)
        if passed_s < 0:  # the machine was restarted
            passed_s = self.uptime_s
        # The data may lie in another machine now, which runs for longer.
        return max(min(passed_s, self.unix_s - before.unix_s), 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> "ClockReading | None":
        return cls(**json.loads(text)) if text else None


_AGENTS_AT_ONCE = 50  # agents of one operation of the index: some milliseconds
_CLOCK = "unused_counted_at"


def left_ms(agent: AgentRecord, namespace: str, config: StoreConfig) -> int | None:
    """The unused time that an agent still has, at most 0 when it may go; None for one that stays."""
    allowed_s = config.expiry_of(namespace)
    if label := agent.labels.get(expires_after.LABEL):
        try:
            allowed_s = expires_after.from_label(label)
        except InvalidArgument:  # of a time when such a label meant nothing
            allowed_s = None
    return None if agent.is_pinned or allowed_s is None else int(allowed_s * 1000) - agent.unused_ms


def expire(core: Core, now: ClockReading) -> int:
    """Count the time since the last sweep, and delete the agents whose time is over; how many. See Care."""
    before = ClockReading.from_json(core.catalog.read(HOUSE, lambda view: view.fact(_CLOCK)))
    if before is not None and before.run != now.run and core.journal is None:
        before = None  # a catalog that is no file: another machine may have read its own uptime, and any clock
    passed_ms = int(now.since(before) * 1000)
    # First the clock: a crash on the way then counts this time for nobody, instead of twice for some.
    core.catalog.write(HOUSE, lambda change: change.set_fact(_CLOCK, now.to_json()), frees_space=True)
    expired = 0
    # In a namespace that is shut no label can be read, and so no agent's own time.
    for namespace in core.open_namespaces():
        try:
            expired += _expire_in(core, namespace, passed_ms)
        except KvasirError as error:
            structlog.get_logger("cachestore").warning("expiry.failed", reason=error.reason)
    return expired


def _expire_in(core: Core, namespace: str, passed_ms: int) -> int:
    expired = 0
    for agents in _agents(core, namespace):
        counted = [agent for agent in agents if left_ms(agent, namespace, core.config) is not None]
        if not counted:
            continue

        def count(change: CatalogChange, counted: list[AgentRecord] = counted) -> None:
            for agent in counted:
                change.count_unused(agent.agent_id, passed_ms)

        core.catalog.write(namespace, count, frees_space=True)
        for agent in counted:
            left = left_ms(agent, namespace, core.config)
            if left is not None and left <= passed_ms:
                expired += _delete_if_over(core, namespace, agent.agent_id)
    return expired


def _agents(core: Core, namespace: str) -> Iterator[list[AgentRecord]]:
    wanted, after, retained = AgentFilter("", {}), "", core.config.retained_versions

    def read(view: CatalogView) -> tuple[list[str], list[AgentRecord]]:
        return view.agents_after(wanted, after, _AGENTS_AT_ONCE, retained)

    while True:
        names, agents = core.catalog.read(namespace, read)
        yield agents
        if len(names) < _AGENTS_AT_ONCE:
            return
        after = names[-1]


def _delete_if_over(core: Core, namespace: str, agent_id: str) -> bool:
    """Delete the agent unless it was used, pinned or leased up to this very operation."""

    def work(change: CatalogChange) -> bool:
        agent = change.get_agent(agent_id, core.config.retained_versions)
        left, is_on_its_way = left_ms(agent, namespace, core.config), agent.ownership.is_on_its_way
        if left is None or left > 0 or is_on_its_way:
            return False
        change.forget_agent(agent_id, False, core.now_unix_ms())
        change.fence_leases(LineQuery(agent_id), core.leases)  # raises where one is live, which undoes all of it
        core.report(change, namespace, [AgentDeleted(agent_id)])
        return True

    try:
        is_deleted = core.catalog.write(namespace, work, frees_space=True)
    except KvasirError:
        return False  # gone, or not to be deleted now: the next sweep looks again
    if is_deleted:
        core.counters.add(namespace, "agents_expired")
        structlog.get_logger("cachestore").info("agent.expired", namespace=namespace)
    return is_deleted
