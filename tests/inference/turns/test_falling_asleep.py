"""Falling asleep: its proof gives way to others; what a cancel and a lost answer of the store leave. And whose KV an
agent that sleeps takes over.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import Unavailable
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.messages import sleep_request, warm_request
from inference_svc.engine.api import AgentKey, Listener, Priority, TurnPlan
from inference_svc.memory.agent_memory import AgentMemory, Ahead, Publication, RememberedText, StoredFiles
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.memory.store.answers import Head
from inference_svc.text.prefix_matching import NO_TEXT
from inference_svc.text.token_ids import TokenChars, TokenIds
from inference_svc.turns.asleep.sleeping import Sleeper
from inference_svc.turns.progress import Progress, TurnTiming
from inference_svc.turns.turn_data import TurnRequest
from tests.inference.turns.test_replanning import ENDED
from tests.inference.turns.test_turn_parts import memory

KEY = AgentKey("default", "ada")
DIGEST = Digest.of(b"asleep")
ASLEEP = Head(6, DIGEST, 5)
Commits = Callable[[Progress, AgentMemory], Awaitable[Head]]


class ProvenSleeper(Sleeper):
    """All rows came back."""

    async def _proven(self, *_given: object) -> list[Digest]:
        return [DIGEST]


async def fallen_asleep(commit: Commits) -> tuple[Head, list[AgentKey]]:
    """The version that is asleep, and the memories that the engine had to drop."""
    dropped = list[AgentKey]()
    parts: Any = SimpleNamespace(
        clock=lambda: 0.0, engine=SimpleNamespace(memories=SimpleNamespace(drop=dropped.append))
    )
    nothing: Any = None
    request: Any = SimpleNamespace(request_id="r")
    turn = Progress(request, nothing, TurnTiming(0.0), NamespaceCounters(), task=asyncio.current_task())

    async def fall_asleep(asleep: AgentMemory) -> Head:
        return await commit(turn, asleep)

    line: Any = SimpleNamespace(key=KEY, publications=SimpleNamespace(fall_asleep=fall_asleep))
    try:
        _, head = await ProvenSleeper(parts)._let_go(turn, line, memory(), None)
    except Unavailable:
        head = Head(0, None, 0)
    return head, dropped


def test_a_cancel_does_not_part_the_engine_from_a_commit_that_was_sent() -> None:
    async def commit(turn: Progress, _asleep: AgentMemory) -> Head:
        turn.cancel()
        await asyncio.sleep(0)  # the store's answer
        return ASLEEP

    assert asyncio.run(fallen_asleep(commit))[0] == ASLEEP


@pytest.mark.parametrize(("is_sent", "dropped"), [(True, [KEY]), (False, [])])
def test_hot_memory_goes_if_the_store_may_have_the_sleeping_version(is_sent: bool, dropped: list[AgentKey]) -> None:
    """Without the store a lease would prove it current, and the agent's next turn would be lost to that version."""

    async def commit(_turn: Progress, asleep: AgentMemory) -> Head:
        if is_sent:
            asleep.publication.standing = asleep.publication.standing.sending(DIGEST)
        raise Unavailable("the store does not take a version now")

    assert asyncio.run(fallen_asleep(commit))[1] == dropped


async def computed_again(request: TurnRequest, *, borrows: bool) -> list[TurnPlan]:
    """The plans of a memory with six tokens, of which a reply left two."""
    plans = list[TurnPlan]()

    def submit(plan: TurnPlan, listener: Listener) -> None:
        plans.append(plan)
        listener([ENDED])

    parts: Any = SimpleNamespace(engine=SimpleNamespace(submit=submit))
    nothing: Any = None
    turn = Progress(request, nothing, TurnTiming(0.0), NamespaceCounters(), task=asyncio.current_task())
    transcript = RememberedText("abcdef", TokenIds(range(6)), TokenChars((1,) * 6))
    told = replace(memory(), transcript=transcript, files=StoredFiles(runs=(2, 4)))
    await Sleeper(parts)._computed(turn, KEY, told, borrows=borrows)
    return plans


@pytest.mark.parametrize(("read", "borrows"), [(sleep_request, False), (warm_request, True)])
def test_proofs_and_wakes_give_way_and_are_billed_to_their_namespace(
    read: Callable[..., TurnRequest], borrows: bool
) -> None:
    """Else the proofs of one namespace's agents would take their cells among the prompts of people elsewhere."""
    named = pb.WarmRequest(agent_id=KEY.agent_id)
    terms = {"namespace": KEY.namespace, "caller": "", "max_prompt_bytes": 0, "new_request_id": str}
    plans = asyncio.run(computed_again(read(named, **terms), borrows=borrows))
    assert [(plan.pace.priority, plan.namespace) for plan in plans] == [(Priority.BACKGROUND, KEY.namespace)] * 2


class CountingSleeper(Sleeper):
    """It is cancelled while it hashes the files of a memory that was computed."""

    async def _computed(self, *_given: object, **_more: object) -> Any:
        return ENDED.state

    async def _files(self, _key: AgentKey) -> list[Digest]:
        raise asyncio.CancelledError


def test_a_wake_that_is_cancelled_behind_its_computing_leaves_no_memory_without_a_name() -> None:
    dropped = list[AgentKey]()
    parts: Any = SimpleNamespace(
        clock=lambda: 0.0, engine=SimpleNamespace(memories=SimpleNamespace(drop=dropped.append))
    )
    asleep = replace(memory(), files=StoredFiles(runs=(2, 4), asleep=manifest_pb2.Asleep(wake_ms=1)))

    async def wake() -> None:
        nothing: Any = None
        await CountingSleeper(parts)._wake(nothing, KEY, asleep)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wake())
    assert dropped == [KEY]


def of_version(head: Head, stage: Stage = Stage.STORED, **more: Any) -> AgentMemory:
    return replace(memory(), publication=Publication(Standing(head, stage)), **more)


TWIN = AgentKey(KEY.namespace, "twin")
AHEAD = Ahead(NO_TEXT, (), 0, ())
HOT = {
    "same version": (TWIN, of_version(Head(2, DIGEST, 1)), True),
    "another namespace": (AgentKey("other", "twin"), of_version(Head(6, DIGEST, 5)), False),
    "another version": (TWIN, of_version(Head(6, Digest.of(b"another"), 5)), False),
    "not stored yet": (TWIN, of_version(ASLEEP, Stage.SENT), False),
    "a prompt behind it": (TWIN, of_version(ASLEEP, ahead=AHEAD), False),
    "a proof": (AgentKey(KEY.namespace, "twin\n"), None, False),
}


@pytest.mark.parametrize(("other", "hot", "is_taken"), HOT.values(), ids=HOT)
@pytest.mark.parametrize("stays", [True, False])
async def test_an_agent_asleep_takes_the_kv_of_its_own_version_in_its_namespace_and_no_other(
    other: AgentKey, hot: AgentMemory | None, is_taken: bool, stays: bool
) -> None:
    """`stays`: whether the other's memory is still there when the engine looks."""
    forked, tagged = list[tuple[AgentKey, AgentKey]](), list[AgentKey]()

    def fork(source: AgentKey, target: AgentKey, tag: object) -> "Future[bool]":
        assert tag is hot, "the engine must see whether it is still that memory"
        forked.append((source, target))
        done: Future[bool] = Future()
        done.set_result(stays)
        return done

    memories = SimpleNamespace(sizes=lambda: {other: 1}, tag_of=lambda _key: hot, fork=fork)
    parts: Any = SimpleNamespace(engine=SimpleNamespace(memories=memories), tag=lambda key, _memory: tagged.append(key))
    assert await Sleeper(parts)._is_shared(KEY, of_version(ASLEEP)) is (is_taken and stays)
    assert forked == [(other, KEY)] * is_taken
    assert tagged == [KEY] * (is_taken and stays)
