"""How long a store waits for its bucket: as long as bytes come. Where they do not, others of the same folder do not
wait with the first: their threads are the namespace's, whose other calls need no bucket."""

import asyncio
import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from kvasir.clients.blob_memory import BlobMemory
from kvasir.waits import HANGS_S, PATIENCE_S

_LEAST_BYTES = 1 << 18  # of all objects that are read, within PATIENCE_S
_TRUSTED_BYTES = 64 << 20
_KEPT_BYTES = 64 << 20  # memory that is used again
_SPARE_BYTES = 64 << 10  # for more than the server named
_MOST_NAMES_BYTES = 1 << 30  # of a list
_Kind = tuple[str, bool]  # of requests: their folder, and whether they write
_LIST_S, _NAME_S = 2 * HANGS_S, 0.1  # for a list, and more for each name of it


class Arriving(Protocol):
    """An object that comes."""

    @property
    def size_bytes(self) -> int:
        """As the server names it."""

    def read_into(self, room: memoryview) -> int:
        """Receive the next bytes, as many as come soon: how many; 0 at the end."""


class Pieces:
    """An object that obstore gives."""

    def __init__(self, found: Any) -> None:
        self.size_bytes = int(found.meta["size"])
        self._pieces = iter(found.stream(1))  # as it comes: one byte a second is no progress
        self._left = memoryview(b"")

    def read_into(self, room: memoryview) -> int:
        while not self._left:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._left = memoryview(piece)
        taken, self._left = self._left[: len(room)], self._left[len(room) :]
        room[: len(taken)] = taken
        return len(taken)


class Patience:
    """With each folder of a bucket, by its last answer to a read and to a write: a write may take minutes, and no read
    is refused beside it. From any thread. `steady`: seconds that nobody sets."""

    def __init__(self, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._memory = BlobMemory(_KEPT_BYTES)
        self._gate = threading.Lock()
        self._asked: Counter[_Kind] = Counter()  # requests that wait
        self._slow: set[_Kind] = set()  # those whose last request failed late

    @contextmanager
    def asking(self, name: str, *, writes: bool = False) -> Iterator[Callable[[], None]]:
        """One request. Raises OSError at once where the folder was slow, and another request finds out whether it still
        is. The block reports each part of its object that was taken: that is an answer, too."""
        kind, began = (name.partition("/")[0], writes), self._steady()
        with self._gate:
            if kind in self._slow and self._asked[kind]:
                raise lying("too slowly", name)
            self._asked[kind] += 1
        is_slow = False
        try:
            yield lambda: self._note(kind, is_slow=False)
        except OSError as error:  # that an object is there, or is not, is an answer, also behind a long write
            is_answered = isinstance(error, FileExistsError | FileNotFoundError)
            is_slow = not is_answered and self._steady() - began >= PATIENCE_S
            raise
        finally:
            self._note(kind, is_slow=is_slow)
            with self._gate:
                self._asked[kind] -= 1
                self._asked += Counter()  # without those that are 0

    def _note(self, kind: _Kind, *, is_slow: bool) -> None:
        with self._gate:
            (self._slow.add if is_slow else self._slow.discard)(kind)

    def first_bytes(self, found: Arriving, name: str, most_bytes: int) -> memoryview:
        """Of an object that comes, at most so many. The server may have named any size: not much is requested on its
        word."""
        data = self._memory.take(min(most_bytes, found.size_bytes, _TRUSTED_BYTES))
        filled, filled_then, give_up, least = 0, 0, self._steady() + PATIENCE_S, self._least_bytes()
        while filled < most_bytes:
            if filled < len(data):
                count = found.read_into(data[filled:])
            else:  # nearly always the end
                more = memoryview(bytearray(_SPARE_BYTES))[: most_bytes - filled]
                if count := found.read_into(more):
                    data = _larger(data, min(most_bytes, 2 * (filled + count)))
                    data[filled : filled + count] = more[:count]
            if not count:
                break
            filled += count
            if self._steady() > give_up:
                least_now = self._least_bytes()
                if filled - filled_then < min(least, least_now):
                    raise lying("too slowly", name)
                filled_then, give_up, least = filled, self._steady() + PATIENCE_S, least_now
        return data[:filled].toreadonly()

    def _least_bytes(self) -> int:
        """Of one object: all requests share the link."""
        with self._gate:
            return _LEAST_BYTES // max(1, self._asked.total())


def _larger(data: memoryview, size_bytes: int) -> memoryview:
    """These bytes, with room behind them."""
    made = memoryview(bytearray(size_bytes))
    made[: len(data)] = data
    return made


def names_of(pages: Any, folder: str, *, only_some: bool = False) -> list[str]:
    """Of a list, or of the first page that has any. Raises OSError for one that comes too slowly, or has no end."""

    async def all_of() -> list[str]:
        seen, left_bytes = dict[str, None](), _MOST_NAMES_BYTES
        async with asyncio.timeout(_LIST_S) as limit:
            async for page in pages:
                for name in (str(each["path"]) for each in page):
                    left_bytes -= len(name)
                    if name in seen or left_bytes < 0:
                        raise lying("with a list that has no end", folder)
                    seen[name] = None
                if only_some and seen:
                    break
                limit.reschedule((limit.when() or 0) + _NAME_S * len(page))
        return list(seen)

    return _ended(all_of, folder)  # type: ignore[no-any-return]


def answer(ask: Callable[[], Any], what: str) -> Any:
    """Of a request that lists, as a whole. Raises OSError where it comes too slowly."""

    async def asked() -> Any:
        async with asyncio.timeout(_LIST_S):
            return await ask()

    return _ended(asked, what)


def _ended(ask: Callable[[], Any], name: str) -> Any:
    """Pages without names, each with a next one, keep a list from ever ending: only a cancel does, and only a loop can
    cancel. It has a thread of its own, as the caller's may run one already."""
    with ThreadPoolExecutor(1, thread_name_prefix="kvasir-list") as thread:
        try:
            return thread.submit(lambda: asyncio.run(ask())).result()
        except TimeoutError:
            raise lying("too slowly", name) from None


def lying(how: str, name: str) -> OSError:
    return OSError(errno.EHOSTUNREACH, f"the bucket answered {how}", name)
