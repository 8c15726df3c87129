"""A Unix socket in front of another one, whose bytes come back as slowly as a test wants."""

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path


class SlowLink:
    """Forwards every connection; answers pass at `bytes_per_s` (0: none pass, None: at full speed)."""

    def __init__(self, listen: Path, target: Path) -> None:
        self.bytes_per_s: float | None = None
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
            while data := source.recv(4096):
                while is_answer and self.bytes_per_s == 0:
                    time.sleep(0.01)
                if is_answer and self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                sink.sendall(data)
