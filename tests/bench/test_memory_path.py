"""What `kvasir bench memory-path` makes of turns: rates from the last token on, shares of cold, and what is missed."""

import os
from pathlib import Path
from typing import Any

import pytest
from kvasir_bench.memory_path import campaign, findings, machine

SECONDS = {"cold": 2.0, "hot": 0.1, "from_ram": 0.5, "engine_killed": 0.4, "both_killed": 2.2}

MACHINE = {"write_synced": 10_000_000, "blake3_all": 40_000_000, "read_cached": 80_000_000, "read_dropped": 5_000_000}


def turn(first_token_s: float, **known: Any) -> dict[str, Any]:
    last = {"last_token_s": first_token_s + 0.5, "lag_s": 0.01, "prefill_s": 0.9 * first_token_s}
    counts = {"prompt_tokens": 8000, "cached_tokens": 7990, "tokens": 50, "snapshot": "committed", "is_exact": True}
    return {"first_token_s": first_token_s, **last, **counts, **known}


def run_of(**known: Any) -> dict[str, Any]:
    """The results of one agent of 8,192 tokens, stored 1 s after its last token."""
    agent = {"length": 8192, "repeat": 0, "short": [{**turn(0.1), "stored_s": 0.7}], "stored_s": 3.5}
    agent |= {phase: turn(seconds) for phase, seconds in SECONDS.items()} | known
    return {
        "settings": {"repeats": 1, "is_quick": False},
        "model": {"name": "m", "device": "cpu", "kv_bytes_per_token": 1000, "kv_policy": "q4", "is_played": False},
        "machine": MACHINE,
        "device": {"device_copy": 1_000_000},
        "ready": {"first": {"engine_s": 3.0}},
        "first_turns": [0.3, 0.1, 0.1],
        "agents": [agent],
    }


def missed(results: dict[str, Any]) -> set[str]:
    return {
        target["what"].partition(",")[0] for target in findings.complete(results)["targets"] if not target["is_met"]
    }


def test_restores_are_shares_of_cold_and_publishing_counts_from_the_last_token() -> None:
    results = findings.complete(run_of())
    [row] = results["rows"]
    assert row["engine_killed_of_cold"] == pytest.approx(0.2)
    assert row["memory_bytes"] == 8050 * 1000
    assert row["both_killed_of_disk"] == pytest.approx(2.2 / (8.05 / 5))
    assert row["both_killed_of_limit"] == pytest.approx(2.2 / (8.05 / 5))
    assert row["engine_killed_of_limit"] == pytest.approx(0.4 / (8.05 / 40)), "BLAKE3 is slower than the page cache"
    assert row["limit_of_cold"] == pytest.approx(8.05 / 5 / 2.0)
    assert row["publish_per_s"] == pytest.approx(8_050_000 / 1.0)
    assert row["whole_per_s"] == pytest.approx(8_050_000 / 3.5)
    assert missed(results) == {"first token both killed / cold", "a process's first turn / its third"}
    assert any("NOT MET" in line for line in findings.lines(results))


@pytest.mark.parametrize(
    ("known", "what"),
    [
        ({"stored_s": None}, "memories that were never stored"),
        ({"engine_killed": turn(0.4, is_exact=False)}, "replies that differ from the hot agent's"),
        ({"short": [{**turn(0.1, lag_s=0.2), "stored_s": 0.7}]}, "the last event behind the last of 50 tokens"),
        ({"from_ram": turn(0.7)}, "first token from ram / cold"),
        ({"stored_s": 12.5}, "publishing / min(synced writes"),
    ],
)
def test_what_is_lost_wrong_late_or_slow_is_a_missed_target(known: dict[str, Any], what: str) -> None:
    assert what in missed(run_of(**known)) - missed(run_of())


def test_a_played_models_prompt_is_no_measure_of_a_restore() -> None:
    results = run_of()
    results["model"]["is_played"] = True
    assert not any("cold" in what for what in missed(results))


def test_a_run_that_was_ended_has_rows_of_what_it_saw() -> None:
    results = run_of()
    for phase in ("from_ram", "engine_killed", "both_killed"):
        del results["agents"][0][phase]
    [row] = findings.complete(results)["rows"]
    assert row["hot_s"] == 0.1
    assert row["both_killed_s"] is None
    assert list(findings.lines(results))


def test_a_length_is_measured_once_and_one_that_the_context_cuts_is_called_what_it_is_cut_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A target is by length: 7,552 tokens must not pass for 32,768."""
    results = run_of()
    known = results["agents"][0]
    monkeypatch.setattr(campaign, "words_per_token", lambda _: 0.5)
    monkeypatch.setattr(
        campaign, "_live", lambda *_: {name: known[name] for name in ("cold", "hot", "short", "stored_s")}
    )
    scope = campaign.PathScope((600, 600, 8192, 32768), repeats=2)
    client: Any = None
    agents = campaign._begin(scope, client, 8192, results, lambda _: None, lambda: 0.0, lambda _: None)
    assert [row["length"] for row in findings.complete(results)["rows"]] == [600, 7552]
    assert [agent.name for agent in agents] == ["bench-600-0", "bench-7552-0", "bench-600-1", "bench-7552-1"]


def test_the_page_cache_forgets_a_file_when_it_is_asked_to(tmp_path: Path) -> None:
    file = tmp_path / "blob"
    file.write_bytes(os.urandom(4 << 20))
    assert machine.cached_share([file]) == 1.0
    machine.drop_cached([file])
    # A file system in RAM, or of a Mac, forgets nothing, and says so.
    assert machine.cached_share([file]) in (0.0, 1.0)


def test_the_machines_rates_are_measured(tmp_path: Path) -> None:
    rates = machine.rates(tmp_path, blocks=1, repeats=1)
    always = {"write_synced", "read_cached", "blake3_thread", "blake3_all", "unix_socket"}
    assert set(rates) - {"read_dropped"} == always  # a file system in RAM forgets no file
    assert all(rate > 0 for rate in rates.values())
    assert list(tmp_path.iterdir()) == []
