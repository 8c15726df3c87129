"""A Unix socket in front of another one, whose bytes go and come back as slowly as a test wants."""

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path


class SlowLink:
    """Forwards every connection; answers pass at `bytes_per_s` (0: none pass, None: at full speed). So do requests at
    `bulk_bytes_per_s`, behind the first megabyte of a connection.
    """

    def __init__(self, listen: Path, target: Path) -> None:
        self.bytes_per_s: float | None = None
        self.bulk_bytes_per_s: float | None = None
        self._target = str(target)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(listen))
        self._server.listen()
        self.address = f"unix:{listen}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                far.connect(self._target)
                threading.Thread(target=self._forward, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._forward, args=(far, near, True), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError), source, sink:
            passed = 0
            while data := source.recv(16384):
                while (rate := self._rate(passed, is_answer)) == 0:
                    time.sleep(0.01)
                if rate:
                    time.sleep(len(data) / rate)
                sink.sendall(data)
                passed += len(data)

    def _rate(self, passed: int, is_answer: bool) -> float | None:
        if is_answer:
            return self.bytes_per_s
        return self.bulk_bytes_per_s if passed > 1 << 20 else None
