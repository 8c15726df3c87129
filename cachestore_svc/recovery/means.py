"""The clock, the chance and the disk that a store is opened with."""

from collections.abc import Callable
from dataclasses import dataclass

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import LAST_UNIX_MS
from cachestore_svc.sealing.sealed_form import RandomBytes


@dataclass(frozen=True)
class Means:
    clock: Callable[[], float]
    token_hex: Callable[[int], str]
    disk: Disk
    steady: Callable[[], float]
    random_bytes: RandomBytes

    def now_unix_ms(self) -> int:
        return now_unix_ms(self.clock)


def now_unix_ms(clock: Callable[[], float]) -> int:
    """The clock's time, at most what a Timestamp can express: what was stored must be answered."""
    return int(min(max(clock() * 1000, 0), LAST_UNIX_MS))
