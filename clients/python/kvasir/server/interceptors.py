"""The interceptors around every handler of both services: they know the caller, check its roles, and map its errors."""

import asyncio
import contextvars
import gc
import inspect
import logging
import time
import traceback
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvasir import errors
from kvasir.call_context import NAMESPACE_KEY, REQUEST_ID_KEY, TRACE_KEY, call_bytes, call_name, measure_call, name_call
from kvasir.credentials import DEFAULT_NAMESPACE, OWNER, Credentials, Principal
from kvasir.server.arriving import UNREADABLE, Arriving, Doorstep, Turnstiles, begun
from kvasir.server.fair_shares import QUARTER, Shares
from kvasir.server.operating.audit import Audit, current_deed
from kvasir.server.operating.durations import RpcCounts
from kvasir.server.operating.log_errors import StrangersLines, places
from kvasir.server.operating.traces import Traces
from kvasir.server.running_calls import RunningCalls
from kvasir.server.shared_room import ModestRoom, Place, SharedRoom, is_only_upkeep
from kvasir.status import abort, answer_to
from kvasir.waits import LOOK_S, SOON_S

_LOG = logging.getLogger("kvasir.rpc")
_BEARER = "Bearer "
_MAX_TOKEN_CHARS = 512
# It shows nobody's data and ends at once, and a load balancer has no token.
_OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
# An engine calls these while it has nothing to do.
_UPKEEP = frozenset({f"/kvasir.cachestore.v1.CacheStoreService/{name}" for name in ("RenewLease", "RenewLeases")})
# Any known caller may use these. Strangers may not, because the calls may last.
_COMMON_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
# Known callers' calls that run at once, shared between namespaces. A stranger's call is refused and holds nothing.
MAX_CALLS = 1024
# A quarter of them, so that no credential shuts out the others of its namespace.
MAX_RPCS_PER_PRINCIPAL = 256
# A large prompt on a slow line takes time. A caller that sends nothing holds one of its own places until then.
FIRST_MESSAGE_S = 20.0
# Messages that are arriving, each counted as one of the largest size, shared between namespaces. A message that comes
# whole holds its place for microseconds.
MAX_ARRIVING_BYTES = 256 << 20
_FEWEST_ARRIVING = 16
# The same for requests of one message. The event loop reads all of them that have arrived before it does anything else,
# and one that names ten thousand blobs takes ten milliseconds.
MAX_ARRIVING_ALONE = 12
# Calls that are being answered. On the event loop each step of a call waits for a step of every other call. So the many
# calls of one namespace wait here, where they delay nobody. A call that lasts longer than `LOOK_S` is counted no more:
# it waits for a disk, a network or a lease, and the call that releases the lease may be waiting here.
MAX_ANSWERING = 16
# Of one namespace, while another was here: two keep the loop busy, one at work and one that waits for a disk.
_BESIDE_OTHERS = 2
_MAX_UNCOLLECTED_BYTES = 32 << 20

# The caller that shows this certificate (PEM) and names this namespace, or None.
CallerOfCertificate = Callable[[bytes, str], Principal | None]

_principal: contextvars.ContextVar[Principal] = contextvars.ContextVar("kvasir_principal")

# Entered around a handler with its ServicerContext.
Guard = Callable[[Any], AbstractAsyncContextManager[None]]
# Makes of the arriving messages the handler's argument: the only message, or the stream of all.
Take = Callable[[Any], AbstractAsyncContextManager[Any]]
Continuation = Callable[[Any], Awaitable[Any]]


def current_principal() -> Principal:
    """The caller of the running RPC. Raises LookupError outside of an RPC."""
    return _principal.get()


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
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


class Errors(_Interceptor):
    """The outermost interceptor: the one place where an exception becomes a status, and where calls are counted."""

    def __init__(
        self,
        new_request_id: Callable[[], str],
        counts: RpcCounts,
        traces: Traces,
        audit: Audit,
        turnstiles: Turnstiles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`turnstiles`: through these go strangers, and who wants more than there is, before they hear of a refusal."""
        super().__init__()
        self._new_request_id = new_request_id
        self._turnstiles = turnstiles
        self._counts = counts
        self._traces = traces
        self._audit = audit
        self._clock = clock
        self._strangers = StrangersLines(clock)

    def _wrap(self, method: str, handler: Any) -> Any:
        rpc = method.rpartition(".")[2]

        @asynccontextmanager
        async def guard(context: Any) -> AsyncIterator[None]:
            began_s, status = self._clock(), "CANCELLED"  # until it is known to be another
            self._counts.began(rpc)
            reason, deed = status, self._audit.begin(method)
            left_out: int | None = 0
            try:
                came = dict(context.invocation_metadata() or ())
                name_call(self._new_request_id())  # unless it came with a name that may be one
                name_call(came.get(REQUEST_ID_KEY, ""))
                with self._traces.serving(rpc, came.get(TRACE_KEY, "")):
                    yield
                status, reason = "OK", ""
            except grpc.aio.AbortError:
                status = reason = "UNKNOWN"
                raise
            except errors.KvasirError as error:
                status, reason = answer_to(error).code.name, error.reason
                left_out = self._refused(rpc, error)
                if deed.caller is not None:
                    left_out = left_out or 0  # a flood of strangers hides nobody who is known
                elif isinstance(error, errors.Unauthenticated):
                    await self._turnstiles.passed("", left_s=context.time_remaining())
                if deed.caller is not None and isinstance(error, errors.ResourceExhausted):
                    traceback.clear_frames(error.__traceback__)  # they have the request, which is in no budget now
                    await self._turnstiles.passed(deed.caller.namespace, call_bytes(), context.time_remaining())
                await abort(context, error)
            # CancelledError is no Exception: it passes, for a handler that swallows a cancel leaks (LESSONS 28).
            except Exception as error:  # noqa: BLE001  every bug ends here, once
                status = reason = "INTERNAL"
                told = (method, call_name(), type(error).__name__, places(error))
                _LOG.error("rpc.failed method=%s request_id=%s error=%s at=%s", *told)
                await abort(context, errors.Internal(f"internal error; request {call_name()}"))
            finally:
                self._counts.ended(rpc, status, self._clock() - began_s)
                if left_out is not None:
                    self._audit.ended(deed, status, reason, call_name(), left_out)

        return _guarded(handler, guard, nullcontext)

    def _refused(self, rpc: str, error: errors.KvasirError) -> int | None:
        """A line for each, without the error's message, which may quote what was sent. How many strangers got none
        before this one; None if this one gets none either."""
        level = logging.DEBUG if isinstance(error, errors.NotFound | errors.Cancelled) else logging.INFO
        what, unheard, left_out = "rpc.refused", "", 0
        if isinstance(error, errors.Unauthenticated | errors.PermissionDenied):
            self._counts.refused_credentials[error.reason] += 1
            may_be_told = self._strangers.left_out()
            if may_be_told is None:
                return None
            left_out = may_be_told
            level, what, unheard = logging.WARNING, "credential.refused", f" left_out={left_out}" if left_out else ""
        _LOG.log(level, "%s rpc=%s request_id=%s reason=%s%s", what, rpc, call_name(), error.reason, unheard)
        return left_out


class Authentication(_Interceptor):
    """Finds the caller before the handler runs, and refuses it unless one of its roles allows the RPC: `allowed_roles`
    has them by "/package.Service/Rpc". An RPC without a row is refused to all."""

    def __init__(
        self,
        credentials: Credentials | None,
        allowed_roles: Mapping[str, frozenset[str]],
        max_message_bytes: int,
        caller_of_certificate: CallerOfCertificate | None = None,
    ) -> None:
        """Call it on the event loop that serves. `max_message_bytes` is the largest message that gRPC takes."""
        super().__init__()
        self._credentials = credentials
        self._caller_of_certificate = caller_of_certificate
        self._calls = RunningCalls()
        self._allowed_roles = allowed_roles
        self._running: Counter[str] = Counter()
        self.calls = Shares(MAX_CALLS)
        places = max(MAX_ARRIVING_BYTES // max_message_bytes, _FEWEST_ARRIVING)
        self.arriving = SharedRoom(places)
        # A call that waits for its message holds a place, too. One credential alone gets a quarter of the places.
        self.arriving_of_caller = _RoomsOfCallers(places)
        self.arriving_alone = SharedRoom(min(places, MAX_ARRIVING_ALONE))
        self.arriving_alone_of_caller = _RoomsOfCallers(min(places, MAX_ARRIVING_ALONE))
        self.answering = ModestRoom(MAX_ANSWERING, _BESIDE_OTHERS)
        self.turnstiles = Turnstiles()
        self.doorstep = Doorstep(self.turnstiles)

    def _wrap(self, method: str, handler: Any) -> Any:
        @asynccontextmanager
        async def guard(context: Any) -> AsyncIterator[None]:
            caller = self._caller(context)
            current_deed().caller = caller
            self._check_role(method, caller)
            with self._counted(caller), self._calls.running(caller):
                _principal.set(caller)
                if method in _UPKEEP:
                    is_only_upkeep()
                yield

        if method in _OPEN_METHODS:
            return _guarded(handler, lambda context: self.doorstep.entered(context.peer()), self.doorstep.begun)
        if handler.request_streaming:
            # Health and reflection have no time limits of their own.
            bounds_each = method.startswith(_COMMON_SERVICES)
            return _guarded(handler, guard, partial(self._all_in_time, bounds_each=bounds_each))
        return _guarded(handler, guard, self._begun)

    def take(self, credentials: Credentials) -> int:
        """From now on these hold. Ends the running calls of callers who lost theirs; returns how many."""
        before, self._credentials = self._credentials, credentials
        lost = before.lost_in(credentials) if before is not None else frozenset()
        return self.end_calls(lambda caller: caller in lost)

    def end_calls(self, is_over: Callable[[Principal], bool]) -> int:
        """End the running calls of callers whose right is over, with UNAUTHENTICATED; returns how many."""
        return self._calls.end(is_over)

    @asynccontextmanager
    async def _all_in_time(self, requests: Any, *, bounds_each: bool) -> AsyncIterator[Any]:
        caller = current_principal()
        of_caller = self.arriving_of_caller[caller.namespace]
        place = Place((of_caller, caller.name), (self.arriving, caller.namespace))
        yield Arriving(requests, FIRST_MESSAGE_S, place, bounds_each=bounds_each, see_first=current_deed().is_about)

    @asynccontextmanager
    async def _begun(self, requests: Any) -> AsyncIterator[Any]:
        caller = current_principal()
        of_caller = self.arriving_alone_of_caller[caller.namespace]
        arriving = Place((of_caller, caller.name), (self.arriving_alone, caller.namespace))
        answering = Place((self.answering, caller.namespace))
        async with begun(requests, FIRST_MESSAGE_S, arriving, answering, LOOK_S) as request:
            current_deed().is_about(request)
            yield request

    @contextmanager
    def _counted(self, caller: Principal) -> Iterator[None]:
        if self._running[caller.name] >= MAX_RPCS_PER_PRINCIPAL:
            raise _too_many_calls(f"{caller.name!r} has {MAX_RPCS_PER_PRINCIPAL} calls running")
        if not self.calls.take(caller.namespace, 1):
            raise _too_many_calls(f"your namespace has {self.calls.held(caller.namespace)} calls running")
        self._running[caller.name] += 1
        try:
            yield
        finally:
            self._running[caller.name] -= 1
            self.calls.give_back(caller.namespace, 1)

    def _caller(self, context: Any) -> Principal:
        metadata = context.invocation_metadata() or ()
        if self._caller_of_certificate is not None and (caller := self._certified(context, metadata)) is not None:
            return caller
        presented = [value for key, value in metadata if key == "authorization"]
        if not presented:
            # The socket's mode lets only its owner connect.
            if context.peer().startswith("unix:"):
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

    def _certified(self, context: Any, metadata: Any) -> Principal | None:
        """The caller whose certificate TLS has checked; None where it showed none, or one that is not pinned."""
        certificates = context.auth_context().get("x509_pem_cert", ())
        if self._caller_of_certificate is None or len(certificates) != 1:
            return None
        named = [value for key, value in metadata if key == NAMESPACE_KEY]
        try:
            namespace = named[0].decode() if len(named) == 1 else DEFAULT_NAMESPACE
        except UnicodeDecodeError:
            return None
        return self._caller_of_certificate(certificates[0], namespace)

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


class _RoomsOfCallers(dict[str, SharedRoom]):
    """A room for the credentials of each namespace, of which one gets a quarter; namespaces share none of it, as a
    caller with a place here still waits for one of its namespace."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self._units = units

    def __missing__(self, namespace: str) -> SharedRoom:
        room = self[namespace] = SharedRoom(self._units, generosity=QUARTER)
        return room


def _too_many_calls(problem: str) -> errors.ResourceExhausted:
    return errors.ResourceExhausted(f"{problem}: let some end", reason="TOO_MANY_CALLS", retry_after_s=1)


def _guarded(handler: Any, guard: Guard, take: Take) -> Any:
    """The same handler inside the guard, its request as a stream of one message: gRPC would wait for a unary one before
    it calls the guard, and a caller that sends none would hold a place without a credential."""
    behaviour = handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
    guarded = _guarded_generator if inspect.isasyncgenfunction(behaviour) else _guarded_coroutine
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    read = handler.request_deserializer if isinstance(handler.request_deserializer, _Reader) else None
    read = read or _Reader(handler.request_deserializer, is_stream=handler.request_streaming)
    return make(guarded(behaviour, guard, take), read, handler.response_serializer)


def settle_garbage() -> None:
    """Exempt all present objects from garbage collection, so that a collection takes only a few milliseconds."""
    gc.collect()
    gc.freeze()


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
            await asyncio.wait((writing,), timeout=SOON_S)
            if writing.done() and not writing.cancelled():
                writing.exception()  # it was raised, or who would hear it is gone
            writing.cancel()
