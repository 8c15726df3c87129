"""Runs publications: at a turn's end what the store lacks of its memory is sent and committed, in a task of its own.

A publication never delays tokens. The turn waits for it a while and reports its outcome. One agent's publications
follow each other; different agents' run side by side.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping

import structlog
from kvasir import errors
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory, Publication, PublicationState
from inference_svc.memory.line_leases import LineLeases
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.committing import Committing, PublishingLimits
from inference_svc.memory.publishing.copies import Copies, files_of
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.answers import StoreMiss
from inference_svc.memory.store.remote_cache import RemoteCache

_LOG = structlog.get_logger(__name__)
_MOST_STORED, _MOST_OF_AN_AGENT = 10_000, 16


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

    def publish(
        self,
        key: AgentKey,
        memory: AgentMemory,
        taken: Snapshot | errors.KvasirError | None,
        store: RemoteCache,
        previous: PublicationState | None,
        stream: BlockStream | None,
        sent_bytes: int = 0,
    ) -> Publication:
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
        before: Publication | None,
    ) -> SnapshotOutcome:
        publication = memory.publication
        began_s = self._clock()
        held_bytes = sum(map(len, files_of(taken))) if isinstance(taken, Snapshot) else 0
        leases = self._leases.get(key.namespace)
        committing = Committing(key, memory, store, self._engine, self.copies, leases, self._limits, self._clock)
        self.copies.held.take(key.namespace, held_bytes)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                # The line stays this engine's meanwhile.
                with leases.using(key.agent_id) if leases is not None else contextlib.nullcontext():
                    if before is not None:
                        # Even if this memory does not extend that one: an agent's turns are stored in their order.
                        await asyncio.wait({before})
                    publication.stored_before = frozenset(self._stored.get(key, ()))
                    # Even if this memory cannot be stored: the memory that extends it must know what it follows.
                    await committing.follow(previous)
                    if isinstance(taken, errors.KvasirError):
                        raise taken
                    if stream is not None:
                        await stream.drain()
                        sent_bytes += stream.sent_bytes
                    outcome = await committing.until_committed(taken, sent_bytes)
            return self._committed(key, memory, outcome, began_s)
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

    def _committed(
        self, key: AgentKey, memory: AgentMemory, outcome: SnapshotOutcome, began_s: float
    ) -> SnapshotOutcome:
        """Count and log that a memory was stored."""
        counters = self._stats.of(key.namespace)
        counters.times.commit.add(self._clock() - began_s)
        counters.publications[SnapshotState.COMMITTED] += 1
        counters.published_bytes += outcome.written_bytes
        _LOG.info(
            "snapshot.committed",
            version=outcome.version,
            tokens=len(memory.transcript.token_ids),
            bytes=outcome.written_bytes,
        )
        return outcome

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
