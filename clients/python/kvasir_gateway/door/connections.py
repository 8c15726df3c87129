"""Connections: what they may cost before a request is admitted, and while nobody reads its answer.

A connection's caller is not known until it shows a key. So strangers' connections have a small room of their own, in
which the oldest makes way for the newest, and so have those of key holders that rest between two requests."""

import asyncio
import math
import select
import socket
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import httptools
from kvasir.errors import ResourceExhausted
from kvasir.waits import HANGS_S, PAUSE_S, SILENCE_S
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvasir_gateway.door.receiving import Filling, Receiving

_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256  # of a head, and of trailers: each takes thirty times as much room as its shortest line
_ONCE = frozenset({b"host", b"origin", b"authorization", b"x-api-key"})  # what comes before us may have read another
# Requests behind one that is not answered yet: they are read, because so an end is seen at once. More are refused, and
# more bytes are read later; meanwhile the system reports an end.
_MAX_WAITING, _MAX_WAITING_BYTES = 16, 64 << 10
_LARGE_PIECE_BYTES = 16 << 10  # of a body: to copy it twice more, and to stop reading until it is taken, costs more
_MOST_AT_ONCE = 16  # connections accepted in one turn of the loop: a crowd's would keep it for long
_CONNECTION = "kvasir.connection"  # in an ASGI scope


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections may be open that no admitted request holds."""

    strangers: int = 512
    resting: int = 1024
    requests: int = 2000
    """Requests that were admitted and are not answered yet, of all namespaces."""

    @classmethod
    def of(cls, files: int) -> "ConnectionLimits":
        """For a process that may open so many files: an eighth of them is left for everything else. A request has two
        while its body is received."""
        most = cls()
        return cls(min(most.strangers, files // 8), min(most.resting, files // 4), min(most.requests, files // 4))

    @property
    def at_once(self) -> int:
        """How many may be accepted before the oldest is closed, and before others' requests are read."""
        return max(1, min(_MOST_AT_ONCE, self.strangers // 2))


class Connections:
    """The open connections that no admitted request holds. Belongs to one event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.receiving = Receiving()
        self._strangers: OrderedDict[Connection, None] = OrderedDict()
        self._resting: OrderedDict[Connection, None] = OrderedDict()

    def close(self) -> None:
        self.receiving.close()

    def opened(self, connection: "Connection") -> None:
        self._keep(self._strangers, connection, self.limits.strangers)

    def asks(self, connection: "Connection") -> None:
        """A whole head came: of all strangers this one has been silent for the shortest time."""
        self._resting.pop(connection, None)
        if connection in self._strangers:
            self._strangers.move_to_end(connection)

    def admitted(self, connection: "Connection") -> None:
        """Its request showed a key."""
        self._strangers.pop(connection, None)

    def rests(self, connection: "Connection") -> None:
        """Its request was answered."""
        if connection not in self._strangers:
            self._keep(self._resting, connection, self.limits.resting)

    def closed(self, connection: "Connection") -> None:
        self._strangers.pop(connection, None)
        self._resting.pop(connection, None)

    @staticmethod
    def _keep(room: "OrderedDict[Connection, None]", connection: "Connection", most: int) -> None:
        room[connection] = None
        while len(room) > most:
            oldest, _ = room.popitem(last=False)
            oldest.transport.abort()


def show_key(scope: MutableMapping[str, Any]) -> None:
    """A request of this scope showed a key that is known: its connection is a stranger's no longer."""
    connection = scope.get(_CONNECTION)
    if connection is not None:
        connection.admitted()


async def receive_rest(
    scope: MutableMapping[str, Any], size_bytes: int, more: Callable[[], Awaitable[memoryview]]
) -> None:
    """Receive what is missing of a request's body, so many bytes, into the memory that `more` gives for some of them.
    Where that is not possible, the rest comes as always. Raises ClientDisconnect."""
    connection = scope.get(_CONNECTION)
    if connection is not None and connection.is_inside_body(scope):
        await connection.receive_rest(size_bytes, more)


class Connection(HttpToolsProtocol):
    """uvicorn's own keeps all of a head that has no end, and waits for it. Its option bounds another parser's.

    Of a large body the parser sees the beginning alone: it would copy each piece, and wake the request for it."""

    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _ending: asyncio.TimerHandle | None = None
    # Since the last that was a whole head, or a body's: of a head, or of a trailer.
    _unread_bytes = 0
    # Of a body that goes past the parser: what has not come yet, and what is received of it.
    _left_bytes = 0
    _filling: Filling | None = None

    def __init__(self, *given: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*given, **named)
        self._connections = connections
        self._unanswered: deque[RequestResponseCycle] = deque()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connections.opened(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._unanswered:  # uvicorn tells the newest alone
            cycle.disconnected = True
            cycle.message_event.set()
        if self._filling is not None:
            self._filling.stop()
        self._connections.closed(self)
        self._stop_waiting()
        self._stop_watching()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader(math.inf)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching()

    def is_inside_body(self, scope: MutableMapping[str, Any]) -> bool:
        """Whether all that comes next is of this request's body. Not of one that ends its connection: the parser takes
        what comes behind it, too, for what is not read when a connection is closed resets it, and the answer is lost.
        """
        cycle = self.cycle
        is_newest = cycle.scope["state"] is scope["state"]  # which the scope's copies share
        goes_on = cycle.more_body and not cycle.body
        return is_newest and goes_on and cycle.keep_alive and not self.parser.should_upgrade()

    async def receive_rest(self, size_bytes: int, more: Callable[[], Awaitable[memoryview]]) -> None:
        """As the function of this name. A rest that nobody takes is dropped as it comes."""
        self.flow.pause_reading()
        self._left_bytes = size_bytes
        try:
            while self._left_bytes:
                with await more() as place:
                    if self.cycle.disconnected or not await self._fill(place):
                        raise ClientDisconnect
        finally:
            if not self._left_bytes:
                self._end_body()
            self.flow.resume_reading()

    async def _fill(self, place: memoryview) -> bool:
        """Whether all of it came. Raises ResourceExhausted."""
        try:
            self._filling = self._connections.receiving.begin(self.transport.get_extra_info("socket"), place)
        except OSError as error:
            text = f"the gateway can receive no large body now: {error.strerror}"
            raise ResourceExhausted(text, reason="TOO_MANY_CALLS", retry_after_s=1) from None
        try:
            await self._filling.end()
        finally:
            self._left_bytes -= self._filling.received_bytes
            is_full, self._filling = self._filling.received_bytes == len(place), None
        return is_full

    def _end_body(self) -> None:
        self.parser = httptools.HttpRequestParser(self)  # what comes next is a request
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._left_bytes:
            self._unset_keepalive_if_required()  # who was refused still sends
            data, self._left_bytes = data[self._left_bytes :], max(0, self._left_bytes - len(data))
            if self._left_bytes:
                return
            self._end_body()
        self._unread_bytes += len(data)
        super().data_received(data)
        if len(self.pipeline) > _MAX_WAITING:
            self.transport.abort()
        self._pause_if_much_waits()
        if self._unread_bytes <= _MAX_HEAD_BYTES or self.transport.is_closing():
            return
        self.send_400_response(f"The request's head has more than {_MAX_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Closes without a word where a request is under way: its reader would take this for its answer, or a part."""
        is_body = self.cycle is not None and self.cycle.more_body and not self.cycle.response_started
        if len(self._unanswered) <= is_body:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def admitted(self) -> None:
        """A request of it showed a key."""
        self._connections.admitted(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        name = self.headers[-1][0]
        if len(self.headers) > _MAX_HEADERS or (name in _ONCE and sum(known == name for known, _ in self.headers) > 1):
            raise ValueError("too many headers")  # the parser ends: 400

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        self._stop_waiting()
        self._connections.asks(self)
        self.scope[_CONNECTION] = self  # type: ignore[literal-required]
        super().on_headers_complete()
        self.headers = []  # of trailers
        self._unanswered.append(self.cycle)
        if self.pipeline:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        cycle = self.cycle
        if not cycle.body and len(body) >= _LARGE_PIECE_BYTES and not cycle.response_complete:
            cycle.body = body  # type: ignore[assignment]  # taken as it is, before the next one is read
            cycle.message_event.set()
            return
        cycle.body = bytearray(cycle.body) if isinstance(cycle.body, bytes) else cycle.body
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._pause_if_much_waits()
        if self._is_answered:  # else the next request is here already
            self._await_head()
            if not self.transport.is_closing():
                self._connections.rests(self)

    def _pause_if_much_waits(self) -> None:
        """Until the next answer."""
        if sum(map(_waiting_bytes, self.pipeline)) > _MAX_WAITING_BYTES and not self.transport.is_closing():
            self.flow.pause_reading()
            if self._ending is None:
                self._look_for_end()

    def _look_for_end(self) -> None:
        """Whether its reader has left behind bytes that are not read yet. Behind more than the system takes for it, an
        end is seen once the reader's system has given up."""
        self._ending = None
        if self.transport.is_closing() or not self.flow.read_paused:
            return
        if _has_ended(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._ending = self.loop.call_later(PAUSE_S, self._look_for_end)

    @property
    def _is_answered(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        """From the connection or from the answer before, a whole head comes in time, or it is closed."""
        self._stop_waiting()
        self._late = self.loop.call_later(SILENCE_S, self._close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        """It stays until its reader has taken all of the answer before."""
        self.transport.close()
        self._stop_watching()
        self._check_reader(math.inf)

    def _check_reader(self, unsent_before: float) -> None:
        """An answer's reader takes some of it each time, or is dropped."""
        if (unsent := self.transport.get_write_buffer_size()) >= unsent_before:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(HANGS_S, self._check_reader, unsent)

    def _stop_watching(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side sends no more, or is gone. Systems without POLLRDHUP report an end as POLLHUP."""
    ends = select.poll()
    ends.register(connection.fileno(), getattr(select, "POLLRDHUP", 0))
    return bool(ends.poll(0))


def _waiting_bytes(waiting: tuple[RequestResponseCycle, object]) -> int:
    cycle, _ = waiting
    head = sum(len(name) + len(value) for name, value in cycle.scope["headers"])
    return len(cycle.body) + len(cycle.scope["raw_path"]) + len(cycle.scope["query_string"]) + head
