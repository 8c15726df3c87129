"""A client of another engine that takes turns over: one call for each request's turns, both sides speak."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Self, cast

import grpc
import grpc.aio

from kvasir.call_context import onward
from kvasir.clients.aio.service_client import AioServiceClient
from kvasir.clients.channel import AnyTls, aio_channel
from kvasir.errors import Unavailable
from kvasir.inference.v1 import handover_pb2 as pb
from kvasir.inference.v1 import handover_pb2_grpc
from kvasir.inference.v1.inference_pb2 import GenerateResponse
from kvasir.status import from_rpc_error


class AioTurnPeer(AioServiceClient):
    """Another engine. Close it with `async with` or close()."""

    @classmethod
    def connect(cls, address: str, *, token: str | None = None, tls: AnyTls | None = None) -> Self:
        """The engine at unix:/path or host:port. Connects with the first call. Raises InvalidArgument."""
        channel = aio_channel(address, tls, ())
        stub = handover_pb2_grpc.HandOverServiceStub(channel)  # type: ignore[no-untyped-call]
        return cls(channel, stub, token, 10.0)

    def take_turn(self) -> "TurnCall":
        return TurnCall(self._stub.TakeTurn(metadata=self._metadata + onward()))

    def read_turn(self, resume_token: str, caller: str) -> AsyncGenerator[GenerateResponse, None]:
        """The rest of a reply of a turn that was given there, for the caller that reads it here. Raises the errors of
        Generate, and NotFound (RESUME_TOKEN_UNKNOWN). Leaving early lets the turn go on there."""
        request = pb.ReadTurnRequest(resume_token=resume_token, caller=caller)
        return self._responses(self._stub.ReadTurn, request, None)

    async def end_turn(self, resume_token: str, timeout_s: float) -> None:
        """End a turn that is read: its reader has left."""
        await self._call(pb.EndTurnResponse, pb.EndTurnRequest(resume_token=resume_token), timeout_s)


class TurnCall:
    """One request's turns on their way to another engine. A call that is closed before its commit changes nothing."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, parts: Iterable[pb.TakeTurnRequest]) -> None:
        """Raises the error that the other engine ended the call with."""
        try:
            for part in parts:
                await self._call.write(part)
        except (grpc.RpcError, asyncio.InvalidStateError):
            await self.receive()
            raise Unavailable("the other engine ended the hand-over") from None

    async def receive(self) -> pb.TakeTurnResponse:
        """The next answer. Raises the error that the call ended with, and Unavailable if it ended without one."""
        try:
            answer = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if answer is grpc.aio.EOF or answer is None:
            raise Unavailable("the other engine ended the hand-over")
        return cast("pb.TakeTurnResponse", answer)

    def close(self) -> None:
        """Without effect once the other engine has ended the call."""
        self._call.cancel()
