"""Decides whether a hot memory may be used, from the version that it follows and the newest known version. Pure.

A version is its number and its manifest's digest. A number alone proves nothing: a rollback or another writer may have
taken the number that this engine expected.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvasir.formats.digest import Digest


class Version(NamedTuple):
    """A version of a line. Number 0 without a manifest: the line has none."""

    number: int
    manifest: Digest | None


@dataclass(frozen=True, slots=True)
class Claim:
    """The versions that a hot memory is or follows, as far as this engine knows."""

    follows: Version | None  # the version that it is or extends; None: this engine does not know it
    attempts: frozenset[
        Version
    ]  # versions whose commit was sent, for it or for memories that it extends, without an answer
    is_lost: bool  # another writer's version came first
    itself: Version | None = None  # its own version, if its commit took effect; None: no commit was sent
    generation: int = 0  # of the lease under which it was made; 0: none


def is_current(claim: Claim, newest: Version) -> bool:
    """Whether the memory is `newest`, or directly extends it. If the agent's first commit may have taken effect, an
    answer that there is no agent proves nothing: the agent may have been deleted since.
    """
    if claim.is_lost:
        return False
    may_be_gone = claim.follows is not None and claim.follows.number == 0 and bool(claim.attempts)
    return newest in claim.attempts or (newest == claim.follows and not may_be_gone)


# Short, because a rollback waits so long for an engine that died or cannot be reached. Long enough that a store which
# restarts, or a machine that stalls for a second or two, does not cost hot agents their memory.
LEASE_TTL_S = 5.0
# Two monotonic clocks may run apart, by far less than this in so short a time.
LEASE_MARGIN_S = 0.25


@dataclass(slots=True)
class Lease:
    """The right to extend a line, as its owner may count on it: while it lasts, no other engine moves the head."""

    generation: int
    newest: Version  # from the store's answer with the lease, or from this engine's commits since
    counts_until: float
    ends_at: float  # it does not end earlier, unless it is taken back

    @classmethod
    def granted(cls, generation: int, newest: Version, asked_at: float) -> "Lease":
        """`asked_at`: the time before the request left. The store may have granted the lease as early as then."""
        return cls(generation, newest, _end(asked_at), _end(asked_at))

    def prolonged(self, asked_at: float) -> None:
        self.counts_until = max(self.counts_until, _end(asked_at))
        self.ends_at = max(self.ends_at, self.counts_until)

    def unverified(self) -> None:
        """The lease may have been lost unnoticed. It counts again when it is prolonged."""
        self.counts_until = 0.0

    def counts(self, now: float) -> bool:
        return now < self.counts_until

    def has_ended(self, now: float) -> bool:
        """Whether the lease may have ended by itself."""
        return now >= self.ends_at


def _end(asked_at: float) -> float:
    return asked_at + LEASE_TTL_S - LEASE_MARGIN_S


def known_newest(answer: Version | None, lease: Lease | None, now: float) -> Version | None:
    """The newest known version: the store's answer, or else the version of a lease that counts."""
    if answer is not None:
        return answer
    return lease.newest if lease is not None and lease.counts(now) else None


def is_unbroken(claim: Claim, newest: Version, lease: Lease | None, now: float) -> bool:
    """Whether the line was this engine's since the memory was made, so that no rollback can have undone the turns that
    the memory has beyond `newest`. An equal number and manifest do not prove it: a deleted agent may have been forked
    or rolled back to the same. A memory that is `newest` has no turn beyond it.
    """
    if newest == claim.itself:
        return True
    return lease is not None and lease.generation == claim.generation and lease.counts(now)


def may_use_hot(claim: Claim, answer: Version | None, lease: Lease | None, now: float) -> bool:
    """Whether a turn may use a hot memory. Without the store's answer and without a lease it may not. With an answer,
    but without an unbroken lease (`is_unbroken`), the caller must ask the store whether the agent was taken back.
    """
    newest = known_newest(answer, lease, now)
    if newest is None or not is_current(claim, newest):
        return False
    return answer is not None or is_unbroken(claim, newest, lease, now)
