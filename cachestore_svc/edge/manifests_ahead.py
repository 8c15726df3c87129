"""Manifests that engines write, read from the bytes that come, while these and the last blobs are still on their way to
the disk: a commit then waits for its rows alone, however long its line is.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from kvasir.formats.digest import Digest
from kvasir.waits import ANSWER_S

from cachestore_svc.moving.manifest_room import ManifestRoom
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.snapshots import KnownManifest


@dataclass(frozen=True, slots=True)
class _Ahead:
    reading: asyncio.Task[KnownManifest]
    end: asyncio.TimerHandle


class Gathering:
    """The bytes of one manifest, piece by piece, within its room: it is read when the last has come. They are copied:
    a piece of one byte would keep its whole message.
    """

    def __init__(self, size_bytes: int, read: Callable[[memoryview], None], give_back: Callable[[], None]) -> None:
        self._lacking_bytes = size_bytes
        self._read = read
        self._give_back = give_back
        self._data = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        if self._lacking_bytes <= 0:
            return
        self._lacking_bytes -= len(data)
        if self._lacking_bytes < 0:
            self._drop()
            return
        self._data += data
        if not self._lacking_bytes:
            self._read(memoryview(self._data))
            self._data = bytearray()

    def end(self) -> None:
        """No more pieces come."""
        if self._lacking_bytes > 0:
            self._lacking_bytes = -1
            self._drop()

    def _drop(self) -> None:
        self._data = bytearray()
        self._give_back()


class ManifestsAhead:
    """On one event loop. A manifest takes room of its namespace until its commit ends, or nobody commits it."""

    def __init__(self, store: AioStore, room: ManifestRoom) -> None:
        self._store = store
        self._room = room
        self._ahead: dict[tuple[str, Digest], _Ahead] = {}
        self._awaited: dict[tuple[str, Digest], asyncio.Event] = {}
        self._unread: set[tuple[str, Digest]] = set()  # came lately, and had no room

    def begin(self, namespace: str, manifest: Digest, data: memoryview | bytes = b"") -> None:
        """Begin to read a manifest that is durable, or of which these are all bytes, if there is much room."""
        key = namespace, manifest
        if key not in self._ahead:
            if self._room.take_ahead(namespace, manifest.size_bytes):
                self._begin(key, data)
            else:
                self._unread.add(key)
                asyncio.get_running_loop().call_later(ANSWER_S, self._unread.discard, key)
        self._wake(key)

    def gather(self, namespace: str, manifest: Digest) -> "Gathering | None":
        """For a manifest whose bytes come in pieces. None without much room: it is read once it is durable."""
        key, size_bytes = (namespace, manifest), manifest.size_bytes
        if key in self._ahead or not self._room.take_ahead(namespace, size_bytes):
            return None
        return Gathering(size_bytes, partial(self._gathered, key), partial(self._room.give_back, namespace, size_bytes))

    def _gathered(self, key: tuple[str, Digest], data: memoryview) -> None:
        if key in self._ahead:
            self._room.give_back(key[0], key[1].size_bytes)
        else:
            self._begin(key, data)
        self._wake(key)

    def _wake(self, key: tuple[str, Digest]) -> None:
        if (awaited := self._awaited.pop(key, None)) is not None:
            awaited.set()

    def _begin(self, key: tuple[str, Digest], data: memoryview | bytes) -> None:
        reading = self._store.threads.run(key[0], self._store.snapshots.known, *key, data)
        # A commit comes as soon as the blobs beside its manifest are durable. A later one reads the manifest itself.
        end = asyncio.get_running_loop().call_later(ANSWER_S, self._forget, key)
        self._ahead[key] = _Ahead(asyncio.create_task(reading), end)

    @asynccontextmanager
    async def known(
        self, namespace: str, manifest: Digest, *, is_coming: bool = False
    ) -> AsyncIterator[KnownManifest | None]:
        """A manifest for its commit, if it was read ahead. None: the commit has to read it, with room for that.
        `is_coming`: its bytes may still be on their way.
        """
        if is_coming:
            await self._begun((namespace, manifest))
        if (ahead := self._ahead.pop((namespace, manifest), None)) is None:
            async with self._room.parsing(namespace, manifest.size_bytes):
                yield None
            return
        ahead.end.cancel()
        try:
            await asyncio.wait((ahead.reading,))
            yield None if ahead.reading.cancelled() or ahead.reading.exception() else ahead.reading.result()
        finally:
            self._give_back(namespace, manifest, ahead)

    async def _begun(self, key: tuple[str, Digest]) -> None:
        """Wait until a manifest has come, for so long at most as an answer may take."""
        if key in self._ahead or key in self._unread:
            return
        begun = self._awaited.setdefault(key, asyncio.Event())
        try:
            async with asyncio.timeout(ANSWER_S):
                await begun.wait()
        except TimeoutError:
            pass
        finally:
            if self._awaited.get(key) is begun:
                del self._awaited[key]

    def _forget(self, key: tuple[str, Digest]) -> None:
        self._give_back(*key, self._ahead.pop(key))

    def _give_back(self, namespace: str, manifest: Digest, ahead: _Ahead) -> None:
        """Give the room back once the thread has ended that reads."""

        def ended(reading: asyncio.Task[KnownManifest]) -> None:
            if not reading.cancelled():
                reading.exception()  # the commit reads it again, and is refused
            self._room.give_back(namespace, manifest.size_bytes)

        if ahead.reading.done():
            ended(ahead.reading)
        else:
            ahead.reading.add_done_callback(ended)
