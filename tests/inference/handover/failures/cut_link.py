"""A Unix socket in front of an engine, which cuts its connections once a number of bytes have passed."""

import contextlib
import socket
import threading
from pathlib import Path


class CutLink:
    """Forwards every connection until it is told to cut. Bytes are counted both ways, over all connections."""

    def __init__(self, listen: Path, target: Path) -> None:
        self.address = f"unix:{listen}"
        self.passed_bytes = 0
        self._cut_after: int | None = None
        self._target = str(target)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(listen))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, size_bytes: int | None) -> None:
        """Cut once, after so many more bytes; None: no more."""
        with self._lock:
            self.passed_bytes, self._cut_after = 0, size_bytes

    def close(self) -> None:
        self._server.close()
        self._cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    far.connect(self._target)
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
                threading.Thread(target=self._forward, args=(far, near), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(4096):
                with self._lock:
                    left = None if self._cut_after is None else max(self._cut_after - self.passed_bytes, 0)
                    self.passed_bytes += len(data)
                    is_cut = left is not None and left < len(data)
                    self._cut_after = None if is_cut else self._cut_after
                sink.sendall(data[:left] if is_cut else data)
                if is_cut:
                    self._cut()
                    return

    def _cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for each in pairs:
            for end in each:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
