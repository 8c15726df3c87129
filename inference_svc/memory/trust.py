"""Whether a hot memory may be used: decided by what it follows and by what is known to be newest. Pure.

A version is its number and its manifest's digest. A number alone says nothing: a rollback or another writer may have
taken the one that this engine expected.
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
    """What a hot memory says of itself."""

    follows: Version | None  # the version that it is or extends; None: nobody told this engine which one that is
    attempts: frozenset[Version]  # versions that it, or memories that it extends, may have become without our knowledge
    is_lost: bool  # another writer's version came first
    itself: Version | None = None  # the version that it is, or is if its commit took effect; None: no commit was sent
    generation: int = 0  # of the lease under which it was made; 0: none


def is_current(claim: Claim, newest: Version) -> bool:
    """Whether the memory is `newest`, or extends it and nothing else. No agent is no proof of that where a first
    version may have been stored: it may have been deleted since.
    """
    if claim.is_lost:
        return False
    may_be_gone = claim.follows is not None and claim.follows.number == 0 and bool(claim.attempts)
    return newest in claim.attempts or (newest == claim.follows and not may_be_gone)


# Short: whoever takes a memory back waits so long for an engine that died or cannot be reached. Long enough that a
# store which restarts, or a machine that stalls, for a second or two does not cost hot agents their memory.
LEASE_TTL_S = 5.0
# Two monotonic clocks may run apart, by far less than this in so short a time.
LEASE_MARGIN_S = 0.25


@dataclass(slots=True)
class Lease:
    """The right to extend a line, as far as its owner may count on it: while it lasts, nobody else moves the head."""

    generation: int
    newest: Version  # as the store told it with the lease, or as this engine has made it since
    counts_until: float
    ends_at: float  # not earlier, unless somebody takes it back

    @classmethod
    def granted(cls, generation: int, newest: Version, asked_at: float) -> "Lease":
        """`asked_at`: before the request left. The store may have granted it at that very moment."""
        return cls(generation, newest, _end(asked_at), _end(asked_at))

    def prolonged(self, asked_at: float) -> None:
        self.counts_until = max(self.counts_until, _end(asked_at))
        self.ends_at = max(self.ends_at, self.counts_until)

    def unverified(self) -> None:
        """It may have been lost unheard: it counts again when it is prolonged."""
        self.counts_until = 0.0

    def counts(self, now: float) -> bool:
        return now < self.counts_until

    def has_ended(self, now: float) -> bool:
        """Whether it may have ended by itself."""
        return now >= self.ends_at


def _end(asked_at: float) -> float:
    return asked_at + LEASE_TTL_S - LEASE_MARGIN_S


def known_newest(answer: Version | None, lease: Lease | None, now: float) -> Version | None:
    """The newest version, as far as it is known: what the store answered, or else what a lease says that counts."""
    if answer is not None:
        return answer
    return lease.newest if lease is not None and lease.counts(now) else None


def is_unbroken(claim: Claim, newest: Version, lease: Lease | None, now: float) -> bool:
    """Whether nobody can have taken back what the memory has beyond `newest`, which it follows: the line was this
    engine's all the while. That its number and manifest are those of then does not prove it, because what was deleted
    may have been forked or rolled back to the same. A memory that is `newest` has nothing beyond it.
    """
    if newest == claim.itself:
        return True
    return lease is not None and lease.generation == claim.generation and lease.counts(now)


def may_use_hot(claim: Claim, answer: Version | None, lease: Lease | None, now: float) -> bool:
    """Whether a turn may answer from a hot memory. Without an answer and without a lease nothing may be used; with an
    answer and without an unbroken lease (`is_unbroken`) the store must say whether anything was taken back.
    """
    newest = known_newest(answer, lease, now)
    if newest is None or not is_current(claim, newest):
        return False
    return answer is not None or is_unbroken(claim, newest, lease, now)
