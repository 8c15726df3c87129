"""Many agents on one engine and its store: nobody hears another's words, and every reply is the one given alone."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.campaigns.hammer.__main__ import Checkpoints, plans
from tests.campaigns.hammer.arena import RoundPlan, RoundResult
from tests.campaigns.hammer.records import Alone, TurnRecord, reuse_problem
from tests.campaigns.hammer.rounds import run_round

SEEN = (
    *("HOT", "WARM", "COLD", "REPLAY", "MATCH_EXACT", "MATCH_EXTEND", "MATCH_DIVERGE"),
    *(
        "cut started",
        "cut prefill",
        "cut tokens",
        "forked",
        "rolled back",
        "sampled",
        "right drafts",
        "engine kill",
        "engine stop",
    ),
)


@pytest.mark.long(32)
@pytest.mark.timeout(600)
def test_80_requests_32_at_a_time_leak_no_canary_and_equal_the_same_turns_alone(tmp_path: Path) -> None:
    """Cancels, disconnects, resumes, forks, trims, restores, kills (LESSONS 2, 15)."""
    result = asyncio.run(run_round(RoundPlan(seed=20, number=0, requests=80), tmp_path))
    print(f"{result.requests} requests, {result.compared} compared, {result.seconds:.0f} s: {dict(result.counts)}")
    assert [f"{each.sort}: {each.agent}: {each.what}" for each in result.problems] == []
    assert result.compared > 50
    assert [what for what in SEEN if not result.counts[what]] == [], "the hammer no longer does all that it should"


@pytest.mark.parametrize(("cached", "is_right"), [(250, True), (256, True), (249, False), (255, False)])
def test_a_turn_may_reuse_whole_blocks_of_a_cut_one_behind_its_memory(cached: int, is_right: bool) -> None:
    alone = Alone([], [], "", prompt_tokens=270, expected_cached=250)
    assert (reuse_problem(TurnRecord("ada", 2, cached_tokens=cached, source="HOT"), alone) == "") is is_right


def test_a_campaign_goes_on_after_the_round_that_was_interrupted(tmp_path: Path) -> None:
    wanted = plans(seed=1, requests=1000, requests_per_round=300, concurrency=32)
    assert [plan.requests for plan in wanted] == [300, 300, 300, 100]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.add("0/2", RoundResult(wanted[0], requests=300))
    checkpoints.add("1/2", RoundResult(wanted[1], requests=300))
    checkpoints.add("1/2", RoundResult(plans(2, 1000, 300, 32)[3], requests=300))  # of another seed
    with (tmp_path / "0-of-2.jsonl").open("a") as file:
        file.write(json.dumps({"plan": vars(wanted[2])})[:40])  # killed while it wrote
    assert sorted(Checkpoints(tmp_path).done(wanted)) == [0, 1]
