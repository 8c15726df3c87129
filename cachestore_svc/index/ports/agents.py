"""Agents, their labels, and their blobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import AgentRecord, AgentUsage, LineQuery, SnapshotVersion


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Which agents are wanted: those whose names begin with the prefix and that have all the labels."""

    name_prefix: str
    labels: Mapping[str, str]


class AgentsView(Protocol):
    def get_agent(self, agent_id: str, default_retained: int) -> AgentRecord:
        """An agent with its labels and the newest version of each line. Raises NotFound."""

    def agents_after(
        self, wanted: AgentFilter, after: str, count: int, default_retained: int
    ) -> tuple[list[str], list[AgentRecord]]:
        """The `count` names that follow, fewer if they are the last; and which of these agents are wanted."""

    def held_digests(self, agent_id: str) -> list[Digest]:
        """Every blob that some version of the agent holds, manifests too, but for those in quarantine. Raises
        NotFound."""

    def usage_of(self, agent_id: str) -> AgentUsage:
        """The blobs that the agent's versions name, and those that others' name too. Raises NotFound."""


class AgentsChange(AgentsView, Protocol):
    def update_agent(
        self,
        agent_id: str,
        labels: Mapping[str, str],
        is_pinned: bool | None,
        retained_versions: int | None,
    ) -> None:
        """Change what is given. Raises NotFound, InvalidArgument."""

    def fork_agent(
        self, source: LineQuery, agent_id: str, version: int | None, now_unix_ms: int
    ) -> list[SnapshotVersion]:
        """The first versions of a new agent's lines. Raises NotFound, AlreadyExists, InvalidArgument."""

    def forget_agent(self, agent_id: str, force: bool, now_unix_ms: int) -> int:
        """Forget an agent and its lines, and mark what nothing holds any more; the bytes of that. Raises NotFound, and
        FailedPrecondition (AGENT_PINNED) unless `force`."""

    def count_unused(self, agent_id: str, passed_ms: int) -> None:
        """Add to an agent's unused time; an agent that was used since the last count starts from 0. No effect if it is
        gone."""
