"""A proxy between a client and a store that counts bytes, cuts connections, is slow, falls silent or stands still."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Proxy:
    """Listens on loopback and forwards to a Unix socket. Counts are of bytes both ways, over all connections."""

    target: str
    sent_bytes: int = 0  # towards the store
    received_bytes: int = 0  # from the store
    cut_after_sent: int | None = None
    cut_after_received: int | None = None
    silent_after_received: int | None = None
    pause_s: float = 0.0  # before each 16 KiB
    cuts: int = 0
    heard: list[bytearray] | None = None  # a list: what is sent towards the store is kept, for each connection
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _pairs: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _flows: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._flows.set()

    def part(self) -> None:
        """Let nothing through, and lose nothing, until `heal`: a network that is parted for a while."""
        self._flows.clear()

    def heal(self) -> None:
        self._flows.set()

    @property
    def address(self) -> str:
        name = self._listener.getsockname()
        return f"unix:{name}" if isinstance(name, str) else f"127.0.0.1:{name[1]}"

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                try:
                    far.connect(self.target.removeprefix("unix:"))
                except OSError:
                    near.close()
                    continue
                pair = (near, far)
                self._pairs.append(pair)
                threading.Thread(target=self._forward, args=(pair, True), daemon=True).start()
                threading.Thread(target=self._forward, args=(pair, False), daemon=True).start()

    def drop_connections(self) -> None:
        for pair in self._pairs:
            _close(pair)
        self._pairs.clear()

    def close(self) -> None:
        self._listener.close()
        self.heal()
        self.drop_connections()

    def _forward(self, pair: tuple[socket.socket, socket.socket], is_sending: bool) -> None:
        source, target = pair if is_sending else pair[::-1]
        heard = bytearray()
        if is_sending and self.heard is not None:
            self.heard.append(heard)
        with contextlib.suppress(OSError):
            while data := source.recv(16 << 10):
                if is_sending and self.heard is not None:
                    heard += data
                if self._is_silent():
                    continue
                time.sleep(self.pause_s)
                self._flows.wait()
                target.sendall(data)
                if self._count(len(data), is_sending):
                    # What was forwarded arrives first: the test knows then where the cut is.
                    time.sleep(1)
                    break
        _close(pair)

    def _is_silent(self) -> bool:
        return self.silent_after_received is not None and self.received_bytes >= self.silent_after_received

    def _count(self, count: int, is_sending: bool) -> bool:
        """Whether this piece was the last before a cut; a cut happens once."""
        with self._lock:
            if is_sending:
                self.sent_bytes += count
                is_cut = self.cut_after_sent is not None and self.sent_bytes >= self.cut_after_sent
                self.cut_after_sent = None if is_cut else self.cut_after_sent
            else:
                self.received_bytes += count
                is_cut = self.cut_after_received is not None and self.received_bytes >= self.cut_after_received
                self.cut_after_received = None if is_cut else self.cut_after_received
            self.cuts += is_cut
            return is_cut


def _listening_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def _close(pair: tuple[socket.socket, socket.socket]) -> None:
    for each in pair:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


@contextmanager
def proxy_to(target: str, socket_at: Path | None = None) -> Iterator[Proxy]:
    """`socket_at`: where it listens, if not at a port."""
    proxy = Proxy(target, **({"_listener": _listening_at(socket_at)} if socket_at else {}))
    threading.Thread(target=proxy.accept, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.close()
