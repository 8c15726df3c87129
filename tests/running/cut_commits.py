"""A proxy before a PostgreSQL server that cuts connections in the middle of a COMMIT."""

import contextlib
import select
import socket
import threading
from dataclasses import dataclass, field


@dataclass
class CommitCutter:
    """Forwards to a port of this host. `cut_next`: the next COMMIT arrives and its answer does not, or neither does."""

    port: int
    cuts: int = 0
    refused: int = 0  # connections after a cut
    refusals: int = 0  # that are still to come
    _cut: str = ""
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    def __post_init__(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def own_port(self) -> int:
        return int(self._listener.getsockname()[1])

    def cut_next(self, *, arrives: bool) -> None:
        self._cut = "behind" if arrives else "before"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.cuts and self.refusals:
                    self.refusals -= 1
                    self.refused += 1
                    near.close()
                    continue
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as far:
            while True:
                readable, _, _ = select.select([near, far], [], [])
                for side in readable:
                    data = side.recv(1 << 16)
                    if not data or (side is near and b"COMMIT\0" in data and self._cuts(far, data)):
                        return
                    (far if side is near else near).sendall(data)

    def _cuts(self, far: socket.socket, data: bytes) -> bool:
        how, self._cut = self._cut, ""
        if how == "behind":
            far.sendall(data)
            far.recv(1 << 16)  # the server has committed
        self.cuts += bool(how)
        return bool(how)
