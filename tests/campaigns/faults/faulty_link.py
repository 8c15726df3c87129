"""A Unix socket or a port in front of another one, whose traffic is cut, held, slowed or damaged at a chosen byte."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SLOW_BYTES_PER_S = 100_000
_CHUNK_BYTES = 1 << 16
_LASTING = ("outage", "busy", "hang", "slow")
_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Fault:
    """What happens once `after_bytes` have passed in one direction.

    "outage": every connection ends, new ones too, until disarmed. "blip": every connection ends, once. "hang": nothing
    passes until disarmed. "delay": everything stands still for `delay_s`. "slow": 100 kB/s until disarmed.
    "truncate": the byte's connection ends before it. "flip": one bit of the byte is turned. "busy": every connection
    ends, and each new one is answered by HTTP's 503 until disarmed.
    """

    kind: str
    is_answer: bool = True
    after_bytes: int = 0
    delay_s: float = 0.0


class _CutError(OSError):
    """This connection ends here."""


class FaultyLink:
    """Forwards every connection; one fault at a time may be armed."""

    def __init__(self, listen: Path | None, target: Path | int) -> None:
        """`target`: a socket's path, or a port of loopback. `listen`: a path, or None for a port."""
        self.was_met = False
        self._target = target
        self._fault: Fault | None = None
        self._passed = 0
        self._lock = threading.Lock()
        self._is_down = self._is_busy = False
        self._free = threading.Event()
        self._free.set()
        self._is_slow = False
        self._open: set[socket.socket] = set()
        if listen is None:
            self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
            self.port = int(self._server.getsockname()[1])
        else:
            self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._server.bind(str(listen))
            self._server.listen()
            self.address = f"unix:{listen}"
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, fault: Fault) -> None:
        with self._lock:
            self._fault, self._passed, self.was_met = fault, 0, False

    def disarm(self) -> None:
        """Everything passes again."""
        with self._lock:
            self._fault, self._is_down, self._is_busy, self._is_slow = None, False, False, False
            self._free.set()

    def close(self) -> None:
        self.disarm()
        self._server.close()
        self._end_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if self._is_down or self._is_busy:
                    self._refuse(near)
                    continue
                try:
                    far = self._connected()
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
                threading.Thread(target=self._forward, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._forward, args=(far, near, True), daemon=True).start()

    def _refuse(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            if self._is_busy:
                near.settimeout(1.0)
                near.recv(_CHUNK_BYTES)
                near.sendall(_BUSY)

    def _connected(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection(("127.0.0.1", self._target))
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            far.connect(str(self._target))
        except OSError:
            far.close()
            raise
        return far

    def _forward(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(_CHUNK_BYTES):
                self._pass(data, is_answer, sink)
        except OSError:
            pass
        finally:
            for each in (source, sink):
                _end(each)
                self._open.discard(each)

    def _pass(self, data: bytes, is_answer: bool, sink: socket.socket) -> None:
        before, fault = data, None
        with self._lock:
            armed = self._fault
            if armed is not None and not self.was_met and armed.is_answer == is_answer:
                self._passed += len(data)
                if self._passed > armed.after_bytes:
                    before = data[: len(data) - (self._passed - armed.after_bytes)]
                    fault, self.was_met = armed, True
        self._send(before, sink)
        if fault is not None:
            self._send(self._happen(fault, data[len(before) :]), sink)

    def _send(self, data: bytes, sink: socket.socket) -> None:
        self._free.wait()
        if self._is_slow:
            time.sleep(len(data) / _SLOW_BYTES_PER_S)
        sink.sendall(data)

    def _happen(self, fault: Fault, rest: bytes) -> bytes:
        """The fault; what then passes of the bytes from the chosen one on."""
        if fault.kind in _LASTING and not self._began(fault):
            return rest
        match fault.kind:
            case "outage" | "blip" | "busy":
                self._end_all()
            case "truncate":
                raise _CutError
            case "delay":
                self._free.clear()
                threading.Timer(fault.delay_s, self._free.set).start()
            case "flip":
                return bytes([rest[0] ^ 0x10]) + rest[1:]
        return rest

    def _began(self, fault: Fault) -> bool:
        """Not if the bytes before it passed only once it was disarmed, as nobody would end it."""
        with self._lock:
            if self._fault is not fault:
                return False
            self._is_down, self._is_busy = fault.kind == "outage", fault.kind == "busy"
            self._is_slow = fault.kind == "slow"
            if fault.kind == "hang":
                self._free.clear()
        return True

    def _end_all(self) -> None:
        for each in list(self._open):
            _end(each)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
