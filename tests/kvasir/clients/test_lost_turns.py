"""A turn whose engine cannot say whether its peer got it: the rest comes from there, or the first one's error."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from kvasir.clients import AioInferenceClient, InferenceClient
from kvasir.errors import KvasirError, NotFound, Unavailable
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir.status import DETAILS_KEY, answer_to, to_status

HELD = Unavailable("held", reason="AGENT_HELD_ELSEWHERE", metadata={"owner": "b"}, retry_after_s=1.0)
LOST = Unavailable("lost", reason="HANDOVER_UNCERTAIN", metadata={"peer": "b", "resume_token": "t"}, retry_after_s=1.0)
NEVER_HEARD = NotFound("resume_token: no turn waits", reason="RESUME_TOKEN_UNKNOWN", field="resume_token")


class _Breaking(inference_pb2_grpc.InferenceServiceServicer):
    """An engine whose turns say one word and end with an error, after a while, or as a proxy may end them."""

    def __init__(
        self,
        error: KvasirError | None,
        text: str,
        pause_s: float,
        left_s: list[float],
        last: Sequence[pb.GenerateResponse],
    ) -> None:
        self._error = error
        self._text = text
        self._pause_s = pause_s
        self._left_s = left_s
        self._last = last

    def GetCapabilities(self, request: Any, context: Any) -> pb.GetCapabilitiesResponse:  # noqa: N802
        return pb.GetCapabilitiesResponse(lease_owner="b")

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        self._left_s.append(context.time_remaining())
        time.sleep(self._pause_s)
        if self._text:
            yield pb.GenerateResponse(delta=pb.Delta(text=self._text))
        yield from self._last
        if self._error is None:
            return
        details = to_status(self._error).SerializeToString()
        context.set_trailing_metadata(((DETAILS_KEY, details),))
        context.abort(answer_to(self._error).code, self._error.message)


@contextmanager
def breaking(
    error: KvasirError | None,
    text: str = "",
    *,
    pause_s: float = 0.0,
    left_s: list[float] | None = None,
    moved: pb.Moved | None = None,
    finished: Sequence[pb.Finished] = (),
) -> Iterator[str]:
    """Its address. `left_s` gets what is left of each turn's deadline."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    last = [
        *([pb.GenerateResponse(moved=moved)] if moved else []),
        *(pb.GenerateResponse(finished=each) for each in finished),
    ]
    engine = _Breaking(error, text, pause_s, [] if left_s is None else left_s, last)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


def heard_by_blocking(a: str, b: str) -> tuple[str, KvasirError]:
    text = ""
    with InferenceClient.connect(a) as client, InferenceClient.connect(b) as peer:
        client.peers["b"] = peer
        try:
            for event in client.generate(prompt="x", timeout_s=30.0):
                text += event.delta.text
        except KvasirError as error:
            return text, error
    raise AssertionError("it ended well")


def heard_by_async(a: str, b: str) -> tuple[str, KvasirError]:
    async def hear() -> tuple[str, KvasirError]:
        text = ""
        async with AioInferenceClient.connect(a) as client, AioInferenceClient.connect(b) as peer:
            client.peers["b"] = peer
            try:
                async for event in client.generate(prompt="x", timeout_s=30.0):
                    text += event.delta.text
            except KvasirError as error:
                return text, error
        raise AssertionError("it ended well")

    return asyncio.run(hear())


@pytest.mark.parametrize("heard", [heard_by_blocking, heard_by_async])
def test_a_peer_that_never_heard_of_the_turn_leaves_the_error_that_reports_when_to_ask_again(heard: Any) -> None:
    with breaking(LOST, "one") as a, breaking(NEVER_HEARD) as b:
        text, error = heard(a, b)
    assert (text, type(error), error.reason) == ("one", Unavailable, "HANDOVER_UNCERTAIN")
    assert (error.retry_after_s, error.metadata["resume_token"]) == (1.0, "t")


@pytest.mark.parametrize("heard", [heard_by_blocking, heard_by_async])
def test_a_reply_without_its_last_event_is_not_taken_for_a_whole_one(heard: Any) -> None:
    with breaking(None, "one") as a, breaking(NEVER_HEARD) as b:
        text, error = heard(a, b)
    assert (text, type(error), error.reason) == ("one", Unavailable, "STREAM_CUT")


def test_several_replies_are_whole_once_each_has_its_last_event() -> None:
    first, second = (pb.Finished(choice=choice, reason=pb.FINISH_REASON_STOP) for choice in (0, 1))
    with breaking(None, "one", finished=[first]) as a, InferenceClient.connect(a) as client:
        assert client.reply(prompt="x").text == "one"
        with pytest.raises(Unavailable) as cut:
            client.reply(prompt="x", sampling={"n": 2})
        assert cut.value.reason == "STREAM_CUT"
    with breaking(None, "one", finished=[second, first]) as a, InferenceClient.connect(a) as client:
        assert len(client.reply(prompt="x", sampling={"n": 2}).choices) == 2


@pytest.mark.parametrize("heard", [heard_by_blocking, heard_by_async])
def test_another_refusal_there_is_reported_as_it_is(heard: Any) -> None:
    with breaking(LOST, "one") as a, breaking(Unavailable("asleep", reason="MODEL_NOT_LOADED")) as b:
        assert heard(a, b)[1].reason == "MODEL_NOT_LOADED"
    with breaking(LOST, "one") as a, breaking(NEVER_HEARD, "two") as b:
        text, error = heard(a, b)
    assert (text, error.reason) == ("onetwo", "RESUME_TOKEN_UNKNOWN")


@pytest.mark.parametrize("heard", [heard_by_blocking, heard_by_async])
def test_a_turn_that_goes_on_elsewhere_has_what_is_left_of_its_deadline(heard: Any) -> None:
    here_s, there_s = list[float](), list[float]()
    with (
        breaking(LOST, "one", pause_s=0.5, left_s=here_s) as a,
        breaking(NEVER_HEARD, left_s=there_s) as b,
    ):
        heard(a, b)
    assert there_s[0] < here_s[0] - 0.25  # calls take their own milliseconds


@pytest.mark.parametrize("heard", [heard_by_blocking, heard_by_async])
def test_a_turn_that_moved_is_followed_though_its_engine_is_killed_right_after(heard: Any) -> None:
    moved = pb.Moved(peer="b", resume_token="t")
    with breaking(Unavailable("killed"), "one", moved=moved) as a, breaking(NEVER_HEARD, "two") as b:
        text, error = heard(a, b)
    assert (text, error.reason) == ("onetwo", "RESUME_TOKEN_UNKNOWN")


def test_a_turn_that_is_made_where_its_agent_is_has_what_is_left_of_its_deadline() -> None:
    here_s, there_s = list[float](), list[float]()
    busy = Unavailable("busy", reason="MODEL_CHANGING")
    with (
        breaking(HELD, pause_s=0.5, left_s=here_s) as a,
        breaking(busy, "one", left_s=there_s) as b,
        InferenceClient.connect(a) as client,
        InferenceClient.connect(b) as holder,
    ):
        client.engines = [holder]
        turn = client.generate(prompt="x", timeout_s=30.0)
        assert next(turn).delta.text == "one"
        with pytest.raises(Unavailable):
            next(turn)
    assert there_s[0] < here_s[0] - 0.25
