"""Reads the memories that were used last behind a start: the system then has them in RAM when their next turns come."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, islice

import structlog
from kvasir.errors import KvasirError
from kvasir.formats.digest import Digest
from kvasir.server.machine import machine_bytes
from kvasir.waits import RETRY_S

from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.store.aio_store import AioStore

# As fast as eight readers of a disk that gives 1.5 GB/s.
_READERS = 2
_AT_ONCE = 4
_PART = 8  # of the machine's memory, or the container's

Blob = tuple[str, Digest]  # with its namespace


class ReadingAhead:
    """Reads `most_bytes`, or an eighth of the machine's memory, once. Errors are left to those who want the blobs.
    `resumed` counts the memories that somebody wanted: each has the disk for a second.
    """

    def __init__(self, store: AioStore, most_bytes: int | None, resumed: Callable[[], int]) -> None:
        self._store = store
        self._most_bytes = machine_bytes() // _PART if most_bytes is None else most_bytes
        self._resumed = resumed
        self._log = structlog.get_logger("cachestore")

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        memories = await self._store.threads.run(HOUSE, self._memories)
        wanted = chain.from_iterable(memories)
        read_bytes = sum(await asyncio.gather(*(self._read(wanted) for _ in range(_READERS))))
        took_ms = round((loop.time() - began_s) * 1000)
        self._log.info("read_ahead.done", memories=len(memories), bytes=read_bytes, ms=took_ms)

    def _memories(self) -> list[list[Blob]]:
        """The blobs of those used last that fit, each blob once, the smallest memory first: most wait least."""
        chosen, seen, left_bytes = list[list[Blob]](), set[Blob](), self._most_bytes
        for namespace, manifest, total_bytes in self._store.care.used_last():
            if left_bytes <= 0:
                break
            try:
                named = self._store.blobs.named_blobs(namespace, manifest, total_bytes)
            except KvasirError:
                continue
            own = [each for digest in (manifest, *named) if (each := (namespace, digest)) not in seen]
            if _size_bytes(own) <= left_bytes:
                seen.update(own)
                left_bytes -= _size_bytes(own)
                chosen.append(own)
        return sorted(chosen, key=_size_bytes)

    async def _read(self, wanted: Iterator[Blob]) -> int:
        read_bytes = 0
        while some := list(islice(wanted, _AT_ONCE)):
            seen = self._resumed()
            read_bytes += await self._store.threads.run(HOUSE, self._store.care.read_ahead, some)
            while (now := self._resumed()) != seen:
                seen = now
                await asyncio.sleep(RETRY_S)
        return read_bytes


def _size_bytes(blobs: list[Blob]) -> int:
    return sum(digest.size_bytes for _, digest in blobs)
