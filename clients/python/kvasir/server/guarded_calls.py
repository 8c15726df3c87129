"""Handlers within a guard: none is called before the guard is entered, no reader waits, and no call leaves garbage."""

import asyncio
import gc
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvasir.call_context import measure_call
from kvasir.server.arriving import UNREADABLE
from kvasir.waits import SOON_S

_MAX_UNCOLLECTED_BYTES = 32 << 20
# Entered around a handler with its ServicerContext.
Guard = Callable[[Any], AbstractAsyncContextManager[None]]
# Makes of the arriving messages the handler's argument: the only message, or the stream of all.
Take = Callable[[Any], AbstractAsyncContextManager[Any]]
Continuation = Callable[[Any], Awaitable[Any]]


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps each RPC's handler once, not at every call, however many addresses it is served at."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        known, wrapped = self._wrapped.get(method, (None, None))
        if known != handler:  # each address has a handler of its own, of the same methods
            wrapped = self._wrap(method, handler)
            self._wrapped[method] = (handler, wrapped)
        return wrapped

    @abstractmethod
    def _wrap(self, method: str, handler: Any) -> Any:
        """The handler as it is called from now on."""


def guarded(handler: Any, guard: Guard, take: Take) -> Any:
    """The same handler inside the guard, its request as a stream of one message: gRPC would wait for a unary one before
    it calls the guard, and a caller that sends none would hold a place without a credential."""
    behaviour = handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
    within = _guarded_generator if inspect.isasyncgenfunction(behaviour) else _guarded_coroutine
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    read = handler.request_deserializer if isinstance(handler.request_deserializer, _Reader) else None
    read = read or _Reader(handler.request_deserializer, is_stream=handler.request_streaming)
    return make(within(behaviour, guard, take), read, handler.response_serializer)


def _guarded_coroutine(behaviour: Any, guard: Guard, take: Take) -> Any:
    async def answer(requests: Any, context: Any) -> Any:
        async with take(requests) as taken:
            return await behaviour(taken, context)

    async def call(requests: Any, context: Any) -> Any:
        context = _Answering(context)
        async with guard(context):
            return await answer(requests, context)

    return _without_rings(call)


def _guarded_generator(behaviour: Any, guard: Guard, take: Take) -> Any:
    """Writes the answers itself. gRPC would write those of a generator outside of the guard, and a call that is ended
    while an answer is on its way would send its caller no status."""

    async def answer(requests: Any, context: Any) -> None:
        async with take(requests) as taken, aclosing(behaviour(taken, context)) as responses:
            async for response in responses:
                await context.write(response)

    async def call(requests: Any, context: Any) -> None:
        context = _Answering(context)
        async with guard(context):
            await answer(requests, context)

    return _without_rings(call)


def _without_rings(call: Any) -> Any:
    """The same call, of which nothing waits for the garbage collector. gRPC keeps the error of an aborted call with the
    call: with its stack frames, which have the call in turn, this would be a ring of a hundred objects and the request.
    Of thousands such a collection stops all threads for a tenth of a second."""

    async def freed(requests: Any, context: Any) -> Any:
        try:
            return await call(requests, context)
        except grpc.aio.AbortError as error:
            del requests, context
            for each in _causes(error):
                each.__traceback__ = None
            raise

    return freed


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that were handled when it was raised."""
    while error is not None:
        yield error
        error = error.__context__


class _Reader:
    """Parses messages. gRPC itself would answer UNKNOWN to bytes that are no message, outside of every guard.

    A refused request stays in a reference ring with its error and the error's stack frames. Python's collector counts
    objects, not bytes: without the collections here, a hundred prompts of 8 MiB would wait for it in no budget."""

    uncollected_bytes = 0  # of all requests since the last collection

    def __init__(self, deserialize: Callable[[bytes], Any], *, is_stream: bool) -> None:
        self._deserialize = deserialize
        self._is_stream = is_stream  # a stream's messages are freed one by one

    def __call__(self, data: bytes) -> Any:
        measure_call(len(data))
        if not self._is_stream:
            _Reader.uncollected_bytes += len(data)
            if _Reader.uncollected_bytes > _MAX_UNCOLLECTED_BYTES:
                _Reader.uncollected_bytes = 0
                gc.collect()
        try:
            return self._deserialize(data)
        except DecodeError:
            return UNREADABLE


class _Answering:
    """A call's context, whose first answer is not interrupted. With it go the initial metadata: to a caller who is to
    learn of an end before these are out, gRPC sends nothing at all."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, response: Any) -> None:
        """As gRPC's. A reader that stands still holds up a cancel for `SOON_S`."""
        if not self._is_first:
            await self._context.write(response)
            return
        self._is_first = False
        writing = asyncio.ensure_future(self._context.write(response))
        try:
            await asyncio.shield(writing)
        finally:
            if not writing.done():
                await asyncio.wait((writing,), timeout=SOON_S)
            if writing.done() and not writing.cancelled():
                writing.exception()  # it was raised, or who would hear it is gone
            writing.cancel()
