"""Large objects, received from the socket into memory that is used again. obstore, which gets the answers of other
kinds, receives each piece into memory of its own and hands it to another thread: twice the processor's time."""

import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from kvasir.waits import ANSWER_S, PATIENCE_S, SILENCE_S

from cachestore_svc.blobs.bucket.patience import lying

LEAST_BYTES = 1 << 20  # of a smaller object most of the time is its request's
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Connections that are used again, unless they rested for more than PATIENCE_S: a router may have dropped those.
_MOST_RESTING = 16
_MOST_HEAD_BYTES = 32 << 10
_PORTS = {"http": 80, "https": 443}
_HEAD = re.compile(rb"HTTP/1\.1 200 [^\r\n]*\r\n(?:[\w-]+:[^\r\n]*\r\n)*\r\n", re.ASCII)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,18})[ \t]*(?=\r\n)", re.ASCII | re.IGNORECASE)
_ABSENT = b"HTTP/1.1 404 "
_OTHER_BODY = re.compile(rb"\r\n(?:transfer|content)-encoding:", re.ASCII | re.IGNORECASE)
_LAST = re.compile(rb"\r\nconnection:[^\r\n]*close", re.ASCII | re.IGNORECASE)


class NotPlain(Exception):
    """No object comes this way, or not all of it: obstore, which repeats requests, gets it or fails."""


class Downlink:
    """Connections to a bucket's server. From any thread. `sign`: gives the signed address of an object; `silence_s`:
    that long it may send nothing; `steady`: seconds that nobody sets."""

    def __init__(
        self, sign: Callable[[str], str], silence_s: float, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._sign = sign
        self._silence_s = silence_s
        self._steady = steady
        self._gate = threading.Lock()
        self._resting: list[tuple[float, socket.socket]] = []
        self._tls: ssl.SSLContext | None = None
        self._has_proxies = bool(getproxies().keys() - {"no"})  # obstore goes through them
        self._not_before = 0.0  # nobody connects before this time

    @contextmanager
    def coming(self, name: str) -> Iterator["PlainObject"]:
        """An object, whose bytes the block receives. Raises NotPlain, FileNotFoundError, and OSError for a server that
        is silent."""
        try:
            address = urlsplit(self._sign(name))
        except Exception as error:  # of obstore: it signs nothing for this bucket
            raise NotPlain from error
        if self._has_proxies or (address.scheme != "https" and address.hostname not in LOOPBACK):
            raise NotPlain
        if self._steady() < self._not_before:
            raise NotPlain
        with ExitStack() as exits:
            connection = exits.enter_context(self._rested() or self._connected(address))
            with _plain(name):
                connection.sendall(_request(address))
                found = self._head(connection)
            if found.startswith(_ABSENT):
                raise FileNotFoundError(name)
            try:
                coming = PlainObject(connection, name, found)
            except NotPlain:  # it may be its way always
                self._not_before = self._steady() + SILENCE_S
                raise
            yield coming
            if not coming.left_bytes and not coming.is_last and self._rests(connection):
                exits.pop_all()

    def _connected(self, address: SplitResult) -> socket.socket:
        try:
            made = socket.create_connection((address.hostname, address.port or _PORTS[address.scheme]), ANSWER_S)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.scheme == "https":
                self._tls = self._tls or ssl.create_default_context()
                made = self._tls.wrap_socket(made, server_hostname=address.hostname)
        except (OSError, ValueError) as error:  # or a certificate that obstore alone knows
            self._not_before = self._steady() + SILENCE_S
            raise NotPlain from error
        if isinstance(made, ssl.SSLSocket):
            made.settimeout(self._silence_s)
        else:  # the kernel waits for all bytes that a caller has room for: each return waits for the interpreter's lock
            made.settimeout(None)
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                made.setsockopt(socket.SOL_SOCKET, direction, _timeval(self._silence_s))
        return made

    def _head(self, connection: socket.socket) -> bytes:
        """All that came until an answer's head was whole. Raises NotPlain, and TimeoutError."""
        came, give_up = b"", self._steady() + self._silence_s
        while b"\r\n\r\n" not in came:
            more = connection.recv(_MOST_HEAD_BYTES)
            came += more
            if not more or len(came) > 2 * _MOST_HEAD_BYTES:
                raise NotPlain
            if self._steady() > give_up:
                raise TimeoutError
        return came

    def _rested(self) -> socket.socket | None:
        """The connection that rested least, of those that may be used again. Ends the others."""
        with self._gate:
            while self._resting:
                since, connection = self._resting.pop()
                if self._steady() - since <= PATIENCE_S and not _has_news(connection):
                    return connection
                connection.close()
        return None

    def _rests(self, connection: socket.socket) -> bool:
        with self._gate:
            if is_kept := len(self._resting) < _MOST_RESTING:
                self._resting.append((self._steady(), connection))
        return is_kept


class PlainObject:
    """An object on its way."""

    def __init__(self, connection: socket.socket, name: str, came: bytes) -> None:
        """`came`: the answer's head, and bytes that came with it. Raises NotPlain."""
        head = _HEAD.match(came)
        lengths = _LENGTH.findall(head[0]) if head else ()
        if head is None or len(lengths) != 1 or _OTHER_BODY.search(head[0]):
            raise NotPlain
        self._connection = connection
        self._flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
        self._name = name
        self._came = memoryview(came)[head.end() :]
        self.size_bytes = self.left_bytes = int(lengths[0])
        self.is_last = _LAST.search(head[0]) is not None or len(self._came) > self.size_bytes

    def read_into(self, room: memoryview) -> int:
        """Receive the next bytes, as many as come within `silence_s`; 0 at the end. Raises NotPlain, and OSError for
        silence."""
        room = room[: self.left_bytes]
        if count := min(len(room), len(self._came)):
            room[:count], self._came = self._came[:count], self._came[count:]
        elif room:
            with _plain(self._name):
                count = self._connection.recv_into(room, 0, self._flags)
            if not count:  # it was cut
                raise NotPlain
        self.left_bytes -= count
        return count


def _timeval(seconds: float) -> bytes:
    whole, part = divmod(round(seconds * 1e6), 1_000_000)
    return struct.pack("ll", whole, part)


def _has_news(connection: socket.socket) -> bool:
    """Whether the server has closed it, or sent what nobody requested: the next answer would begin with that."""
    news = select.poll()
    news.register(connection, select.POLLIN)
    return bool(news.poll(0)) or (isinstance(connection, ssl.SSLSocket) and connection.pending() > 0)


def _request(address: SplitResult) -> bytes:
    return f"GET {address.path}?{address.query} HTTP/1.1\r\nHost: {address.netloc}\r\nAccept: */*\r\n\r\n".encode()


@contextmanager
def _plain(name: str) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, BlockingIOError):
        raise lying("too slowly", name) from None
    except OSError as error:
        raise NotPlain from error
