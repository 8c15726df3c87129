"""A memory's files on their way from the store to the engine, which takes those that came while others are read."""

import asyncio
from collections.abc import Sequence

import structlog
from kvasir.formats.digest import Digest

from inference_svc.engine.incoming import Incoming
from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache

_LOG = structlog.get_logger(__name__)


class BackgroundRead:
    """Reads blobs in the background, from now until they are all there, one fails, or it is stopped."""

    def __init__(self, store: RemoteCache, digests: Sequence[Digest], budget: Budget) -> None:
        self.incoming = Incoming(len(digests))
        self.size_bytes = sum(digest.size_bytes for digest in digests)
        self.came_bytes = 0
        self.first_s = 0.0  # until the first blob came
        self.miss: Miss | None = None  # why not all came; known once `incoming` has ended
        self._has_begun = asyncio.Event()
        self._task = asyncio.create_task(self._read(store, digests, budget))

    async def begun(self) -> bool:
        """Wait for the first blob. False if there is none."""
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
        incoming, before_s = self.incoming, budget.spent_s

        def take(data: bytes) -> None:
            incoming.add(data)
            self.came_bytes += len(data)
            if not self._has_begun.is_set():
                self.first_s = budget.spent_s - before_s
                self._has_begun.set()

        try:
            self.miss = await store.read_blobs(digests, budget, take)
        except Exception:  # noqa: BLE001 - whatever failed, the turn goes on with what came
            _LOG.exception("restore.read_failed")
            self.miss = Miss(MissReason.STORE_REFUSED, "the blobs could not be read")
        finally:
            incoming.end()
            self._has_begun.set()
