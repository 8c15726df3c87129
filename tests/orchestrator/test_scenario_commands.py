"""`kvasir scenario` where no service is needed: prompts ahead of a run, refusals, what ships, and a missing extra."""

import json
import signal
import sys
from pathlib import Path

import pytest
from kvasir_orchestrator import Journal, Scenario, shipped_names
from kvasir_orchestrator.model import json_schema

from tests.cli.running import Cli, in_process
from tests.orchestrator.test_scenario_format import RIGHT
from tests.running.waiting import eventually


def test_a_dry_run_prints_every_prompt_and_the_reuse_it_will_get(tmp_path: Path) -> None:
    command = ("--home", tmp_path, "scenario", "run", "prisoners-dilemma", "--dry-run")
    ended = in_process(*command, "--json")
    rows = ended.value
    assert ended.code == 0
    assert "tokens are not counted: no engine answers at" in ended.err
    assert [row["prompt_tokens"] for row in rows] == [None] * len(rows)
    assert len(rows) == len(Scenario.shipped("prisoners-dilemma").plan.turns)
    assert [row["match"] for row in rows if row["agent"] == "warden"] == ["none"] + ["extend"] * 11
    [notes] = [row for row in rows if row["agent"] == "analyst" and row["round"] == 1]
    assert notes["new"][0]["role"] == "system"
    assert "Marco: ‹Marco, turn 20›" in notes["new"][1]["content"]
    assert "EXTEND, 3 messages reused\n" in in_process(*command).out


def test_a_file_that_is_wrong_is_refused_by_line_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "talk.yaml"
    file.write_text(RIGHT.replace("[danny, marco]", "[danny, marko]"))
    ended = in_process("scenario", "run", file, "--json")
    assert ended.code == 4
    assert ended.value["error"]["reason"] == "SCENARIO_INVALID"
    assert f"{file}:14: phases[1].agents[1]: no agent 'marko'" in ended.value["error"]["message"]
    assert in_process("scenario", "run", tmp_path / "nothing.yaml").code == 5
    assert in_process("scenario", "run", "gossip", "--namespace", "nameless").code == 2
    file.write_text(RIGHT.replace("name: Dan", "namespace: guests"))
    ended = in_process("scenario", "run", file)
    assert (ended.code, "the token file of guests" in ended.err) == (2, True)


def test_what_ships_is_listed_shown_and_described() -> None:
    assert [row["name"] for row in in_process("scenario", "ls", "--json").value] == shipped_names()
    assert in_process("scenario", "show", "gossip").out == Scenario.shipped("gossip").text
    assert json.loads(in_process("scenario", "schema").out) == json_schema()


def test_a_run_that_sigterm_ends_reports_how_to_go_on(tmp_path: Path) -> None:
    with Cli(tmp_path / "home").running("scenario", "run", "gossip", "--retries", "99") as run:
        eventually(lambda: "retrying in" in run.err)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(20) == 143
        assert "stopped after 0 turns; run it again, without --fresh, to go on" in run.err


def test_a_run_names_agents_by_id_before_their_first_turn(tmp_path: Path) -> None:
    file = tmp_path / "talk.yaml"
    file.write_text(RIGHT.replace("name: Dan", "id: ada"))
    run = in_process("--home", tmp_path / "home", "scenario", "run", file, "--retries", "0")
    assert (run.code, "ada continues with its memory" in run.err) == (3, True)
    assert "marco goes on" not in run.err


def test_a_damaged_journal_is_said_and_fresh_begins_beside_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    damaged = home / "scenarios" / "gossip.1.jsonl"
    with Journal.begin(damaged, Scenario.shipped("gossip"), "run-1"):
        pass
    damaged.write_text("no journal\n")
    run = ("--home", home, "scenario", "run", "gossip", "--retries", "0")
    refused = in_process(*run)
    assert (refused.code, "--fresh" in refused.err, "scrub" in refused.err) == (6, True, False)
    ended = in_process(*run, "--fresh", "--json")
    assert ended.value["error"]["reason"] == "UNAVAILABLE", "it began, and no engine is here"
    assert Journal.read(home / "scenarios" / "gossip.2.jsonl").answers == {}
    assert damaged.read_text() == "no journal\n"


def test_fresh_deletes_no_agents_that_another_process_runs_with(tmp_path: Path) -> None:
    folder, scenario = tmp_path / "scenarios", Scenario.shipped("gossip")
    with Journal.begin(folder / "gossip.1.jsonl", scenario, "one"):
        ended = in_process("--home", tmp_path, "--json", "scenario", "run", "gossip", "--fresh")
    assert (ended.code, ended.value["error"]["reason"]) == (4, "JOURNAL_IN_USE")
    assert [each.name for each in folder.iterdir()] == ["gossip.1.jsonl"]


def test_a_report_is_written_of_the_newest_run(tmp_path: Path) -> None:
    home, page = tmp_path / "home", tmp_path / "page.html"
    assert in_process("--home", home, "scenario", "report", "gossip", "--out", page).code == 5
    with Journal.begin(home / "scenarios" / "gossip.1.jsonl", Scenario.shipped("gossip"), "run-7"):
        assert in_process("--home", home, "scenario", "report", "gossip", "--out", page).code == 0
    assert "run-7" in page.read_text()


@pytest.mark.parametrize("missing", ["kvasir_orchestrator", "jinja2", "yaml"])
def test_without_the_extra_a_command_reports_which(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delitem(sys.modules, "kvasir.cli.scenarios.runs", raising=False)
    monkeypatch.delattr("kvasir.cli.scenarios.runs", raising=False)
    for name in [each for each in sys.modules if each.split(".")[0] == "kvasir_orchestrator"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    ended = in_process("scenario", "ls", "--json")
    assert ended.value["error"]["reason"] == "EXTRA_MISSING"
    assert "kvasir[orchestrator]" in ended.value["error"]["message"]
