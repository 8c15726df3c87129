"""Pairing over gRPC, without TLS: the exchange seals its messages, and there is no certificate to trust yet."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from kvasir import errors
from kvasir.cachestore.v1 import pairing_pb2 as pb
from kvasir.cachestore.v1 import pairing_pb2_grpc
from kvasir.server.serving import RefusedToStart
from kvasir.status import abort, from_rpc_error
from kvasir.waits import SILENCE_S

from cachestore_svc.pairing.exchange import PROTOCOL, Card, Hosting, Joining

_MAX_ATTEMPTS_AT_ONCE = 4
_MAX_CALLS = 64
_MAX_MESSAGE_BYTES = 16 << 10
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 4 << 10),
    ("grpc.max_concurrent_streams", _MAX_ATTEMPTS_AT_ONCE),
    ("grpc.max_connection_idle_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class HostSide:
    """What the listener does with an attempt: begin it, name this store, pin the joiner, report refusals."""

    begin: Callable[[], Hosting]
    card: Card
    pin: Callable[[Card], Awaitable[None]]
    refused: Callable[[str, errors.KvasirError], None]  # from which address, and why


class PairingService(pairing_pb2_grpc.PairingServiceServicer):
    def __init__(self, side: HostSide) -> None:
        self._side = side
        self._running = 0
        self._pinning: asyncio.Future[None] | None = None  # one code, one joiner; a task that nobody holds may end

    async def Pair(self, requests: AsyncIterator[pb.PairRequest], context: Any) -> None:
        said = _said(requests)
        try:
            async with asyncio.timeout(SILENCE_S):
                # Read before anything is refused: a joiner whose call ends while it sends is not given its status by
                # grpc.aio. A silent one takes no place.
                share = _share(await said("share"))
                with self._place():
                    await self._attempt(share, said, context)
        except TimeoutError:
            await self._refuse(context, errors.DeadlineExceeded(f"pairing took longer than {SILENCE_S:g} s"))
        except errors.KvasirError as error:
            await self._refuse(context, error)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._running >= _MAX_ATTEMPTS_AT_ONCE:
            text = "others are trying to pair: try again"
            raise errors.ResourceExhausted(text, reason="TOO_MANY_CALLS", retry_after_s=5)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _refuse(self, context: Any, error: errors.KvasirError) -> None:
        self._side.refused(context.peer(), error)
        await abort(context, error)

    async def _attempt(self, share: bytes, said: "_Said", context: Any) -> None:
        run = self._side.begin()
        run.take_share(share)
        await context.write(pb.PairResponse(share=pb.PairingShare(protocol=PROTOCOL, spake2=run.share)))
        joiner = run.take_card(await said("sealed_card"))
        await context.write(pb.PairResponse(sealed_card=run.card(self._side.card)))
        run.take_signature(await said("sealed_signature"))
        # Pinned is pinned: a joiner that leaves meanwhile must not leave a peer that nobody here knows of.
        self._pinning = asyncio.ensure_future(self._side.pin(joiner))
        await asyncio.shield(self._pinning)
        await context.write(pb.PairResponse(sealed_signature=run.signature()))


@asynccontextmanager
async def listening(address: str, side: HostSide) -> AsyncIterator[str]:
    """Serve attempts at HOST:PORT (0: any port) while inside; yields the address. Raises RefusedToStart."""
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
    pairing_pb2_grpc.add_PairingServiceServicer_to_server(PairingService(side), server)  # type: ignore[no-untyped-call]
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        raise RefusedToStart(f"cannot listen on {address}: is another process there?") from None
    await server.start()
    try:
        yield f"{address.rpartition(':')[0]}:{port}"
    finally:
        await server.stop(1.0)


async def join(address: str, run: Joining, card: Card) -> Card:
    """Take a code to the listener at HOST:PORT; returns the host's card, which may be pinned. Raises KvasirError."""
    async with grpc.aio.insecure_channel(address, (("grpc.enable_http_proxy", 0),)) as channel:
        call = pairing_pb2_grpc.PairingServiceStub(channel).Pair(timeout=SILENCE_S)  # type: ignore[no-untyped-call]
        try:
            return await _join(call, run, card)
        except grpc.RpcError as error:
            raise _refusal(address, error) from error
        except asyncio.InvalidStateError:  # the stream ended while we wrote: its status has the reason
            raise _refusal(address, await _ended(call)) from None
        finally:
            call.cancel()


def _refusal(address: str, error: grpc.RpcError) -> errors.KvasirError:
    """The host's message; where it has none, gRPC's own words do not help the person who typed the address."""
    refusal = from_rpc_error(error)
    if isinstance(refusal, errors.Unavailable | errors.DeadlineExceeded) and refusal.reason == type(refusal).reason:
        return errors.Unavailable(f"no `kvasir pair` answers at {address}", reason="PEER_UNAVAILABLE")
    return refusal


async def _join(call: Any, run: Joining, card: Card) -> Card:
    said = _said(_responses(call))
    await call.write(pb.PairRequest(share=pb.PairingShare(protocol=PROTOCOL, spake2=run.share)))
    run.take_share(_share(await said("share")))
    await call.write(pb.PairRequest(sealed_card=run.card(card)))
    sealed = await said("sealed_card")
    try:
        host = run.take_card(sealed)
    except errors.KvasirError:
        await call.write(pb.PairRequest(is_refused=True))
        await call.done_writing()
        await call.code()  # the host has heard it
        raise
    await call.write(pb.PairRequest(sealed_signature=run.signature()))
    run.take_signature(await said("sealed_signature"))
    return host


async def _responses(call: Any) -> AsyncIterator[pb.PairResponse]:
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


async def _ended(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )


_Said = Callable[[str], Awaitable[Any]]


def _said(steps: AsyncIterator[Any]) -> _Said:
    """The next step by its name. Raises InvalidArgument for another, PermissionDenied, Unavailable."""

    async def next_step(name: str) -> Any:
        step = await anext(steps, None)
        if step is None:
            raise errors.Unavailable("the other side left in the middle of the pairing", reason="STREAM_CUT")
        came = step.WhichOneof("step")
        if came == "is_refused":
            text = "the other side refused our card: a machine in the middle? Nothing is pinned"
            raise errors.PermissionDenied(text, reason="PAIRING_REFUSED")
        if came != name:
            raise errors.InvalidArgument.of("step", f"expected {name}, got {came}", reason="PAIRING_MALFORMED")
        return getattr(step, name)

    return next_step


def _share(share: pb.PairingShare) -> bytes:
    if share.protocol != PROTOCOL:
        raise errors.InvalidArgument.of(
            "share.protocol",
            f"this side has protocol {PROTOCOL}, the other {share.protocol}: install one version of Kvasir on both",
            reason="PAIRING_MALFORMED",
        )
    return share.spake2
