"""A memory is stored whatever its size and whatever befalls the store, and goes on as if it had never left."""

from pathlib import Path

import pytest

from tests.campaigns.sizes.rounds import Round, play

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
