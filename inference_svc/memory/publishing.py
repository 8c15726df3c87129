"""Publishes memories to the store: full blocks while a turn still runs, the rest and the commit at its end.

A publication never delays tokens. It runs as a task of its own; the turn waits for it a while and reports its outcome.
One agent's publications follow each other, and the store's compare-and-swap decides between engines.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import structlog
from kvasir import errors
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory, PublicationState, to_manifest
from inference_svc.memory.copies import Copies, await_copy, files_of, stored_files
from inference_svc.memory.line_leases import LineLeases
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.remote_cache import RemoteCache
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store_answers import NO_HEAD, Head, StoreMiss
from inference_svc.memory.store_patience import Budget
from inference_svc.memory.stored_windows import StoredWindow
from inference_svc.memory.trust import Version, is_current

_LOG = structlog.get_logger(__name__)
_MOST_STORED, _MOST_OF_AN_AGENT = 10_000, 16


@dataclass(frozen=True, slots=True)
class PublishingLimits:
    """How long publications may take."""

    commit_wait_s: float
    """How long a turn's final message waits for its commit before it reports PENDING."""
    timeout_s: float
    """After this a publication fails; the memory stays hot, and the agent's next turn publishes it too."""
    head_budget_s: float
    """Time to ask for the newest version when a turn began without knowing it."""


class BlockStream:
    """Sends the full blocks of one running turn, so that at its end only the tail and the manifest remain."""

    def __init__(
        self,
        engine: Engine,
        copies: Copies,
        key: AgentKey,
        store: RemoteCache,
        stored: Sequence[Digest],
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._copies = copies
        self.key = key
        self._store = store
        self._timeout_s = timeout_s
        self._full = len(stored)
        self._task: asyncio.Task[None] | None = None
        self._waits_for_room = False
        self.stored = list(stored)
        self.sent_bytes = 0

    def began(self, stored: Sequence[Digest]) -> None:
        """The turn's KV has these of the blocks planned with. On the MLX thread, before any block is full."""
        self.stored[len(stored) :] = []
        self._full = len(stored)

    def blocks_full(self, count: int) -> None:
        """The turn's sequence now has `count` full blocks."""
        self._full = max(self._full, count)
        if self._task is None and len(self.stored) < self._full and self._store.is_reachable:
            self._task = asyncio.create_task(self._send())

    def ask_for_rest(self, stored_windows: Mapping[int, StoredWindow]) -> "Future[Snapshot | None]":
        """The turn is over: ask the engine for what was not sent yet. On the MLX thread."""
        return self._copies.ask(self.key, len(self.stored), stored_windows)

    def stop(self) -> None:
        """Begin no more pieces. The piece under way may end."""
        self._full = 0
        if self._task is not None and self._waits_for_room:
            self._task.cancel()  # the turn's end sends these blocks, and may hold the room itself

    def abandon(self) -> None:
        """The turn failed: no manifest will name its blocks."""
        self.stop()
        if self._task is not None:
            self._task.cancel()

    async def drain(self) -> None:
        """Wait for the piece under way."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _send(self) -> None:
        try:
            while len(self.stored) < self._full:
                piece_bytes = self._copies.piece_bytes
                self._waits_for_room = True
                await self._copies.held.wait_for(self.key.namespace, piece_bytes)
                self._waits_for_room = False
                try:
                    if not await self._send_piece():
                        return
                finally:
                    self._copies.held.give_back(self.key.namespace, piece_bytes)
        except Exception as error:  # noqa: BLE001 - it has no reader but the log
            # The end of the turn sends what is missing, and says so if it cannot.
            _LOG.info("publish.blocks_failed", error=type(error).__name__, reason=getattr(error, "reason", ""))
        finally:
            self._task = None

    async def _send_piece(self) -> bool:
        """Send one piece; False when there was none."""
        first, most = len(self.stored), self._copies.piece_blocks
        snapshot = await await_copy(self._engine.snapshot(self.key, first, blocks_only=True, max_blocks=most))
        if snapshot is None or not snapshot.blocks:
            return False
        digests, sent_bytes = await self._store.write_tensors(files_of(snapshot), self._timeout_s)
        self.stored += digests
        self.sent_bytes += sent_bytes
        return True


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
        self._latest: dict[AgentKey, asyncio.Task[SnapshotOutcome]] = {}
        self._stored: dict[AgentKey, deque[Digest]] = {}  # manifests that were stored last, of so many agents
        self._engine = engine
        self._limits = limits
        self._stats = stats
        self._clock = clock
        self._now_ms = now_ms
        self._running: set[asyncio.Task[SnapshotOutcome]] = set()

    def publish(
        self,
        key: AgentKey,
        memory: AgentMemory,
        taken: Snapshot | errors.KvasirError | None,
        store: RemoteCache,
        previous: PublicationState | None,
        stream: BlockStream | None,
        sent_bytes: int = 0,
    ) -> "asyncio.Task[SnapshotOutcome]":
        """Begin to publish the agent's newest memory. `taken`: its files from the first block that the store lacks, or
        the error of copying them. `previous`: state of the memory that the turn extended, whose publication may still
        run. `stream`: the blocks that were sent while the turn ran. `sent_bytes`: bytes that were sent since.
        """
        memory.publication.created_unix_ms = memory.publication.created_unix_ms or self._now_ms()
        before = self._latest.get(key)
        task = asyncio.create_task(self._publish(key, memory, taken, store, previous, stream, sent_bytes, before))
        memory.publication.task = self._latest[key] = task
        self._running.add(task)
        task.add_done_callback(lambda _: self._ended(key, task))
        return task

    def _ended(self, key: AgentKey, task: "asyncio.Task[SnapshotOutcome]") -> None:
        self._running.discard(task)
        if self._latest.get(key) is task:
            del self._latest[key]
        if not task.cancelled() and (manifest := task.result().manifest) is not None:
            stored = self._stored[key] = self._stored.pop(key, deque(maxlen=_MOST_OF_AN_AGENT))
            stored.append(manifest)
            if len(self._stored) > _MOST_STORED:
                del self._stored[next(iter(self._stored))]

    @property
    def commit_wait_s(self) -> float:
        return self._limits.commit_wait_s

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
        problem = "has not answered yet" if store.is_reachable else "cannot be reached"
        return SnapshotOutcome(
            SnapshotState.PENDING,
            _version(memory.publication),
            f"the store {problem}; trying for {self._limits.timeout_s:.0f} s, the memory is hot meanwhile",
        )

    async def drain(self, patience_s: float) -> None:
        """Wait for the running publications."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=patience_s)

    async def _publish(
        self,
        key: AgentKey,
        memory: AgentMemory,
        taken: Snapshot | errors.KvasirError | None,
        store: RemoteCache,
        previous: PublicationState | None,
        stream: BlockStream | None,
        sent_bytes: int,
        before: "asyncio.Task[SnapshotOutcome] | None" = None,
    ) -> SnapshotOutcome:
        publication = memory.publication
        began_s = self._clock()
        held_bytes = sum(map(len, files_of(taken))) if isinstance(taken, Snapshot) else 0
        self.copies.held.take(key.namespace, held_bytes)
        try:
            async with self._using(key), asyncio.timeout(self._limits.timeout_s):
                if before is not None:
                    # Even if this memory does not extend that one: an agent's turns are stored in their order.
                    await asyncio.wait({before})
                publication.stored_before = frozenset(self._stored.get(key, ()))
                # Even if this memory cannot be stored: the memory that extends it must know what it follows.
                await self._follow(previous, publication)
                if isinstance(taken, errors.KvasirError):
                    raise taken
                if stream is not None:
                    await stream.drain()
                    sent_bytes += stream.sent_bytes
                committed = await self._until_committed(key, memory, taken, store, sent_bytes)
                self._stats.of(key.namespace).times.commit.add(self._clock() - began_s)
                return committed
        except TimeoutError:
            return self.failed(key, publication, f"the store did not take it within {self._limits.timeout_s:.0f} s")
        except errors.Conflict as error:
            self._drop(key, memory)
            publication.lost_to = error.metadata.get("head_version", "another")
            return self.failed(
                key, publication, f"another writer was first: version {publication.lost_to} is the agent's newest"
            )
        except errors.KvasirError as error:
            return self.failed(key, publication, f"{type(error).__name__}: {error.message}")
        except StoreMiss as error:
            return self.failed(key, publication, error.miss.detail)
        except Exception as error:  # noqa: BLE001 - it has no reader but the log
            # The reply was sent already: even if storing failed, the turn itself did not.
            _LOG.exception("publish.failed", namespace=key.namespace)
            return self.failed(key, publication, f"an answer was not understood ({type(error).__name__})")
        finally:
            self.copies.held.give_back(key.namespace, held_bytes)

    @contextlib.asynccontextmanager
    async def _using(self, key: AgentKey) -> AsyncIterator[None]:
        """Keep the line this engine's while a publication of it runs."""
        leases = self._leases.get(key.namespace)
        with leases.using(key.agent_id) if leases is not None else contextlib.nullcontext():
            yield

    async def _until_committed(
        self, key: AgentKey, memory: AgentMemory, snapshot: Snapshot | None, store: RemoteCache, sent_bytes: int
    ) -> SnapshotOutcome:
        """Commit, and try again whenever the store comes back. A repeated commit answers with the version it made."""
        while True:
            await store.until_reachable()
            try:
                await self._know_lease(key, memory.publication, store)
                await self._know_head(key, memory.publication, store)
                return await self._commit(key, memory, snapshot, store, sent_bytes)
            except (errors.Unavailable, errors.DeadlineExceeded):
                continue
            except StoreMiss:
                if store.is_reachable:
                    raise

    async def _follow(self, previous: PublicationState | None, publication: PublicationState) -> None:
        """Wait for the agent's publication before this one: its version is this one's parent."""
        if previous is None:
            return
        if previous.is_being_published and previous.task is not None:
            await asyncio.wait({previous.task})
        if previous.lost_to:
            raise errors.Conflict("the memory it extends lost", metadata={"head_version": previous.lost_to})
        # Even if it ended before this one began: other work runs between a turn's end and its publication.
        publication.head = previous.head
        if not previous.is_head:  # the line never gets a version between
            publication.base_version = publication.base_version or previous.base_version
        publication.attempted_before = previous.attempts
        if previous.head is None and previous.expected_version is not None:
            publication.expected_version = previous.expected_version

    async def _know_lease(self, key: AgentKey, publication: PublicationState, store: RemoteCache) -> None:
        """Set the generation that the commit brings: the turn's own, or the current one if the store could not be asked
        or the line was given back meanwhile. The current one does not prove that the parent was there all the while, so
        the store is asked about that.
        """
        leases = self._leases.get(key.namespace)
        if leases is None or publication.generation:
            return
        try:
            lease = await leases.obtain(key.agent_id, self._limits.commit_wait_s)
            if (
                publication.head is not None
                and publication.head.version
                and await store.was_taken_back(key.agent_id, publication.event_cursor)
            ):
                raise errors.Conflict("the agent was changed", metadata={"head_version": str(lease.newest.number)})
            publication.generation = lease.generation
        except errors.Unavailable as error:
            if error.reason != "AGENT_HELD_ELSEWHERE":
                raise
            raise errors.Conflict("another inference service has the agent now") from error

    async def _know_head(self, key: AgentKey, publication: PublicationState, store: RemoteCache) -> None:
        if publication.head is None:
            head = await self._newest(key, store)
            if await self._may_be_changed(key, publication, head, store):
                raise errors.Conflict("the agent was changed", metadata={"head_version": str(head.version)})
            if publication.expected_version not in (None, head.version):
                raise errors.Conflict("the head moved", metadata={"head_version": str(head.version)})
            publication.head = head

    async def _may_be_changed(
        self, key: AgentKey, publication: PublicationState, head: Head, store: RemoteCache
    ) -> bool:
        """Whether the agent may have been deleted, rolled back, or used elsewhere since the turn began, for a turn that
        could not ask for its memory. To store the memory would undo that change, unless the turn's caller named the
        parent version. From here on the lease keeps other engines from the line.
        """
        is_untouched = head == NO_HEAD and publication.generation == 1
        if key.namespace not in self._leases or is_untouched:
            return False
        if publication.expected_version is not None:
            return await store.was_taken_back(key.agent_id, publication.event_cursor)
        line = self._engine.model.kv_identity_hash
        return await store.was_changed(key.agent_id, line, publication.event_cursor, publication.stored_before)

    async def _newest(self, key: AgentKey, store: RemoteCache) -> Head:
        budget = Budget(self._limits.head_budget_s, 1.0, self._clock)
        heads = await store.heads(key.agent_id, self._engine.model.kv_identity_hash, budget)
        return heads.ours if heads is not None else NO_HEAD

    async def _commit(
        self,
        key: AgentKey,
        memory: AgentMemory,
        snapshot: Snapshot | None,
        store: RemoteCache,
        sent_bytes: int,
        *,
        is_second_try: bool = False,
    ) -> SnapshotOutcome:
        publication, timeout_s = memory.publication, self._limits.timeout_s
        if snapshot is None:
            raise errors.ResourceExhausted("the memory was dropped before it could be stored")
        files = files_of(snapshot)
        digests, tensor_bytes = await store.write_tensors(files, timeout_s) if files else ([], 0)
        stored = stored_files(snapshot, digests, publication)
        manifest = to_manifest(memory, self._engine.model, stored.blocks, stored.tail, stored.windows, stored.states)
        digest = Digest.of(manifest)
        parent = publication.head.identity if publication.head is not None else NO_HEAD.identity
        publication.attempted = Version(parent.number + 1, digest)
        try:
            head = await store.commit(
                key.agent_id,
                manifest,
                parent,
                timeout_s,
                is_brought=memory.is_brought,
                base_version=publication.base_version,
                lease=await self._token(key, publication, store),
            )
        except errors.Conflict:
            head = await self._newest(key, store)
            if head.identity != publication.attempted:
                if is_second_try or head.identity not in publication.attempted_before:
                    raise
                # The commit before this one took effect after all; its answer was lost.
                publication.head = head
                return await self._commit(key, memory, snapshot, store, sent_bytes + tensor_bytes, is_second_try=True)
        except errors.FailedPrecondition:
            if is_second_try:
                raise
            # A block that the store had is gone or damaged since: send all blocks that the engine still has.
            whole = await self._whole_snapshot(key, memory, store)
            return await self._commit(key, memory, whole, store, sent_bytes + tensor_bytes, is_second_try=True)
        publication.head, publication.is_head, publication.attempted = head, True, None
        if (leases := self._leases.get(key.namespace)) is not None:
            leases.committed(key.agent_id, head, publication.generation)
        publication.blocks[:], publication.tail = stored.blocks, stored.tail
        publication.windows, publication.states = stored.windows, stored.states
        written_bytes = sent_bytes + tensor_bytes + digest.size_bytes
        counters = self._stats.of(key.namespace)
        counters.publications[SnapshotState.COMMITTED] += 1
        counters.published_bytes += written_bytes
        _LOG.info(
            "snapshot.committed", version=head.version, tokens=len(memory.transcript.token_ids), bytes=written_bytes
        )
        return SnapshotOutcome(SnapshotState.COMMITTED, head.version, "", head.manifest, written_bytes)

    async def _whole_snapshot(self, key: AgentKey, memory: AgentMemory, store: RemoteCache) -> Snapshot | None:
        hot = self._engine.hot_memory(key)
        if hot is None or hot.tag is not memory:
            return None
        first = await await_copy(self.copies.ask(key, 0, {}))
        # A newer turn may have extended it meanwhile.
        if first is None or tuple(first.state.token_ids) != tuple(memory.transcript.token_ids):
            return None
        memory.publication.blocks.clear()
        memory.publication.windows.clear()
        whole, _ = await self.copies.rest(key, memory, first, store, self._limits.timeout_s)
        return whole

    async def _token(self, key: AgentKey, publication: PublicationState, store: RemoteCache) -> tuple[str, int] | None:
        """The lease that the commit brings. This engine may have given the line back and taken it again. The memory
        moves to the new lease if its parent is still the newest version and the agent was not taken back in between.
        For a first version that cannot be known.
        """
        leases = self._leases.get(key.namespace)
        if leases is None:
            return None
        lease, follows = leases.lease(key.agent_id), publication.claim.follows
        if (
            lease is not None
            and lease.generation != publication.generation
            and follows is not None
            and follows.number
            and is_current(publication.claim, lease.newest)
            and not await store.was_taken_back(key.agent_id, publication.event_cursor)
        ):
            publication.generation = lease.generation
        return (leases.owner, publication.generation) if publication.generation else None

    def _drop(self, key: AgentKey, memory: AgentMemory) -> None:
        """Forget a hot memory that lost to another writer, unless a newer turn has replaced it already."""
        hot = self._engine.hot_memory(key)
        if hot is not None and hot.tag is memory:
            self._engine.drop_hot(key)

    def failed(self, key: AgentKey, publication: PublicationState, reason: str) -> SnapshotOutcome:
        """Count and log that a memory was not stored. Its turn succeeded all the same."""
        self._stats.of(key.namespace).publications[SnapshotState.FAILED] += 1
        _LOG.warning("snapshot.failed", namespace=key.namespace, reason=reason)
        return SnapshotOutcome(SnapshotState.FAILED, _version(publication), reason)


def _version(publication: PublicationState) -> int:
    return publication.head.version if publication.head is not None else 0
