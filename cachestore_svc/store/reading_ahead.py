"""Reads the memories that were used last behind a start: the system then has them in RAM when their next turns come."""

import asyncio
import os
from collections.abc import Iterator
from itertools import islice

import structlog
from kvasir.errors import KvasirError
from kvasir.formats.digest import Digest

from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.store.aio_store import AioStore

# An engine reads by eight threads, so most of the disk is for memories that are wanted now.
_READERS = 2
_AT_ONCE = 8
_PART = 8  # of the machine's memory


class ReadingAhead:
    """Reads `most_bytes`, or an eighth of the machine's memory, once. Errors are left to those who want the blobs."""

    def __init__(self, store: AioStore, most_bytes: int | None) -> None:
        self._store = store
        self._left_bytes = _machine_bytes() // _PART if most_bytes is None else most_bytes
        self._read_bytes = 0
        self._log = structlog.get_logger("cachestore")

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        wanted = iter(await self._store.threads.run(HOUSE, lambda: list(self._wanted())))
        await asyncio.gather(*(self._read(wanted) for _ in range(_READERS)))
        self._log.info("read_ahead.done", bytes=self._read_bytes, ms=round((loop.time() - began_s) * 1000))

    def _wanted(self) -> Iterator[tuple[str, Digest]]:
        """Each blob once, those of the memory that was used last first, as far as they fit."""
        seen = set[tuple[str, Digest]]()
        for namespace, manifest, total_bytes in self._store.care.used_last():
            if self._left_bytes <= 0:
                return
            try:
                named = self._store.blobs.named_blobs(namespace, manifest, total_bytes)
            except KvasirError:
                continue
            for each in dict.fromkeys((namespace, digest) for digest in (manifest, *named)):
                if each not in seen and (left_bytes := self._left_bytes - each[1].size_bytes) >= 0:
                    seen.add(each)
                    self._left_bytes = left_bytes
                    yield each

    async def _read(self, wanted: Iterator[tuple[str, Digest]]) -> None:
        while some := list(islice(wanted, _AT_ONCE)):
            self._read_bytes += await self._store.threads.run(HOUSE, self._store.care.read_ahead, some)


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
