"""A wire between two stores that keeps what passes, as bytes and as calls, so that it can be sent again."""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from kvasir.status import from_rpc_error

from tests.cachestore.rights.peered import Mac
from tests.cachestore.service.proxy import Proxy, proxy_to

_QUIET_S, _LONGEST_S = 0.1, 10.0
_BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class BugError(Exception):
    """A replayed call got an answer without a type."""


@dataclass(frozen=True)
class Call:
    """What one store asked of another."""

    at: str  # the store that was asked
    by: str  # the peer that asked
    method: str  # as /package.Service/Rpc
    message: bytes
    answers: list[bytes] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.method.rpartition("/")[2]

    def cut(self, count: int) -> "Call":
        return replace(self, message=self.message[:count])


class Wire(grpc.GenericRpcHandler):  # type: ignore[misc]
    """From one store to another: the bytes pass a proxy, then the calls pass this."""

    def __init__(self, by: str, at: str, behind: grpc.aio.Channel) -> None:
        self.calls: list[Call] = []
        self.loses = ""  # the RPC whose next answer does not come
        self.lost = asyncio.Event()
        self.by = by
        self.at = at
        self._behind = behind
        self.proxy: Proxy

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(partial(self._relay, details.method))

    async def _relay(self, method: str, message: bytes, context: Any) -> AsyncIterator[bytes]:
        call = Call(self.at, self.by, method, message)
        self.calls.append(call)
        metadata = [(key, value) for key, value in context.invocation_metadata() if key != "user-agent"]
        try:
            onward = self._behind.unary_stream(method)(message, metadata=metadata, timeout=context.time_remaining())
            async for answer in onward:
                call.answers.append(answer)
                if self.loses == call.name:
                    self.loses = ""
                    self.lost.set()
                    await asyncio.sleep(_LONGEST_S)
                yield answer
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


@asynccontextmanager
async def wired(macs: Iterable[Mac], folder: Path) -> AsyncIterator[dict[tuple[str, str], Wire]]:
    """A wire for each direction between these stores, by (who asks, who is asked)."""
    by_name = {mac.name: mac for mac in macs}
    wires: dict[tuple[str, str], Wire] = {}
    async with AsyncExitStack() as exits:
        for by, at in ((by, at) for by in by_name for at in by_name if by != at):
            behind = await exits.enter_async_context(grpc.aio.insecure_channel(by_name[at].address))
            wire = wires[by, at] = Wire(by, at, behind)
            address = await exits.enter_async_context(served(wire, folder / f"{by}-{at}"))
            wire.proxy = exits.enter_context(proxy_to(address))
            wire.proxy.heard = []
            reach(by_name[by], at, wire.proxy.address)
        yield wires


@asynccontextmanager
async def served(handler: grpc.GenericRpcHandler, socket: Path) -> AsyncIterator[str]:
    """The address at which it is served."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield f"unix:{socket}"
    finally:
        await server.stop(0)


def reach(mac: Mac, peer: str, address: str) -> None:
    """Let a store find its peer at this address."""
    book = mac.books[-1]
    mac.books.append(
        replace(book, peers={**book.peers, peer: book.peers[peer].model_copy(update={"address": address})})
    )
    mac.peers.reload()


class Replayed(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Plays a store by what it answered once: each RPC's answers in their order, the last one again and again."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._answers: dict[str, deque[list[bytes]]] = defaultdict(deque)
        for call in calls:
            self._answers[call.method].append(call.answers)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(partial(self._answer, details.method))

    async def _answer(self, method: str, _message: bytes, context: Any) -> AsyncIterator[bytes]:
        if not (left := self._answers[method]):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody asked that")
        for answer in left.popleft() if len(left) > 1 else left[0]:
            yield answer


async def sent_again(call: Call, at: Mac, by: str) -> str:
    """Send a call to a store with the token that this peer has there. How it ended: OK, or the refusal's reason.
    Raises BugError."""
    metadata = (("authorization", f"Bearer {at.tokens[by].read_text().strip()}"),)
    async with grpc.aio.insecure_channel(at.address) as channel:
        try:
            async for _ in channel.unary_stream(call.method)(call.message, metadata=metadata, timeout=_LONGEST_S):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() in _BUGS or not (reason := from_rpc_error(error).reason):
                raise BugError(f"{call.name} by {by} at {at.name}: {error.code()} {error.details()}") from None
            return reason
    return "OK"


async def bytes_sent_again(data: bytes, at: Mac) -> None:
    """Send a connection's bytes to a store, and leave when it has been silent for a moment."""
    reader, writer = await asyncio.open_unix_connection(at.address.removeprefix("unix:"))
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(data)
        await writer.drain()
        while await asyncio.wait_for(reader.read(64 << 10), _QUIET_S):
            pass
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
