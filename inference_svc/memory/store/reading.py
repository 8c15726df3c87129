"""A memory's files on their way from the store to the engine, which takes those that came while others are read."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog
from kvasir.formats.block_file import FileBytes
from kvasir.formats.digest import Digest

from inference_svc.engine.files.incoming import Incoming
from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache

AHEAD_BYTES = 128 << 20  # files that came and wait for the engine have no more bytes, but for one file
MOST_BYTES = 512 << 20
"""Nor do they have more together with files that are being read, and those that are copied to the device."""
_LOG = structlog.get_logger(__name__)


class BackgroundRead:
    """Reads blobs in the background, from now until they are all there, one fails, or it is stopped."""

    def __init__(self, store: RemoteCache, digests: Sequence[Digest], budget: Budget) -> None:
        self.incoming = Incoming(len(digests))
        self.size_bytes = sum(digest.size_bytes for digest in digests)
        self.is_from_disk = False  # known once the first blob came
        self.came_bytes = 0
        self.first_s = 0.0  # until the first blob came
        self.took_s = 0.0  # until the last one came, or none came any more
        self.waited_s = 0.0  # of these, for the engine to take some
        self.miss: Miss | None = None  # why not all came; known once `incoming` has ended
        self._clock = store.connection.clock
        self._has_begun = asyncio.Event()
        self._task = asyncio.create_task(self._read(store, digests, budget))

    async def begun(self) -> bool:
        try:
            await self._has_begun.wait()
        except BaseException:
            self.stop()
            raise
        return self.incoming.ready > 0

    def stop(self) -> None:
        """Nobody needs the blobs any more. Idempotent."""
        self._task.cancel()
        self.incoming.end()
        self.incoming = Incoming(0)

    async def _read(self, store: RemoteCache, digests: Sequence[Digest], budget: Budget) -> None:
        incoming, before_s, clock = self.incoming, budget.spent_s, self._clock
        began_s = clock()
        loop, was_taken = asyncio.get_running_loop(), asyncio.Event()

        def taken() -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody reads any more
                loop.call_soon_threadsafe(was_taken.set)

        async def take(data: FileBytes) -> None:
            incoming.add(data)
            self.came_bytes += len(data)
            if not self._has_begun.is_set():
                self.first_s = budget.spent_s - before_s
                self._has_begun.set()
            if incoming.waiting_bytes > AHEAD_BYTES:
                full_s = clock()
                while incoming.waiting_bytes > AHEAD_BYTES:
                    await was_taken.wait()
                    was_taken.clear()
                self.waited_s += clock() - full_s

        incoming.watch_taking(taken)
        try:
            self.is_from_disk = not await store.blobs.are_cached(digests)
            self.miss = await store.blobs.give_blobs(digests, budget, take)
        except Exception:  # noqa: BLE001 - after any failure the turn goes on with the files that came
            _LOG.exception("restore.read_failed")
            self.miss = Miss(MissReason.STORE_REFUSED, "the blobs could not be read")
        finally:
            self.took_s = clock() - began_s
            incoming.end()
            self._has_begun.set()
