"""Large requests begin in threads, over a channel of their own: gRPC copies them, which would hold the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from kvasir.status import from_rpc_error

LARGE_BYTES = 1 << 20
_MOST_CALLS = 64  # at once, a thread each; later ones wait for one of them
_END: Any = object()


class LargeRequests:
    """Makes calls that take written requests: small ones go as before, large ones over this channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="large-requests")

    def unary(self, small: Callable[..., Any], path: str, parse: Callable[[bytes], Any]) -> Callable[..., Any]:
        return self._by_size(small, self._channel.unary_unary(path, response_deserializer=parse).future)

    def stream(self, small: Callable[..., Any], path: str, parse: Callable[[bytes], Any]) -> Callable[..., Any]:
        return self._by_size(small, self._channel.unary_stream(path, response_deserializer=parse))

    def _by_size(self, small: Callable[..., Any], large: Callable[..., Any]) -> Callable[..., Any]:
        def begin(written: bytes, *, timeout: float | None = None, **options: Any) -> Any:
            if len(written) < LARGE_BYTES:
                return small(written, timeout=timeout, **options)
            ends_s = None if timeout is None else time.monotonic() + timeout

            def begin_large() -> Any:  # a thread may come late
                left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
                return large(written, timeout=left_s, **options)

            return _LargeCall(self._threads, begin_large)

        return begin

    def close(self) -> None:
        self._channel.close()
        self._threads.shutdown(wait=False)


class _LargeCall:
    """A call as its asynchronous caller sees it: one that is awaited, or a stream. A thread waits for each response."""

    def __init__(self, threads: ThreadPoolExecutor, begin: Callable[[], Any]) -> None:
        self._threads = threads
        self._begin: Callable[[], Any] | None = begin
        self._call: Any = None
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        try:
            return await self._taken(lambda call: call.result())
        finally:
            self.cancel()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        response = await self._taken(lambda call: next(call, _END))
        if response is _END:
            raise StopAsyncIteration
        return response

    async def _taken(self, take: Callable[[Any], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._take, take)

    def _take(self, take: Callable[[Any], Any]) -> Any:
        """On a thread. One that is cancelled while it begins ends then."""
        if self._begin is not None:
            self._call, self._begin = self._begin(), None
            if self._is_cancelled:
                self._call.cancel()
        try:
            return take(self._call)
        except grpc.RpcError as error:  # it holds itself by its frames: further ones would be kept with it
            raise from_rpc_error(error) from None
