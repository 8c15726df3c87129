"""A link in front of a server: a socket or a port whose pieces a kind of link may count, hold, cut or change."""

import socket
import threading
from contextlib import suppress
from pathlib import Path


class Link:
    """Forwards every connection to `target`, a socket's path or a port of loopback. `listen`: a path; None: a port."""

    piece_bytes = 1 << 14

    def __init__(self, listen: Path | None, target: Path | int) -> None:
        self._target, self._open, self._lock = target, set[socket.socket](), threading.Lock()
        if listen is None:
            self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
            self.port = int(self._server.getsockname()[1])
            self.address = f"127.0.0.1:{self.port}"
        else:
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(str(listen))
            self._server.listen()
            self.address = f"unix:{listen}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()
        self.end_connections()

    def end_connections(self) -> None:
        for each in list(self._open):
            end(each)

    def admits(self, near: socket.socket) -> bool:
        """Whether a new connection is forwarded; one that is not was ended here."""
        return True

    def carry(self, data: bytes, sink: socket.socket, *, is_answer: bool) -> None:
        """Send a piece. Raises OSError where the connection ends here."""
        sink.sendall(data)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if not self.admits(near):
                    continue
                try:
                    far = self._connected()
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _connected(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection(("127.0.0.1", self._target))
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(str(self._target))
        except OSError:
            far.close()
            raise
        return far

    def _forward(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(self.piece_bytes):
                self.carry(data, sink, is_answer=is_answer)
        for each in (source, sink):
            end(each)
            self._open.discard(each)


def end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
