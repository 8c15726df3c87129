"""How a service stops: whoever watches its health delays nobody, and its successor keeps its address."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvasir.server.serving import EdgeServer, Listening, Reports

NAME = "kvasir.cachestore.v1.CacheStoreService"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GRACE_S = 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"unix:{tmp_path}/s"


@contextlib.asynccontextmanager
async def served(address: str, grace_s: float = GRACE_S) -> AsyncIterator[tuple[EdgeServer, "asyncio.Task[None]"]]:
    """A service, and its task, which ends when the service is stopped."""
    edge = EdgeServer(Listening(address), [NAME], {}, Reports(lambda: "x"))
    await edge.start()
    running = asyncio.create_task(edge.run_until_stopped(grace_s))
    await asyncio.sleep(0)
    try:
        yield edge, running
    finally:
        edge.stop()
        await running


def watch(channel: grpc.aio.Channel, service: str = NAME) -> "grpc.aio.UnaryStreamCall[object, object]":
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))  # type: ignore[no-untyped-call]


async def is_healthy(address: str) -> bool:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)  # type: ignore[no-untyped-call]
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_watch_of_health_hears_of_the_stop_and_does_not_delay_it(address: str) -> None:
    async with served(address) as (edge, running), grpc.aio.insecure_channel(address) as channel:
        watches = [watch(channel, service) for service in (NAME, "", "unknown")]
        first = [(await each.read()).status for each in watches]
        assert first == [NOT_SERVING, health_pb2.HealthCheckResponse.SERVING, 3]
        edge.set_ready(True)
        assert (await watches[0].read()).status == health_pb2.HealthCheckResponse.SERVING
        began = time.monotonic()
        edge.stop()
        await running
        assert time.monotonic() - began < GRACE_S / 2
        for each in watches[:2]:
            assert (await each.read()).status == NOT_SERVING
        for each in watches:
            assert await each.read() is grpc.aio.EOF


async def test_a_watch_that_reads_nothing_keeps_no_service_from_stopping(address: str) -> None:
    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value

    path = b"/grpc.health.v1.Health/Watch"
    headers = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"localhost"}
    headers |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    asked = health_pb2.HealthCheckRequest(service=NAME).SerializeToString()
    no_window = frame(_SETTINGS, 0, 0, (4).to_bytes(2) + (0).to_bytes(4))
    call = frame(_HEADERS, _END_HEADERS, 1, b"".join(literal(*each) for each in headers.items()))
    message = frame(_DATA, _END_STREAM, 1, b"\x00" + len(asked).to_bytes(4) + asked)
    async with served(address, grace_s=0.3) as (edge, running):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        writer.write(_PREFACE + no_window + call + message)
        async with asyncio.timeout(60):
            while True:  # until the answer begins; its first message has no room
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3]))
                if head[3] == _HEADERS:
                    break
        edge.set_ready(True)
        edge.stop()
        async with asyncio.timeout(2 * GRACE_S):  # gRPC by itself gives up after 20 s
            await asyncio.shield(running)
        writer.close()


async def test_a_service_that_stops_leaves_its_successors_socket_alone(address: str) -> None:
    async with served(address) as (edge, running), grpc.aio.insecure_channel(address) as channel:
        reading = reflecting(channel)
        await reading.read()  # a call that is under way
        edge.stop()
        await asyncio.sleep(0.2)
        async with served(address):
            assert not running.done()
            reading.cancel()
            await running
            assert await is_healthy(address)


def reflecting(channel: grpc.aio.Channel) -> "grpc.aio.StreamStreamCall[object, object]":
    """A call that lasts as long as its caller wants."""
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def asked() -> AsyncIterator[object]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        await asyncio.sleep(60)

    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked())  # type: ignore[no-untyped-call,no-any-return]
