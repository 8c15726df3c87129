"""Hand-overs that are given up half-way: nothing stays held, so the agent's next turn does not wait for ever."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.errors import DeadlineExceeded, Internal, KvasirError, Unavailable
from kvasir.inference.v1 import inference_pb2
from kvasir.server.shared_room import SharedRoom

from inference_svc.config import EngineSettings
from inference_svc.edge import handover_messages as wire
from inference_svc.engine.api import CarriedTurn, Timings
from inference_svc.handover.giving import TurnGiver
from inference_svc.handover.passing import Opening, Stand, Surroundings
from inference_svc.handover.resume_tokens import ResumeTokens
from inference_svc.handover.taking import Taking
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Tokenized
from inference_svc.served_model import ServedModel, open_served
from inference_svc.turns.admission import Admission
from inference_svc.turns.turn_state import BegunTurn
from tests.inference.handover.test_taking import PROMPT, TOKENS

VERSION = "1"


@contextlib.asynccontextmanager
async def serving(state_dir: Path) -> AsyncIterator[ServedModel]:
    """One engine and its turns, in this process and without a store."""
    settings, clock = EngineSettings(listen="unix:/nowhere", state_dir=state_dir), time.monotonic
    served = await open_served(
        "tiny",
        str(kvasir_tiny.path()),
        settings,
        {},
        "owner",
        Admission(settings.admission, clock),
        ServiceStats(clock()),
        lambda engine, leases: TurnGiver(engine, leases, {}, {}, no_link, VERSION, clock),
        clock,
        lambda: 0,
    )
    try:
        yield served
    finally:
        await served.close()


def no_link(peer: str, namespace: str) -> contextlib.AbstractAsyncContextManager[None]:
    raise AssertionError("nothing is given away here")


def taking_one(served: ServedModel) -> Taking:
    """Everything that another engine sends of a turn which has computed nothing yet."""
    tokens = Tokenized(tuple(TOKENS.ids), tuple(end - start for start, end in TOKENS.offsets))
    begun = BegunTurn(0, 40, tokens, None, (), None, False, None, None, None, 0.0, None)
    request = inference_pb2.GenerateRequest(prompt=PROMPT, sampling=inference_pb2.Sampling(max_tokens=40))
    opening = Opening(Surroundings.of(served.engine, VERSION), request, "taken", "owner", begun, (0,))
    checked = wire.read_request(opening, "default", 1 << 20)
    room, waiting = SharedRoom(1 << 30), ResumeTokens(lambda: "token", time.monotonic)
    taking = Taking(served.turns, served.engine, room, waiting, opening, checked, VERSION)
    taking.add_stand(Stand(0, CarriedTurn(tokens.ids, 0, 0, 0, (0, 1), (), {0: 0}, Timings()), 0, 0))
    return taking


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


@dataclass
class LateStore:
    """A store whose answer to the move is lost, and what it says of the agent when it is asked then."""

    answers: list[bool | KvasirError | None]

    async def move_agent(self, agent_id: str, peer: str, timeout_s: float) -> None:
        raise DeadlineExceeded("late")

    async def has_moved(self, agent_id: str, peer: str) -> bool | None:
        assert (agent_id, peer) == ("ada", "studio")
        answer = self.answers.pop(0)
        if isinstance(answer, KvasirError):
            raise answer
        return answer

    async def hand_on(self, agent_id: str) -> None:
        pass


@pytest.mark.parametrize(
    ("answers", "goes"),
    [([None, None, True], True), ([None, False], False), ([Unavailable("away")], False)],
    ids=["moved all the same", "undone", "not to be asked"],
)
def test_a_turn_follows_its_agent_where_the_answer_to_the_move_is_lost(
    answers: list[bool | KvasirError | None], goes: bool
) -> None:
    store: Any = LateStore(answers)
    nothing: Any = None
    turn: Any = SimpleNamespace(request=SimpleNamespace(namespace="home", agent_id="ada"), is_kept=True)
    begun: Any = SimpleNamespace(parent_manifest=object())
    giver = TurnGiver(nothing, {"home": store}, {"home": store}, {"b": "studio"}, no_link, VERSION, lambda: 0.0)
    with contextlib.nullcontext() if goes else pytest.raises(DeadlineExceeded):
        asyncio.run(giver._let_go(turn, begun, "b"))
    assert not answers
