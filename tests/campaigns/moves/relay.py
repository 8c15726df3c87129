"""A link of a rate and a delay between two network namespaces, in user space, for kernels without netem.

Each namespace gets a TUN device. What one of them sends waits in that device, as behind a slow network card, until it
is its turn at the link's rate; it arrives at the other after the delay. Nothing is lost but what a device cannot hold.

    python -m tests.campaigns.moves.relay NAMESPACE NAMESPACE  # Linux, root; prints a line when both devices are there
"""

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

DEVICE = "kv0"
# A packet of this size costs about as much as one of 1,500 bytes here, and there are 20 times fewer.
MTU_BYTES = 32_000
# A device that was not looked at for a moment may catch up by so much.
_LATE_S = 0.001
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass
class Direction:
    """From one device to the other: when the link is free for the next packet, and what is under way."""

    source: int
    target: int
    rate_bytes_per_s: float
    delay_s: float
    free_s: float = 0.0
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)  # with the time of arrival

    def send(self, now_s: float) -> None:
        """Take one packet that waits at the source."""
        packet = os.read(self.source, 1 << 16)
        self.free_s = max(self.free_s, now_s - _LATE_S) + len(packet) / self.rate_bytes_per_s
        self.under_way.append((self.free_s + self.delay_s, packet))

    def deliver(self, now_s: float) -> None:
        """Write what has arrived."""
        while self.under_way and self.under_way[0][0] <= now_s:
            with contextlib.suppress(OSError):  # a device that is not up yet takes nothing
                os.write(self.target, self.under_way.popleft()[1])

    def next_s(self, now_s: float) -> float | None:
        """When there is something to do by the clock: a packet arrives, or the link is free again."""
        times = [self.under_way[0][0]] if self.under_way else []
        if self.free_s > now_s:
            times.append(self.free_s)
        return min(times, default=None)


def device_in(namespace: str) -> int:
    """A new TUN device of that network namespace, as a descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as there, Path("/proc/self/ns/net").open() as here:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        finally:
            libc.setns(here.fileno(), _CLONE_NEWNET)
    return device


def relay(directions: list[Direction]) -> None:
    """Carry packets for good."""
    while True:
        now_s = time.monotonic()
        for each in directions:
            each.deliver(now_s)
        waits = [at_s for each in directions if (at_s := each.next_s(now_s)) is not None]
        timeout_s = max(min(waits) - now_s, 0.0) if waits else None
        free = [each for each in directions if each.free_s <= now_s]
        ready, _, _ = select.select([each.source for each in free], [], [], timeout_s)
        for each in free:
            if each.source in ready:
                each.send(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--delay-ms", type=float, default=2)
    given = parser.parse_args()
    one, other = map(device_in, given.namespaces)
    print("both devices are there", flush=True)
    relay([Direction(a, b, given.mbit * 125_000, given.delay_ms / 1e3) for a, b in ((one, other), (other, one))])


if __name__ == "__main__":
    main()
