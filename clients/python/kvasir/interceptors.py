"""What stands around every handler of both services: who calls, may they, and what their error becomes.

`Authentication` tells the handler its caller, or refuses. `Errors` turns typed errors into statuses; what is not typed
is a bug of ours: INTERNAL with a request id and nothing else, logged without any payload. Handlers are coroutines, or
asynchronous generators of responses.
"""

import contextvars
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvasir import errors
from kvasir.credentials import OWNER, Credentials, Principal
from kvasir.log_errors import places
from kvasir.status import abort

_LOG = logging.getLogger("kvasir.rpc")
_BEARER = "Bearer "
_MAX_TOKEN_CHARS = 512
# It says nothing of anyone's data and ends at once, and a load balancer has no token.
_OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
# Any caller that is known may use these; they may last, so strangers may not.
_COMMON_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
# A quarter of what the server runs at once: no one credential shuts the others out.
MAX_RPCS_PER_PRINCIPAL = 256

_principal: contextvars.ContextVar[Principal] = contextvars.ContextVar("kvasir_principal")

# Entered around a handler with its ServicerContext.
Guard = Callable[[Any], AbstractAsyncContextManager[None]]
Continuation = Callable[[Any], Awaitable[Any]]


def current_principal() -> Principal:
    """Who calls the RPC that is running. Raises LookupError outside of one."""
    return _principal.get()


class Errors(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The outermost interceptor: the one place where an exception becomes a status."""

    def __init__(self, new_request_id: Callable[[], str]) -> None:
        self._new_request_id = new_request_id

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method

        @asynccontextmanager
        async def guard(context: Any) -> AsyncIterator[None]:
            try:
                yield
            except grpc.aio.AbortError:
                raise
            except errors.KvasirError as error:
                await abort(context, error)
            # CancelledError is no Exception: it passes, for a handler that swallows a cancel leaks (LESSONS 28).
            except Exception as error:  # noqa: BLE001  every bug ends here, once
                request_id = self._new_request_id()
                _log_bug(method, request_id, error)
                await abort(context, errors.Internal(f"internal error; request {request_id}"))

        return handler and _guarded(handler, guard)


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Knows the caller before the handler runs, and whether its roles allow the RPC.

    `allowed_roles` has a row for every RPC of the service: "/package.Service/Rpc" → roles, any of which suffices. An
    RPC without a row is refused to everybody.
    """

    def __init__(self, credentials: Credentials | None, allowed_roles: Mapping[str, frozenset[str]]) -> None:
        self._credentials = credentials
        self._allowed_roles = allowed_roles
        self._running: Counter[str] = Counter()

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        metadata = handler_call_details.invocation_metadata or ()

        @asynccontextmanager
        async def guard(context: Any) -> AsyncIterator[None]:
            caller = self._caller(context.peer(), metadata)
            self._check_role(method, caller)
            with self._counted(caller):
                _principal.set(caller)
                yield

        is_open = handler is None or method in _OPEN_METHODS
        return handler if is_open else _guarded(handler, guard)

    @contextmanager
    def _counted(self, caller: Principal) -> Iterator[None]:
        if self._running[caller.name] >= MAX_RPCS_PER_PRINCIPAL:
            raise errors.ResourceExhausted(
                f"{caller.name!r} has {MAX_RPCS_PER_PRINCIPAL} calls running: let some end",
                reason="TOO_MANY_CALLS",
                retry_after_s=1,
            )
        self._running[caller.name] += 1
        try:
            yield
        finally:
            self._running[caller.name] -= 1

    def _caller(self, peer: str, metadata: Any) -> Principal:
        presented = [value for key, value in metadata if key == "authorization"]
        if not presented:
            # The socket's mode lets its owner connect and nobody else.
            if peer.startswith("unix:"):
                return OWNER
            raise errors.Unauthenticated("no credential: send `authorization: Bearer <token>`", reason="NO_CREDENTIAL")
        text = presented[0]
        if len(presented) > 1 or not isinstance(text, str) or not text.startswith(_BEARER):
            raise errors.Unauthenticated("authorization: expected one `Bearer <token>`")
        token = text.removeprefix(_BEARER)
        caller = self._credentials.principal_of(token) if self._credentials and len(token) <= _MAX_TOKEN_CHARS else None
        if caller is None:
            raise errors.Unauthenticated("the token is not one of this service's credentials")
        return caller

    def _check_role(self, method: str, caller: Principal) -> None:
        if method.startswith(_COMMON_SERVICES):
            return
        allowed = self._allowed_roles.get(method, frozenset())
        if not allowed & caller.roles:
            name = method.rpartition("/")[2]
            raise errors.PermissionDenied(
                f"{name} needs one of the roles {sorted(allowed)}; {caller.name!r} has {sorted(caller.roles)}",
                metadata={"rpc": name, "roles": " ".join(sorted(allowed))},
            )


def _guarded(handler: Any, guard: Guard) -> Any:
    """The same handler, run inside the guard.

    It takes its request as a stream of one, also where the RPC has no stream: gRPC would wait for a unary request
    before it asks anybody, and whoever sends none would hold a place without a credential.
    """
    behaviour = handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
    guarded = _guarded_generator if inspect.isasyncgenfunction(behaviour) else _guarded_coroutine
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    read = _reader(handler.request_deserializer) if not handler.request_streaming else handler.request_deserializer
    take = _all if handler.request_streaming else _only
    return make(guarded(behaviour, guard, take), read, handler.response_serializer)


# Stands for a request that is no message: gRPC itself would answer UNKNOWN, from outside of every guard.
_UNREADABLE = object()


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNREADABLE

    return read


async def _only(requests: Any) -> Any:
    """The one request of an RPC without a stream."""
    request = await anext(requests, _UNREADABLE)
    if request is _UNREADABLE:
        raise errors.InvalidArgument(
            "request: not a message of this RPC; every text must be UTF-8", reason="UNREADABLE", field="request"
        )
    return request


async def _all(requests: Any) -> Any:
    return requests


def _guarded_coroutine(behaviour: Any, guard: Guard, take: Callable[[Any], Awaitable[Any]]) -> Any:
    async def call(requests: Any, context: Any) -> Any:
        async with guard(context):
            return await behaviour(await take(requests), context)

    return call


def _guarded_generator(behaviour: Any, guard: Guard, take: Callable[[Any], Awaitable[Any]]) -> Any:
    async def call(requests: Any, context: Any) -> AsyncIterator[Any]:
        async with guard(context), aclosing(behaviour(await take(requests), context)) as responses:
            async for response in responses:
                yield response

    return call


def _log_bug(method: str, request_id: str, error: BaseException) -> None:
    _LOG.error(
        "rpc.failed method=%s request_id=%s error=%s at=%s", method, request_id, type(error).__name__, places(error)
    )
