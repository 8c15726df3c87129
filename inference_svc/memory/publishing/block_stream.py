"""Sends the full blocks of a running turn to the store, so that at its end only the tail and the manifest remain."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import structlog
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.engine.engine import Engine
from inference_svc.memory.publishing.copies import Copies, await_copy, files_of
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.stored_windows import StoredWindow

_LOG = structlog.get_logger(__name__)


class BlockStream:
    """The blocks of one turn: those that the store has, and the piece on its way."""

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

    def keeps(self, blocks: int) -> None:
        """The turn's KV has so many of the stored blocks at most; others are computed anew. On the MLX thread. A piece
        on its way has blocks from before: it goes on with the list that it began with.
        """
        self.stored = self.stored[:blocks]
        self._full = len(self.stored)

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
        stored = self.stored
        first, most = len(stored), self._copies.piece_blocks
        snapshot = await await_copy(self._engine.snapshot(self.key, first, blocks_only=True, max_blocks=most))
        if snapshot is None or not snapshot.blocks:
            return False
        digests, sent_bytes = await self._store.write_tensors(files_of(snapshot), self._timeout_s)
        stored += digests
        self.sent_bytes += sent_bytes
        return True
