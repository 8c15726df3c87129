"""Swaps a preempted turn's files out to the store, and back in. No manifest names these blobs: the store keeps them for
its grace period, renewed while the turn waits. Files that it does not take stay in RAM, and bound what else is
preempted.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import structlog
from kvasir.errors import KvasirError
from kvasir.formats.block_file import FileBytes
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import Event, Hot, Preempted, Resumed, Reuse, Wanted
from inference_svc.engine.engine import TurnHandle
from inference_svc.engine.files.incoming import Incoming
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache

_LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SwapLimits:
    write_stall_s: float  # time without progress, after which the files stay in RAM
    read_budget_s: float
    """Time without progress; then KV of the missing files is computed again. The turn holds its room meanwhile."""
    min_bytes_per_s: float
    renew_s: float
    piece_files: int  # files that are hashed and sent at a time


@dataclass(frozen=True, slots=True)
class SwapRooms:
    """The rooms for a namespace's swapped files. A turn does not wait for either: it had the bytes before."""

    namespace: str
    publishing: SharedRoom  # files that wait for the store
    restoring: SharedRoom  # files that came back and are not KV yet


def may_be_preempted(store: RemoteCache | None, memory: AgentMemory | None, reuse: Reuse) -> bool:
    """Whether a turn may be preempted: a store takes its KV, and has the hot memory that it extends, which goes too."""
    if store is None or not store.connection.is_reachable:
        return False
    publication = memory.publication if memory is not None else None
    is_stored = publication is not None and publication.standing.is_stored and not publication.is_running
    return is_stored or not isinstance(reuse, Hot)


class SwapStore:
    def __init__(
        self,
        handle: TurnHandle,
        store: RemoteCache,
        rooms: SwapRooms,
        counters: NamespaceCounters,
        limits: SwapLimits,
        clock: Callable[[], float],
    ) -> None:
        self._handle = handle
        self._store = store
        self._rooms = rooms
        self._counters = counters
        self._limits = limits
        self._clock = clock
        self._files: tuple[FileBytes, ...] | None = None  # files in memory, as long as the store does not have them
        self._digests: list[Digest] = []
        self._held: tuple[SharedRoom, int] | None = None
        self._miss: Miss | None = None
        self._task: asyncio.Task[None] | None = None

    def event(self, event: Event) -> None:
        match event:
            case Preempted(files):
                self._files = files
                self._hold(self._rooms.publishing, sum(map(len, files)))
                self._begin(self._keep(files))
            case Wanted():
                self._begin(self._bring_back())
            case Resumed(_, lost_tokens):
                self._count(lost_tokens)
                self.close()
            case _:
                pass

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._files, self._digests, self._miss = None, [], None
        self._let_go()

    async def _keep(self, files: Sequence[FileBytes]) -> None:
        digests: list[Digest] = []
        try:
            for first in range(0, len(files), self._limits.piece_files):
                piece = files[first : first + self._limits.piece_files]
                digests += (await self._store.blobs.write_tensors(piece, self._limits.write_stall_s))[0]
        except KvasirError as error:
            _LOG.warning("swap.not_stored", error=type(error).__name__, reason=getattr(error, "reason", ""))
            return
        self._files, self._digests = None, digests
        self._let_go()
        self._handle.files_stored()
        await self._renew()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._limits.renew_s)
            try:
                await self._store.blobs.renew(self._digests, self._limits.write_stall_s)
            except KvasirError as error:
                _LOG.info("swap.not_renewed", error=type(error).__name__)

    async def _bring_back(self) -> None:
        if self._files is not None:
            self._handle.resume(self._files)
            return
        incoming = Incoming(len(self._digests), is_kept=True)

        async def take(data: FileBytes) -> None:
            incoming.add(data)

        self._handle.resume(incoming)
        try:
            self._hold(self._rooms.restoring, sum(digest.size_bytes for digest in self._digests))
            budget = Budget(self._limits.read_budget_s, self._limits.min_bytes_per_s, self._clock)
            self._miss = await self._store.blobs.give_blobs(self._digests, budget, take)
        except Exception:  # noqa: BLE001 - whatever failed, the turn holds room and must go on
            _LOG.exception("swap.read_failed")
        finally:
            incoming.end()

    def _count(self, lost_tokens: int) -> None:
        if lost_tokens:
            reason = self._miss.reason if self._miss is not None else MissReason.BLOB_DAMAGED
            self._counters.misses[reason] += 1
            _LOG.warning("swap.lost", reason=reason.value, tokens=lost_tokens)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(work)

    def _hold(self, held: SharedRoom, size_bytes: int) -> None:
        self._let_go()
        held.take(self._rooms.namespace, size_bytes)
        self._held = (held, size_bytes)

    def _let_go(self) -> None:
        if self._held is not None:
            held, size_bytes = self._held
            held.give_back(self._rooms.namespace, size_bytes)
            self._held = None
