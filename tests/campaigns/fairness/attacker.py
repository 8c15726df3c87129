"""Namespace `a`, which does its worst with its own credentials: a process of its own, so that what its clients cost is
not `b`'s to pay.

`python -m tests.campaigns.fairness.attacker NAME` reads where the services are from its input, prints "ready" when the
attack is under way, and goes on until it is killed. An attack is a coroutine of an `Attacker`.
"""

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from kvasir.clients import AioInferenceClient, AioStoreClient
from kvasir.errors import InvalidArgument, KvasirError, NotFound, PermissionDenied, Unauthenticated

from tests.campaigns.fairness.half_messages import HalfSender

_REFUSED_PAUSE_S = 0.02
_OWN_FAULTS = (InvalidArgument, NotFound, PermissionDenied, Unauthenticated)
_STARTS_WITHIN_S = 1.0
# A connection has at most 320 streams.
_CALLS_PER_CHANNEL = 100
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


@dataclass
class Attacker:
    """What an attack may use: clients with credentials in turn, and calls that do not behave."""

    store_address: str
    engine_address: str
    gateway_url: str
    tokens: list[str]

    def __post_init__(self) -> None:
        self._turns = itertools.cycle(self.tokens)
        self._running: list[asyncio.Task[None]] = []
        self._kept: list[Any] = []

    def store(self) -> AioStoreClient:
        """A client of the store, with the next credential and a connection of its own."""
        return self._keep(AioStoreClient(self.channel(self.store_address), token=next(self._turns), timeout_s=60.0))

    def engine(self) -> AioInferenceClient:
        return self._keep(AioInferenceClient(self.channel(self.engine_address), token=next(self._turns)))

    def channel(self, address: str) -> grpc.aio.Channel:
        return self._keep(grpc.aio.insecure_channel(address, _OPTIONS))

    def flood(self, count: int, call: Callable[[int], Awaitable[object]], refused: str = "") -> None:
        """So many callers at once; each calls again and again, with its own number, though there be no room for it.
        `refused`: why its calls are refused once they have cost something. For another fault of its own it ends: it
        would attack nothing.
        """
        self._running += [asyncio.create_task(self._again(call, index, refused)) for index in range(count)]

    def hold(self, address: str, method: str, count: int, *, is_known: bool, messages: Iterable[bytes] = ()) -> None:
        """So many calls that send these messages and then nothing, and read nothing; begun again when they end."""
        sent = tuple(messages)
        for index in range(count):
            if index % _CALLS_PER_CHANNEL == 0:
                channel = self.channel(address)
            self._running.append(asyncio.create_task(self._held(channel, method, is_known, sent)))

    async def _again(self, call: Callable[[int], Awaitable[object]], index: int, refused: str) -> None:
        while True:
            try:
                await call(index)
            except KvasirError as error:
                is_own_fault = isinstance(error, _OWN_FAULTS) or error.reason == "CONTEXT_EXCEEDED"
                if is_own_fault and error.reason != refused:
                    raise
                await asyncio.sleep(_REFUSED_PAUSE_S)

    async def _held(self, channel: grpc.aio.Channel, method: str, is_known: bool, messages: tuple[bytes, ...]) -> None:
        while True:
            metadata = (("authorization", f"Bearer {next(self._turns)}"),) if is_known else ()
            rpc = channel.stream_stream(method)(metadata=metadata)
            with contextlib.suppress(grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                await rpc.wait_for_connection()
                for message in messages:
                    await rpc.write(message)
            await rpc.code()
            await asyncio.sleep(_REFUSED_PAUSE_S)

    def withhold(self, address: str, method: str, message_bytes: int, *, calls: int) -> None:
        """So many calls that send all of a message but its last byte."""
        for _ in range(0, calls, _CALLS_PER_CHANNEL):
            sender = HalfSender(address.removeprefix("unix:"), method, next(self._turns), message_bytes)
            self._running.append(asyncio.create_task(self._withheld(sender)))

    async def _withheld(self, sender: HalfSender) -> None:
        while True:
            await sender.run(_CALLS_PER_CHANNEL)
            await asyncio.sleep(_REFUSED_PAUSE_S)

    def _keep(self, thing: Any) -> Any:
        self._kept.append(thing)  # a channel that is collected is closed
        return thing

    async def go_on(self) -> None:
        """Until it is killed, or a caller ends in a way that nobody thought of."""
        await asyncio.gather(*self._running)


Attack = Callable[[Attacker], Awaitable[None]]


async def consume(stream: AsyncIterator[Any]) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


async def _main(name: str) -> None:
    from tests.campaigns.fairness.rows import ROWS  # the table names this module's Attacker

    attacker = Attacker(**json.loads(sys.stdin.readline()))
    [row] = [each for each in ROWS if each.name == name]
    await row.attack(attacker)
    await asyncio.sleep(_STARTS_WITHIN_S)
    print("ready", flush=True)
    await attacker.go_on()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
