"""The port behind which the ends of leases are: RAM of the one process that has a catalog, or rows that all see."""

from collections.abc import Sequence
from typing import Protocol

from cachestore_svc.facts.records import HeldLease, LeaseToken, LineKey, RenewedLeases
from cachestore_svc.index.sqlite.rows import Rows


class Ends(Protocol):
    """The ends as one operation sees and changes them."""

    def grant(self, line: LineKey, token: LeaseToken, ttl_s: float) -> None:
        """Hold it for so long from now on, or for as long as it holds already."""

    def left_s(self, line: LineKey, token: LeaseToken, ttl_s: float) -> float:
        """Seconds that a lease which was not released still holds; 0 when it ended."""

    def prolong_all(
        self, namespace: str, owner: str, kv_identity_hash: str, held: Sequence[HeldLease], ttl_s: float
    ) -> RenewedLeases:
        """Hold them for longer, but those that ended, are taken back, or would end earlier by their rows' time."""

    def want(self, line: LineKey, *, takes_back: bool) -> bool:
        """Note that the lease is waited for; whether its holder does not know it yet."""

    def bar_all(self, seconds: float) -> None:
        """For so long no lease is given: some may hold of which nothing is known here."""

    def barred_s(self, line: LineKey) -> float:
        """Seconds for which no owner gets the lease: a rollback or its like waits for it, or `bar_all`."""

    def drop(self, line: LineKey) -> None:
        """The lease was released."""

    def taken_back(self, line: LineKey) -> None:
        """The change that waited for its end takes place. That it ended stays known: the change may still be undone."""


class LeaseEnds(Protocol):
    @property
    def in_ram(self) -> Ends | None:
        """The ends, where no operation is needed to read and change them."""

    def within(self, rows: Rows) -> Ends:
        """The ends for an operation, whose failure undoes its changes of those that are in rows."""
