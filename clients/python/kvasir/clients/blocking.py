"""The bridge from an asynchronous client to a blocking one: over a channel whose calls block, no await ever waits.

So a coroutine ends in its first step, in its caller's thread, without an event loop. Errors and KeyboardInterrupt are
raised inside the coroutine, whose `finally` ends the call."""

import functools
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast, overload

import grpc

from kvasir.clients.aio.stall_limit import AioStallLimit, no_progress

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _run(begin: Callable[[], Awaitable[_T]]) -> _T:
    """What the coroutine returns. An event loop that runs in this thread does not hear of the generators that it
    begins: it would close them when it ends, and the rest of a stream would be missing without an error."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        cast("Coroutine[Any, Any, _T]", begin()).send(None)
    except StopIteration as end:
        return cast("_T", end.value)
    finally:
        sys.set_asyncgen_hooks(*hooks)
    raise RuntimeError("a blocking client awaited what does not block")


def _iterate(items: AsyncGenerator[_T, None]) -> Generator[_T, None, None]:
    """The same items. Closing this generator closes that one."""
    try:
        while True:
            try:
                item = _run(items.__anext__)
            except StopAsyncIteration:
                return
            yield item
    finally:
        _run(items.aclose)


@overload
def blocking(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]) -> Callable[Concatenate[Any, _P], _T]: ...
@overload
def blocking(
    method: Callable[Concatenate[Any, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate[Any, _P], Generator[_T, None, None]]: ...
def blocking(method: Any) -> Any:
    """The method of the asynchronous client as one of the blocking client: same arguments, same docstring."""

    @functools.wraps(method)
    def call(client: Any, *args: Any, **kwargs: Any) -> Any:
        begun: Any = getattr(client._aio, method.__name__)(*args, **kwargs)  # its first step has not run
        return _iterate(begun) if isinstance(begun, AsyncGenerator) else _run(lambda: begun)

    return call


class _Responses:
    """A stream's call as its asynchronous reader sees it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._call)
        except StopIteration:
            raise StopAsyncIteration from None


def _one(method: Any) -> Any:
    async def call(request: Any, **options: Any) -> Any:
        return method(request, **options)

    return call


def _many(method: Any, requests: Callable[[Any], Any] = lambda given: given) -> Any:
    return lambda given, **options: _Responses(method(requests(given), **options))


class BlockingChannel:
    """What the asynchronous clients use of a grpc.aio.Channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.unary_unary = lambda *args, **kwargs: _one(channel.unary_unary(*args, **kwargs))
        self.stream_unary = lambda *args, **kwargs: _one(channel.stream_unary(*args, **kwargs))
        self.unary_stream = lambda *args, **kwargs: _many(channel.unary_stream(*args, **kwargs))
        self.stream_stream = lambda *args, **kwargs: _many(channel.stream_stream(*args, **kwargs), _iterate)

    async def close(self) -> None:
        self._channel.close()


class BlockingStallLimit(AioStallLimit):
    """As AioStallLimit. A thread watches while there is a limit: only a cancel ends a call that blocks."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._until = seconds, 0.0
        self._call: Any = None
        self._is_over, self._ended = False, threading.Event()

    def progress(self) -> None:
        self._until = time.monotonic() + (self._seconds or 0.0)

    def watched(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._call = method(*args, **kwargs)
            return self._call

        return call

    async def __aenter__(self) -> Self:
        self.progress()
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="kvasir-stall-limit", daemon=True).start()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self._ended.set()
        if self._is_over and raised[1] is not None:
            raise no_progress(self._seconds) from None

    def _watch(self) -> None:
        while not self._ended.wait(max(self._until - time.monotonic(), 0.001)):
            if time.monotonic() >= self._until and self._call is not None:
                self._is_over = True
                self._call.cancel()
                return
