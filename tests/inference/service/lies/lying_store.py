"""A store whose answers about agents are another's choice: it stands between an engine and its store, at a socket."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import grpc
from kvasir.cachestore.v1 import cachestore_pb2 as pb

Lie = Callable[[pb.GetAgentResponse], pb.GetAgentResponse]
_MAX = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_GET_AGENT = "/kvasir.cachestore.v1.AgentService/GetAgent"
_HANDLERS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class LyingStore(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Hands all calls on as bytes, and lets `lie` change the answers of GetAgent. None: it is honest."""

    def __init__(self, behind: grpc.aio.Channel) -> None:
        self.lie: Lie | None = None
        self.silent_before = 0.0  # streams that began earlier bring nothing
        self._behind = behind

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        is_streaming = _streams(details.method)
        kind, handler = _HANDLERS[is_streaming]
        own = [(k, v) for k, v in details.invocation_metadata if k not in ("user-agent", "te", "content-type")]
        call = partial(getattr(self._behind, kind)(details.method), metadata=own)
        return handler(partial(self._many if is_streaming[1] else self._one, details.method, call))

    async def _one(self, method: str, call: Any, request: Any, context: Any) -> bytes:
        try:
            answer = bytes(await call(request))
        except grpc.aio.AioRpcError as error:
            await _refuse(context, error)
        if method == _GET_AGENT and self.lie is not None:
            return bytes(self.lie(pb.GetAgentResponse.FromString(answer)).SerializeToString())
        return answer

    async def _many(self, _: str, call: Any, request: Any, context: Any) -> AsyncIterator[bytes]:
        began = time.monotonic()
        try:
            async for answer in call(request):
                while began < self.silent_before:  # noqa: ASYNC110 - another thread ends it
                    await asyncio.sleep(0.02)
                yield answer
        except grpc.aio.AioRpcError as error:
            await _refuse(context, error)


def _streams(method: str) -> tuple[bool, bool]:
    """Whether the request and the answer of an RPC are streams. Health's are not the store's own: one watches."""
    service, _, name = method.removeprefix("/").rpartition("/")
    known = pb.DESCRIPTOR.services_by_name.get(service.rpartition(".")[2])
    rpc = known.methods_by_name.get(name) if known is not None else None
    return (rpc.client_streaming, rpc.server_streaming) if rpc is not None else (False, name == "Watch")


async def _refuse(context: Any, error: grpc.aio.AioRpcError) -> None:
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


@contextlib.contextmanager
def lying_store(at: str, behind: str) -> Iterator[LyingStore]:
    """Between an engine, which connects `at`, and the store `behind` it."""
    made: list[LyingStore] = []
    is_up, is_over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with grpc.aio.insecure_channel(behind, options=_MAX) as channel:
            made.append(LyingStore(channel))
            server = grpc.aio.server(options=_MAX)
            server.add_generic_rpc_handlers((made[0],))
            server.add_insecure_port(at)
            await server.start()
            is_up.set()
            await is_over.wait()
            await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert is_up.wait(10)
    try:
        yield made[0]
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(10)
