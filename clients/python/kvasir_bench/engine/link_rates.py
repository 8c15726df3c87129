"""How fast bytes reach the device, by copies and hashing, which bounds a restore; a program prints the copies'."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np
from blake3 import blake3

from inference_svc.engine.mlx_thread import MlxThread
from kvasir_bench.arithmetic import median_time
from kvasir_bench.program import printed

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


class LetterWorker:
    """Lives on an MLX thread, and works only when a letter arrives."""

    def step(self, take_mail: Callable[[], None]) -> bool:  # noqa: ARG002 - letters are its only work
        return False

    def close(self) -> None:
        """Nothing is left to end."""


def measured(clock: Callable[[], float], size_bytes: int) -> LinkRates:
    """Medians over copies of so many bytes, after one round that warms up, on a thread of its own."""
    thread = MlxThread(LetterWorker, name="links")
    try:
        return thread.post(lambda _: _rates(clock, size_bytes)).result()
    finally:
        thread.close()


def _rates(clock: Callable[[], float], size_bytes: int) -> LinkRates:
    # Not zeros: pages that nobody wrote may all be the same one.
    host = np.arange(size_bytes // 4, dtype=np.uint32)
    there = mx.array(host)
    mx.eval(there)
    data = host.tobytes()

    def rate(moved_bytes: int, work: Callable[[], object]) -> float:
        def synchronized() -> None:
            work()
            mx.synchronize()

        return moved_bytes / median_time(synchronized, _REPEATS, clock)

    # The addition makes the device read what was copied.
    return LinkRates(
        host_to_device=rate(size_bytes, lambda: mx.eval(mx.array(host) + 1)),
        device_copy=rate(2 * size_bytes, lambda: mx.eval(there + 1)),
        blake3=rate(size_bytes, lambda: blake3(data, max_threads=blake3.AUTO).digest()),
    )


def _copies() -> dict[str, int]:
    found = asdict(measured(time.perf_counter, 64 << 20))
    return {name: round(rate) for name, rate in found.items() if name != "blake3"}


if __name__ == "__main__":
    sys.exit(printed(_copies))
