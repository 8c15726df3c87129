"""Large bodies of a declared length: received where they belong, past the parser, and billed as they come."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kvasir.errors import DeadlineExceeded, ResourceExhausted
from kvasir_gateway.door import bodies, receiving
from kvasir_gateway.door.bodies import RequestRoom, Rooms
from kvasir_gateway.door.connections import Connection
from kvasir_gateway.door.receiving import Filling, Receiving
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tests.gateway.connections.test_connections import connections_to

_MOST_BYTES = 8 << 20
_BODY = bytes(range(256)) * (20 << 10)
Ended = list[bytes | BaseException]


@contextlib.asynccontextmanager
async def reading(rooms: Rooms) -> AsyncIterator[tuple[Callable[[], Any], Ended]]:
    """How to connect to a server that reads bodies, and how each reading ended."""
    ended: Ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        room, status = RequestRoom(rooms), 200
        room.admit("n")
        try:
            data = await room.read(Request({**scope}, receive), _MOST_BYTES)
            ended.append(bytes(data))
        except (ResourceExhausted, ClientDisconnect, DeadlineExceeded) as error:
            ended.append(error)
            status = 408 if isinstance(error, DeadlineExceeded) else 429
        finally:
            room.release()
        await Response(status_code=status)({**scope}, receive, send)

    async with connections_to(app) as (port, _):
        yield lambda: asyncio.open_connection("127.0.0.1", port), ended


def _request(length: int) -> bytes:
    return f"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode()


async def _status(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n\r\n"))[9:12]


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110  of another task's doing
            await asyncio.sleep(0.01)


async def test_the_parser_sees_the_beginning_of_a_large_body_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the requests around it on its connection are answered, in one write or in many."""
    seen, on_body = list[int](), Connection.on_body

    def noted(self: Connection, body: bytes) -> None:
        seen.append(len(body))
        on_body(self, body)

    monkeypatch.setattr(Connection, "on_body", noted)
    async with reading(Rooms(10, 1 << 30)) as (connect, ended):
        reader, writer = await connect()
        writer.write(_request(3) + b"abc" + _request(len(_BODY)) + _BODY + _request(3) + b"def")
        statuses = [await _status(reader) for _ in range(3)]
        for piece in (_request(len(_BODY)), _BODY[:1000], _BODY[1000:90_000], _BODY[90_000:]):
            writer.write(piece)
            await asyncio.sleep(0.05)
        statuses.append(await _status(reader))
        writer.close()
    assert statuses == [b"200"] * 4
    assert ended == [b"abc", _BODY, b"def", _BODY]
    assert sum(seen) < len(_BODY)


async def test_another_thread_receives_a_large_body_and_a_gap_in_it_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, receive = set[str](), Filling.receive

    def noted(self: Filling) -> None:
        threads.add(threading.current_thread().name)
        receive(self)

    monkeypatch.setattr(Filling, "receive", noted)
    async with reading(Rooms(10, 1 << 30)) as (connect, ended):
        streams = [await connect() for _ in range(3)]
        for _, writer in streams:
            writer.write(_request(len(_BODY)) + _BODY[:100_000])
        await asyncio.sleep(0.05)
        statuses = []
        for reader, writer in reversed(streams):
            writer.write(_BODY[100_000:])
            statuses.append(await _status(reader))
            writer.close()
    assert statuses == [b"200"] * 3
    assert ended == [_BODY] * 3
    assert threads == {"receiving"}


async def test_behind_a_body_that_did_not_come_in_time_the_next_request_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "_SENDING_S", 0.3)
    async with reading(Rooms(10, 1 << 30)) as (connect, ended):
        reader, writer = await connect()
        writer.write(_request(len(_BODY)) + _BODY[:500_000])
        statuses = [await _status(reader)]
        writer.write(_BODY[500_000:] + _request(3) + b"abc")
        statuses.append(await _status(reader))
        writer.close()
        late, next_one = ended
    assert statuses == [b"408", b"200"]
    assert isinstance(late, DeadlineExceeded)
    assert next_one == b"abc"


def test_a_connection_that_this_side_closes_while_a_body_comes_is_closed_for_its_sender() -> None:
    open_ones = list[Connection]()

    async def run() -> tuple[bytes, Ended]:
        async with reading(Rooms(10, 1 << 30)) as (connect, ended):
            reader, writer = await connect()
            writer.write(_request(len(_BODY)) + _BODY[:500_000])
            await asyncio.sleep(0.1)
            open_ones[0].transport.abort()
            with contextlib.suppress(ConnectionError):
                rest = await reader.read()
            await _until(lambda: bool(ended))
            writer.close()
            return rest, ended

    with pytest.MonkeyPatch.context() as patch:
        made = Connection.connection_made
        patch.setattr(Connection, "connection_made", lambda self, to: (open_ones.append(self), made(self, to))[1])
        rest, ended = asyncio.run(run())
    assert rest == b""
    assert [type(each) for each in ended] == [ClientDisconnect]


async def test_without_a_file_for_it_a_large_body_is_refused_and_the_next_request_is_found() -> None:
    async with reading(Rooms(10, 1 << 30)) as (connect, ended):
        reader, writer = await connect()
        writer.write(_request(3) + b"abc")  # it is accepted then
        statuses = [await _status(reader)]
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, usual[1]))
        try:
            writer.write(_request(len(_BODY)) + _BODY[:500_000])
            statuses.append(await _status(reader))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        writer.write(_BODY[500_000:] + _request(len(_BODY)) + _BODY)
        statuses.append(await _status(reader))
        writer.close()
        _, refused, whole = ended
    assert statuses == [b"200", b"429", b"200"]
    assert isinstance(refused, ResourceExhausted)
    assert whole == _BODY


async def test_a_body_that_still_comes_ends_with_the_thread_that_receives_it() -> None:
    receiving, (ours, theirs) = Receiving(), socket.socketpair()
    ours.setblocking(False)
    filling = receiving.begin(ours, memoryview(bytearray(10)))
    ending = asyncio.create_task(filling.end())
    await asyncio.sleep(0.05)
    ending.cancel()
    receiving.close()
    with pytest.raises(asyncio.CancelledError):
        await ending
    filling.stop()
    ours.close()
    theirs.settimeout(5)
    assert theirs.recv(1) == b"", "another descriptor of the connection is open"
    theirs.close()


def test_of_a_body_that_has_come_a_part_is_received_before_the_next_connection_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "AT_ONCE_BYTES", 100)
    ours, theirs = socket.socketpair()
    loop = asyncio.new_event_loop()
    with ours, theirs, contextlib.closing(loop):
        theirs.sendall(b"x" * 1000)
        filling = Filling(loop, ours, memoryview(bytearray(250)))
        received = list[int]()
        for _ in range(3):
            filling.receive()
            received.append(filling.received_bytes)
    assert received == [100, 200, 250]
    assert filling.ended.done()


async def test_a_stalled_sender_holds_little_more_room_than_it_has_sent() -> None:
    rooms = Rooms(100, 1 << 30)
    async with reading(rooms) as (connect, ended):
        writers = []
        for _ in range(20):
            _, writer = await connect()
            writer.write(_request(_MOST_BYTES) + b"x" * 1000)
            writers.append(writer)
        await _until(lambda: rooms.bodies.held_by_all >= 20 * 1000)
        await asyncio.sleep(0.05)
        held = rooms.bodies.held_by_all
        for writer in writers:
            writer.close()
        await _until(lambda: not rooms.bodies.held_by_all)
    assert held <= 20 * (100 << 10)
    assert [type(each) for each in ended] == [ClientDisconnect] * 20


async def test_a_body_that_is_refused_while_it_comes_does_not_hide_the_answer_or_the_next_request() -> None:
    rooms = Rooms(10, 1 << 30)
    async with reading(rooms) as (connect, ended):
        reader, writer = await connect()
        writer.write(_request(len(_BODY)) + _BODY[:100_000])
        await _until(lambda: rooms.bodies.held_by_all >= 100_000)
        rooms.bodies.hold("others", (1 << 30) - rooms.bodies.held_by_all)
        writer.write(_BODY[100_000:])
        statuses = [await _status(reader)]
        rooms.bodies.give_back("others", rooms.bodies.held("others"))
        writer.write(_request(len(_BODY)) + _BODY)
        statuses.append(await _status(reader))
        writer.close()
    assert statuses == [b"429", b"200"]
    assert isinstance(ended[0], ResourceExhausted)
    assert ended[1] == _BODY


@pytest.mark.parametrize(
    ("heads", "behind"),
    [
        ((b"HTTP/1.1\r\nconnection: close",), b"\r\n"),
        ((b"HTTP/1.0",), b"no request"),
        ((b"HTTP/1.1", b"HTTP/1.1\r\nconnection: close"), b"no request"),
        ((b"HTTP/1.1", b"HTTP/1.0"), b"\r\n"),
    ],
)
async def test_bytes_behind_the_last_request_of_a_connection_take_no_answer_away(
    heads: tuple[bytes, ...], behind: bytes
) -> None:
    body = _BODY[:100_000]  # received at once, with what is behind it
    async with reading(Rooms(10, 1 << 30)) as (connect, ended):
        reader, writer = await connect()
        for head in heads:
            writer.write(_request(len(body)).replace(b"HTTP/1.1", head) + body[:1000])
            await asyncio.sleep(0.05)
            writer.write(body[1000:] + (behind if head is heads[-1] else b""))
        answers = await reader.read()
        writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"HTTP/1.1") == len(heads)
    assert ended == [body] * len(heads)


async def test_who_is_refused_while_a_body_comes_may_send_the_rest_of_it_before_the_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rooms, begun = Rooms(10, 1 << 30), Connection.__init__

    def closes_soon(self: Connection, *given: Any, **named: Any) -> None:
        begun(self, *given, **named)
        self.timeout_keep_alive = 0.2  # type: ignore[assignment]

    monkeypatch.setattr(Connection, "__init__", closes_soon)
    async with reading(rooms) as (connect, _):
        reader, writer = await connect()
        writer.write(_request(len(_BODY)) + _BODY[:100_000])
        await _until(lambda: rooms.bodies.held_by_all >= 100_000)
        rooms.bodies.hold("others", (1 << 30) - rooms.bodies.held_by_all)
        writer.write(_BODY[100_000:1_000_000])
        statuses = [await _status(reader)]
        rooms.bodies.give_back("others", rooms.bodies.held("others"))
        await asyncio.sleep(0.1)
        writer.write(_BODY[1_000_000:2_000_000])
        await asyncio.sleep(0.3)
        writer.write(_BODY[2_000_000:] + _request(3) + b"abc")
        statuses.append(await _status(reader))
        writer.close()
        assert statuses == [b"429", b"200"]
