"""A simulated day of agents that sleep: the engine's own policy hides 95 of 100 wakes."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvasir.options.engine import EngineTable
from kvasir.options.table import options_of
from kvasir_bench.fleet import naps
from kvasir_bench.fleet.report import lines_of_naps

from inference_svc.turns.asleep.returns import Returns
from tests.made_models.sampling import first_and_in_turn
from tests.running.programs import run

_GIVEN: dict[str, Any] = json.loads(Path(naps.__file__).with_name("naps.json").read_text())


def _days(*seeds: int, **changes: object) -> list[dict[str, Any]]:
    return [naps.simulate(_GIVEN | changes, seed)["day"] for seed in seeds]


def _hidden(days: list[dict[str, Any]]) -> float:
    return float(sum(day["hidden"] for day in days) / sum(day["wakes"] for day in days))


@pytest.mark.long(2)
def test_ninety_five_of_a_hundred_wakes_are_over_before_their_turns() -> None:
    days = _days(11, 12)
    assert _hidden(days) >= 0.95
    for day in days:
        assert day["wakes"] > 40
        assert day["share_of_time"] <= 2 * _GIVEN["share_of_time"]["value"], "a day's share may be saved"
        assert day["mean_held_bytes"] < day["bytes_of_all"] / 4, "keeping all awake would hide them, too"


@pytest.mark.parametrize(
    "changes", first_and_in_turn([{}, {"share_of_time": {"value": 0.0}}, {"hot_gib": {"value": 0.0}}], seconds=1)
)
def test_without_knowledge_time_or_memory_none_is(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    if not changes:
        monkeypatch.setattr(Returns, "expected", lambda *_: [])
    assert _hidden(_days(11, agents=20, **changes)) == 0


def test_each_assumption_has_its_source_and_the_share_of_time_is_the_options() -> None:
    for name, each in _GIVEN.items():
        assert isinstance(each, int) or each["source"].startswith(("assumed", "after", "clients", "Llama")), name
    assert _GIVEN["share_of_time"]["value"] == options_of(EngineTable)["wake_ahead_share"].default


def test_the_command_prints_the_share(tmp_path: Path) -> None:
    small = ["bench", "fleet", "--simulate", "--naps", "--agents", "20"]
    results = json.loads(run("kvasir", *small, "--json").stdout)
    assert results["day"]["agents"] == 20
    assert "of the wakes were over before their turn came" in "\n".join(lines_of_naps(results))
    refused = run("kvasir", *small, "--engines", "3")
    assert refused.returncode != 0
    assert "--engines" in refused.stderr
    own = tmp_path / "own.json"
    own.write_text('{"seconds_of_turn": {}}')
    assert "--assumptions: " in run("kvasir", *small, "--assumptions", str(own)).stderr
