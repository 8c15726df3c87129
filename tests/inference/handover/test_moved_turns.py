"""A turn that moves while it speaks: its reader hears what it would have heard, and its agent remembers it there."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from kvasir.clients import AioInferenceClient
from kvasir.errors import InvalidArgument, NotFound
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.handover.cases import CASES, ON, STORY
from tests.inference.handover.two_engines import Heard, TwoEngines, hear, hear_until_it_moved

T = TypeVar("T")
Work = Callable[[AioInferenceClient, AioInferenceClient], Awaitable[T]]


def run(two: TwoEngines, work: Work[T]) -> T:
    async def to_the_end() -> T:
        async with two.clients() as (a, b), asyncio.timeout(120):
            return await work(a, b)

    return asyncio.run(to_the_end())


async def moved(source: AioInferenceClient, at: int, peer: str = "b", **turn: Any) -> Heard:
    """A turn that moved once. On a busy machine it may have ended before it was asked to."""
    for _ in range(5):
        heard = await hear(source, {at: (source, peer)}, **turn)
        if heard.moves:
            return heard
    raise AssertionError(f"it never moved: {[error.message for error in heard.not_moved]}")


@pytest.mark.long(22)
@pytest.mark.parametrize("name", CASES)
def test_its_reader_hears_what_it_would_have_heard(two: TwoEngines, name: str) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        stayed, one = await hear(a, **CASES[name]), await moved(a, 5, **CASES[name])
        assert one.told == stayed.told
        assert one.kinds.count("moved") == one.kinds.count("started") == one.kinds.count("finished") == 1
        assert stayed.reply.finished.tool_calls or name != "tools", "no call to tell"

    run(two, work)


@pytest.mark.long(4)
def test_it_may_come_back_within_one_reply(two: TwoEngines) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        turn = {"prompt": STORY, "sampling": {**ON, "temperature": 0.9, "seed": 5, "max_tokens": 160}}
        stayed = await hear(a, **turn)
        both = await hear(a, {2: (a, "b"), 60: (b, "a")}, **turn)
        assert [move.peer for move in both.moves] == ["b", "a"], both.not_moved
        assert both.told == stayed.told

    run(two, work)


def test_a_stop_string_is_found_across_the_move_and_not_told(two: TwoEngines) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        whole = await hear(a, prompt=STORY, sampling=ON)
        stop = whole.reply.text[-20:-12]
        turn = {"prompt": STORY, "sampling": {**ON, "stop": [stop]}}
        stayed, one = await hear(a, **turn), await moved(a, 3, **turn)
        assert stayed.reply.finished.matched_stop == stop
        assert one.told == stayed.told

    run(two, work)


@pytest.mark.long(4)
def test_several_replies_move_together(two: TwoEngines) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        turn = {"prompt": STORY, "sampling": {**ON, "temperature": 1.0, "seed": 2**64 - 2, "n": 3}}
        stayed, one = await hear(a, **turn), await moved(a, 4, **turn)
        assert len(stayed.reply.choices) == 3
        assert one.told == stayed.told

    run(two, work)


@pytest.mark.long(5)
def test_its_agent_goes_on_there_hot_and_here_warm_with_one_history(
    two: TwoEngines, new_agent: Callable[[], str]
) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        said = {"messages": [{"role": "user", "content": STORY}], "sampling": ON}
        more = {"append_messages": [{"role": "user", "content": "And then?"}], "sampling": {**ON, "max_tokens": 16}}
        stays, goes = new_agent(), new_agent()
        first, moved_first = await hear(a, agent_id=stays, **said), await moved(a, 5, agent_id=goes, **said)
        assert moved_first.reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
        assert moved_first.told == first.told
        for engine, source in ((b, pb.CACHE_SOURCE_HOT), (a, pb.CACHE_SOURCE_WARM), (b, pb.CACHE_SOURCE_WARM)):
            expected = await hear(a, agent_id=stays, **more)
            found = await hear(engine, agent_id=goes, **more)
            assert found.reply.started.source == source
            assert (found.reply.text, found.reply.finished.snapshot.version) == (
                expected.reply.text,
                expected.reply.finished.snapshot.version,
            )

    run(two, work)


@pytest.mark.long(2)
def test_the_second_turn_of_an_agent_moves_and_a_retry_is_not_done_twice(
    two: TwoEngines, new_agent: Callable[[], str]
) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        agent = new_agent()
        await hear(a, agent_id=agent, messages=[{"role": "user", "content": STORY}], sampling=ON)
        more = {
            "agent_id": agent,
            "append_messages": [{"role": "user", "content": "And then?"}],
            "sampling": ON,
            "request_id": f"again {agent}",
        }
        heard = await hear(a, {3: (a, "b")}, **more)
        assert [move.peer for move in heard.moves] == ["b"], heard.not_moved
        assert heard.reply.finished.snapshot.version == 2
        again = await hear(b, **more)
        assert again.reply.started.source == pb.CACHE_SOURCE_REPLAY
        assert again.reply.text == heard.reply.text

    run(two, work)


@pytest.mark.long(2)
def test_a_reader_that_cannot_follow_is_told_where_the_rest_is_and_gets_it_once(two: TwoEngines) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        turn = {"prompt": STORY, "sampling": ON}
        whole = (await hear(a, **turn)).reply.text
        text, told = await hear_until_it_moved(a, "b", request_id="cannot follow", **turn)
        assert (told.reason, told.metadata["peer"]) == ("TURN_MOVED", "b")
        token = told.metadata["resume_token"]
        async for event in b.resume(token):
            text += event.delta.text
        assert text == whole
        for taken in (token, token[:-1], "x" * 5000):
            with pytest.raises(NotFound) as unknown:
                await anext(b.resume(taken))
            assert unknown.value.reason == "RESUME_TOKEN_UNKNOWN"

    run(two, work)


@pytest.mark.long(3)
def test_a_turn_that_nobody_follows_is_remembered(two: TwoEngines, new_agent: Callable[[], str]) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        agent = new_agent()
        await hear_until_it_moved(a, "b", agent_id=agent, request_id=agent, prompt=STORY, sampling=ON)
        again = await hear(b, agent_id=agent, request_id=agent, prompt=STORY, sampling=ON)  # waits for the turn before
        assert again.reply.started.source == pb.CACHE_SOURCE_REPLAY
        assert again.reply.finished.snapshot.version == 1

    run(two, work)


def test_what_cannot_be_asked_is_refused_by_name(two: TwoEngines) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        with pytest.raises(NotFound) as no_turn:
            await a.hand_over("b", agent_id="nobody")
        assert (no_turn.value.reason, no_turn.value.field) == ("TURN_NOT_FOUND", "agent_id")
        with pytest.raises(InvalidArgument):
            await a.hand_over("b")
        request = pb.GenerateRequest(resume_token="x", prompt="y")
        with pytest.raises(InvalidArgument) as beside:
            await anext(a.stream_rpc("Generate", request.SerializeToString(), 5.0))
        assert beside.value.field == "resume_token"
        heard = await hear(a, {3: (a, "nowhere")}, prompt=STORY, sampling=ON)
        assert [error.reason for error in heard.not_moved] == ["PEER_UNKNOWN"]
        assert len(heard.reply.token_ids) == ON["max_tokens"]

    run(two, work)
