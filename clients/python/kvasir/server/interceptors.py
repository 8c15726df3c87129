"""The interceptors around every handler of both services: they know the caller, check its roles, and map its errors."""

import contextvars
import gc
import logging
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvasir import errors
from kvasir.call_context import NAMESPACE_KEY, REQUEST_ID_KEY, TRACE_KEY, call_bytes, call_name, name_call
from kvasir.credentials import DEFAULT_NAMESPACE, OWNER, Credentials, Principal
from kvasir.server.arriving import Arriving, Doorstep, Turnstiles, begun, for_a_while
from kvasir.server.fair_shares import QUARTER, Shares
from kvasir.server.guarded_calls import Continuation, Interceptor, guarded
from kvasir.server.operating.audit import Audit, current_deed
from kvasir.server.operating.durations import RpcCounts
from kvasir.server.operating.log_errors import StrangersLines, places
from kvasir.server.operating.traces import Traces
from kvasir.server.running_calls import RunningCalls
from kvasir.server.shared_room import ModestRoom, Place, SharedRoom, is_only_upkeep
from kvasir.status import abort, answer_to
from kvasir.waits import LOOK_S

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
# And at most so many quick calls a second then: each keeps its place for 5 ms at least, after its answer, too. It takes
# a millisecond of the loop, and a loop that has no pause takes calls from gRPC later than they come: another
# namespace's call stands behind hundreds there, where nobody knows whose it is.
QUICK_A_SECOND = 400
# So many new objects begin a collection, instead of Python's 700, which walks through those of the calls under way: a
# turn's end in an engine and its store takes 1.5 ms of 34 less. The third one looks once more at all that two have
# left, instead of the eleventh: that took 14 ms, for which 64 streams waited. All objects are looked at as seldom.
_COLLECTIONS = 5_000, 2, 40

# The caller that shows this certificate (PEM) and names this namespace, or None.
CallerOfCertificate = Callable[[bytes, str], Principal | None]

_principal: contextvars.ContextVar[Principal] = contextvars.ContextVar("kvasir_principal")


def current_principal() -> Principal:
    """The caller of the running RPC. Raises LookupError outside of an RPC."""
    return _principal.get()


class Errors(Interceptor):
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
        """`turnstiles`: strangers, and callers that want more than there is, wait there before they are refused."""
        super().__init__()
        self._new_request_id = new_request_id
        self._turnstiles = turnstiles
        self._counts = counts
        self._traces = traces
        self._audit = audit
        self._clock = clock
        self._strangers = StrangersLines(clock)
        unknown: Any = grpc.stream_unary_rpc_method_handler(_refuse_unknown)
        self._unknown = guarded(unknown, self._paced, nullcontext)

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        return await super().intercept_service(continuation, handler_call_details) or self._unknown

    @asynccontextmanager
    async def _paced(self, context: Any) -> AsyncIterator[None]:
        await self._turnstiles.passed("", left_s=context.time_remaining())
        yield

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
                if deed.caller is not None and isinstance(error, errors.ResourceExhausted | errors.PermissionDenied):
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

        return guarded(handler, guard, nullcontext)

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


async def _refuse_unknown(_: object, context: Any) -> None:
    """As gRPC itself, which would refuse as many as come."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class Authentication(Interceptor):
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
            return guarded(handler, lambda context: self.doorstep.entered(context.peer()), self.doorstep.begun)
        if handler.request_streaming:
            # Health and reflection have no time limits of their own.
            bounds_each = method.startswith(_COMMON_SERVICES)
            return guarded(handler, guard, partial(self._all_in_time, bounds_each=bounds_each))
        return guarded(handler, guard, self._begun)

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
        async with self._answering(caller.namespace):  # nothing of it was read
            yield Arriving(requests, FIRST_MESSAGE_S, place, bounds_each=bounds_each, see_first=current_deed().is_about)

    @asynccontextmanager
    async def _begun(self, requests: Any) -> AsyncIterator[Any]:
        caller = current_principal()
        of_caller = self.arriving_alone_of_caller[caller.namespace]
        arriving = Place((of_caller, caller.name), (self.arriving_alone, caller.namespace))
        async with begun(requests, FIRST_MESSAGE_S, arriving, self._answering(caller.namespace)) as request:
            current_deed().is_about(request)
            yield request

    def _answering(self, namespace: str) -> AbstractAsyncContextManager[None]:
        def at_least_s() -> float:
            return 0.0 if self.answering.is_alone(namespace) else _BESIDE_OTHERS / QUICK_A_SECOND

        return for_a_while(Place((self.answering, namespace)), LOOK_S, at_least_s)

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


def settle_garbage() -> None:
    """Exempt all present objects from garbage collection, so that one takes only a few milliseconds, and let it begin
    later: most objects of a call go without one. A program may disable it until then. The garbage of imports stays: an
    engine's is 0.5 MB, and to find it takes 0.1 s."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
