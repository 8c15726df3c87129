"""A memory is stored whatever its size and whatever befalls the store, and goes on as if it had never left."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.sizes import rounds
from tests.campaigns.sizes.rounds import PlayedAgent, Round, SizeFindings, play

FAULTS = Round(
    "4 of 8,192, slow, stalled and killed",
    agents=4,
    tokens=8192,
    memory_gib=1.4,
    kills_at=(0.5,),
    stalls_at=(0.2,),
    stall_s=6.0,
    slow_bytes_per_s=50e6,
    good_within_s=60.0,
)
# Half of the memories fit the engine: it must store one before it drops it.
PRESSED = Round(
    "4 of 8,192, slow, in room for two",
    agents=4,
    tokens=8192,
    memory_gib=0.7,
    slow_bytes_per_s=50e6,
    good_within_s=60.0,
)
SMALL = Round("2 of 1,024, killed", agents=2, tokens=1024, memory_gib=0.25, kills_at=(0.5,), good_within_s=30.0)


@pytest.mark.timeout(120)
def test_a_store_that_is_killed_in_the_middle_loses_no_memory(tmp_path: Path) -> None:
    findings = play(SMALL, tmp_path)
    assert findings.problems == [], findings.summary()


def test_a_memory_that_is_computed_again_after_the_kill_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replies are the same, and it was in the store."""

    async def turn(_client: Any, agent: PlayedAgent, *_: Any, **__: Any) -> pb.Started:
        return pb.Started(source=pb.CACHE_SOURCE_WARM if agent.name == "ada" else pb.CACHE_SOURCE_COLD)

    monkeypatch.setattr(rounds, "_turn", turn)
    monkeypatch.setattr(rounds, "_client", lambda _: contextlib.nullcontext())
    findings, house = SizeFindings(), Any
    asyncio.run(rounds._ask_again(house, [PlayedAgent("ada", ""), PlayedAgent("bob", "")], findings))  # type: ignore[arg-type]
    assert findings.problems == ["bob: after the kill it came COLD"]


@pytest.mark.long(39)
@pytest.mark.timeout(400)
def test_memories_of_a_gigabyte_are_stored_by_a_slow_stalled_and_killed_store(tmp_path: Path) -> None:
    findings = play(FAULTS, tmp_path)
    assert findings.problems == [], findings.summary()
    assert findings.sources == {"WARM": FAULTS.agents}


@pytest.mark.long(50)
@pytest.mark.timeout(400)
def test_memories_that_wait_for_a_slow_store_are_not_dropped_for_others(tmp_path: Path) -> None:
    findings = play(PRESSED, tmp_path)
    assert findings.problems == [], findings.summary()
