"""The clock, the chance and the disk that a store is opened with."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import LAST_UNIX_MS
from cachestore_svc.sealing.sealed_form import RandomBytes


@dataclass(frozen=True)
class Means:
    clock: Callable[[], float]  # Unix seconds (`time.time`)
    token_hex: Callable[[int], str]  # so many random bytes in hex (`secrets.token_hex`)
    disk: Disk = field(default_factory=Disk)
    steady: Callable[[], float] = time.monotonic
    random_bytes: RandomBytes = secrets.token_bytes

    def now_unix_ms(self) -> int:
        """The clock's time, at most what a Timestamp can express: what was stored must be answered."""
        return int(min(max(self.clock() * 1000, 0), LAST_UNIX_MS))
