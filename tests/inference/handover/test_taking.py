"""An engine that takes turns in: what a stranger may send, and what it refuses by name."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import pytest
from kvasir.clients import AioInferenceClient
from kvasir.clients.aio.turn_peer import AioTurnPeer, TurnCall
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import handover_pb2 as pb
from kvasir.inference.v1 import inference_pb2
from tokenizers import Tokenizer

from inference_svc.model import kvasir_tiny
from inference_svc.model.model_info import ModelInfo
from tests.inference.handover.cases import ON
from tests.inference.handover.two_engines import TwoEngines, hear

PROMPT = "Ada keeps a lamp in her bag. Ben"
TOKENS = Tokenizer.from_file(str(kvasir_tiny.path() / "tokenizer.json")).encode(PROMPT, add_special_tokens=False)
Work = Callable[[AioInferenceClient, Callable[[], TurnCall], pb.TurnOpening], Awaitable[None]]


def run(two: TwoEngines, work: Work) -> None:
    """`work` gets a client of engine b, calls to give it turns, and an opening that b would take."""

    async def to_the_end() -> None:
        async with (
            AioInferenceClient.connect(two.b.address) as b,
            AioTurnPeer.connect(two.b.address) as peer,
            asyncio.timeout(60),
        ):
            await work(b, peer.take_turn, opening_for(await b.get_model(), (await b.get_capabilities()).device))

    asyncio.run(to_the_end())


def opening_for(model: inference_pb2.Model, device: str) -> pb.TurnOpening:
    opening = plain_opening(model, device, ON["max_tokens"])
    opening.request.CopyFrom(inference_pb2.GenerateRequest(prompt=PROMPT, sampling=inference_pb2.Sampling(**ON)))
    opening.request_id, opening.caller = "taken", "owner"
    return opening


def plain_opening(model: inference_pb2.Model | ModelInfo, device: str, max_tokens: int) -> pb.TurnOpening:
    """The same in all openings to one engine."""
    return pb.TurnOpening(
        format=1,
        surroundings=pb.TurnSurroundings(
            kv_identity_hash=model.kv_identity_hash,
            tokenizer_digest=model.tokenizer_digest,
            template_digest=model.template_digest,
            device=device,
            compute_type=model.compute_type,
            cell_tokens=model.cell_tokens,
            version=version("kvasir"),
        ),
        max_tokens=max_tokens,
        prompt_token_ids=TOKENS.ids,
        prompt_token_chars=[end - start for start, end in TOKENS.offsets],
        choices=[0],
    )


def stand(**others: Any) -> pb.TurnStand:
    """Of a turn that has computed nothing yet."""
    plain: dict[str, Any] = {"sampler_key": [0, 1], "groups": [pb.TurnGroup()], "files": 0}
    return pb.TurnStand(**(plain | others))


async def opened(call: TurnCall, opening: pb.TurnOpening, **changes: Any) -> None:
    """Raises what the engine refuses it with."""
    changed = pb.TurnOpening()
    changed.CopyFrom(opening)
    for name in changes:
        changed.ClearField(name)
    changed.MergeFrom(pb.TurnOpening(**changes))
    await call.send([pb.TakeTurnRequest(opening=changed)])
    assert (await call.receive()).HasField("opened")


async def refusal(call: TurnCall, parts: list[pb.TakeTurnRequest]) -> KvasirError:
    try:
        await call.send(parts)
        while True:
            await call.receive()
    except KvasirError as error:
        return error


@pytest.mark.long(4)
def test_a_turn_without_any_kv_is_computed_from_its_tokens(two: TwoEngines) -> None:
    async def work(b: AioInferenceClient, call: Callable[[], TurnCall], opening: pb.TurnOpening) -> None:
        expected = await hear(b, prompt=PROMPT, sampling=ON)
        taking = call()
        await opened(taking, opening)
        await taking.send([pb.TakeTurnRequest(stand=stand())])
        prepared = (await taking.receive()).prepared
        await taking.send([pb.TakeTurnRequest(commit=pb.TurnCommit())])
        assert (await taking.receive()).HasField("taken")
        text = "".join([event.delta.text async for event in b.resume(prepared.resume_token)])
        assert text == expected.reply.text

    run(two, work)


@pytest.mark.long(4)
def test_turns_whose_giver_goes_away_leave_nothing(two: TwoEngines) -> None:
    async def work(b: AioInferenceClient, call: Callable[[], TurnCall], opening: pb.TurnOpening) -> None:
        taking = call()
        await opened(taking, opening)
        await taking.send([pb.TakeTurnRequest(stand=stand())])
        token = (await taking.receive()).prepared.resume_token
        assert [turn.completion_tokens for turn in await b.list_turns()] == [0], "it waits for the word"
        taking.close()
        for _ in range(100):
            if not await b.list_turns():
                break
            await asyncio.sleep(0.02)
        assert not await b.list_turns()
        with pytest.raises(KvasirError) as unknown:
            await anext(b.resume(token))
        assert unknown.value.reason == "RESUME_TOKEN_UNKNOWN"

    run(two, work)


def test_a_reader_that_left_before_its_rest_was_read_ends_the_turn(two: TwoEngines) -> None:
    async def work(b: AioInferenceClient, call: Callable[[], TurnCall], opening: pb.TurnOpening) -> None:
        taking = call()
        await opened(taking, opening, max_tokens=1500)
        await taking.send([pb.TakeTurnRequest(stand=stand())])
        token = (await taking.receive()).prepared.resume_token
        await taking.send([pb.TakeTurnRequest(commit=pb.TurnCommit())])
        assert (await taking.receive()).HasField("taken")
        async with AioTurnPeer.connect(two.b.address) as peer:
            await peer.end_turn("another's", 5.0)
            [going_on] = await b.list_turns()
            await peer.end_turn(token, 5.0)
        ended = going_on
        while open_turns := await b.list_turns():
            [ended] = open_turns
            await asyncio.sleep(0.02)
        assert ended.completion_tokens < 1000, "nobody would have read them"

    run(two, work)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"surroundings": {"device": "cuda"}}, "HANDOVER_NOT_ALIKE"),
        ({"choices": [3]}, "INVALID_FIELD"),
        ({"prompt_token_chars": [1]}, "INVALID_FIELD"),
        ({"request": {"prompt": ""}}, "INVALID_FIELD"),
        ({"format": 7}, "INVALID_FIELD"),
    ],
    ids=lambda given: str(given)[:30],
)
def test_an_opening_is_refused_before_any_file(two: TwoEngines, changes: dict[str, Any], reason: str) -> None:
    async def work(b: AioInferenceClient, call: Callable[[], TurnCall], opening: pb.TurnOpening) -> None:
        with pytest.raises((FailedPrecondition, InvalidArgument)) as refused:
            await opened(call(), opening, **changes)
        assert refused.value.reason == reason

    run(two, work)


FILE = pb.TakeTurnRequest(file=pb.TurnFile(digest=Digest.of(b"x").to_proto()))
HUGE = pb.TakeTurnRequest(file=pb.TurnFile(digest={"hash": "0" * 64, "size_bytes": 1 << 50}))
FRAME = pb.TakeTurnRequest(frame=b"x")


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ([pb.TakeTurnRequest(commit=pb.TurnCommit())], "part"),
        ([FRAME], "part"),
        ([HUGE], "file.digest"),
        ([FILE, pb.TakeTurnRequest(frame=b"y")], "frame"),
        ([FILE, pb.TakeTurnRequest(frame=b"xy")], "frame"),
        ([pb.TakeTurnRequest(file=pb.TurnFile(choice=4, digest=Digest.of(b"x").to_proto())), FRAME], "file.choice"),
        ([pb.TakeTurnRequest(stand=stand(choice=9))], "stand.choice"),
        ([pb.TakeTurnRequest(stand=stand(files=-1))], "stand.files"),
        ([pb.TakeTurnRequest(stand=stand(told_chars=5))], "stand.told_chars"),
        ([pb.TakeTurnRequest(stand=stand(computed_tokens=999))], "carried.computed"),
        ([pb.TakeTurnRequest(stand=stand(reply_token_ids=[4_000_000]))], "carried.token_ids"),
        ([pb.TakeTurnRequest(stand=stand(sampler_key=[]))], "carried.sampler_key"),
        ([pb.TakeTurnRequest(stand=stand(groups=[]))], "carried.first_blocks"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_follows_is_refused_by_field(two: TwoEngines, parts: list[pb.TakeTurnRequest], field: str) -> None:
    async def work(b: AioInferenceClient, call: Callable[[], TurnCall], opening: pb.TurnOpening) -> None:
        taking = call()
        await opened(taking, opening)
        error = await refusal(taking, parts)
        assert (type(error), error.field) == (InvalidArgument, field)
        assert not await b.list_turns()

    run(two, work)


def test_a_turn_of_another_parent_is_refused(two: TwoEngines, new_agent: Callable[[], str]) -> None:
    async def work(b: AioInferenceClient, call: Callable[[], TurnCall], opening: pb.TurnOpening) -> None:
        agent = new_agent()
        await hear(b, agent_id=agent, prompt=PROMPT, sampling={"max_tokens": 2})
        taking = call()
        request = inference_pb2.GenerateRequest(prompt=PROMPT, agent_id=agent)
        await opened(taking, opening, request=request, parent_manifest=Digest.of(b"another").to_proto())
        error = await refusal(taking, [pb.TakeTurnRequest(stand=stand())])
        assert error.reason == "HANDOVER_PARENT_DIFFERS"

    run(two, work)
