"""A link that cuts its connections once a number of bytes have passed."""

import socket
from pathlib import Path

from tests.campaigns.faults.link import Link


class CutLink(Link):
    """Bytes are counted both ways, over all connections."""

    piece_bytes = 4096

    def __init__(self, listen: Path, target: Path) -> None:
        self.passed_bytes = 0
        self._cut_after: int | None = None
        super().__init__(listen, target)

    def cut_after(self, size_bytes: int | None) -> None:
        """Cut once, after so many more bytes; None: no more."""
        with self._lock:
            self.passed_bytes, self._cut_after = 0, size_bytes

    def carry(self, data: bytes, sink: socket.socket, *, is_answer: bool) -> None:
        with self._lock:
            left = None if self._cut_after is None else max(self._cut_after - self.passed_bytes, 0)
            self.passed_bytes += len(data)
            is_cut = left is not None and left < len(data)
            self._cut_after = None if is_cut else self._cut_after
        sink.sendall(data[:left] if is_cut else data)
        if is_cut:
            self.end_connections()
