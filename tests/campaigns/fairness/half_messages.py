"""Requests of which all but the last byte is sent: gRPC's own clients cannot, so this speaks HTTP/2 by itself.

What has arrived of a message is kept until the rest comes, before anybody is asked who sends it.
"""

import asyncio
import struct
from collections import Counter

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SETTING = 4
_FRAME_BYTES = 16_384


class HalfSender:
    """One connection with many calls, none of which ever sends its message's last byte."""

    def __init__(self, socket_path: str, method: str, token: str | None, message_bytes: int) -> None:
        self._socket_path = socket_path
        self._method = method
        self._token = token
        self._message_bytes = message_bytes
        self._windows: Counter[int] = Counter({0: 65_535})
        self._initial_window = 65_535
        self._left: dict[int, int] = {}
        self._writer: asyncio.StreamWriter

    async def run(self, calls: int) -> None:
        """Send as fast as the service lets it, until the connection is closed."""
        reader, self._writer = await asyncio.open_unix_connection(self._socket_path)
        self._writer.write(_PREFACE)
        self._frame(_SETTINGS, 0, 0, b"")
        for number in range(calls):
            stream = 2 * number + 1
            self._windows[stream] += self._initial_window
            self._left[stream] = 5 + self._message_bytes - 1
            self._frame(_HEADERS, _END_HEADERS, stream, self._headers())
        self._send()
        try:
            while True:
                head = await reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                self._take(kind, flags, int.from_bytes(head[5:]) & 0x7FFFFFFF, await reader.readexactly(size))
                self._send()
                await self._writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._writer.close()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for place in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, place)
                if name == _INITIAL_WINDOW_SETTING:
                    for each in self._left:
                        self._windows[each] += value - self._initial_window
                    self._initial_window = value
            self._frame(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING and not flags & _ACK:
            self._frame(_PING, _ACK, 0, payload)
        elif kind == _WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload) & 0x7FFFFFFF
        elif kind == _RST_STREAM:
            self._left.pop(stream, None)
        elif kind == _GOAWAY:
            raise ConnectionError("sent away")

    def _send(self) -> None:
        for stream, left in self._left.items():
            while (size := min(left, self._windows[0], self._windows[stream], _FRAME_BYTES)) > 0:
                is_first = left == 5 + self._message_bytes - 1
                data = b"\0" + struct.pack(">I", self._message_bytes) if is_first else b""
                if len(data) > size:
                    break
                self._frame(_DATA, 0, stream, data + bytes(size - len(data)))
                left -= size
                self._left[stream] = left
                self._windows[0] -= size
                self._windows[stream] -= size

    def _headers(self) -> bytes:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", self._method), (":authority", "localhost")]
        fields += [("content-type", "application/grpc"), ("te", "trailers")]
        fields += [("authorization", f"Bearer {self._token}")] if self._token else []
        # Literal fields that are never indexed, with lengths below 127.
        return b"".join(b"\x10" + _text(name) + _text(value) for name, value in fields)

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._writer.write(len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload)


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()
