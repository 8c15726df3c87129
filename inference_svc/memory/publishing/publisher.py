"""Runs publications: at a turn's end the missing part of its memory is sent and committed, in a task of its own.

A publication never delays tokens. The turn waits for it a while and reports its outcome. One agent's publications
follow each other; different agents' run side by side. An unstored memory stays owed: it is tried again for as long as
it is hot and no newer memory of its agent has replaced it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog
from kvasir import errors
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory, Publication, PublicationState
from inference_svc.memory.line_leases import LineLeases
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.owing import Owing
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.committing import Committing, OtherConversation, PublishingLimits
from inference_svc.memory.publishing.copies import Copies, Pinning
from inference_svc.memory.publishing.memory_files import MemoryFiles
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.answers import StoreMiss
from inference_svc.memory.store.remote_cache import RemoteCache

_LOG = structlog.get_logger(__name__)
_MOST_STORED, _MOST_OF_AN_AGENT = 10_000, 16
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
_UNSTORED_PAUSE_S = 0.02


class Publisher:
    """Stores and commits memories, each in a task of its own."""

    def __init__(
        self,
        engine: Engine,
        copies: Copies,
        limits: PublishingLimits,
        stats: ServiceStats,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
        leases: Mapping[str, LineLeases] | None = None,
    ) -> None:
        """`leases`: by namespace; commits without a lease are protected by compare-and-swap alone."""
        self.copies = copies
        self._leases = {} if leases is None else leases  # an empty one may be filled
        self._latest: dict[AgentKey, Publication] = {}
        self._stored: dict[AgentKey, deque[Digest]] = {}  # manifests that were stored last, of so many agents
        self._engine = engine
        self._limits = limits
        self._stats = stats
        self._clock = clock
        self._now_ms = now_ms
        self._running: set[Publication] = set()
        self._retries: dict[AgentKey, _Retry] = {}

    def owe(self, key: AgentKey, publication: PublicationState, store: RemoteCache) -> Owing:
        """Begin to owe the store a memory: the engine learns what it may drop for room, and what it waits for."""
        loop = asyncio.get_running_loop()
        publication.owing = Owing(
            lambda: not publication.is_safe and not publication.lost_to,
            store.has_moved_within,
            self._clock,
            lambda: loop.call_soon_threadsafe(self._hurry, key),
        )
        return publication.owing

    def publish(
        self,
        key: AgentKey,
        memory: AgentMemory,
        asked: Pinning,
        store: RemoteCache,
        previous: PublicationState | None,
        stream: BlockStream | None,
    ) -> Publication:
        """Begin to publish the agent's newest memory. `asked`: for its KV, before another turn of the agent could
        begin. `previous`: state of the memory that the turn extended, whose publication may still run. `stream`: the
        blocks that were sent while the turn ran.
        """
        memory.publication.created_unix_ms = memory.publication.created_unix_ms or self._now_ms()
        before = self._latest.get(key)
        task = asyncio.create_task(self._publish(key, memory, asked, store, previous, stream, before))
        memory.publication.task = self._latest[key] = task
        self._running.add(task)
        task.add_done_callback(lambda _: self._ended(key, task))
        return task

    def _ended(self, key: AgentKey, task: Publication) -> None:
        self._running.discard(task)
        if self._latest.get(key) is task:
            del self._latest[key]
        if not task.cancelled() and (manifest := task.result().manifest) is not None:
            stored = self._stored[key] = self._stored.pop(key, deque(maxlen=_MOST_OF_AN_AGENT))
            stored.append(manifest)
            if len(self._stored) > _MOST_STORED:
                del self._stored[next(iter(self._stored))]

    def running(self, key: AgentKey) -> Publication | None:
        """The agent's last publication, if it has not ended; its memory may have left RAM."""
        return self._latest.get(key)

    async def until_stored(self, key: AgentKey, patience_s: float) -> None:
        """Wait until the store has the agent's newest memory, if a turn here made it. Raises Unavailable
        (MEMORY_NOT_STORED) if that takes longer, or has failed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while (owing := self._owing(key)) is not None or key in self._latest:
                    if (running := self._latest.get(key)) is not None:
                        await asyncio.wait({running})
                    elif owing is not None and owing.has_failed:
                        break
                    else:
                        await asyncio.sleep(_UNSTORED_PAUSE_S)
                else:
                    return
        raise errors.Unavailable(
            "agent_id: the agent's newest turn is not stored yet; name an older version, or retry",
            reason="MEMORY_NOT_STORED",
            field="agent_id",
            retry_after_s=_FIRST_RETRY_S,
            metadata={"agent_id": key.agent_id},
        )

    def _owing(self, key: AgentKey) -> Owing | None:
        """What is owed of the agent's hot memory."""
        tag = self._engine.hot_tag(key)
        owing = tag.publication.owing if isinstance(tag, AgentMemory) else None
        return owing if owing is not None and owing.is_owed else None

    async def outcome(self, namespace: str, memory: AgentMemory, store: RemoteCache) -> SnapshotOutcome:
        """The outcome of a publication, or PENDING. A turn's reader waits at most `commit_wait_s` for it, and not at
        all while the store cannot be reached.
        """
        task = memory.publication.task
        if task is None:
            return SnapshotOutcome(SnapshotState.NONE)
        unreachable = asyncio.create_task(store.until_unreachable())
        try:
            await asyncio.wait(
                {task, unreachable}, timeout=self._limits.commit_wait_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            unreachable.cancel()
        if task.done():
            return task.result()
        self._stats.of(namespace).publications[SnapshotState.PENDING] += 1
        memory.publication.reported = SnapshotState.PENDING
        problem = "has not taken all of it yet" if store.is_reachable else "cannot be reached"
        return SnapshotOutcome(
            SnapshotState.PENDING,
            _version(memory.publication),
            f"the store {problem}; the engine goes on trying, the memory is hot meanwhile",
        )

    async def drain(self, patience_s: float) -> None:
        """Wait for the running publications."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=patience_s)

    async def _publish(
        self,
        key: AgentKey,
        memory: AgentMemory,
        asked: Pinning,
        store: RemoteCache,
        previous: PublicationState | None,
        stream: BlockStream | None,
        before: Publication | None,
    ) -> SnapshotOutcome:
        publication = memory.publication
        owing = publication.owing or self.owe(key, publication, store)
        began_s = self._clock()
        leases = self._leases.get(key.namespace)
        committing = Committing(key, memory, store, self._engine, self.copies, leases, self._limits, self._clock)
        files = MemoryFiles(key, memory, self.copies, store, self._limits.timeout_s, owing.progressed)
        owing.progressed()
        # The line stays this engine's meanwhile.
        with leases.using(key.agent_id) if leases is not None else contextlib.nullcontext(), files:
            try:
                waits = before is not None and not before.done()
                not_taken = await _refusal(files.pinned(asked, waits=waits))
                if before is not None:
                    # Even if this memory does not extend that one: an agent's turns are stored in their order.
                    await asyncio.wait({before})
                publication.stored_before = frozenset(self._stored.get(key, ()))
                # Even if this memory cannot be stored: the memory that extends it must know what it follows.
                await committing.follow(previous)
                if not_taken is not None:
                    raise not_taken
                if stream is not None:
                    full = len(memory.transcript.token_ids) // BLOCK_TOKENS
                    publication.blocks[:] = (await stream.drain())[:full]
                    files.sent_bytes = stream.sent_bytes
                if publication.is_head and publication.head is not None:  # by an earlier try
                    head = publication.head
                    return SnapshotOutcome(SnapshotState.COMMITTED, head.version, "", head.manifest)
                outcome = await committing.until_committed(files)
                return self._committed(key, memory, outcome, began_s)
            except TimeoutError:
                reason = f"the store took nothing for {self._limits.timeout_s:.0f} s"
            except errors.Conflict as error:
                self._drop(key, memory)
                publication.lost_to = error.metadata.get("head_version", "another")
                reason = f"another writer was first: version {publication.lost_to} is the agent's newest"
                reason = error.message if isinstance(error, OtherConversation) else reason
            except errors.KvasirError as error:
                owing.is_refused = isinstance(error, errors.InvalidArgument)
                reason = f"{type(error).__name__}: {error.message}"
            except StoreMiss as error:
                reason = error.miss.detail
            except Exception as error:  # noqa: BLE001 - it has no reader but the log
                # The reply was sent already: even if storing failed, the turn itself did not.
                _LOG.exception("publish.failed", namespace=key.namespace)
                reason = f"an answer was not understood ({type(error).__name__})"
        owing.failed()
        self._retry_later(key, memory, store)
        return self.failed(key, publication, reason)

    def _committed(
        self, key: AgentKey, memory: AgentMemory, outcome: SnapshotOutcome, began_s: float
    ) -> SnapshotOutcome:
        """Count and log that a memory was stored."""
        counters = self._stats.of(key.namespace)
        counters.times.commit.add(self._clock() - began_s)
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
            **({} if reported is None else {"was": reported.value}),
        )
        return outcome

    def _drop(self, key: AgentKey, memory: AgentMemory) -> None:
        """Forget a hot memory that lost to another writer, unless a newer turn has replaced it already."""
        hot = self._engine.hot_memory(key)
        if hot is not None and hot.tag is memory:
            self._engine.drop_hot(key)

    def failed(self, key: AgentKey, publication: PublicationState, reason: str) -> SnapshotOutcome:
        """Count and log that a memory was not stored, once. Its turn succeeded all the same."""
        if publication.reported is not SnapshotState.FAILED:
            self._stats.of(key.namespace).publications[SnapshotState.FAILED] += 1
            publication.reported = SnapshotState.FAILED
        _LOG.warning("snapshot.failed", namespace=key.namespace, reason=reason)
        return SnapshotOutcome(SnapshotState.FAILED, _version(publication), reason)

    # --- what is owed ---

    def _retry_later(self, key: AgentKey, memory: AgentMemory, store: RemoteCache) -> None:
        """Try again in the background, unless it is being tried already or cannot succeed."""
        retry = self._retries.get(key)
        if not self._may_retry(key, memory.publication) or (retry is not None and retry.memory is memory):
            return
        if retry is not None:
            retry.task.cancel()
        hurry = asyncio.Event()
        task = asyncio.create_task(self._retry(key, memory, store, hurry))
        retry = self._retries[key] = _Retry(memory, hurry, task)

        def ended(_task: "asyncio.Task[None]") -> None:
            if self._retries.get(key) is retry:
                del self._retries[key]

        task.add_done_callback(ended)

    def _may_retry(self, key: AgentKey, publication: PublicationState) -> bool:
        """Whether the memory is still owed, and still the agent's hot one: a newer one stores its KV too."""
        owing = self._owing(key)
        return owing is not None and owing is publication.owing and not owing.is_refused

    async def _retry(self, key: AgentKey, memory: AgentMemory, store: RemoteCache, hurry: asyncio.Event) -> None:
        publication, pause_s = memory.publication, _FIRST_RETRY_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await hurry.wait()
            hurry.clear()
            await store.until_reachable()
            if publication.is_being_published or not await self.publish_owed(key, memory, store):
                return
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    async def publish_owed(self, key: AgentKey, memory: AgentMemory, store: RemoteCache) -> bool:
        """Publish a memory that was not stored, if it is still hot. Returns whether it is owed after that."""
        publication, held = memory.publication, self.copies.held
        if publication.owing is None:  # it was made before its namespace had a store
            self.owe(key, publication, store)
        await held.wait_for(key.namespace, self.copies.piece_bytes)  # so many at once as may be copied
        try:
            if not self._may_retry(key, publication):
                return False
            asked = self.copies.pin(key, len(publication.blocks), publication.windows)
            await asyncio.wait({asyncio.wrap_future(asked)})
        finally:
            held.give_back(key.namespace, self.copies.piece_bytes)
        await asyncio.wait({self.publish(key, memory, asked, store, None, None)})
        return self._may_retry(key, publication)

    def close(self) -> None:
        """The engine ends: try nothing again."""
        for retry in list(self._retries.values()):
            retry.task.cancel()

    def _hurry(self, key: AgentKey) -> None:
        if (retry := self._retries.get(key)) is not None:
            retry.hurry.set()


@dataclass(frozen=True, slots=True)
class _Retry:
    """A memory that is tried again."""

    memory: AgentMemory
    hurry: asyncio.Event
    task: "asyncio.Task[None]"


def _version(publication: PublicationState) -> int:
    return publication.head.version if publication.head is not None else 0


async def _refusal(work: Awaitable[None]) -> errors.KvasirError | None:
    """Why the work failed, if it did."""
    try:
        await work
    except errors.KvasirError as error:
        return error
    return None
