"""Makes one memory the next version of its line: `line_states` decides, this file queries the store and sends. It knows
that nobody took back what the memory extends, and of commits whose answers were lost.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field

from kvasir import errors
from kvasir.clients import Lineage
from kvasir.formats.digest import Digest
from kvasir.waits import LOOK_S, RETRY_S

from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory, StoredFiles, from_manifest, parsed
from inference_svc.memory.lines.line_lease import LineLease
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.lines.line_states import Changes, Doubt, Standing
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.publishing.manifest_draft import ManifestDraft
from inference_svc.memory.publishing.memory_files import MemoryFiles
from inference_svc.memory.store.answers import Head, StoreMiss
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache

_AWAITS = "awaits"  # a store's feature
_MOST_AWAITED = 16  # a turn's tails, windows and a last block; a large memory is committed once it is there


class OtherConversation(errors.Conflict):
    """A turn that could not read its agent's memory does not go on from it."""


class NoFiles:
    """Stands for the files of a memory that is asleep."""

    sent_bytes = 0
    coming: Sequence[Digest] = ()

    def __init__(self, known: StoredFiles) -> None:
        self._known = known

    async def named(self) -> StoredFiles:
        return self._known

    def take_along(self, _manifest: bytes) -> bool:
        """It goes alone."""
        return False

    async def all_stored(self) -> None:
        """There is nothing to wait for."""

    def leave(self, writing: "asyncio.Task[None]") -> None:
        """Nothing is on its way."""

    async def restart(self, _asked: object) -> None:
        """There is nothing to send again."""

    def note(self, _stored: StoredFiles) -> None:
        """All files were known."""


@dataclass(frozen=True, slots=True)
class Commit:
    key: AgentKey
    memory: AgentMemory
    files: "MemoryFiles | NoFiles"
    draft: ManifestDraft
    store: RemoteCache
    lease: LineLease
    parts: LineParts
    own: frozenset[Digest]
    """Manifests of the agent that this engine stored lately, for a turn that could not request the newest version."""
    noted_s: dict[str, float] = field(default_factory=dict)
    """When the last try had named its files, and had stored them."""

    @property
    def _standing(self) -> Standing:
        return self.memory.publication.standing

    def _stands(self, standing: Standing) -> None:
        self.memory.publication.standing = standing

    async def until_committed(self) -> SnapshotOutcome:
        """Commit, again and again until nothing has moved for the time limit. Raises why it cannot be stored."""
        clock, timeout_s = self.parts.clock, self.parts.limits.timeout_s
        moved_s, sent_bytes, pause_s = clock(), self.files.sent_bytes, LOOK_S
        while True:
            async with asyncio.timeout(max(moved_s + timeout_s - clock(), 0)):
                await self.store.connection.breaker.closed.wait()
            try:
                async with self._in_time():
                    while (doubt := self._standing.doubt) is not None:
                        await self._learn(doubt)
                return await self._commit()
            except (errors.Unavailable, errors.DeadlineExceeded) as error:
                if (error.retry_after_s or 0) > timeout_s:  # as of a disk that the system made read-only
                    raise
            except StoreMiss:
                if self.store.connection.is_reachable:
                    raise
            if self.files.sent_bytes > sent_bytes:
                moved_s, sent_bytes, pause_s = clock(), self.files.sent_bytes, LOOK_S
            elif clock() - moved_s >= timeout_s:
                raise TimeoutError
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Around small calls, some of which have no deadline of their own."""
        try:
            async with asyncio.timeout(self.parts.limits.timeout_s):
                yield
        except TimeoutError:
            raise errors.DeadlineExceeded("the store did not answer") from None

    async def _learn(self, doubt: Doubt) -> None:
        """Raises Conflict if the memory must not be written."""
        match doubt:
            case Doubt.LEASE:
                self._stands(self._standing.under(await self._generation()))
            case Doubt.PARENT:
                newest = await self._newest()
                is_changed = await self._has_happened(self._standing.forbidden(newest))
                self._stands(self._standing.placed(newest, is_changed=is_changed))
            case Doubt.CONVERSATION:
                await self._check_conversation()
                self._stands(self._standing.decided())

    async def _generation(self) -> int:
        """Of the line's lease, where the turn had none: the store must answer for the time before."""
        try:
            lease = await self.lease.obtain(self.parts.limits.commit_wait_s)
        except errors.Unavailable as error:
            if error.reason != "AGENT_HELD_ELSEWHERE":
                raise
            raise errors.Conflict("another inference service has the agent now") from error
        if self._standing.may_be_undone(lease.generation) and await self._has_happened(Changes.TAKEN_BACK):
            raise errors.Conflict("the agent was changed", metadata={"head_version": str(lease.newest.number)})
        return lease.generation

    async def _check_conversation(self) -> None:
        """Read the memory that a turn could not read. Raises OtherConversation if the turn does not go on from it."""
        head, may_follow = self._standing.head, self.memory.publication.may_follow
        if may_follow is None or head is None or not head.version:
            return
        budget = Budget(self.parts.limits.head_budget_s, 1.0, self.parts.clock)
        manifest = await parsed(await self.store.blobs.manifest(self.key.agent_id, head, budget))
        if not may_follow(from_manifest(manifest, head, self.parts.engine.model.tokenizer_digest)):
            raise OtherConversation(
                "the agent remembers another conversation: this turn is a branch, which is not remembered",
                metadata={"head_version": str(head.version)},
            )

    async def _has_happened(self, changes: Changes | None) -> bool:
        agent_id, since = self.key.agent_id, self._standing.event_cursor
        match changes:
            case Changes.TAKEN_BACK:
                return await self.store.events.was_taken_back(agent_id, since)
            case Changes.ANY:
                return await self.store.events.was_changed(agent_id, since, self.own)
            case None:
                return False

    async def _newest(self) -> Head:
        budget = Budget(self.parts.limits.head_budget_s, 1.0, self.parts.clock)
        hash_ = self.parts.engine.model.kv_identity_hash
        return (await self.store.agents.heads(self.key.agent_id, hash_, budget)).newest

    async def _commit(self, *, is_second_try: bool = False) -> SnapshotOutcome:
        stored = await self.files.named()
        self.noted_s["named"] = self.parts.clock()
        manifest, digest = await self.draft.completed(stored)
        goes_along = self.files.take_along(manifest)  # the files go first: the store waits for them
        early = self._begin_early(digest)
        await self._write(b"" if goes_along else manifest, early)
        self._stands(self._standing.sending(digest))
        try:
            async with self._in_time():
                sent = await self._sent(digest, early)
                self._stands(self._standing.committed(sent))
        except errors.Conflict:
            # This commit, or one before it whose answer was lost, may have taken effect after all.
            found = self._standing.found(await self._newest())
            if found == self._standing or (is_second_try and not found.is_stored):
                raise
            self._stands(found)
            if not found.is_stored:
                return await self._commit(is_second_try=True)
        except errors.FailedPrecondition:
            if is_second_try:
                raise
            # A block that the store had is gone or damaged since: send all blocks that the engine still has.
            await self.files.restart(self.parts.copies.pin(self.key, 0, {}))
            return await self._commit(is_second_try=True)
        self.files.note(stored)
        head = self._standing.head
        assert head is not None
        if self.lease.held is not None:
            self.lease.held.committed(head, self._standing.generation)
        written_bytes = self.files.sent_bytes + digest.size_bytes
        return SnapshotOutcome(SnapshotState.COMMITTED, head.version, "", head.manifest, written_bytes)

    def _begin_early(self, manifest: Digest) -> "asyncio.Task[Head] | None":
        """Send the commit beside the last blobs if there are few, and the store lets it wait for them. Not of a first
        version: if that is in doubt, a turn cannot use the memory.
        """
        coming = self.files.coming
        if not self._standing.version or not 0 < len(coming) <= _MOST_AWAITED:
            return None
        if _AWAITS not in self.store.connection.features:
            return None
        self._stands(self._standing.sending(manifest))
        return asyncio.create_task(self._send(manifest, coming))

    async def _write(self, manifest: bytes, early: "asyncio.Task[Head] | None") -> None:
        """Wait until the store has the files and the manifest, which is written unless it is empty: then it goes with
        them. The answer to a commit that waited for them proves it: nobody waits for their own answers then.
        """
        writes = [self.store.blobs.write_manifest(manifest, self.parts.limits.timeout_s)] if manifest else []
        writing = asyncio.create_task(_all_of(self.files.all_stored(), *writes))
        try:
            if early is not None:
                await asyncio.wait({writing, early}, return_when=asyncio.FIRST_COMPLETED)
            if early is not None and early.done() and not early.cancelled() and early.exception() is None:
                self.files.leave(writing)
            else:
                await writing
        except BaseException:
            writing.cancel()
            if early is not None:
                early.cancel()
            await asyncio.gather(writing, *filter(None, (early,)), return_exceptions=True)
            raise
        self.noted_s["written"] = self.parts.clock()

    async def _sent(self, manifest: Digest, early: "asyncio.Task[Head] | None") -> Head:
        if early is not None:
            with contextlib.suppress(errors.FailedPrecondition):  # its blobs came too late for it
                return await early
        return await self._send(manifest)

    async def _send(self, manifest: Digest, awaited: Sequence[Digest] = ()) -> Head:
        """Commit. May move the standing to another lease."""
        lease = self.lease.held
        if lease is not None and self._standing.moves_to(lease) and not await self._has_happened(Changes.TAKEN_BACK):
            self._stands(self._standing.under(lease.generation))
        standing = self._standing
        lineage = Lineage(
            parent_manifest=standing.parent.manifest,
            base_version=standing.base_version,
            handed_over_by=standing.handed_over_by,
            is_brought=self.memory.is_brought,
        )
        return await self.store.agents.commit(
            self.key.agent_id,
            manifest,
            standing.parent.number,
            lineage=lineage,
            lease=(self.parts.owner, standing.generation),
            awaited=awaited,
            timeout_s=self.parts.limits.timeout_s,
        )


async def _all_of(*work: Awaitable[object]) -> None:
    """Wait until all have ended, and raise what the first of them that failed raised."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
