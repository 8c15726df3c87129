"""A thread that reads requests' blocks from the store, one request after the other. It needs neither vLLM nor torch."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Queue

from kvasir.errors import DeadlineExceeded, Unavailable
from kvasir.formats.digest import Digest
from kvasir.store_for_vllm.stored_kv import StoredKv
from kvasir.waits import PATIENCE_S, SILENCE_S

_LOG = logging.getLogger("kvasir.store_for_vllm")
_BLOCKS_READ = 8  # that wait to be copied into vLLM's


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of the store by number, and vLLM's block for each of their parts; None: vLLM has that part."""

    tokens: list[int]
    digests: dict[int, tuple[str, int]]
    places: dict[int, list[int | None]]


@dataclass(frozen=True, slots=True)
class Read:
    """A block that came for a request, and vLLM's blocks for its parts. Without layers: no more will come."""

    name: str
    places: Sequence[int | None] = ()
    layers: Sequence[memoryview] = ()


class Reading:
    """`blocks` has those that came. Of a request that could not be read the last word comes at once, and for a while
    of all others: each of them would wait for the store as long."""

    def __init__(
        self, stored: StoredKv, silence_s: float = SILENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stored = stored
        self._silence_s = silence_s
        self._clock = clock
        self._retry_s = 0.0
        self._asked: Queue[tuple[str, Load]] = Queue()
        self.blocks: Queue[Read] = Queue(_BLOCKS_READ)
        threading.Thread(target=self._read_all, daemon=True).start()

    def ask(self, name: str, load: Load) -> None:
        self._asked.put((name, load))

    def _read_all(self) -> None:
        while True:
            name, load = self._asked.get()
            if self._clock() >= self._retry_s:
                with warning("stored blocks are computed again"):
                    self._read(name, load)
            self.blocks.put(Read(name))

    def _read(self, name: str, load: Load) -> None:
        digests = {number: Digest(*each) for number, each in load.digests.items()}
        try:
            for number, layers in self._stored.read(load.tokens, digests, self._silence_s):
                self.blocks.put(Read(name, load.places[number], layers))
        except (Unavailable, DeadlineExceeded):
            self._retry_s = self._clock() + PATIENCE_S
            raise


@contextmanager
def warning(failure: str) -> Iterator[None]:
    """Log a failure of any kind, and go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  of a store or disk: vLLM computes instead
        _LOG.warning("%s: %s: %s", failure, type(error).__name__, error)
