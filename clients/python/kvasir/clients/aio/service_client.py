"""A caller of one service over one channel: the token, the deadline and the errors of its calls, asynchronously."""

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, Self, TypeVar, cast

import grpc
import grpc.aio

from kvasir.call_context import NAMESPACE_KEY, onward
from kvasir.clients.channel import Metadata, bearer
from kvasir.errors import Cancelled, Internal, KvasirError, Unavailable
from kvasir.status import from_rpc_error

_Response = TypeVar("_Response")
_LONGEST_S = 1e9  # gRPC's clock ends: a later deadline, or `inf`, would be over at once


class Making(Protocol):
    """Makes a request's bytes, which may take its time: at once or beside an event loop."""

    def __call__(self, make: Callable[[], bytes]) -> Awaitable[bytes]: ...


async def at_once(make: Callable[[], _Response]) -> _Response:
    return make()


class AioServiceClient:
    """What the clients of both services have in common. Close it with `async with` or close()."""

    def __init__(self, channel: grpc.aio.Channel, stub: Any, token: str | None, timeout_s: float) -> None:
        """`timeout_s` is the deadline of round trips that are given no other one."""
        self._channel = channel
        self._owns_channel = True
        self._closed = threading.Event()  # of the channel, for all clients over it
        self._stub = stub
        self._metadata: Metadata = () if token is None else bearer(token)
        self._timeout_s = timeout_s

    def with_token(self, token: str) -> Self:
        """The same service for another caller, over the same channel, which stays this client's to close. Raises
        Unauthenticated without a token: on a Unix socket such a call is the owner's."""
        other = copy.copy(self)
        other._metadata = bearer(token)
        other._owns_channel = False
        return other

    def renew_token(self, token: str) -> None:
        """The calls from now on show this token. Raises Unauthenticated for text that is none."""
        self._metadata = bearer(token)

    def in_namespace(self, namespace: str) -> Self:
        """This client, whose calls name a namespace: to a store that knows the caller by a pinned certificate."""
        self._metadata += ((NAMESPACE_KEY, namespace.encode()),)
        return self

    async def close(self) -> None:
        """End the connection and all that is under way on it, which raises Cancelled. Closing it twice does no harm."""
        if self._owns_channel:
            self._closed.set()
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()

    async def _call(
        self, response_type: type[_Response], request: Any, timeout_s: float | None = None, *, has_deadline: bool = True
    ) -> _Response:
        """One round trip of the RPC that is answered by this type: XResponse belongs to X."""
        deadline_s = self._timeout_s if timeout_s is None and has_deadline else timeout_s
        response = await self.call_rpc(response_type.__name__.removesuffix("Response"), request, deadline_s)
        return cast("_Response", response)

    async def call_rpc(self, name: str, request: Any, timeout_s: float | None) -> Any:
        """One round trip of the RPC of that name, for whoever serves it for this service. None: no deadline."""
        metadata, deadline_s = self._metadata + onward() + self._place(request), _deadline(timeout_s)
        with self._typed():
            return _parsed(await getattr(self._stub, name)(request, timeout=deadline_s, metadata=metadata))

    def _place(self, _request: Any) -> Metadata:
        """What tells a load balancer where a call belongs: nothing, for a service of which there is one."""
        return ()

    def stream_rpc(self, name: str, request: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """The same for an RPC that streams its responses."""
        return self._responses(getattr(self._stub, name), request, timeout_s)

    async def _responses(
        self, method: Any, request: Any, timeout_s: float | None, more: Metadata = ()
    ) -> AsyncGenerator[Any, None]:
        """A stream's responses with typed errors. Leaving early cancels the call, so that the service stops too."""
        metadata, deadline_s = self._metadata + onward() + (more or self._place(request)), _deadline(timeout_s)
        with self._typed():
            call = method(request, timeout=deadline_s, metadata=metadata)
            try:
                async for response in call:
                    yield _parsed(response)
            finally:
                call.cancel()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Raises typed errors for gRPC's, and Cancelled where this client was closed meanwhile: gRPC has several errors
        for that, among them CancelledError in a task that nobody has cancelled, which then ends without a trace."""
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except (asyncio.CancelledError, Exception) as error:
            if not self._closed.is_set() or (isinstance(error, asyncio.CancelledError) and _is_task_cancelled()):
                raise
            raise Cancelled("the client is closed") from None

    async def _steps(self, method: Any, request: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """The responses of a stream that ends with `done`. What breaks it behind that undoes nothing."""
        is_done = False
        try:
            async with aclosing(self._responses(method, request, timeout_s)) as responses:
                async for response in responses:
                    is_done = response.HasField("done")
                    yield response
        except KvasirError:
            if not is_done:
                raise

    async def _until_done(
        self, what: str, steps: AsyncGenerator[Any, None], on_progress: Callable[[Any], None] | None
    ) -> Any:
        """What a stream ends with. It is read to its end: left before, it would be a cancelled call."""
        done = None
        async with aclosing(steps):
            async for step in steps:
                if step.HasField("done"):
                    done = step.done
                elif step.HasField("progress") and on_progress is not None:
                    on_progress(step.progress)
        if done is None:
            raise Internal(f"the {what} ended without saying how")
        return done


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None or timeout_s > _LONGEST_S else timeout_s


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _parsed(response: Any) -> Any:
    """The response. gRPC gives None for bytes that are no message of its type."""
    if response is None:
        raise Unavailable("the service's answer cannot be parsed")
    return response
