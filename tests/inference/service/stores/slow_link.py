"""A link whose bytes go and come back as slowly as a test wants."""

import socket
import time
from collections import Counter
from pathlib import Path

from tests.campaigns.faults.link import Link


class SlowLink(Link):
    """Answers pass at `bytes_per_s` (0: none pass, None: at full speed). So do requests at `bulk_bytes_per_s`, behind
    the first megabyte of a connection.
    """

    def __init__(self, listen: Path, target: Path) -> None:
        self.bytes_per_s: float | None = None
        self.bulk_bytes_per_s: float | None = None
        self._passed = Counter[socket.socket]()
        super().__init__(listen, target)

    def carry(self, data: bytes, sink: socket.socket, *, is_answer: bool) -> None:
        while (rate := self._rate(sink, is_answer=is_answer)) == 0:
            time.sleep(0.01)
        if rate:
            time.sleep(len(data) / rate)
        sink.sendall(data)
        self._passed[sink] += len(data)

    def _rate(self, sink: socket.socket, *, is_answer: bool) -> float | None:
        if is_answer:
            return self.bytes_per_s
        return self.bulk_bytes_per_s if self._passed[sink] > 1 << 20 else None
