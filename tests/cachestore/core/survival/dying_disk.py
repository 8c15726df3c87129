"""A disk whose process dies at a chosen effect: before it, after it, or, for a write, in the middle of it."""

import os
import signal
import threading
from pathlib import Path

from cachestore_svc.blobs.disk import Disk


class DyingDisk(Disk):
    """Counts effects; at number `death` the process kills itself, as `kill -9` does. 0: never."""

    def __init__(self, death: int = 0) -> None:
        self._death = death
        self._lock = threading.Lock()
        self.effects = 0

    def _effect(self) -> None:
        with self._lock:
            self.effects += 1
            if self.effects == self._death:
                os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        self._effect()
        half = len(data) // 2
        super().write(descriptor, data[:half])
        self._effect()
        super().write(descriptor, data[half:])

    def add_directory(self, path: Path) -> None:
        if path.is_dir():  # no effect: each store makes sure of 256 of them once
            return
        self._effect()
        super().add_directory(path)
        self._effect()

    def fsync(self, descriptor: int) -> None:
        self._effect()
        super().fsync(descriptor)
        self._effect()

    def rename(self, source: Path, target: Path) -> None:
        self._effect()
        super().rename(source, target)
        self._effect()

    def remove(self, path: Path) -> None:
        self._effect()
        super().remove(path)
        self._effect()

    def reached(self, point: str) -> None:
        self._effect()
