"""Decides what may be written to a line, and when a hot memory may be used. Pure.

A memory that a turn made here is on its way to be the next version of its line:

    MADE ── sending ──▶ SENT ── committed, found ──▶ STORED      ELSEWHERE: the agent's newest version has its text
      │                  │ ◀─ sending ─┐                         under another KV identity; it is never written
      └────── lost ──────┴─ lost ──▶ LOST

`head` is the version that a memory follows; once STORED, the version that it is. It is the only parent that a commit
may have, and no commit is sent while there is a `Doubt`:

    LEASE ── under ──▶ PARENT ── placed ──▶ CONVERSATION ── decided ──▶ none: it may be written

A version is its number and its manifest's digest. A number alone proves nothing: a rollback or another writer may have
taken the number that this engine expected. FOUND means that a commit whose answer was lost took effect after all.
"""

from dataclasses import dataclass, replace
from enum import Enum

from kvasir.errors import Conflict
from kvasir.formats.digest import Digest

from inference_svc.memory.store.answers import LEASE_TTL_S, NO_HEAD, EventCursor, Head, Version

LEASE_MARGIN_S = 0.25  # two monotonic clocks may run apart, by far less than this in so short a time
COUNTS_S = LEASE_TTL_S - LEASE_MARGIN_S  # from the question on; a later answer gives nothing


@dataclass(slots=True)
class Lease:
    """The right to extend a line, as its owner may count on it: while it lasts, no other engine moves the head."""

    generation: int
    newest: Version  # from the store's answer with the lease, or from this engine's commits since
    counts_until: float
    ends_at: float  # it does not end earlier, unless it is taken back
    doubted_at: float = 0.0  # an answer to an earlier question may not know that it was taken back

    @classmethod
    def granted(cls, generation: int, newest: Version, sent_at: float) -> "Lease":
        """`sent_at`: the time before the request left. The store may have granted the lease as early as then."""
        return cls(generation, newest, _end(sent_at), _end(sent_at))

    def prolonged(self, sent_at: float) -> None:
        if sent_at >= self.doubted_at:
            self.counts_until = max(self.counts_until, _end(sent_at))
        self.ends_at = max(self.ends_at, _end(sent_at))

    def unverified(self, now: float) -> None:
        """The lease may have been lost unnoticed. It counts again when it is prolonged."""
        self.counts_until, self.doubted_at = 0.0, now

    def committed(self, head: Head, generation: int) -> None:
        """This engine moved the head. The lease may know a newer version than a repeated commit answers with."""
        if self.generation == generation and head.version > self.newest.number:
            self.newest = head.identity

    def counts(self, now: float) -> bool:
        return now < self.counts_until

    def has_ended(self, now: float) -> bool:
        return now >= self.ends_at


def _end(sent_at: float) -> float:
    return sent_at + COUNTS_S


class Stage(Enum):
    MADE = "made"  # no commit of it was sent
    SENT = "sent"  # one was sent, and no answer came
    STORED = "stored"
    ELSEWHERE = "elsewhere"
    LOST = "lost"  # another writer's version came first


class Doubt(Enum):
    LEASE = "lease"  # the line was not this engine's when the memory was made
    PARENT = "parent"  # the newest version was not known then
    CONVERSATION = "conversation"  # nor what the agent remembered: the turn may not go on from that


class Changes(Enum):
    """Events of an agent that must not have happened since a turn began."""

    TAKEN_BACK = "taken back"  # a rollback, a deletion, and the like
    ANY = "any"  # these, and turns of other engines


class Use(Enum):
    YES = "yes"
    NO = "no"
    UNLESS_TAKEN_BACK = "unless taken back"  # the store's events since the memory was made decide


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a memory stands on its line, as far as this engine knows."""

    head: Head | None  # None: the store could not answer when the memory was made
    stage: Stage = Stage.MADE
    # Of the lease under which the memory was made; 0: none. The store refuses the commit if another engine held the
    # line since, or if it was rolled back.
    generation: int = 0
    event_cursor: EventCursor | None = None  # the place in the store's history when its turn began
    is_undecided: bool = False
    expected_version: int | None = None  # the parent that the turn's caller named
    base_version: int = 0  # the earlier version that the turn went on from; 0: its parent
    handed_over_by: str = ""  # the peer from whose store the agent came with the turn
    sent: Version | None = None  # whose commit has no answer yet
    sent_before: frozenset[Version] = frozenset()  # the same for memories that this one extends
    lost_to: str = ""  # another writer's version: neither this memory nor one that extends it may follow it

    # --- what is known ---

    @property
    def version(self) -> int:
        """The newest version's number, as far as is known; else 0."""
        return self.head.version if self.head is not None else 0

    @property
    def parent(self) -> Version:
        return (self.head or NO_HEAD).identity

    @property
    def follows(self) -> Version | None:
        return self.head.identity if self.head is not None and not self.is_undecided else None

    @property
    def itself(self) -> Version | None:
        """Its own version, if its commit took effect; None: no commit was sent."""
        return self.follows if self.is_stored else self.sent

    @property
    def sent_all(self) -> frozenset[Version]:
        return self.sent_before | ({self.sent} if self.sent is not None else frozenset())

    @property
    def is_stored(self) -> bool:
        return self.stage is Stage.STORED

    @property
    def is_safe(self) -> bool:
        """Whether the store has this memory, under this KV identity or another."""
        return self.stage in (Stage.STORED, Stage.ELSEWHERE)

    @property
    def is_owed(self) -> bool:
        return self.stage in (Stage.MADE, Stage.SENT)

    @property
    def is_begun(self) -> bool:
        """Whether the agent's first commit was sent, and it is not known yet whether it took effect."""
        return self.head is not None and not self.head.version and bool(self.sent_all)

    # --- may a hot memory be used ---

    def is_current(self, newest: Version) -> bool:
        """Whether the memory is `newest`, or directly extends it. If the agent's first commit may have taken effect, an
        answer that there is no agent proves nothing: the agent may have been deleted since.
        """
        if self.stage is Stage.LOST:
            return False
        may_be_gone = self.is_begun and not self.is_undecided
        return newest in self.sent_all or (newest == self.follows and not may_be_gone)

    def use(self, answer: Version | None, lease: Lease | None, now: float) -> Use:
        """Whether a turn may use the memory, by the store's answer or, where there is none, by a lease that counts.
        Only while the line was this engine's since the memory was made can no rollback have undone the turns that it
        has beyond the newest version. An equal number and manifest do not prove it: a deleted agent may have been
        forked or rolled back to the same. A memory that is the newest version has no turn beyond it.
        """
        counting = lease if lease is not None and lease.counts(now) else None
        newest = answer if answer is not None or counting is None else counting.newest
        if newest is None or not self.is_current(newest):
            return Use.NO
        if newest == self.itself or (counting is not None and counting.generation == self.generation):
            return Use.YES
        return Use.UNLESS_TAKEN_BACK if answer is not None else Use.NO

    def is_outdated_by(self, newest: Head | None) -> bool:
        """Whether no turn can use the memory any more, by an event: the agent's newest version, or None: it is gone."""
        was_stored = newest is None and (self.sent_all or (self.head is not None and not self.head.version))
        if not self.is_safe and not was_stored:
            return False
        is_old_news = newest is not None and (self.head is None or newest.version <= self.head.version)
        return not is_old_news and (newest is None or not self.is_current(newest.identity))

    # --- may it be written ---

    @property
    def doubt(self) -> Doubt | None:
        """What must be learned first; None: it may be written behind `parent`, under its generation."""
        if not self.generation:
            return Doubt.LEASE
        if self.head is None:
            return Doubt.PARENT
        return Doubt.CONVERSATION if self.is_undecided else None

    def forbidden(self, newest: Head) -> Changes | None:
        """Of a memory whose parent is not known: what must not have happened to the agent, for which this is the newest
        version. To store the memory would undo it, unless the turn's caller named the parent. From here on the lease
        keeps other engines from the line.
        """
        if newest == NO_HEAD and self.generation == 1:
            return None
        return Changes.ANY if self.expected_version is None else Changes.TAKEN_BACK

    def may_be_undone(self, generation: int) -> bool:
        """Whether the agent may have been taken back between the answer that named its parent and the line's lease of
        this generation: a first version, too, if another engine had the line. Nobody had it before the first lease.
        """
        return self.head is not None and (self.version > 0 or generation > 1)

    def moves_to(self, lease: Lease | None) -> bool:
        """Whether the memory's commit brings this lease instead of that under which it was made, provided that the
        agent was not taken back in between: the engine gave the line back and took it again, and the parent is still
        the newest version. For a first version that cannot be known.
        """
        if lease is None or lease.generation == self.generation:
            return False
        return self.follows is not None and self.follows.number > 0 and self.is_current(lease.newest)

    # --- transitions ---

    def extending(self, previous: "Standing") -> "Standing":
        """It extends another memory, whose version will be its parent. Raises Conflict if that one lost."""
        if previous.stage is Stage.LOST:
            raise _conflict("the memory it extends lost", previous.lost_to)
        passed_on = self if previous.is_stored else previous  # else the line never gets a version between
        is_named = previous.head is None and previous.expected_version is not None
        return replace(
            self,
            head=previous.head,
            is_undecided=self.is_undecided or previous.is_undecided,
            base_version=self.base_version or passed_on.base_version,
            handed_over_by=self.handed_over_by or passed_on.handed_over_by,
            sent_before=previous.sent_all,
            expected_version=previous.expected_version if is_named else self.expected_version,
        )

    def under(self, generation: int) -> "Standing":
        return replace(self, generation=generation)

    def placed(self, newest: Head, *, is_changed: bool) -> "Standing":
        """The newest version is its parent. Raises Conflict if the agent was changed, or another parent was named."""
        if is_changed:
            raise _conflict("the agent was changed", newest.version)
        if self.expected_version not in (None, newest.version):
            raise _conflict("the head moved", newest.version)
        return replace(self, head=newest)

    def decided(self) -> "Standing":
        return replace(self, is_undecided=False)

    def sending(self, manifest: Digest) -> "Standing":
        return replace(self, stage=Stage.SENT, sent=Version(self.parent.number + 1, manifest))

    def committed(self, head: Head) -> "Standing":
        return replace(self, stage=Stage.STORED, head=head, sent=None)

    def found(self, newest: Head) -> "Standing":
        """The same, if the store's newest version is none whose commit had no answer."""
        if self.sent == newest.identity:
            return self.committed(newest)
        return replace(self, head=newest) if not self.is_stored and newest.identity in self.sent_before else self

    def lost(self, to: str) -> "Standing":
        return replace(self, stage=Stage.LOST, lost_to=to)


def _conflict(why: str, to: int | str) -> Conflict:
    return Conflict(why, metadata={"head_version": str(to)})
