"""The interceptors around every handler, on a real server: bugs say nothing of data, cancels pass, rows decide."""

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import copy_context
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients.channel import calls_of
from kvasir.credentials import Principal, write_credentials
from kvasir.errors import Internal, InvalidArgument, KvasirError, PermissionDenied, Unauthenticated
from kvasir.server import guarded_calls
from kvasir.server.interceptors import MAX_RPCS_PER_PRINCIPAL, current_principal, settle_garbage
from kvasir.server.serving import EdgeServer, Listening, Reports
from kvasir.status import from_rpc_error

NAME = "kvasir.cachestore.v1.CacheStoreService"
AGENTS = "kvasir.cachestore.v1.AgentService"
SECRET = "my secret prompt"


class Service(cachestore_pb2_grpc.CacheStoreServiceServicer, cachestore_pb2_grpc.AgentServiceServicer):
    """Fails in every way that a handler can."""

    def __init__(self) -> None:
        self.waits, self.ended = asyncio.Event(), asyncio.Event()
        self.saw_cancel = False
        self.edge: EdgeServer | None = None

    async def GetStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise KeyError(SECRET)

    async def GetAgent(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise InvalidArgument("wrong", field="agent_id")

    async def GetCapabilities(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetCapabilitiesResponse(namespace=current_principal().namespace)

    async def VerifyBlobs(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield pb.VerifyBlobsResponse(blobs_checked=1)
        raise ValueError(SECRET)

    async def ReadBlobs(self, request: Any, context: Any) -> None:  # noqa: N802
        await context.write(pb.ReadBlobsResponse())
        raise InvalidArgument("late", field="digests")

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            yield pb.WatchEventsResponse()
            self.waits.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.saw_cancel = True
            raise
        finally:
            self.ended.set()

    async def ImportAgent(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        count = 0
        async for _ in request_iterator:
            count += 1
        raise InvalidArgument(f"{count} messages", field="data")

    async def ListAgents(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ListAgentsResponse()


ROWS = {
    *(f"/{NAME}/{rpc}" for rpc in ("GetStats", "GetCapabilities", "VerifyBlobs", "ReadBlobs", "WatchEvents")),
    *(f"/{AGENTS}/{rpc}" for rpc in ("GetAgent", "ImportAgent")),
}


class Flood(Service):
    """Says more than a reader that stands still takes."""

    def __init__(self) -> None:
        super().__init__()
        self.said = 0

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        answer = pb.WatchEventsResponse(cursor=pb.EventCursor(incarnation="x" * 100_000))
        while True:
            self.said += 1
            yield answer


class Brief(Service):
    """Its caller is removed while the first answer is on its way."""

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.remove_soon()
        yield pb.WatchEventsResponse()
        await asyncio.sleep(60)

    async def ReadBlobs(self, request: Any, context: Any) -> None:  # noqa: N802
        self.remove_soon()
        await context.write(pb.ReadBlobsResponse())
        await asyncio.sleep(60)

    def remove_soon(self) -> None:
        assert self.edge is not None
        asyncio.get_running_loop().call_soon(self.edge.authentication.end_calls, lambda _: True)


@asynccontextmanager
async def served(root: Path, service: Service | None = None) -> AsyncIterator[tuple[Any, Any]]:
    service = service or Service()
    service.edge = edge = EdgeServer(
        Listening(f"unix:{root}/s"),
        [NAME],
        {row: frozenset({"client"}) for row in ROWS},
        Reports(lambda: "request-42"),
    )
    cachestore_pb2_grpc.add_CacheStoreServiceServicer_to_server(service, edge.grpc)  # type: ignore[no-untyped-call]
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(service, edge.grpc)  # type: ignore[no-untyped-call]
    await edge.start()
    try:
        async with grpc.aio.insecure_channel(edge.address) as channel:
            yield calls_of(channel, cachestore_pb2_grpc.CacheStoreServiceStub), service
    finally:
        await edge.grpc.stop(0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_who_is_removed_while_an_answer_is_on_its_way_hears_of_it(root: Path) -> None:
    async def test() -> None:
        async with served(root, Flood()) as (stub, service):
            answers = aiter(stub.WatchEvents(pb.WatchEventsRequest()))
            await anext(answers)
            said = 0
            while said != service.said:  # until the reader's stillness is felt
                said = service.said
                await asyncio.sleep(0.3)
            assert service.edge.authentication.end_calls(lambda _: True) == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [_ async for _ in answers]
            error = from_rpc_error(caught.value)
            assert type(error) is Unauthenticated
            assert error.reason == "CREDENTIAL_REVOKED"

    run(test())


@pytest.mark.parametrize("rpc", ["WatchEvents", "ReadBlobs"])
def test_who_is_removed_while_the_first_answer_is_on_its_way_hears_of_it(root: Path, rpc: str) -> None:
    async def test() -> None:
        async with served(root, Brief()) as (stub, _):
            request = {"WatchEvents": pb.WatchEventsRequest(), "ReadBlobs": pb.ReadBlobsRequest()}[rpc]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [_ async for _ in getattr(stub, rpc)(request, timeout=60)]
            assert from_rpc_error(caught.value).reason == "CREDENTIAL_REVOKED"

    run(test())


def test_a_bug_becomes_internal_with_a_request_id_and_no_text(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with served(root) as (stub, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStats(pb.GetStatsRequest())
            error = from_rpc_error(caught.value)
            assert type(error) is Internal
            assert error.message == "internal error; request request-42"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [_ async for _ in stub.VerifyBlobs(pb.VerifyBlobsRequest())]
            assert type(from_rpc_error(caught.value)) is Internal

    with caplog.at_level(logging.DEBUG):
        run(test())
    assert "request-42" in caplog.text
    assert "KeyError" in caplog.text
    assert "GetStats" in caplog.text
    assert SECRET not in caplog.text


def test_typed_errors_pass_from_every_kind_of_handler(root: Path) -> None:
    async def test() -> None:
        async with served(root) as (stub, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetAgent(pb.GetAgentRequest())
            assert from_rpc_error(caught.value).field == "agent_id"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [_ async for _ in stub.ReadBlobs(pb.ReadBlobsRequest())]
            assert from_rpc_error(caught.value).field == "digests"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ImportAgent(iter([pb.ImportAgentRequest()] * 3))
            assert from_rpc_error(caught.value).message == "3 messages"

    run(test())


def test_a_call_that_was_refused_leaves_nothing_to_the_garbage_collector(root: Path) -> None:
    """Thousands that did had stopped a store for 0.2 s."""

    async def refused(stub: Any) -> None:
        for call in (
            *(stub.GetStats(pb.GetStatsRequest()), stub.GetAgent(pb.GetAgentRequest())),
            *(stub.ListAgents(pb.ListAgentsRequest()), stub.ImportAgent(iter([pb.ImportAgentRequest()] * 3))),
        ):
            assert await call.code() is not grpc.StatusCode.OK
        for stream in (stub.VerifyBlobs(pb.VerifyBlobsRequest()), stub.ReadBlobs(pb.ReadBlobsRequest())):
            with pytest.raises(grpc.aio.AioRpcError):
                [_ async for _ in stream]

    async def test() -> None:
        async with served(root) as (stub, _):
            await refused(stub)
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            for _ in range(3):
                await refused(stub)
            gc.collect()
            kinds = (KvasirError, grpc.aio.AbortError, guarded_calls._Answering, FrameType)
            assert [each for each in gc.garbage if isinstance(each, kinds)] == []
            assert gc.garbage, "gRPC's own"

    try:
        run(test())
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_cancel_reaches_the_handler_and_ends_it(root: Path) -> None:
    async def test() -> None:
        async with served(root) as (stub, service):
            call = stub.WatchEvents(pb.WatchEventsRequest())
            await call.read()
            await service.waits.wait()  # an answer on its way would end it by being closed
            call.cancel()
            await asyncio.wait_for(service.ended.wait(), 5)
            assert service.saw_cancel

    run(test())


def test_a_deadline_reaches_the_handler_and_ends_it(root: Path) -> None:
    async def test() -> None:
        async with served(root) as (stub, service):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [_ async for _ in stub.WatchEvents(pb.WatchEventsRequest(), timeout=0.2)]
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await asyncio.wait_for(service.ended.wait(), 5)

    run(test())


def test_an_rpc_without_a_row_is_refused_to_everybody(root: Path) -> None:
    async def test() -> None:
        async with served(root) as (stub, _):
            assert (await stub.GetCapabilities(pb.GetCapabilitiesRequest())).namespace == "default"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListAgents(pb.ListAgentsRequest())
            assert isinstance(from_rpc_error(caught.value), PermissionDenied)

    run(test())


def test_outside_of_an_rpc_there_is_no_principal() -> None:
    with pytest.raises(LookupError):
        current_principal()


@asynccontextmanager
async def served_over_tcp(root: Path) -> AsyncIterator[tuple[EdgeServer, Service, dict[str, str]]]:
    tokens = iter(f"token-{number}-{'x' * 32}" for number in range(9))
    names = ("ada", "bob")
    principals = [Principal(name, "default", frozenset({"client"})) for name in names]
    given = write_credentials(root / "credentials.toml", principals, lambda: next(tokens))
    service = Service()
    edge = EdgeServer(
        Listening("127.0.0.1:0", credentials_file=root / "credentials.toml"),
        [NAME],
        {row: frozenset({"client"}) for row in ROWS},
        Reports(lambda: "request-42"),
    )
    cachestore_pb2_grpc.add_CacheStoreServiceServicer_to_server(service, edge.grpc)  # type: ignore[no-untyped-call]
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(service, edge.grpc)  # type: ignore[no-untyped-call]
    await edge.start()
    try:
        yield edge, service, given
    finally:
        await edge.grpc.stop(0)


async def code_of(call: Any) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), 5)  # type: ignore[no-any-return]


def test_without_a_token_only_a_health_check_is_answered(root: Path) -> None:
    async def test() -> None:
        async with (
            served_over_tcp(root) as (edge, _, tokens),
            grpc.aio.insecure_channel(edge.address) as channel,
        ):
            health: Any = health_pb2_grpc.HealthStub(channel)
            listing: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = health_pb2.HealthCheckRequest()
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
            assert await code_of(health.Watch(asked)) is grpc.StatusCode.UNAUTHENTICATED
            assert await code_of(listing.ServerReflectionInfo()) is grpc.StatusCode.UNAUTHENTICATED
            known = (("authorization", f"Bearer {tokens['ada']}"),)
            assert (await health.Watch(asked, metadata=known).read()).status == health_pb2.HealthCheckResponse.SERVING

    run(test())


def test_who_sends_no_request_is_refused_all_the_same(root: Path) -> None:
    async def test() -> None:
        async with (
            served_over_tcp(root) as (edge, _, _),
            grpc.aio.insecure_channel(edge.address) as channel,
        ):
            # As a stream, so that nothing is sent until something is written.
            call: Any = channel.stream_unary(f"/{NAME}/GetStats")()
            assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED

    run(test())


def test_one_credential_cannot_shut_the_others_out(root: Path) -> None:
    async def test() -> None:
        async with served_over_tcp(root) as (edge, _, tokens):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.aio.insecure_channel(edge.address, options=options) for _ in range(3)]
            stubs: list[Any] = [cachestore_pb2_grpc.CacheStoreServiceStub(each) for each in channels]  # type: ignore[no-untyped-call]
            ada, bob = ((("authorization", f"Bearer {tokens[name]}"),) for name in ("ada", "bob"))
            calls = [
                stubs[number % 3].WatchEvents(pb.WatchEventsRequest(), metadata=ada)
                for number in range(MAX_RPCS_PER_PRINCIPAL)
            ]
            await asyncio.gather(*(call.read() for call in calls))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stubs[0].GetCapabilities(pb.GetCapabilitiesRequest(), metadata=ada)
            assert from_rpc_error(caught.value).reason == "TOO_MANY_CALLS"
            await stubs[0].GetCapabilities(pb.GetCapabilitiesRequest(), metadata=bob)
            for call in calls:
                call.cancel()
            async with asyncio.timeout(60):
                while not await _is_let_in(stubs[0], ada):  # noqa: ASYNC110  the server learns of a cancel when it does
                    await asyncio.sleep(0.05)
            for channel in channels:
                await channel.close()

    run(test())


async def _is_let_in(stub: Any, metadata: Any) -> bool:
    try:
        await stub.GetCapabilities(pb.GetCapabilitiesRequest(), metadata=metadata)
    except grpc.aio.AioRpcError:
        return False
    return True


def test_refused_requests_wait_for_the_garbage_collector_by_their_bytes() -> None:
    """Each is left in a ring with its error. The collector counts objects: a few, and a hundred megabytes."""

    class Ring:
        def __init__(self) -> None:
            self.itself = self

    gc.collect()
    left = weakref.ref(Ring())
    assert left() is not None
    read = guarded_calls._Reader(bytes, is_stream=False)
    for _ in range(34):
        copy_context().run(read, b"x" * (1 << 20))  # each in its call
    assert left() is None


def test_a_settled_service_collects_no_garbage_in_the_middle_of_a_call() -> None:
    """Objects of a call go by themselves; a collection that comes before walks through them on the call's way."""
    before = gc.get_threshold()
    gc.disable()  # as while a service is imported
    try:
        settle_garbage()
        assert gc.isenabled()
        young, times, rounds = gc.get_threshold()
        assert young >= 5_000
        assert (times + 1) * young <= 15_000, "objects of one collection, while all streams wait"
        assert young * (times + 1) * (rounds + 1) >= 5_000 * (before[1] + 1) * (before[2] + 1)
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.unfreeze()
