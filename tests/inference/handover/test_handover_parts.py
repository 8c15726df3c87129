"""The parts of a hand-over by themselves: what makes engines alike, tokens for readers, files on their way."""

import asyncio
import contextlib
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvasir.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import handover_pb2 as pb
from kvasir.inference.v1 import inference_pb2

from inference_svc.config import ConfigError, EngineSettings, read_settings
from inference_svc.edge import handover_messages as wire
from inference_svc.edge import handover_service
from inference_svc.engine.api import AgentKey, CarriedTurn, HeldTurn, SamplingParams, Timings, TurnPlan
from inference_svc.engine.files.held_turns import check_carried
from inference_svc.handover import giving
from inference_svc.handover.giving import TurnGiver
from inference_svc.handover.passing import Opening, Stand, Surroundings
from inference_svc.handover.resume_tokens import LIVES_S, ResumeTokens, WaitingReply
from inference_svc.memory.recall import NOTHING_REMEMBERED
from inference_svc.model.prompting import Tokenized
from inference_svc.text.token_ids import TokenChars, TokenIds
from inference_svc.text.token_text import TokenText
from inference_svc.turns import taken_turns
from inference_svc.turns.phases import BegunPrompt, BegunTurn, Prompted, Recalled
from inference_svc.turns.progress import TurnPhase, TurnTiming
from inference_svc.turns.taken_turns import TakenTurns
from inference_svc.turns.turn_data import Continuation
from inference_svc.turns.turn_service import Choices
from tests.made_models.synthetic import SMALL

HERE = Surroundings("kv", "tokenizer", "template", "cpu", "float32", 256, "0.1")


@pytest.mark.parametrize("name", ["kv_identity_hash", "template_digest", "device", "compute_type", "version"])
def test_engines_that_differ_refuse_and_name_what_differs(name: str) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        HERE.check_alike(replace(HERE, **{name: "another"}))
    assert (refused.value.reason, refused.value.field) == ("HANDOVER_NOT_ALIKE", f"opening.surroundings.{name}")
    HERE.check_alike(replace(HERE))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def reply(namespace: str = "home") -> WaitingReply:
    return WaitingReply(cast("Choices", object()), "request", namespace, "ada", "model", lambda _token: b"")


def test_a_token_is_for_one_reader_once_and_for_minutes() -> None:
    clock, names = Clock(), count()
    tokens = ResumeTokens(lambda: f"token {next(names)}", clock)
    mine, late = tokens.new(), tokens.new()
    tokens.offer(mine, reply())
    for namespace, caller in (("home", "ben"), ("away", "ada")):
        with pytest.raises(NotFound):
            tokens.claim(mine, namespace, caller)
    assert tokens.claim(mine, "home", "ada").request_id == "request"
    with pytest.raises(NotFound):
        tokens.claim(mine, "home", "ada")
    tokens.offer(late, reply())
    clock.now_s = LIVES_S
    with pytest.raises(NotFound):
        tokens.claim(late, "home", "ada")


def test_a_token_is_for_the_engine_that_gave_the_turn_and_its_named_caller() -> None:
    tokens = ResumeTokens(lambda: "token", Clock())
    tokens.offer("token", replace(reply(), peer="studio"))
    for caller, peer in (("ada", "attic"), ("ben", "studio"), ("ada", "")):
        with pytest.raises(NotFound):
            tokens.claim("token", "home", caller, peer)
    assert tokens.claim("token", "home", "ada", "studio").peer == "studio"


def test_a_namespace_that_has_too_many_waiting_replies_loses_its_own_oldest() -> None:
    names = count()
    tokens = ResumeTokens(lambda: f"token {next(names)}", Clock())
    theirs, *ours = (tokens.new() for _ in range(258))
    tokens.offer(theirs, reply("away"))
    for token in ours:
        tokens.offer(token, reply())
    with pytest.raises(NotFound):
        tokens.claim(ours[0], "home", "ada")
    for token, namespace in ((theirs, "away"), (ours[1], "home"), (ours[-1], "home")):
        assert tokens.claim(token, namespace, "ada").namespace == namespace


def begun(**others: Any) -> BegunTurn:
    plain: dict[str, Any] = {
        "seed": 2**64 - 1,
        "max_tokens": 9,
        "prompt": BegunPrompt(Tokenized(TokenIds((5, 6)), TokenChars((2, 3)))),
        "parent_manifest": Digest.of(b"parent"),
        "is_brought": False,
        "continuation": Continuation.EXTENDED,
        "shortened": None,
        "shortening": None,
        "age_s": 1.5,
        "first_token_s": None,
    }
    return BegunTurn(**(plain | others))


def test_what_is_written_is_what_is_read() -> None:
    opening = Opening(HERE, inference_pb2.GenerateRequest(prompt="hello"), "request", "ada", begun(), (0, 2))
    sent = wire.write_opening(opening).opening
    assert wire.read_opening(sent, "") == opening
    assert wire.read_opening(sent, "laptop").begun.is_brought
    carried = CarriedTurn(TokenIds((5, 6, 7)), 2, 1, 0, (1, 2**32 - 1), (2,), {0: 0, 512: 1}, Timings(queue_s=0.5))
    stand = Stand(2, carried, 4, 3)
    assert wire.read_stand(wire.write_stand(stand, 2).stand, opening.begun.prompt.tokens) == stand


@pytest.mark.parametrize(("token_ids", "is_right"), [((5, 6, 7), True), ((5, 9, 7), False), ((4, 6, 7), False)])
def test_carried_tokens_begin_with_the_prompt_that_is_remembered(token_ids: tuple[int, ...], is_right: bool) -> None:
    model: Any = SimpleNamespace(kv_identity=SMALL)
    asked = TurnPlan(TokenIds((5, 6)), TokenChars((2, 3)), SamplingParams(9))
    carried = CarriedTurn(TokenIds(token_ids), 2, 1, 0, (1, 2), (), {0: 0}, Timings())
    refused = ""
    try:
        check_carried(asked, carried, model, 100)
    except InvalidArgument as error:
        refused = error.field
    assert refused == ("" if is_right else "carried.token_ids")


@pytest.mark.parametrize("is_brought", [True, False])
def test_a_taken_turn_stays_brought_and_lends_no_rows(is_brought: bool) -> None:
    carried = CarriedTurn(TokenIds((5, 6, 7)), 2, 0, 2, (1, 2), (), {0: 0}, Timings())
    made = SimpleNamespace(plan=lambda *_given: TurnPlan(TokenIds((5, 6)), TokenChars((2, 3)), SamplingParams(9)))
    flow: Any = SimpleNamespace(_plans=made, _begun_reply=lambda *_given: "")
    taken: Any = SimpleNamespace(begun=begun(is_brought=is_brought), carried=carried)
    request: Any = None
    planned = TakenTurns._taken_plan(flow, Prompted(Recalled(request, NOTHING_REMEMBERED), "hello"), taken)
    assert planned.has_brought_kv is is_brought
    assert planned.plan.carried is not None
    assert planned.plan.carried.shareable == (0 if is_brought else 2)


def test_what_a_turn_waited_before_its_engine_had_it_goes_along() -> None:
    engine: Any = SimpleNamespace(
        token_text=TokenText.of_bytes(lambda _: b""), model=SimpleNamespace(stop_token_ids=())
    )
    giver = TurnGiver(engine, {}, {}.get, cast("Any", None), "0.1", Clock(), str)
    times = TurnTiming(arrived=10.0, queue_s=1.0, restore_s=0.5, first_token_at=14.0)
    plan = TurnPlan(TokenIds((5, 6)), TokenChars((2, 3)), SamplingParams(9))
    planned, request = SimpleNamespace(plan=plan), SimpleNamespace(choice=0)
    turn: Any = SimpleNamespace(planned=planned, request=request, times=times)
    spent = Timings(queue_s=0.25, restore_s=0.125, prefill_s=2.0, first_token_s=2.5, decode_s=7.0)
    carried = CarriedTurn(TokenIds((5, 6, 7)), 2, 1, 0, (1, 2), (), {0: 0}, spent)
    stand = giver.stand(turn, HeldTurn(carried, ()))
    assert stand.carried.spent == Timings(1.25, 0.625, 2.0, 4.0, 7.0)


async def test_a_drain_hands_over_also_a_turn_that_has_an_ended_ones_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "LOOK_S", 0.0)
    given = list[str]()

    class Turn:
        can_move, phase = True, TurnPhase.RUNNING

    async def give(_giver: TurnGiver, _turns: Any, peer: str) -> None:
        given.append(peer)

    monkeypatch.setattr(TurnGiver, "give", give)
    looks = count()

    def under_way() -> list[list[Turn]]:
        if next(looks) == 9:
            draining.cancel()
        return [[Turn()]]

    turns: Any = SimpleNamespace(under_way=under_way)
    giver = TurnGiver(cast("Any", None), {}, {}.get, cast("Any", None), "0.1", Clock(), str)
    draining = asyncio.create_task(giver.give_all(turns, "b"))
    with contextlib.suppress(asyncio.CancelledError):
        await draining
    assert len(given) >= 9


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": 2}, "opening.format"),
        ({"request_id": "\n"}, "request_id"),
        ({"caller": "x" * 300}, "opening.caller"),
        ({"prompt_token_chars": [1]}, "opening.prompt_token_chars"),
        ({"continuation": 99}, "opening.continuation"),
        ({"messages": [{"role": "emperor"}]}, "opening.messages"),
        ({"max_tokens": 0}, "opening.max_tokens"),
        ({"template_time_ms": -1}, "opening.template_time_ms"),
        ({"template_time_ms": 1 << 60}, "opening.template_time_ms"),
    ],
)
def test_an_opening_that_cannot_be_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    opening = Opening(HERE, inference_pb2.GenerateRequest(prompt="hello"), "request", "ada", begun(), (0,))
    sent = wire.write_opening(opening).opening
    for name in change:
        sent.ClearField(name)
    sent.MergeFrom(pb.TurnOpening(**change))
    with pytest.raises(InvalidArgument) as refused:
        wire.read_opening(sent, "")
    assert refused.value.field == field


def test_a_file_has_the_bytes_of_its_digest_or_is_refused() -> None:
    data = bytes(range(256)) * 8192  # two frames
    first, *frames = wire.write_file(1, data)
    arriving = wire.ArrivingFile(first.file)
    for part in frames:
        assert not arriving.is_whole
        arriving.add(part.frame)
    assert (arriving.is_whole, arriving.data(), arriving.choice) == (True, data, 1)
    wrong = wire.ArrivingFile(first.file)
    wrong.add(frames[0].frame)
    with pytest.raises(InvalidArgument):
        wrong.add(frames[1].frame + b"x")
    wrong.add(frames[1].frame[:-1] + b"x")
    with pytest.raises(InvalidArgument):
        wrong.data()
    with pytest.raises(InvalidArgument):
        wire.ArrivingFile(pb.TurnFile(digest={"hash": "../../etc", "size_bytes": 1}))


def test_peers_are_named_in_the_configuration() -> None:
    listen = ["--listen", "unix:/nowhere/s", "--peer", "b=unix:/nowhere/b", "--peer", "c=127.0.0.1:9"]
    settings: EngineSettings = read_settings(
        [*listen, "--peer-token-file", "c=/tokens/c", "--peer-token-file", "team/c=/tokens/team", "--drain-to", "c"]
    )
    assert settings.peer == {"b": "unix:/nowhere/b", "c": "127.0.0.1:9"}
    assert {name: str(path) for name, path in settings.peer_tokens("c").items()} == {
        "default": "/tokens/c",
        "team": "/tokens/team",
    }
    for wrong in (["--drain-to", "nobody"], ["--peer", "nameless"]):
        with pytest.raises(ConfigError):
            read_settings([*listen, *wrong])


async def test_a_hand_over_whose_bytes_come_one_by_one_ends_and_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part is in time: only the whole is not. The room is that of the namespace's own memories."""
    monkeypatch.setattr(handover_service, "_RECEIVE_S", 0.3)
    monkeypatch.setattr(handover_service, "current_principal", lambda: None)
    events = list[str]()

    class Held:
        is_whole = False

        async def hold(self, size_bytes: int) -> None:
            events.append(f"holds {size_bytes}")

        def close(self) -> None:
            events.append("closed")

    async def drops() -> Any:
        yield pb.TakeTurnRequest(opening=pb.TurnOpening())
        yield pb.TakeTurnRequest(file=pb.TurnFile(digest={"hash": "5" * 64, "size_bytes": 1 << 20}))
        while True:
            await asyncio.sleep(0.02)
            yield pb.TakeTurnRequest(frame=b"x")

    async def opened(*_given: Any) -> Any:
        return Held()

    async with asyncio.timeout(20):
        nobody = cast("Any", None)
        telling = SimpleNamespace(is_stopping=lambda: False)
        service = handover_service.HandOverService(cast("Any", SimpleNamespace(telling=telling)), nobody, 1)
        monkeypatch.setattr(service, "_opened", opened)
        monkeypatch.setattr(handover_service, "check_serves", lambda _: None)

        async def write(_answer: object) -> None:
            return

        with pytest.raises(DeadlineExceeded, match="got no further"):
            await service.TakeTurn(drops(), SimpleNamespace(write=write))
    assert events == [f"holds {1 << 20}", "closed"]


async def test_a_taken_turn_does_not_wait_for_ever_behind_one_that_waits_for_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else both would wait until a caller cancels. Its agent's next turns go on."""
    monkeypatch.setattr(taken_turns, "HANGS_S", 0.01)
    key = AgentKey("home", "ada")

    @contextlib.asynccontextmanager
    async def never() -> Any:
        await asyncio.Event().wait()
        yield

    async with asyncio.timeout(20):
        turns, turn = TakenTurns(cast("Any", None), cast("Any", None)), cast("Any", object())
        async with contextlib.AsyncExitStack() as place:
            with pytest.raises(FailedPrecondition) as refused, turns.before_arrival(turn, key, place, never):
                await turns._take_place(turn)
        assert refused.value.reason == "HANDOVER_NOT_MOVED"
        assert not await turns.coming(key)
