"""A Unix socket or a port in front of another one, whose traffic is cut, held, slowed or damaged at a chosen byte."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.faults.link import Link

_SLOW_BYTES_PER_S = 100_000
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


class FaultyLink(Link):
    """One fault at a time may be armed."""

    piece_bytes = 1 << 16

    def __init__(self, listen: Path | None, target: Path | int) -> None:
        self.was_met = False
        self._fault: Fault | None = None
        self._passed = 0
        self._is_down = self._is_busy = False
        self._free = threading.Event()
        self._free.set()
        self._is_slow = False
        super().__init__(listen, target)

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
        super().close()

    def admits(self, near: socket.socket) -> bool:
        if not (self._is_down or self._is_busy):
            return True
        with near, suppress(OSError):
            if self._is_busy:
                near.settimeout(1.0)
                near.recv(self.piece_bytes)
                near.sendall(_BUSY)
        return False

    def carry(self, data: bytes, sink: socket.socket, *, is_answer: bool) -> None:
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
                self.end_connections()
            case "truncate":
                raise ConnectionAbortedError
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
