"""Who may extend a line: leases, and agents' owners."""

from typing import NamedTuple, Protocol

from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import LeaseToken, LineKey, LineQuery
from cachestore_svc.index.live_leases import LiveLeases


class UnreleasedLease(NamedTuple):
    line: LineKey
    token: LeaseToken
    ttl_ms: int


class RightsView(Protocol):
    def unreleased_leases(self) -> list[UnreleasedLease]:
        """Leases of all lines that were not released. How long each had still to go at the last end is not known."""

    def held_leases(self, query: LineQuery, live: LiveLeases) -> list[LineKey]:
        """Lines of an agent whose lease is live."""

    def ownership_of(self, agent_id: str) -> Ownership:
        """What is known of an agent's owner; HERE where nothing is. The agent need not exist."""

    def owners(self) -> list[tuple[str, Ownership]]:
        """All facts about owners, by agent; also of agents that are gone."""

    def count_owners(self, peer: str) -> tuple[int, int]:
        """Facts about owners that a peer has a part in, and agents that are on their way to it."""

    def unfinished_moves(self) -> list[tuple[str, Ownership]]:
        """Agents that are on their way, or whose owner must still be announced, and their facts."""


class RightsChange(RightsView, Protocol):
    def acquire_lease(
        self, line: LineKey, live: LiveLeases, owner: str, ttl_ms: int, *, begins_anew: bool = False
    ) -> LeaseToken:
        """Take the lease of a line, or prolong one's own. Raises FailedPrecondition (LEASE_HELD)."""

    def renew_lease(self, line: LineKey, live: LiveLeases, token: LeaseToken, ttl_ms: int) -> None:
        """Prolong one's own lease, if nobody took it. Raises Conflict, NotFound, FailedPrecondition (LEASE_HELD)."""

    def release_lease(self, line: LineKey, live: LiveLeases, token: LeaseToken) -> None:
        """Give back one's own lease. Raises Conflict (LEASE_FENCED), NotFound."""

    def fence_leases(self, query: LineQuery, live: LiveLeases) -> None:
        """Shut out every writer of these lines that began before now. Raises FailedPrecondition (LEASE_HELD)."""

    def set_lease_floor(self, generation: int) -> None:
        """No lease that is not known yet begins below this generation."""

    def set_ownership(self, agent_id: str, known: Ownership) -> None:
        """Write what is known of an agent's owner."""
