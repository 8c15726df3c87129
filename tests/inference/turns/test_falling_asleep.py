"""The last step of falling asleep: what a cancel and a lost answer of the store leave."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.errors import Unavailable
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.store.answers import Head
from inference_svc.turns.asleep.sleeping import Sleeper
from inference_svc.turns.progress import Progress, TurnTiming
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
    turn = Progress(request, nothing, TurnTiming(0.0), nothing, task=asyncio.current_task())

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
