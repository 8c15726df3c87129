"""Runs the scrub beside a serving store: slowly, so that callers do not notice, and with peers' help for damage."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from kvasir.errors import KvasirError, Unavailable
from kvasir.formats.digest import Digest
from kvasir.waits import LONGEST_RETRY_S

from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.upkeep.scrubbing import ToScrub

_TRIES = 3

Repair = Callable[[str, Digest], Awaitable[bool]]


class BackgroundScrub:
    """One pass after the other, each `every_s` after the end of the last one, at `bytes_per_s`."""

    def __init__(self, store: AioStore, repair: Repair, *, bytes_per_s: int, every_s: float) -> None:
        self._scrubbing = store.care.scrubbing
        self._threads = store.threads
        self._repair = repair
        self._bytes_per_s = bytes_per_s
        self._every_s = every_s
        self._log = structlog.get_logger("cachestore")

    async def run(self) -> None:
        """Never ends by itself. When it is cancelled, it notes where it is."""
        is_loaded = False
        while True:
            try:
                if not is_loaded:
                    await self._threads.run(HOUSE, self._scrubbing.load)
                    is_loaded = True
                await self._pass_when_due()
            except KvasirError as error:
                # A disk that fails or is full now: the pass goes on where it was.
                self._log.warning("scrub.paused", reason=error.reason)
                await asyncio.sleep(LONGEST_RETRY_S)
            except Exception:  # noqa: BLE001  a bug of ours must not end it for good
                self._log.exception("scrub.failed")
                await asyncio.sleep(LONGEST_RETRY_S)

    async def _pass_when_due(self) -> None:
        if due_in_s := self._scrubbing.due_in_s(self._every_s):
            await asyncio.sleep(min(due_in_s, LONGEST_RETRY_S))
            return
        if self._scrubbing.state.ended_unix_ms:
            await self._threads.run(HOUSE, self._scrubbing.begin)
            self._log.info("scrub.began")
        saved_s = asyncio.get_running_loop().time()
        try:
            while blobs := await self._threads.run(HOUSE, self._scrubbing.next):
                for blob in blobs:
                    if not await self._is_whole(blob):
                        self._log.error("scrub.damaged", namespace=blob.namespace)
                        if await self._repair(blob.namespace, blob.digest):
                            self._scrubbing.repaired()
                    await asyncio.sleep(blob.digest.size_bytes / self._bytes_per_s)
                now_s = asyncio.get_running_loop().time()
                if now_s - saved_s > LONGEST_RETRY_S:
                    await self._threads.run(HOUSE, self._scrubbing.save)
                    saved_s = now_s
        except asyncio.CancelledError:
            await self._threads.run(HOUSE, self._scrubbing.save)
            raise
        state = self._scrubbing.state
        counts = {"blobs": state.blobs_checked, "damaged": state.blobs_damaged, "repaired": state.blobs_repaired}
        self._log.info("scrub.done", **counts)

    async def _is_whole(self, blob: ToScrub) -> bool:
        for _ in range(_TRIES):
            try:
                return await self._threads.run(HOUSE, self._scrubbing.is_whole, blob)
            except Unavailable as error:
                self._log.warning("scrub.paused", reason=error.reason)
                await asyncio.sleep(LONGEST_RETRY_S)
        return self._scrubbing.skip(blob)
