"""A store and an engine that plays Llama 3.1 8B's pages, on one machine as `kvasir up` has them; and their faults."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.running.system_fixtures import ENGINE_SERVICE, House, Service

SHAPE = "llama-3.1-8b"
BYTES_PER_TOKEN = 36_864
# Of a turn that restores: prompts then cost so much that the engine reads instead.
_DEAR_TOKENS_PER_S = 500
_LOOK_S = 0.02


class PlayedHouse(House):
    """The limits of the engine are the product's own: what is large must fit them."""

    def __init__(self, root: Path, memory_gib: float, *, has_store: bool = True) -> None:
        super().__init__(root)
        store = self.engine.options[: 2 * has_store]  # what House says of the store comes first
        self.engine = Service("engine", "played_engine", ENGINE_SERVICE, self.engine.socket, root / "engine.log")
        self.engine.options = [
            *("--shape", SHAPE, "--memory-gib", str(memory_gib), "--state-dir", str(root / "state")),
            *(("--store-data-dir", str(self.data_dir), "--store-wait-s", "20") if has_store else ()),
            *store,
        ]

    def restart_dear(self) -> None:
        """Both killed with -9, and both back, with an engine for which a prompt is dear."""
        self.kill()
        self.engine.options += ["--prefill-tokens-per-s", str(_DEAR_TOKENS_PER_S)]
        self.start()

    def stored_bytes(self) -> int:
        """Of all files below the store's directory, those that are being written too."""
        size = 0
        for path in self.data_dir.rglob("*"):
            with contextlib.suppress(OSError):  # it got its name, or went
                size += path.stat().st_size
        return size

    @contextlib.contextmanager
    def slow_store(self, bytes_per_s: float) -> Iterator[None]:
        """The store is stopped and goes on in slices, so that no more than this reaches its directory in a second."""
        over, began_s, before = threading.Event(), time.monotonic(), self.stored_bytes()

        def hold_back() -> None:
            while not over.wait(_LOOK_S):
                is_ahead = self.stored_bytes() - before > bytes_per_s * (time.monotonic() - began_s)
                with contextlib.suppress(ProcessLookupError, AssertionError):  # it was killed meanwhile
                    self.store.freeze() if is_ahead else self.store.thaw()

        thread = threading.Thread(target=hold_back)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            with contextlib.suppress(ProcessLookupError, AssertionError):
                self.store.thaw()
