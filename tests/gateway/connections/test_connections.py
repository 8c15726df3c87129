"""What a connection may cost before its request is admitted: nobody without a key keeps a key's holder out."""

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import uvicorn
from kvasir_gateway.door import connections, listening
from kvasir_gateway.door.connections import Connection, ConnectionLimits, Connections, show_key
from uvicorn.server import ServerState

from tests.gateway.conftest import Front
from tests.gateway.serving import GatewayProcess

_ASKED = b"GET / HTTP/1.1\r\nhost: localhost\r\nx-api-key: mine\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connections_to(
    app: Any, limits: ConnectionLimits = ConnectionLimits()
) -> AsyncIterator[tuple[int, ServerState]]:
    """The port of a server of this app, and what is open there."""
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, timeout_keep_alive=60)
    config.load()
    state = ServerState()

    with contextlib.closing(Connections(limits)) as open_ones:
        made = partial(Connection, config, state, {}, connections=open_ones)
        server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        async with server, asyncio.timeout(20):
            yield server.sockets[0].getsockname()[1], state


async def answers_key_holders(scope: Any, _receive: Any, send: Any) -> None:
    """An application that knows every key."""
    if any(name == b"x-api-key" for name, _ in scope["headers"]):
        show_key(scope)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def answer(stream: Stream, sent: bytes = _ASKED) -> bytes:
    """The head of an answer; empty if the connection was closed."""
    reader, writer = stream
    with contextlib.suppress(OSError):
        writer.write(sent)
        return await reader.readuntil(b"\r\n\r\n")
    return b""


async def is_closed(stream: Stream) -> bool:
    try:
        return await stream[0].read(1) == b""
    except OSError:
        return True


async def closed_of(streams: Sequence[Stream], count: int) -> list[bool]:
    """Which of them are closed, once so many are, and a moment later."""
    reads = [asyncio.ensure_future(is_closed(stream)) for stream in streams]
    async with asyncio.timeout(20):
        for closed_one in islice(asyncio.as_completed(reads), count):
            await closed_one
    await asyncio.wait(reads, timeout=0.3)
    closed = [read.done() and read.result() for read in reads]
    for read in reads:
        read.cancel()
    return closed


async def test_the_oldest_silent_stranger_makes_way_for_the_newest() -> None:
    async with connections_to(answers_key_holders, ConnectionLimits(strangers=3)) as (port, _):
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        streams[0][1].write(_ASKED.replace(b"x-api-key", b"x-other"))  # the one that asked is not the oldest
        assert await streams[0][0].readuntil(b"\r\n\r\n")
        streams += [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await closed_of(streams, 2) == [False, True, True, False, False]


async def test_strangers_close_no_connection_of_a_key_holder() -> None:
    async with connections_to(answers_key_holders, ConnectionLimits(strangers=4)) as (port, _):
        known = await asyncio.open_connection("127.0.0.1", port)
        found = [await answer(known)]
        for _ in range(20):
            await asyncio.open_connection("127.0.0.1", port)
        found.append(await answer(known))
        assert [head[:12] for head in [*found, await answer(await asyncio.open_connection("127.0.0.1", port))]] == [
            b"HTTP/1.1 204"
        ] * 3


async def test_of_key_holders_connections_those_that_rest_longest_are_closed() -> None:
    """One whose request is not answered yet does not rest."""
    may_answer = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            show_key(scope)
            await may_answer.wait()
        await answers_key_holders(scope, receive, send)

    async with connections_to(app, ConnectionLimits(resting=2)) as (port, _):
        slow = await asyncio.open_connection("127.0.0.1", port)
        slow[1].write(_ASKED.replace(b"GET /", b"GET /slow", 1))
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for stream in streams:
            assert await answer(stream)
        found = []
        for stream in streams:
            with contextlib.suppress(asyncio.IncompleteReadError):
                found.append(await answer(stream))
        may_answer.set()
        slow, found = await slow[0].readuntil(b"\r\n\r\n"), found
    assert slow[:12] == b"HTTP/1.1 204"
    assert len([head for head in found if head]) == 2


_LARGE = _ASKED.replace(b"GET", b"POST")[:-2] + b"content-length: 150000\r\n\r\n" + bytes(150_000)


@pytest.mark.parametrize("behind", [[_ASKED], [_ASKED] * 3, [_LARGE]], ids=["one", "some", "more than is read"])
async def test_requests_behind_another_do_not_hide_that_the_reader_left(behind: list[bytes]) -> None:
    async def app(scope: Any, receive: Any, _send: Any) -> None:
        if scope["path"] == "/slow":
            begun.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
        seen.append(scope["path"])

    seen: list[str] = []
    begun, left = asyncio.Event(), asyncio.Event()
    async with connections_to(app) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_ASKED.replace(b"GET /", b"GET /slow", 1))
        await begun.wait()
        for each in behind:
            writer.write(each)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()
        await asyncio.wait_for(left.wait(), 5)
    assert seen == ["/slow"], "the others are not begun"


def test_requests_behind_an_unanswered_one_are_bounded() -> None:
    """Requests within the bound are all answered, in their order."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await may_answer.wait()
        await answers_key_holders(scope, receive, send)

    async def answered(sent: bytes, count: int) -> bytes:
        async with connections_to(app) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_ASKED)
            await asyncio.sleep(0.02)
            writer.write(sent)
            await asyncio.sleep(0.1)
            may_answer.set()
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                return b"".join([await reader.readuntil(b"\r\n\r\n") for _ in range(count)])
            return b""

    may_answer = asyncio.Event()
    assert asyncio.run(answered(_ASKED * 15, 16)).count(b"HTTP/1.1 204") == 16
    may_answer = asyncio.Event()
    assert asyncio.run(answered(_ASKED * 17, 1)) == b""


async def test_a_large_body_behind_an_unanswered_request_is_read_later() -> None:
    length = 8 << 20

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await may_answer.wait()
        while (message := await receive())["type"] == "http.request":
            taken.append(len(message["body"]))
            if not message["more_body"]:
                break
        await answers_key_holders(scope, receive, send)

    taken: list[int] = []
    may_answer = asyncio.Event()
    async with connections_to(app) as (port, state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = _ASKED.replace(b"GET", b"POST")[:-2] + b"content-length: %d\r\n\r\n" % length
        writer.write(_ASKED + head + bytes(length) + _ASKED)
        await asyncio.sleep(0.1)
        (connection,) = state.connections
        waiting = len(connection.cycle.body)  # type: ignore[union-attr]
        may_answer.set()
        for _ in range(3):
            assert (await reader.readuntil(b"\r\n\r\n"))[:12] == b"HTTP/1.1 204"
        assert 0 < waiting < 1 << 20
    assert sum(taken) == length


async def test_a_large_piece_of_a_body_is_neither_copied_nor_a_reason_to_stop_reading() -> None:
    reading: list[str] = []

    class NotedTransport(asyncio.Transport):
        def pause_reading(self) -> None:
            reading.append("paused")

        def resume_reading(self) -> None:
            reading.append("resumed")

    async def never(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.sleep(60)

    with contextlib.closing(Connections(ConnectionLimits())) as open_ones:
        config = uvicorn.Config(never, lifespan="off", ws="none", log_config=None)
        config.load()
        connection = Connection(config, ServerState(), {}, connections=open_ones)
        connection.connection_made(NotedTransport())
        connection.data_received(_ASKED.replace(b"GET", b"POST")[:-2] + b"content-length: 1000000\r\n\r\n")
        cycle, large = connection.cycle, b"x" * 200_000
        connection.on_body(large)
        assert cycle.body is large  # type: ignore[comparison-overlap]
        assert reading == []
        connection.on_body(b"y")  # nobody has taken the first
        assert (reading, len(cycle.body)) == (["paused"], 200_001)
        assert (await cycle.receive())["body"] == large + b"y"  # type: ignore[typeddict-item]
        assert reading == ["paused", "resumed"]
        for _ in range(20):
            connection.on_body(b"z" * 10)
        assert (await cycle.receive())["body"] == b"z" * 200  # type: ignore[typeddict-item]
        for task in connection.tasks:
            task.cancel()


async def test_a_gateway_at_rest_does_not_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wakes(_seconds: float) -> None:
        raise AssertionError("it woke")

    server = listening._Server(uvicorn.Config(answers_key_holders))
    server.config.load()
    monkeypatch.setattr(asyncio, "sleep", wakes)
    running = asyncio.create_task(server.main_loop())
    await asyncio.wait({running}, timeout=0.05)
    assert not running.done()
    server.stop()
    await asyncio.wait_for(running, 5)


def test_a_head_of_many_short_headers_is_refused() -> None:
    async def head(count: int) -> bytes:
        async with connections_to(answers_key_holders) as (port, _):
            return await answer(
                await asyncio.open_connection("127.0.0.1", port), _ASKED[:-2] + b"a:\r\n" * count + b"\r\n"
            )

    assert asyncio.run(head(250))[:12] == b"HTTP/1.1 204"
    assert asyncio.run(head(260))[:12] == b"HTTP/1.1 400"


def test_a_process_with_few_files_keeps_some_for_each_kind_of_connection() -> None:
    few, many = ConnectionLimits.of(256), ConnectionLimits.of(65_536)
    assert few.strangers + few.resting + 2 * few.requests <= 256 - 32
    assert 2 * few.at_once <= few.strangers, "a crowd that is accepted at once leaves files"
    assert min(few.strangers, few.resting, few.requests) >= 32
    assert many == ConnectionLimits()
    assert many.at_once <= 16, "nor does the loop accept for long"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no other process's limits are shown")
def test_no_service_leaves_a_core_dump_and_each_may_open_many_files(front: Front) -> None:
    for service in (front.house.store, front.house.engine, front.gateway):
        process = psutil.Process(service.pid)
        assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft >= 10_240 or soft == hard


@pytest.mark.long(3)
@pytest.mark.parametrize(("files", "connections"), [(256, 2500), pytest.param(4096, 5000, marks=pytest.mark.campaign)])
def test_thousands_of_silent_connections_change_nothing_for_a_key_holder(
    front: Front, files: int, connections: int
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    gateway = GatewayProcess(
        front.house, "--credentials", str(front.house.root / "credentials.toml"), name=f"files-{files}"
    )
    silent = contextlib.ExitStack()
    try:
        gateway.start(files=files)
        for number in range(connections):
            with contextlib.suppress(OSError):  # its backlog is full for a moment
                silent.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=1))
            if number % 500 == 499:
                for path in ("/v1/models", "/healthz", "/openapi.json"):
                    assert httpx.get(gateway.url + path, headers=front.bearer(), timeout=60).status_code == 200
    finally:
        silent.close()
        gateway.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_connection_on_which_no_request_comes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has begun a request, before its first answer or after, is no better; one that is answered late is."""
    monkeypatch.setattr(connections, "SILENCE_S", 0.2)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await asyncio.sleep(0.6)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    asked = b"GET / HTTP/1.1\r\nhost: localhost\r\n"

    async def answer_to(sent: bytes, port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        return answer

    async with connections_to(app) as (port, _state):
        whole = asked + b"\r\n"
        sent = (b"", asked, whole, whole + asked, whole + whole)
        assert [
            answer.count(b"HTTP/1.1 204") for answer in await asyncio.gather(*(answer_to(each, port) for each in sent))
        ] == [0, 0, 1, 1, 2]


@pytest.mark.long(6)
@pytest.mark.parametrize(
    ("ends", "pieces"), [(b"", 256), (b"", 1), (b"connection: close\r\n", 1)], ids=["running", "over", "closed"]
)
async def test_a_reader_who_takes_nothing_of_an_answer_is_cut_off_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch, ends: bytes, pieces: int
) -> None:
    """Each would keep its connection for good, and 2,000 of them would shut everybody out."""
    monkeypatch.setattr(connections, "SILENCE_S", 0.2)
    monkeypatch.setattr(connections, "HANGS_S", 0.7)
    length = 24 << 20

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for left in reversed(range(pieces)):
            await send({"type": "http.response.body", "body": bytes(length // pieces), "more_body": left > 0})

    async with connections_to(app) as (port, state):
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in streams:
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + ends + b"\r\n")
        taken = 0
        while piece := await streams[0][0].read(1 << 20):
            taken += len(piece)
            await asyncio.sleep(0.02)
        while state.connections:  # noqa: ASYNC110  of the one who takes nothing
            await asyncio.sleep(0.02)
        for _, writer in streams:
            writer.close()
        assert taken > length


@pytest.mark.parametrize("second", [b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"no request\r\n\r\n"])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_refusal_behind_a_request_is_no_answer_to_that_one(second: bytes, has_begun: bool) -> None:
    async def app(_scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"text", "more_body": True})
        assert await receive() == {"type": "http.request", "body": b"", "more_body": False}
        assert await receive() == {"type": "http.disconnect"}
        ended.set()

    ended = asyncio.Event()
    async with connections_to(app) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_ASKED)
        await asyncio.sleep(0.05)
        writer.write(second)
        answered = await reader.read()
        await ended.wait()
    assert b" 400 " not in answered, answered
    assert answered.startswith(b"HTTP/1.1 200") == has_begun


async def test_a_body_that_is_none_is_refused_by_an_answer() -> None:
    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    sent = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nno length\r\n"
    async with connections_to(app) as (port, _):
        head = await answer(await asyncio.open_connection("127.0.0.1", port), sent)
    assert head.startswith(b"HTTP/1.1 400")
