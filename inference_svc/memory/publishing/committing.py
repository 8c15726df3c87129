"""Makes one memory the next version of its agent, under this engine's lease and after the version it follows.

The store's compare-and-swap decides between engines. This file adds two things: the check that nobody took back what
the memory extends, and the knowledge of commits whose answers were lost.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from kvasir import errors
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory, PublicationState, from_manifest, to_manifest
from inference_svc.memory.line_leases import LineLeases
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.publishing.copies import Copies, StoredFiles
from inference_svc.memory.publishing.memory_files import MemoryFiles
from inference_svc.memory.recall import parsed
from inference_svc.memory.store.answers import NO_HEAD, Head, StoreMiss
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.trust import Version, is_current

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_LONG_TOKENS = 4_096  # the manifest of more takes milliseconds


class OtherConversation(errors.Conflict):
    """A turn that could not read its agent's memory does not go on from it."""


@dataclass(frozen=True, slots=True)
class PublishingLimits:
    """How long publications may take."""

    commit_wait_s: float
    """How long a turn's final message waits for its commit before it reports PENDING."""
    timeout_s: float
    """After so long without progress a publication fails; the memory stays hot, and is tried again."""
    head_budget_s: float
    """Time to ask for the newest version when a turn began without knowing it."""


@dataclass(frozen=True, slots=True)
class Committing:
    """One memory on its way to be a version."""

    key: AgentKey
    memory: AgentMemory
    store: RemoteCache
    engine: Engine
    copies: Copies
    leases: LineLeases | None
    """Of its namespace; None if commits bring no lease."""
    limits: PublishingLimits
    clock: Callable[[], float]

    @property
    def _publication(self) -> PublicationState:
        return self.memory.publication

    async def follow(self, previous: PublicationState | None) -> None:
        """Wait for the publication of the memory that this one extends: its version is this one's parent. Raises
        Conflict if it lost to another writer.
        """
        publication = self._publication
        if previous is None:
            return
        if previous.is_being_published and previous.task is not None:
            await asyncio.wait({previous.task})
        if previous.lost_to:
            raise errors.Conflict("the memory it extends lost", metadata={"head_version": previous.lost_to})
        # Even if it ended before this one began: other work runs between a turn's end and its publication.
        publication.head = previous.head
        publication.may_follow = publication.may_follow or previous.may_follow
        if not previous.is_head:  # the line never gets a version between
            publication.base_version = publication.base_version or previous.base_version
            publication.handed_over_by = publication.handed_over_by or previous.handed_over_by
        publication.attempted_before = previous.attempts
        if previous.head is None and previous.expected_version is not None:
            publication.expected_version = previous.expected_version

    async def until_committed(self, files: MemoryFiles) -> SnapshotOutcome:
        """Commit, and try again whenever the store comes back, until nothing has moved for the time limit. A repeated
        commit answers with the version it made.

        `files`: those that the store lacks. Raises Conflict if another writer was first, TimeoutError, and other
        KvasirErrors and StoreMiss if it cannot be stored.
        """
        moved_s, sent_bytes, pause_s = self.clock(), files.sent_bytes, _FIRST_PAUSE_S
        while True:
            async with asyncio.timeout(max(moved_s + self.limits.timeout_s - self.clock(), 0)):
                await self.store.until_reachable()
            try:
                async with self._in_time():
                    await self._know_lease()
                    await self._know_head()
                    await self._know_conversation()
                return await self._commit(files)
            except (errors.Unavailable, errors.DeadlineExceeded):
                pass
            except StoreMiss:
                if self.store.is_reachable:
                    raise
            if files.sent_bytes > sent_bytes:
                moved_s, sent_bytes, pause_s = self.clock(), files.sent_bytes, _FIRST_PAUSE_S
            elif self.clock() - moved_s >= self.limits.timeout_s:
                raise TimeoutError
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Around small calls, some of which have no deadline of their own."""
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                yield
        except TimeoutError:
            raise errors.DeadlineExceeded("the store did not answer") from None

    async def _know_lease(self) -> None:
        """Set the generation that the commit brings: the turn's own, or the current one if the store could not be asked
        or the line was given back meanwhile. The current one does not prove that the parent was there all the while, so
        the store is asked about that.
        """
        publication = self._publication
        if self.leases is None or publication.generation:
            return
        try:
            lease = await self.leases.obtain(self.key.agent_id, self.limits.commit_wait_s)
            if publication.head is not None and publication.head.version and await self._was_taken_back():
                raise errors.Conflict("the agent was changed", metadata={"head_version": str(lease.newest.number)})
            publication.generation = lease.generation
        except errors.Unavailable as error:
            if error.reason != "AGENT_HELD_ELSEWHERE":
                raise
            raise errors.Conflict("another inference service has the agent now") from error

    async def _know_head(self) -> None:
        publication = self._publication
        if publication.head is None:
            head = await self._newest()
            if await self._may_be_changed(head):
                raise errors.Conflict("the agent was changed", metadata={"head_version": str(head.version)})
            if publication.expected_version not in (None, head.version):
                raise errors.Conflict("the head moved", metadata={"head_version": str(head.version)})
            publication.head = head

    async def _know_conversation(self) -> None:
        """Read the memory that a turn could not read. Raises OtherConversation if the turn does not go on from
        it: it would take that memory's place, and its caller did not ask for that.
        """
        publication = self._publication
        head, may_follow = publication.head, publication.may_follow
        if may_follow is not None and head is not None and head.version:
            budget = Budget(self.limits.head_budget_s, 1.0, self.clock)
            manifest = await parsed(await self.store.manifest(self.key.agent_id, head, budget))
            if not may_follow(from_manifest(manifest, head, self.engine.model.tokenizer_digest)):
                raise OtherConversation(
                    "the agent remembers another conversation: this turn is a branch, which is not remembered",
                    metadata={"head_version": str(head.version)},
                )
        publication.may_follow = None

    async def _may_be_changed(self, head: Head) -> bool:
        """Whether the agent may have been deleted, rolled back, or used elsewhere since the turn began, for a turn that
        could not ask for its memory. To store the memory would undo that change, unless the turn's caller named the
        parent version. From here on the lease keeps other engines from the line.
        """
        publication = self._publication
        is_untouched = head == NO_HEAD and publication.generation == 1
        if self.leases is None or is_untouched:
            return False
        if publication.expected_version is not None:
            return await self._was_taken_back()
        return await self.store.was_changed(self.key.agent_id, publication.event_cursor, publication.stored_before)

    async def _was_taken_back(self) -> bool:
        return await self.store.was_taken_back(self.key.agent_id, self._publication.event_cursor)

    async def _newest(self) -> Head:
        budget = Budget(self.limits.head_budget_s, 1.0, self.clock)
        heads = await self.store.heads(self.key.agent_id, self.engine.model.kv_identity_hash, budget)
        return heads.newest if heads is not None else NO_HEAD

    async def _commit(self, files: MemoryFiles, *, is_second_try: bool = False) -> SnapshotOutcome:
        publication = self._publication
        stored = await files.named()
        manifest, digest = await self._manifest(stored)
        await _all_of(files.all_stored(), self.store.write_manifest(manifest, self.limits.timeout_s))
        parent = publication.head.identity if publication.head is not None else NO_HEAD.identity
        publication.attempted = Version(parent.number + 1, digest)
        try:
            async with self._in_time():
                head = await self.store.commit(
                    self.key.agent_id,
                    digest,
                    parent,
                    self.limits.timeout_s,
                    is_brought=self.memory.is_brought,
                    base_version=publication.base_version,
                    handed_over_by=publication.handed_over_by,
                    lease=await self._token(),
                )
        except errors.Conflict:
            head = await self._newest()
            if head.identity != publication.attempted:
                if is_second_try or head.identity not in publication.attempted_before:
                    raise
                # The commit before this one took effect after all; its answer was lost.
                publication.head = head
                return await self._commit(files, is_second_try=True)
        except errors.FailedPrecondition:
            if is_second_try:
                raise
            # A block that the store had is gone or damaged since: send all blocks that the engine still has.
            await files.begin_anew(self.copies.pin(self.key, 0, {}))
            return await self._commit(files, is_second_try=True)
        publication.head, publication.is_head, publication.attempted = head, True, None
        if self.leases is not None:
            self.leases.committed(self.key.agent_id, head, publication.generation)
        publication.blocks[:], publication.tail = stored.blocks, stored.tail
        publication.windows, publication.states = stored.windows, stored.states
        written_bytes = files.sent_bytes + digest.size_bytes
        return SnapshotOutcome(SnapshotState.COMMITTED, head.version, "", head.manifest, written_bytes)

    async def _manifest(self, stored: StoredFiles) -> tuple[bytes, Digest]:
        """The manifest's bytes and digest."""

        def made() -> tuple[bytes, Digest]:
            model = self.engine.model
            data = to_manifest(self.memory, model, stored.blocks, stored.tail, stored.windows, stored.states)
            return data, Digest.of(data)

        is_long = len(self.memory.transcript.token_ids) > _LONG_TOKENS
        return await asyncio.to_thread(made) if is_long else made()

    async def _token(self) -> tuple[str, int] | None:
        """The lease that the commit brings. This engine may have given the line back and taken it again. The memory
        moves to the new lease if its parent is still the newest version and the agent was not taken back in between.
        For a first version that cannot be known.
        """
        publication = self._publication
        if self.leases is None:
            return None
        lease, follows = self.leases.lease(self.key.agent_id), publication.claim.follows
        if (
            lease is not None
            and lease.generation != publication.generation
            and follows is not None
            and follows.number
            and is_current(publication.claim, lease.newest)
            and not await self._was_taken_back()
        ):
            publication.generation = lease.generation
        return (self.leases.owner, publication.generation) if publication.generation else None


async def _all_of(*work: Awaitable[object]) -> None:
    """Wait until all have ended, and raise what the first of them that failed raised."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
