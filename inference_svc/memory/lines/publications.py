"""The memories of one agent that are to become versions of its line, one after the other. A publication never delays
tokens: the turn waits for it a while. An unstored memory is tried again while it is hot and its agent's newest.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import structlog
from kvasir import errors
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.waits import LONGEST_RETRY_S, LOOK_S, RETRY_S

from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory, Carrier, Publication, PublicationTask
from inference_svc.memory.lines.commit import Commit, NoFiles, OtherConversation
from inference_svc.memory.lines.known_versions import Known, KnownVersions
from inference_svc.memory.lines.line_lease import LineLease
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.copies import Pinning
from inference_svc.memory.publishing.manifest_draft import ManifestDraft, PackedLine
from inference_svc.memory.publishing.memory_files import MemoryFiles
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.memory.store.answers import Head, StoreMiss
from inference_svc.memory.store.remote_cache import RemoteCache

_LOG = structlog.get_logger(__name__)


class Publications:
    def __init__(
        self,
        key: AgentKey,
        store: RemoteCache,
        parts: LineParts,
        lease: LineLease,
        known: KnownVersions,
        in_use: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`known`: gets the versions that are stored. `in_use`: while work needs the line to stay here."""
        self.running: list[PublicationTask] = []  # in the order of their turns
        self._key = key
        self._store = store
        self._parts = parts
        self._lease = lease
        self._known = known
        self._in_use = in_use
        self._packed = PackedLine()
        self._retrying: tuple[AgentMemory, asyncio.Task[None]] | None = None
        self._hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def last(self) -> PublicationTask | None:
        """The last one, if it has not ended; its memory may have left RAM."""
        return self.running[-1] if self.running else None

    def tag(self, memory: AgentMemory) -> None:
        """Attach the memory to its hot KV. The engine learns what it may drop for room, and what it waits for."""
        self._owe(memory.publication)
        self._parts.engine.memories.tag(self._key, memory, memory.publication)

    def _owe(self, publication: Publication) -> None:
        """It may have been made before its namespace had a store."""
        if publication.carrier is None:
            hurry = partial(self._loop.call_soon_threadsafe, self._hurry.set)
            publication.owe(Carrier(self._parts.clock, self._store.connection.bulk.has_moved_within, hurry))

    def publish(
        self,
        memory: AgentMemory,
        asked: Pinning,
        previous: AgentMemory | None = None,
        stream: BlockStream | None = None,
    ) -> PublicationTask:
        """Begin to publish the agent's newest memory. `asked`: for its KV, before another turn of the agent could
        begin. `previous`: the memory that the turn extended, whose publication may still run. `stream`: the blocks that
        were sent while the turn ran.
        """
        publication = memory.publication
        publication.created_unix_ms = publication.created_unix_ms or self._parts.now_ms()
        task = asyncio.create_task(self._publish(memory, asked, previous, stream, tuple(self.running)))
        publication.task = task
        self.running.append(task)
        task.add_done_callback(partial(self._ended, self._known.now))
        return task

    def _ended(self, before: Known, task: PublicationTask) -> None:
        self.running.remove(task)
        if not task.cancelled():
            self._known.committed(task.result(), before)

    async def _publish(
        self,
        memory: AgentMemory,
        asked: Pinning,
        previous: AgentMemory | None,
        stream: BlockStream | None,
        before: Sequence[PublicationTask],
    ) -> SnapshotOutcome:
        publication, parts, began_s = memory.publication, self._parts, self._parts.clock()
        self._owe(publication)
        publication.progressed()
        files = MemoryFiles(self._key, memory, parts.copies, self._store, parts.limits.timeout_s)
        with self._in_use(), files:  # the line stays this engine's meanwhile
            try:
                waits = any(not task.done() for task in before)
                not_taken = await _refusal(files.pinned(asked, waits=waits))
                copied_s = parts.clock()
                # Not before: it keeps the interpreter from the threads that copy, and has time while files are written.
                draft = ManifestDraft(memory, parts.engine.model, self._packed)
                if before:  # even if this memory does not extend those: an agent's turns are stored in their order
                    await asyncio.wait(before)
                # Even if this memory cannot be stored: the memory that extends it must know what it follows.
                if previous is not None:
                    await _follow(publication, previous.publication)
                if not_taken is not None:
                    raise not_taken
                if stream is not None:
                    full = len(memory.computed_ids) // BLOCK_TOKENS
                    memory.files.blocks[:] = (await stream.drain())[:full]
                    files.sent_bytes = stream.sent_bytes
                if (stored := _stored(publication)) is not None:  # by an earlier try
                    return stored
                commit = Commit(self._key, memory, files, draft, self._store, self._lease, parts, self._known.own)
                outcome = await commit.until_committed()
                return self._committed(memory, outcome, began_s, {"copied": copied_s, **commit.noted_s})
            except Exception as error:  # noqa: BLE001 - it has no reader but the log
                reason = self._reason(memory, error)
        publication.failed()
        self._retry_later(memory)
        return self._failed(publication, reason)

    def _reason(self, memory: AgentMemory, error: Exception) -> str:
        """Why a memory was not stored. The reply was sent already: even if storing failed, the turn itself did not."""
        match error:
            case TimeoutError():
                return f"the store took nothing for {self._parts.limits.timeout_s:.0f} s"
            case errors.Conflict():
                if self._parts.hot(self._key) is memory:  # unless a newer turn has replaced it already
                    self._parts.engine.memories.drop(self._key)
                version = error.metadata.get("head_version", "")  # a lease that was taken back names none
                memory.publication.standing = memory.publication.standing.lost(version)
                if isinstance(error, OtherConversation):
                    return error.message
                return "another writer was first" + (f": version {version} is the agent's newest" if version else "")
            case errors.KvasirError():
                memory.publication.is_refused = isinstance(error, errors.InvalidArgument)
                return f"{type(error).__name__}: {error.message}"
            case StoreMiss():
                return error.miss.detail
        _LOG.error("publish.failed", namespace=self._key.namespace, exc_info=error)
        return f"an answer was not understood ({type(error).__name__})"

    @property
    def _counters(self) -> NamespaceCounters:
        return self._parts.stats.of(self._key.namespace)

    def _committed(
        self, memory: AgentMemory, outcome: SnapshotOutcome, began_s: float, parts_s: Mapping[str, float]
    ) -> SnapshotOutcome:
        """`parts_s`: when each part of the publication, which began then, was done."""
        counters, ended_s = self._counters, self._parts.clock()
        counters.times.commit.add(ended_s - began_s)
        counters.publications[SnapshotState.COMMITTED] += 1
        counters.published_bytes += outcome.written_bytes
        reported, memory.publication.reported = memory.publication.reported, None
        if reported is not None:
            counters.made_good[reported] += 1
        _LOG.info(
            "snapshot.committed" if reported is None else "snapshot.made_good",
            version=outcome.version,
            tokens=len(memory.transcript.token_ids),
            bytes=outcome.written_bytes,
            **{f"{name}_ms": round(1e3 * (at_s - began_s), 1) for name, at_s in parts_s.items()},
            committed_ms=round(1e3 * (ended_s - began_s), 1),
            **({} if reported is None else {"was": reported.value}),
        )
        return outcome

    def _failed(self, publication: Publication, reason: str) -> SnapshotOutcome:
        """Count and log that a memory was not stored, once. Its turn succeeded all the same."""
        if publication.reported is not SnapshotState.FAILED:
            self._counters.publications[SnapshotState.FAILED] += 1
            publication.reported = SnapshotState.FAILED
        _LOG.warning("snapshot.failed", namespace=self._key.namespace, reason=reason)
        return SnapshotOutcome(SnapshotState.FAILED, publication.standing.version, reason)

    async def outcome(self, publication: Publication) -> SnapshotOutcome:
        """The outcome of a publication, or PENDING after `commit_wait_s`; at once while the store cannot be reached."""
        if (task := publication.task) is None:
            return SnapshotOutcome(SnapshotState.NONE)
        unreachable = asyncio.create_task(self._store.connection.breaker.opened.wait())
        try:
            wait_s = self._parts.limits.commit_wait_s
            await asyncio.wait({task, unreachable}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            unreachable.cancel()
        if task.done():
            return task.result()
        self._counters.publications[SnapshotState.PENDING] += 1
        publication.reported = SnapshotState.PENDING
        problem = "has not taken all of it yet" if self._store.connection.is_reachable else "cannot be reached"
        reason = f"the store {problem}; the engine goes on trying, the memory is hot meanwhile"
        return SnapshotOutcome(SnapshotState.PENDING, publication.standing.version, reason)

    async def keep(
        self,
        memory: AgentMemory,
        asked: Pinning | None = None,
        previous: AgentMemory | None = None,
        stream: BlockStream | None = None,
    ) -> SnapshotOutcome:
        """Publish a memory, unless it is stored or on its way; the outcome, as far as a reader waits. As `publish`."""
        if (stored := _stored(memory.publication)) is not None:
            return stored
        if not memory.publication.is_running:
            # The engine takes it before it begins another turn of the agent, which is requested later.
            self.publish(memory, asked or self._pin(memory), previous, stream)
        return await self.outcome(memory.publication)

    async def fall_asleep(self, memory: AgentMemory) -> Head:
        """Commit a memory that names no file. Raises why it cannot be committed."""
        memory.publication.created_unix_ms = self._parts.now_ms()
        draft, before = ManifestDraft(memory, self._parts.engine.model, self._packed), self._known.now
        files = NoFiles(memory.files)
        with self._in_use():
            commit = Commit(self._key, memory, files, draft, self._store, self._lease, self._parts, self._known.own)
            try:
                outcome = await commit.until_committed()
            except (TimeoutError, StoreMiss):
                raise errors.Unavailable("the store does not take a version now", retry_after_s=RETRY_S) from None
        self._known.committed(outcome, before)
        head = memory.publication.standing.head
        assert head is not None
        return head

    def _pin(self, memory: AgentMemory) -> Pinning:
        return self._parts.copies.pin(self._key, len(memory.files.blocks), memory.files.windows)

    async def until_stored(self, patience_s: float) -> None:
        """Wait until the store has the newest memory that a turn here made. Raises Unavailable (MEMORY_NOT_STORED)."""
        with self._in_use(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while (owed := self._owed()) is not None or self.running:
                    if self.running:
                        await asyncio.wait({self.running[-1]})
                    elif owed is not None and owed.has_failed:
                        break
                    else:
                        await asyncio.sleep(LOOK_S)
                else:
                    return
        raise errors.Unavailable.of(
            "agent_id",
            "the agent's newest turn is not stored yet; name an older version, or retry",
            reason="MEMORY_NOT_STORED",
            retry_after_s=RETRY_S,
            agent_id=self._key.agent_id,
        )

    def _owed(self) -> Publication | None:
        memory = self._parts.hot(self._key)
        return memory.publication if memory is not None and memory.publication.is_owed else None

    def _may_retry(self, publication: Publication) -> bool:
        """Whether the memory is still owed, and still the agent's hot one: a newer one stores its KV too."""
        return self._owed() is publication and not publication.is_refused

    def _retry_later(self, memory: AgentMemory) -> None:
        """Try again in the background, unless it is being tried already or cannot succeed."""
        is_retrying = self._retrying is not None and self._retrying[0] is memory and not self._retrying[1].done()
        if is_retrying or not self._may_retry(memory.publication):
            return
        self.close()
        self._hurry.clear()
        self._retrying = memory, asyncio.create_task(self._retry(memory))

    async def _retry(self, memory: AgentMemory) -> None:
        pause_s = RETRY_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()
            self._hurry.clear()
            await self._store.connection.breaker.closed.wait()
            async with self._parts.copies.again.held_for(self._key.namespace, 1):
                if memory.publication.is_running or not await self.publish_owed(memory):
                    return
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def publish_owed(self, memory: AgentMemory) -> bool:
        """Publish a memory that was not stored, if it is still hot. Returns whether it is owed after that."""
        publication, copies = memory.publication, self._parts.copies
        self._owe(publication)
        await copies.held.wait_for(self._key.namespace, copies.piece_bytes)  # so many at once as may be copied
        try:
            if not self._may_retry(publication):
                return False
            asked = self._pin(memory)
            await asyncio.wait({asyncio.wrap_future(asked)})
        finally:
            copies.held.give_back(self._key.namespace, copies.piece_bytes)
        # A newer memory may be on its way since: it would wait for this one, which waits for all before it.
        if not self._may_retry(publication):
            return False
        await asyncio.wait({self.publish(memory, asked)})
        return self._may_retry(publication)

    async def store_owed(self, memory: AgentMemory) -> None:
        """Store a memory at the engine's end, after the try that may run: two at once would be two versions."""
        answers = self._store.connection.is_reachable or await self._store.connection.answers()
        if memory.publication.task is not None:
            await asyncio.wait({memory.publication.task})
        if answers:
            await self.publish_owed(memory)

    def close(self) -> None:
        if self._retrying is not None:
            self._retrying[1].cancel()


async def _follow(publication: Publication, previous: Publication) -> None:
    """Wait for the memory that this one extends: its version is the parent. Raises Conflict if it lost."""
    if previous.is_running and previous.task is not None:
        await asyncio.wait({previous.task})
    # Even if it ended before this one began: other work runs between a turn's end and its publication.
    publication.standing = publication.standing.extending(previous.standing)
    publication.may_follow = publication.may_follow or previous.may_follow


def _stored(publication: Publication) -> SnapshotOutcome | None:
    head = publication.standing.head
    if not publication.standing.is_stored or head is None:
        return None
    return SnapshotOutcome(SnapshotState.COMMITTED, head.version, "", head.manifest)


async def _refusal(work: Awaitable[None]) -> errors.KvasirError | None:
    try:
        await work
    except errors.KvasirError as error:
        return error
    return None
