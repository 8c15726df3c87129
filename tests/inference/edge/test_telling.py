"""What a reader hears of a turn that moved, whatever the peer's engine says of the rest."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import pytest
from kvasir import errors
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.telling import Telling
from inference_svc.handover.resume_tokens import WaitingReply
from inference_svc.turns.turn_data import TurnEvent, TurnMoved

DELTA, FINISHED = pb.GenerateResponse(delta=pb.Delta(text="on")), pb.GenerateResponse(finished=pb.Finished())
ELSEWHERE = pb.GenerateResponse(moved=pb.Moved(peer="attic", resume_token="theirs"))
UNCERTAIN = {"peer": "studio", "resume_token": "token"}


class Peer:
    """Stands for a peer's engine, and for the book that has it."""

    def __init__(self, *events: pb.GenerateResponse, error: errors.KvasirError | None = None) -> None:
        self.events, self.error = events, error
        self.read, self.ended = list[tuple[str, ...]](), list[str]()

    async def client(self, peer: str, namespace: str) -> "Peer":
        self.read.append((peer, namespace))
        return self

    async def read_turn(self, token: str, caller: str) -> AsyncGenerator[pb.GenerateResponse, None]:
        self.read.append((token, caller))
        for event in self.events:
            yield event
        if self.error is not None:
            raise self.error

    async def end_turn(self, token: str, timeout_s: float) -> None:
        self.ended.append(token)


class Choices:
    """A reply whose turn moves at once, or whose link broke when it was given away."""

    def __init__(self, error: errors.KvasirError | None = None) -> None:
        self.error, self.is_cancelled = error, False

    async def events(self) -> AsyncIterator[tuple[int, TurnEvent]]:
        if self.error is not None:
            raise self.error
        yield 0, TurnMoved("studio", "token", 300.0)

    def cancel(self) -> None:
        self.is_cancelled = True


class Reader:
    """A call's context; it leaves with its first event if it is told so."""

    def __init__(self, *, leaves: bool = False) -> None:
        self.heard, self.leaves = list[pb.GenerateResponse](), leaves

    async def write(self, event: pb.GenerateResponse) -> None:
        if self.leaves:
            raise asyncio.CancelledError
        self.heard.append(event)


def told(
    peer: Peer,
    reader: Reader,
    followed: Sequence[str] = (),
    *,
    error: errors.KvasirError | None = None,
    is_stopping: bool = False,
) -> list[pb.GenerateResponse]:
    async def work() -> None:
        telling = Telling(peer, 5.0, lambda: is_stopping)  # type: ignore[arg-type]
        choices: Any = Choices(error)
        try:
            reply = WaitingReply(choices, "request", "home", "ada", "model", bytes_of=lambda _token: b"")
            await telling.tell(reply, reader, followed)
        finally:
            assert choices.is_cancelled
            await asyncio.gather(*telling._ending)

    asyncio.run(work())
    return reader.heard


def test_the_rest_comes_from_the_peer_for_the_caller_of_this_engine() -> None:
    peer = Peer(DELTA, FINISHED)
    assert told(peer, Reader()) == [DELTA, FINISHED]
    assert (peer.read, peer.ended) == ([("studio", "home"), ("token", "ada")], [])


@pytest.mark.parametrize("how", [{"followed": ["studio"]}, {"is_stopping": True}])
def test_a_reader_that_follows_or_whose_engine_stops_hears_where_the_rest_is(how: dict[str, Any]) -> None:
    peer = Peer(DELTA)
    [event] = told(peer, Reader(), **how)
    assert (event.moved.peer, event.moved.resume_token, peer.read) == ("studio", "token", [])


@pytest.mark.parametrize(
    "peer",
    [
        Peer(DELTA, ELSEWHERE),
        Peer(DELTA, error=errors.Unauthenticated("who are you?")),
        Peer(DELTA, error=errors.Unavailable("gone")),
    ],
)
def test_no_word_of_a_peer_leads_its_reader_elsewhere(peer: Peer) -> None:
    reader = Reader()
    with pytest.raises(errors.Unavailable) as moved:
        told(peer, reader)
    assert (moved.value.reason, moved.value.metadata) == ("TURN_MOVED", {"peer": "studio", "resume_token": "token"})
    assert reader.heard == [DELTA]
    assert peer.ended == [], "the peer remembers it"


def test_an_error_of_the_turn_itself_is_passed_on() -> None:
    with pytest.raises(errors.ResourceExhausted) as ended:
        told(Peer(error=errors.ResourceExhausted("slow", reason="READER_TOO_SLOW")), Reader())
    assert ended.value.reason == "READER_TOO_SLOW"


def test_after_a_broken_link_the_peer_decides_whether_it_has_the_turn() -> None:
    broken = errors.Unavailable("it broke", reason="HANDOVER_UNCERTAIN", metadata=UNCERTAIN)
    assert told(Peer(DELTA, FINISHED), Reader(), error=broken) == [DELTA, FINISHED]
    with pytest.raises(errors.Unavailable) as lost:
        told(Peer(error=errors.NotFound("none", reason="RESUME_TOKEN_UNKNOWN")), Reader(), error=broken)
    assert lost.value.reason == "HANDOVER_UNCERTAIN"


def test_a_reader_that_leaves_ends_the_turn_at_the_peer() -> None:
    peer = Peer(DELTA, FINISHED)
    with pytest.raises(asyncio.CancelledError):
        told(peer, Reader(leaves=True))
    assert peer.ended == ["token"]
