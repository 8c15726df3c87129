"""Pairing over gRPC in one process: whoever stands between or sends nonsense is refused, and both sides are told."""

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from kvasir.cachestore.v1 import pairing_pb2 as pb
from kvasir.cachestore.v1 import pairing_pb2_grpc
from kvasir.errors import (
    FailedPrecondition,
    InvalidArgument,
    KvasirError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from kvasir.status import from_rpc_error

from cachestore_svc.edge.pairing_service import HostSide, join, listening
from cachestore_svc.pairing.exchange import Card, Hosting, Invitation, Joining
from cachestore_svc.pairing.identity import Identity, new_identity

CODE, OTHER_CODE = "ABCD-EFGH", "ZZZZ-ZZZZ"
HOST, JOINER, STRANGER = new_identity(), new_identity(), new_identity()


def card_of(identity: Identity, name: str) -> Card:
    return Card(name, identity.certificate, "127.0.0.1:1")


def joining(code: str = CODE) -> Joining:
    return Joining(code, JOINER, secrets.token_bytes)


@dataclass
class Host:
    """The side that shows a code, and what it was told."""

    identity: Identity = HOST
    code: str = CODE
    pinned: list[Card] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    pinning: asyncio.Event = field(default_factory=asyncio.Event)
    pins_s: float = 0.0

    def __post_init__(self) -> None:
        self.invitation = Invitation(self.code, time.monotonic)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async def pin(card: Card) -> None:
            self.pinning.set()
            await asyncio.sleep(self.pins_s)
            self.pinned.append(card)

        side = HostSide(
            lambda: Hosting(self.invitation, self.identity, secrets.token_bytes),
            card_of(self.identity, "host"),
            pin,
            lambda _, error: self.refused.append(error.reason),
        )
        async with listening("127.0.0.1:0", side) as address:
            yield address


async def test_two_that_know_the_code_get_each_others_card() -> None:
    host = Host()
    async with host.listening() as address:
        assert await join(address, joining(), card_of(JOINER, "joiner")) == card_of(HOST, "host")
        with pytest.raises(FailedPrecondition) as told:
            await join(address, joining(), card_of(JOINER, "joiner"))
    assert (host.pinned, host.refused) == ([card_of(JOINER, "joiner")], [told.value.reason])


async def test_a_code_that_is_over_is_refused_after_the_joiners_first_message() -> None:
    host = Host()
    host.invitation.is_used = True
    async with host.listening() as address, grpc.aio.insecure_channel(address) as channel:
        call = pairing_pb2_grpc.PairingServiceStub(channel).Pair()  # type: ignore[no-untyped-call]
        await call.wait_for_connection()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call.code()), 0.1)
        await call.write(pb.PairRequest(share=pb.PairingShare(protocol=1, spake2=joining().share)))
        with pytest.raises(grpc.RpcError) as told:
            await call.read()
    assert host.refused == [from_rpc_error(told.value).reason] == ["PAIRING_OVER"]


async def test_one_too_many_at_once_is_refused_after_its_first_message_and_silent_ones_take_no_place() -> None:
    host = Host()
    async with host.listening() as address, AsyncExitStack() as stack:

        async def begun(*, speaks: bool = True) -> Any:
            options = (("grpc.use_local_subchannel_pool", 1),)  # each from a machine of its own
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
            call = pairing_pb2_grpc.PairingServiceStub(channel).Pair()  # type: ignore[no-untyped-call]
            await call.wait_for_connection()
            if speaks:
                await call.write(pb.PairRequest(share=pb.PairingShare(protocol=1, spake2=joining().share)))
            return call

        for _ in range(4):
            await begun(speaks=False)
        for call in [await begun() for _ in range(4)]:
            assert (await call.read()).HasField("share")
        late = await begun(speaks=False)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(late.code()), 0.1)
        with pytest.raises(ResourceExhausted) as refused:
            await join(address, joining(), card_of(JOINER, "joiner"))
    assert host.refused[:1] == [refused.value.reason] == ["TOO_MANY_CALLS"]


def test_where_nobody_waits_the_address_is_said_and_not_grpcs_own_words() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(Unavailable) as told:
            asyncio.run(join(address, joining(), card_of(JOINER, "joiner")))
    assert (told.value.message, told.value.reason) == (f"no `kvasir pair` answers at {address}", "PEER_UNAVAILABLE")


async def test_a_joiner_that_leaves_while_it_is_pinned_is_a_peer_that_the_host_knows() -> None:
    host = Host(pins_s=0.3)
    async with host.listening() as address:
        leaving = asyncio.create_task(join(address, joining(), card_of(JOINER, "joiner")))
        await host.pinning.wait()
        leaving.cancel()
        await asyncio.sleep(0.6)
    assert host.pinned == [card_of(JOINER, "joiner")]


async def test_a_wrong_code_is_reported_on_both_sides_and_the_right_one_still_works() -> None:
    host = Host()
    async with host.listening() as address:
        with pytest.raises(PermissionDenied, match="4 guesses") as told:
            await join(address, joining(OTHER_CODE), card_of(JOINER, "joiner"))
        assert host.refused == [told.value.reason] == ["PAIRING_REFUSED"]
        await join(address, joining(), card_of(JOINER, "joiner"))
    assert len(host.pinned) == 1


async def test_a_machine_in_the_middle_with_its_own_certificate_is_refused_and_both_hear_it() -> None:
    host, middle = Host(), Host(STRANGER, OTHER_CODE)
    async with host.listening() as behind, middle.listening() as before:
        with pytest.raises(PermissionDenied) as told:
            await join(before, joining(), card_of(JOINER, "joiner"))
        assert told.value.reason == "PAIRING_REFUSED"
        with pytest.raises(PermissionDenied):
            await join(behind, Joining(OTHER_CODE, STRANGER, secrets.token_bytes), card_of(STRANGER, "joiner"))
    assert (host.pinned, middle.pinned, host.refused) == ([], [], ["PAIRING_REFUSED"])


class Relay(pairing_pb2_grpc.PairingServiceServicer):
    """A machine in the middle that hands messages on, but one step of one side with a bit changed."""

    def __init__(self, behind: str, side: str, step: str) -> None:
        self._behind, self._side, self._step = behind, side, step

    async def Pair(self, requests: AsyncIterator[pb.PairRequest], context: Any) -> None:  # noqa: N802
        async with grpc.aio.insecure_channel(self._behind) as channel:
            call = pairing_pb2_grpc.PairingServiceStub(channel).Pair()  # type: ignore[no-untyped-call]
            onward = asyncio.create_task(self._onward(requests, call))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    await context.write(self._changed("host", response))
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
            finally:
                onward.cancel()

    async def _onward(self, requests: AsyncIterator[pb.PairRequest], call: Any) -> None:
        async for request in requests:
            await call.write(self._changed("joiner", request))

    def _changed(self, side: str, message: Any) -> Any:
        step = message.WhichOneof("step")
        if (side, step) == (self._side, self._step):
            sealed = getattr(message, step)
            setattr(message, step, sealed[:-1] + bytes((sealed[-1] ^ 1,)))
        return message


@pytest.mark.parametrize(
    ("side", "step", "are_told"),
    [
        ("joiner", "sealed_card", True),
        ("host", "sealed_card", True),
        ("joiner", "sealed_signature", True),
        ("nobody", "", False),
    ],
)
def test_a_message_changed_on_the_way_pins_nobody_and_both_hear_it(side: str, step: str, are_told: bool) -> None:
    async def run() -> None:
        host, server = Host(), grpc.aio.server()
        async with host.listening() as behind:
            pairing_pb2_grpc.add_PairingServiceServicer_to_server(Relay(behind, side, step), server)  # type: ignore[no-untyped-call]
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                if not are_told:  # the relay itself disturbs nothing
                    await join(f"127.0.0.1:{port}", joining(), card_of(JOINER, "joiner"))
                    assert len(host.pinned) == 1
                    return
                with pytest.raises(PermissionDenied) as told:
                    await join(f"127.0.0.1:{port}", joining(), card_of(JOINER, "joiner"))
            finally:
                await server.stop(0)
            assert (told.value.reason, host.pinned, host.refused) == ("PAIRING_REFUSED", [], ["PAIRING_REFUSED"])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (pb.PairRequest(), InvalidArgument),
        (pb.PairRequest(sealed_card=b"x"), InvalidArgument),
        (pb.PairRequest(share=pb.PairingShare(protocol=2, spake2=b"x")), InvalidArgument),
        (pb.PairRequest(share=pb.PairingShare(protocol=1, spake2=b"\xff" * 33)), InvalidArgument),
        (None, Unavailable),
    ],
)
async def test_nonsense_is_refused_and_costs_no_guess(
    first: pb.PairRequest | None, expected: type[KvasirError]
) -> None:
    host = Host()
    async with host.listening() as address, grpc.aio.insecure_channel(address) as channel:
        call = pairing_pb2_grpc.PairingServiceStub(channel).Pair()  # type: ignore[no-untyped-call]
        if first is not None:
            await call.write(first)
        await call.done_writing()
        with pytest.raises(grpc.RpcError) as told:
            await call.read()
        assert isinstance(from_rpc_error(told.value), expected)
    assert host.invitation.guesses_left == 5
    assert len(host.refused) == 1
