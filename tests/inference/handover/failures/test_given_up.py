"""Hand-overs that are given up half-way: nothing stays held, so the agent's next turn does not wait for ever."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir import on_full, volatile
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.errors import Cancelled, DeadlineExceeded, FailedPrecondition, Internal, KvasirError, Unavailable
from kvasir.inference.v1 import inference_pb2
from kvasir.server.shared_room import SharedRoom

from inference_svc.config import EngineSettings
from inference_svc.edge import handover_messages as wire
from inference_svc.engine.api import CarriedTurn, Timings
from inference_svc.engine.engine import Engine
from inference_svc.handover.giving import TurnGiver
from inference_svc.handover.passing import Opening, Promise, Stand, Surroundings
from inference_svc.handover.resume_tokens import ResumeTokens
from inference_svc.handover.taking import Taking
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.recall import Recall
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.answers import AgentSettings, LastMove, Version, last_move_of
from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Tokenized
from inference_svc.model_opening import ModelsParts, open_served
from inference_svc.served_model import ServedModel
from inference_svc.text.token_ids import TokenChars, TokenIds
from inference_svc.turns.admission import Admission
from inference_svc.turns.phases import BegunPrompt, BegunTurn
from inference_svc.turns.progress import Progress, TurnPhase
from tests.inference.handover.cases import ON
from tests.inference.handover.test_taking import PROMPT, TOKENS
from tests.inference.turns.parts import line_parts

VERSION = "1"


@contextlib.asynccontextmanager
async def serving(state_dir: Path) -> AsyncIterator[ServedModel]:
    """One engine and its turns, in this process and without a store."""
    settings, clock = EngineSettings(listen="unix:/nowhere", state_dir=state_dir), time.monotonic
    admission, stats = Admission(settings.admission, clock), ServiceStats(clock())
    served = await open_served(
        "tiny",
        str(kvasir_tiny.path()),
        ModelsParts(settings, {}, "owner", admission, stats, clock, lambda: 0, lambda: 0),
        partial(Engine.open, memory_budget_bytes=64 << 20),
    )
    try:
        yield served
    finally:
        await served.close()


def no_link(peer: str, namespace: str) -> contextlib.AbstractAsyncContextManager[None]:
    raise AssertionError("nothing is given away here")


def taking_one(served: ServedModel, agent_id: str = "") -> Taking:
    """Everything that another engine sends of a turn which has computed nothing yet."""
    tokens = Tokenized(TokenIds(TOKENS.ids), TokenChars(end - start for start, end in TOKENS.offsets))
    begun = BegunTurn(0, 40, BegunPrompt(tokens), None, False, None, None, None, 0.0, None)
    sampling = inference_pb2.Sampling(max_tokens=40)
    request = inference_pb2.GenerateRequest(prompt=PROMPT, agent_id=agent_id, sampling=sampling)
    opening = Opening(Surroundings.of(served.engine, VERSION), request, "taken", "owner", begun, (0,))
    checked = wire.read_request(opening, "default", 1 << 20)
    room, waiting = SharedRoom(1 << 30), ResumeTokens(lambda: "token", time.monotonic)
    taking = Taking(served.turns, served.engine, room, waiting, opening, checked)
    taking.add_stand(Stand(0, CarriedTurn(tokens.ids, 0, 0, 0, (0, 1), (), {0: 0}, Timings()), 0, 0))
    return taking


class StillLink:
    """A peer that takes everything, and says so only when it may."""

    def __init__(self) -> None:
        self.has_all, self.may_answer, self.commits = asyncio.Event(), asyncio.Event(), 0

    async def open(self, opening: Opening) -> None:
        pass

    async def send_file(self, choice: int, data: bytes) -> None:
        pass

    async def send_stand(self, stand: Stand) -> None:
        pass

    async def prepared(self) -> Promise:
        self.has_all.set()
        await self.may_answer.wait()
        return Promise("token", 9.0)

    async def commit(self) -> None:
        self.commits += 1
        await self.while_committing()

    async def while_committing(self) -> None:
        pass


def giver_over(served: ServedModel, link: StillLink, lines: Any = None) -> TurnGiver:
    def links(peer: str, namespace: str) -> Any:
        return contextlib.nullcontext(link)

    return TurnGiver(served.engine, lines or {}, {}.get, links, VERSION, time.monotonic, str)


async def speaking_one(served: ServedModel, agent_id: str = "") -> Progress:
    sampling = inference_pb2.Sampling(**{**ON, "max_tokens": 400, "seed": 1})
    asked = inference_pb2.GenerateRequest(prompt=PROMPT, agent_id=agent_id, sampling=sampling)
    opening: Any = SimpleNamespace(origin=asked, request_id="given", caller="owner")
    served.turns.begin(wire.read_request(opening, "default", 1 << 20))
    while not (turns := served.turns.under_way()) or not turns[0][0].can_move:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return turns[0][0]


def run(state_dir: Path, work: Callable[[ServedModel], Awaitable[None]]) -> None:
    async def to_the_end() -> None:
        async with asyncio.timeout(30), serving(state_dir) as served:
            await work(served)
            while not served.turns.is_idle:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(to_the_end())


def test_a_link_that_breaks_while_the_kv_is_loaded_ends_the_turn(tmp_path: Path) -> None:
    async def work(served: ServedModel) -> None:
        taking = taking_one(served)
        preparing = asyncio.create_task(taking.prepare())
        await asyncio.sleep(0)  # it waits for the engine, which has done nothing yet
        preparing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await preparing
        taking.close()

    run(tmp_path, work)


def test_a_turn_that_cannot_go_on_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(served: ServedModel) -> None:
        async def broken(taken: object) -> None:
            raise Internal("a bug")

        taking = taking_one(served)
        promise = await taking.prepare()
        monkeypatch.setattr(served.turns, "own", broken)
        taking.own(promise)
        with pytest.raises(Internal):
            await taking.go_on()
        taking.close()

    run(tmp_path, work)


def test_a_turn_is_given_once_at_a_time_and_a_drain_waits(tmp_path: Path) -> None:
    async def work(served: ServedModel) -> None:
        link = StillLink()
        turn, giver = await speaking_one(served), giver_over(served, link)
        first = asyncio.create_task(giver.give([turn], "b"))
        await link.has_all.wait()
        computed = turn.tokens.completion
        drain = asyncio.create_task(giver_over(served, StillLink()).give_all(served.turns, "c"))
        with pytest.raises(FailedPrecondition) as second:
            await giver.give([turn], "c")
        assert second.value.reason == "HANDOVER_NOT_NOW"
        await asyncio.sleep(0.1)
        assert turn.tokens.completion == computed, "the first still holds it"
        link.may_answer.set()
        assert (await first).peer == "b"
        drain.cancel()

    run(tmp_path, work)


def test_a_turn_that_is_not_owned_yet_is_not_given_on(tmp_path: Path) -> None:
    async def work(served: ServedModel) -> None:
        taking = taking_one(served)
        promise = await taking.prepare()
        [[turn]] = served.turns.under_way()
        with pytest.raises(FailedPrecondition):
            await giver_over(served, StillLink()).give([turn], "c")
        await asyncio.sleep(0.1)
        assert turn.tokens.completion == 0, "nobody let it go on"
        taking.own(promise)
        await taking.go_on()
        assert turn.can_move
        taking.close()

    run(tmp_path, work)


def test_a_cancel_while_the_lease_goes_back_ends_the_turn_here(tmp_path: Path) -> None:
    async def work(served: ServedModel) -> None:
        link, lease = StillLink(), SimpleNamespace(request=lambda: None)
        turn = await speaking_one(served, "ada")

        async def hand_on() -> None:
            turn.cancel()

        lease.hand_on = hand_on
        lines = SimpleNamespace(line=lambda agent_id: SimpleNamespace(lease=lease))
        link.may_answer.set()
        with pytest.raises(Cancelled):
            await giver_over(served, link, {"default": lines}).give([turn], "b")
        assert (link.commits, turn.phase is TurnPhase.MOVED) == (0, False)

    run(tmp_path, work)


@pytest.mark.parametrize("stop", [Progress.stop, Progress.cancel])
def test_a_cancel_while_the_last_word_is_on_its_way_ends_no_turn_that_goes_on_there(
    tmp_path: Path, stop: Callable[[Progress], None]
) -> None:
    class Slow(StillLink):
        async def while_committing(self) -> None:
            stop(turn)
            await asyncio.sleep(0.3)  # the engine ends a turn within some milliseconds

    async def work(served: ServedModel) -> None:
        nonlocal turn
        turn, link = await speaking_one(served, "ada"), Slow()
        link.may_answer.set()
        await giver_over(served, link).give([turn], "b")
        assert (turn.phase, turn.finished, turn.error) == (TurnPhase.MOVED, None, None)

    turn: Any = None
    run(tmp_path, work)


def test_a_taken_turn_extends_the_number_that_its_parent_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(served: ServedModel) -> None:
        async def obtain(patience_s: float) -> Any:
            return SimpleNamespace(newest=Version(3, None))

        taking = taking_one(served, "ada")
        taking.own(await taking.prepare())
        [[turn]] = served.turns.under_way()
        turns, line = served.turns._flow.taken, SimpleNamespace(lease=SimpleNamespace(obtain=obtain))
        lines: Any = {"default": SimpleNamespace(line=lambda agent_id: line)}
        recall = Recall(served.engine, lines)
        monkeypatch.setattr(turns, "_parts", replace(turns._parts, recall=recall))
        await taking.go_on()
        assert turn.planned is not None
        assert turn.planned.recollection.head is not None
        assert (turn.parent_version, turn.planned.recollection.head.version) == (3, 3)
        taking.close()

    run(tmp_path, work)


def test_a_taken_turn_has_the_settings_with_which_its_agent_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it was prepared, this store did not know the agent yet."""
    came = cachestore_pb2.Agent(agent_id="ada", labels={on_full.LABEL: "drop_oldest", volatile.LABEL: "none"})
    came.ownership.state, came.ownership.move_id = cachestore_pb2.OWNER_STATE_OWNED, "a move"
    came.ownership.given_by = "laptop"
    line = came.lines.add(version=1, origin=cachestore_pb2.ORIGIN_MOVE, origin_detail="laptop/ada@1")
    line.manifest.hash, line.manifest.size_bytes = "0" * 64, 1

    async def work(served: ServedModel) -> None:
        async def last_move(agent_id: str, within_s: float) -> LastMove:
            return last_move_of(came)

        taking = taking_one(served, "ada")
        taking.own(await taking.prepare())
        [[turn]] = served.turns.under_way()
        turns = served.turns._flow.taken
        stores: Any = {"default": SimpleNamespace(agents=SimpleNamespace(last_move=last_move))}
        assert turn.planned is not None
        assert turn.taken is not None
        begun = replace(
            turn.taken.begun, move_id="a move", peer="laptop", parent_manifest=last_move_of(came).newest.manifest
        )
        with monkeypatch.context() as patched:
            patched.setattr(turns, "_parts", replace(turns._parts, stores=stores))
            moved = await turns._moved(turn.planned, begun)
        assert moved.recollection.settings == AgentSettings("drop_oldest", "none")
        await taking.go_on()
        taking.close()

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("named", "origin", "giver"),
    [
        ("desktop", cachestore_pb2.ORIGIN_MOVE, "desktop"),  # it came back as it left
        ("", cachestore_pb2.ORIGIN_MOVE, "laptop"),
        ("", cachestore_pb2.ORIGIN_PULL, ""),
        ("", cachestore_pb2.ORIGIN_TURN, ""),
    ],
)
def test_of_a_store_that_names_no_giver_the_move_of_the_newest_version_does(
    named: str, origin: cachestore_pb2.Origin, giver: str
) -> None:
    came = cachestore_pb2.Agent(agent_id="ada")
    came.ownership.given_by = named
    came.lines.add(version=1, origin=origin, origin_detail="laptop/ada@1").manifest.hash = "0" * 64
    assert last_move_of(came).given_by == giver


@dataclass
class LateStore:
    """A store whose answer to the move is lost, and what it says of the agent when it is asked then."""

    answers: list[bool | KvasirError | None]

    @property
    def agents(self) -> "LateStore":
        return self

    async def move_agent(self, agent_id: str, peer: str, move_id: str, timeout_s: float) -> None:
        raise DeadlineExceeded("late")

    async def has_moved(self, agent_id: str, peer: str, move_id: str) -> bool | None:
        assert (agent_id, peer, move_id) == ("ada", "studio", "a move")
        answer = self.answers.pop(0)
        if isinstance(answer, KvasirError):
            raise answer
        return answer


async def let_go(store: Any) -> None:
    """Of the turn of an agent that must move to another store."""
    nothing: Any = None
    turn: Any = SimpleNamespace(request=SimpleNamespace(namespace="home", agent_id="ada"), is_kept=True)
    lines = {"home": Lines("home", store, line_parts())}
    giver = TurnGiver(nothing, lines, {"b": "studio"}.get, no_link, VERSION, lambda: 0.0, str)
    await giver._let_go(turn, "a move", "b")


@pytest.mark.parametrize(
    ("answers", "goes"),
    [([None, None, True], True), ([None, False], False), ([Unavailable("away")], False)],
    ids=["moved all the same", "undone", "not to be asked"],
)
def test_a_turn_follows_its_agent_where_the_answer_to_the_move_is_lost(
    answers: list[bool | KvasirError | None], goes: bool
) -> None:
    with contextlib.nullcontext() if goes else pytest.raises(DeadlineExceeded):
        asyncio.run(let_go(LateStore(answers)))
    assert not answers
