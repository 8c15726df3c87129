"""How fast bytes reach the device: copies from host memory, copies on the device, and hashing, in bytes per second.

A restore cannot be faster than the slowest of them, so its time is judged against what was measured in the same run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import mlx.core as mx
import numpy as np
from blake3 import blake3

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second."""

    host_to_device: float
    device_copy: float  # bytes read and bytes written
    blake3: float

    @property
    def slowest(self) -> float:
        return min(self.host_to_device, self.device_copy, self.blake3)


class LinkProbe:
    """Measures on an MLX thread, when a letter asks for it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def step(self, take_mail: Callable[[], None]) -> bool:  # noqa: ARG002 - letters are its only work
        return False

    def close(self) -> None:
        """Nothing is left to end."""

    def rates(self, size_bytes: int) -> LinkRates:
        """Medians over copies of so many bytes, after one round that warms up."""
        # Not zeros: pages that nobody wrote may all be the same one.
        host = np.arange(size_bytes // 4, dtype=np.uint32)
        there = mx.array(host)
        mx.eval(there)
        data = host.tobytes()
        # The addition makes the device read what was copied.
        return LinkRates(
            host_to_device=self._rate(size_bytes, lambda: mx.eval(mx.array(host) + 1)),
            device_copy=self._rate(2 * size_bytes, lambda: mx.eval(there + 1)),
            blake3=self._rate(size_bytes, lambda: blake3(data, max_threads=blake3.AUTO).digest()),
        )

    def _rate(self, size_bytes: int, work: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS + 1):
            mx.synchronize()
            began = self._clock()
            work()
            mx.synchronize()
            times.append(self._clock() - began)
        return size_bytes / median(times[1:])
