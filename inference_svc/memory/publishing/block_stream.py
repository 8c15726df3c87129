"""Sends the full blocks of a running turn to the store, so that at its end only the tail and the manifest remain."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory, as_hot
from inference_svc.memory.publishing.copies import Copies, Pinning
from inference_svc.memory.publishing.sending import Sending
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.stored_windows import StoredWindow

_LOG = structlog.get_logger(__name__)


class BlockStream:
    """The blocks of one turn: those that the store has, and the pieces on their way."""

    def __init__(
        self,
        copies: Copies,
        key: AgentKey,
        store: RemoteCache,
        stored: Sequence[Digest],
        stall_timeout_s: float,
        previous: AgentMemory | None = None,
    ) -> None:
        """`previous`: the hot memory that the turn extends, whose blocks are not sent twice."""
        self.key = key
        self._copies = copies
        self._store = store
        self._stall_timeout_s = stall_timeout_s
        self._previous = as_hot(previous) if previous is not None else None
        self._full = len(stored)
        self._cuts = 0
        self._reused = 0  # blocks of the turn that are the previous memory's
        self._task: asyncio.Task[None] | None = None
        self._current = self._new_sending(stored)
        self._sent_before_bytes = 0

    @property
    def _sending(self) -> Sending:
        return self._current.sending

    @property
    def stored(self) -> list[Digest]:
        return self._sending.stored

    @property
    def sent_bytes(self) -> int:
        return self._sent_before_bytes + self._sending.sent_bytes

    def keeps(self, blocks: int, reused: int) -> None:
        """The turn's KV has so many of the stored blocks at most, and reuses so many of the memory that it extends;
        others are computed again. Pieces on their way have blocks from before: they go on with the list that they began
        with.
        """
        self._reused = reused
        self._cuts += 1
        self._restart(self.stored[:blocks])
        self._full = self._sending.next_block

    def blocks_full(self, count: int) -> None:
        self._full = max(self._full, count)
        if self._task is None and self._sending.next_block < self._full and self._store.connection.is_reachable:
            self._task = asyncio.create_task(self._send())

    def pin_rest(self, cuts: int, kept_blocks: int, stored_windows: Mapping[int, StoredWindow]) -> Pinning:
        """The turn is over: request what is not under way yet from the engine. From any thread: it only reads. Its KV
        was cut so often (`keeps`), and has so many of the stored blocks; perhaps the event loop has not heard of it.
        """
        current = self._current
        sending = current.sending
        first_block = sending.next_block if current.cuts == cuts else min(len(sending.stored), kept_blocks)
        return self._copies.pin(self.key, first_block, stored_windows)

    def stop(self) -> None:
        """Begin no more pieces. Those under way may end."""
        self._full = 0
        if self._task is not None and self._sending.waits_for_room:
            self._task.cancel()  # the turn's end sends these blocks, and may hold the room itself

    def abandon(self) -> None:
        """The turn failed: no manifest will name its blocks."""
        self.stop()
        self._sending.cancel()
        if self._task is not None:
            self._task.cancel()

    async def drain(self) -> list[Digest]:
        """The turn's leading full blocks that are in the store, once no piece and no earlier memory is under way."""
        if self._task is not None:
            await asyncio.wait({self._task})
        await self._sending.drain()
        return max(self.stored, self._of_previous(), key=len)

    async def _send(self) -> None:
        try:
            await self._follow()
            if self._sending.has_failed:
                await self._sending.drain()
                self._restart(self.stored)
            while self._sending.next_block < self._full:
                most = min(self._full - self._sending.next_block, self._copies.piece_blocks)
                copy = partial(self._copies.blocks, self.key, most=most)
                if not await self._sending.put(copy, most * self._copies.block_bytes):
                    return
        except Exception as error:  # noqa: BLE001 - it has no reader but the log
            # The next full block tries again; the end of the turn sends what is missing, and reports it if it cannot.
            _LOG.info("publish.blocks_failed", error=type(error).__name__, reason=getattr(error, "reason", ""))
        finally:
            self._task = None

    async def _follow(self) -> None:
        """Wait for the publication of the memory before: what it sends is not sent twice."""
        task = self._previous.publication.task if self._previous is not None else None
        if task is None or task.done():
            return
        self._sending.waits_for_room = True
        await asyncio.wait({task})
        if len(self._of_previous()) > self._sending.next_block:
            self._restart(self._of_previous())

    def _of_previous(self) -> list[Digest]:
        return self._previous.files.blocks[: self._reused] if self._previous is not None else []

    def _restart(self, stored: Sequence[Digest]) -> None:
        self._sent_before_bytes = self.sent_bytes
        self._current = self._new_sending(stored)

    def _new_sending(self, stored: Sequence[Digest]) -> "_Current":
        sending = Sending(self._copies, self.key.namespace, self._store, stored, self._stall_timeout_s)
        return _Current(self._cuts, sending)


@dataclass(frozen=True, slots=True)
class _Current:
    """The pieces that go, and how often the turn's KV was cut before them: one value for readers in other threads."""

    cuts: int
    sending: Sending
