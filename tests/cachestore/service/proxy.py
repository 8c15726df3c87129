"""A link between a client and a store that counts bytes, cuts connections, is slow, falls silent or stands still."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.campaigns.faults.link import Link


class Proxy(Link):
    """Counts are of bytes both ways, over all connections."""

    def __init__(self, listen: Path | None, target: str) -> None:
        self.sent_bytes = 0  # towards the store
        self.received_bytes = 0  # from the store
        self.cut_after_sent: int | None = None
        self.cut_after_received: int | None = None
        self.silent_after_received: int | None = None
        self.pause_s = 0.0  # before each 16 KiB
        self.cuts = 0
        self.heard: list[bytearray] | None = None  # a list: what is sent towards the store is kept, by connection
        self._heard = dict[socket.socket, bytearray]()
        self._flows = threading.Event()
        self.heal()
        super().__init__(listen, Path(target.removeprefix("unix:")))

    def part(self) -> None:
        """Let nothing through, and lose nothing, until `heal`: a network that is parted for a while."""
        self._flows.clear()

    def heal(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self.heal()
        super().close()

    def carry(self, data: bytes, sink: socket.socket, *, is_answer: bool) -> None:
        if not is_answer and self.heard is not None:
            if sink not in self._heard:
                self.heard.append(self._heard.setdefault(sink, bytearray()))
            self._heard[sink] += data
        if self.silent_after_received is not None and self.received_bytes >= self.silent_after_received:
            return
        time.sleep(self.pause_s)
        self._flows.wait()
        sink.sendall(data)
        if self._is_last(len(data), is_answer=is_answer):
            time.sleep(1)  # what was forwarded arrives first: the test knows then where the cut is
            raise ConnectionAbortedError

    def _is_last(self, count: int, *, is_answer: bool) -> bool:
        """Whether this piece was the last before a cut; a cut happens once."""
        with self._lock:
            if is_answer:
                self.received_bytes += count
                is_cut = self.cut_after_received is not None and self.received_bytes >= self.cut_after_received
                self.cut_after_received = None if is_cut else self.cut_after_received
            else:
                self.sent_bytes += count
                is_cut = self.cut_after_sent is not None and self.sent_bytes >= self.cut_after_sent
                self.cut_after_sent = None if is_cut else self.cut_after_sent
            self.cuts += is_cut
            return is_cut


@contextmanager
def proxy_to(target: str, socket_at: Path | None = None) -> Iterator[Proxy]:
    """`socket_at`: where it listens, if not at a port."""
    proxy = Proxy(socket_at, target)
    try:
        yield proxy
    finally:
        proxy.close()
