"""A proof goes on where it was ended, and its result is signed and names nobody."""

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from kvasir import credentials
from kvasir.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvasir_bench.prove import command, exactness
from kvasir_bench.prove import steps as proof_steps
from kvasir_bench.prove.exactness import Decoded
from kvasir_bench.prove.figures import read_shown, side_by_side
from kvasir_bench.prove.page import page
from kvasir_bench.prove.proving import KeptSteps, only_proof, remaining_s
from kvasir_bench.prove.result import broken_claims, impersonal, read_result, result_of, signed
from kvasir_bench.prove.step import ProofScope, Step
from kvasir_bench.prove.steps import STEPS as REAL_STEPS
from kvasir_bench.prove.steps import shown

from tests.bench.played_proof import NAMES, STEPS, prover
from tests.cli.running import in_process
from tests.running.waiting import eventually
from tools.measured import __main__ as measured_pages

ROOT = Path(__file__).parents[2]
DAY = datetime.date(2026, 11, 26)
MADE_WITH = {"versions": {"kvasir": "1", "source": "0a", "packages": {"mlx": "0.32"}}, "is_quick": True}


def record(name: str = "kill", **known: Any) -> dict[str, Any]:
    about = {"name": name, "title": name, "expected_s": 2, "seconds": 4.0, "slept_s": 0.0}
    value = {} if "failed" in known else {"value": {"claims": [{"what": "it holds", "is_met": True}]}}
    return {**about, **value, **known}


def result(*records: dict[str, Any], words: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    return result_of(records or (record(),), MADE_WITH, DAY, words)


# How a proof goes on.


def test_a_proof_that_was_ended_goes_on_with_its_first_unfinished_step(tmp_path: Path) -> None:
    begun: list[str] = []

    def interrupted(step: Step) -> dict[str, Any]:
        begun.append(step.name)
        if begun == ["first", "second", "third"]:
            raise KeyboardInterrupt
        return {"claims": [], "number": len(begun)}

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        prover(tmp_path, interrupted, report=said.append).prove(STEPS)
    assert said[-1] == "stopped; the same command goes on with step 3"
    records = prover(tmp_path, interrupted).prove(STEPS)
    assert begun == ["first", "second", "third", "third", "fourth"]
    assert [each["value"]["number"] for each in records] == [1, 2, 4, 5]


@pytest.mark.long(1)
def test_three_kills_lose_the_step_that_each_interrupts_and_no_other(tmp_path: Path) -> None:
    def process() -> "subprocess.Popen[str]":
        argv = [sys.executable, "-m", "tests.bench.played_proof", str(tmp_path)]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    begun = tmp_path / "begun"
    for name in ("first", "third", "fourth"):
        (tmp_path / "hold").write_text(name)
        with process() as killed:
            eventually(lambda name=name: begun.exists() and begun.read_text().endswith(f"{name}\n"))  # type: ignore[misc]
            killed.kill()
    (tmp_path / "hold").unlink()
    with process() as last:
        records = json.loads(last.communicate(timeout=30)[0])
    assert begun.read_text().split() == ["first", "first", "second", "third", "third", "fourth", "fourth"]
    assert [(each["name"], "value" in each) for each in records] == [(name, True) for name in NAMES]


def test_other_versions_measure_every_step_again(tmp_path: Path) -> None:
    begun: list[str] = []
    for version in ("1", "1", "2"):
        made_with = {"versions": {"kvasir": version}}
        prover(tmp_path, lambda step: begun.append(step.name) or {}, made_with=made_with).prove(STEPS)  # type: ignore[func-returns-value]
    assert begun == [*NAMES, *NAMES]


def command_of(measured: Callable[..., Any], source: list[str], home: Path, patch: pytest.MonkeyPatch) -> list[bool]:
    """`kvasir prove` of played steps: which of them failed."""
    patch.setattr(command, "steps_of", lambda _: STEPS)
    patch.setattr(command, "measured_by", measured)
    patch.setattr(command, "versions", lambda: {"kvasir": "1", "source": source[-1], "packages": {"mlx": "0.32"}})
    options = ["--quick", "--no-pause", "--out", str(home)]
    ended = in_process("--home", home / "h", "prove", *options)
    if not (home / "kvasir-prove.json").exists():
        return []
    found = read_result(home / "kvasir-prove.json")
    assert ended.code == (1 if broken_claims(found) else 0)
    return ["failed" in each for each in found["steps"]]


def test_a_step_beside_which_the_code_was_changed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ["old"]

    def measured(*words: Any) -> dict[str, Any]:
        source.extend(["new"] * (words[-1] == "third"))
        return {"claims": []}

    assert command_of(measured, source, tmp_path, monkeypatch) == [False, False, True, True]
    assert command_of(measured, source, tmp_path, monkeypatch) == [False] * 4


def test_steps_that_another_machine_has_finished_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def measured(*words: Any) -> dict[str, Any]:
        begun.append(words[-1])
        if len(begun) in (3, 4):
            raise KeyboardInterrupt
        return {"claims": []}

    for chip in ("one", "one", "other"):
        monkeypatch.setattr(command, "chip", lambda chip=chip: chip)
        command_of(measured, [""], tmp_path, monkeypatch)
    assert begun == ["first", "second", "third", "third", *NAMES]


def test_a_record_that_is_no_json_is_measured_again(tmp_path: Path) -> None:
    kept = KeptSteps(tmp_path, MADE_WITH)
    kept.keep("first", record())
    assert kept.read("first") == record()
    (tmp_path / "first.json").write_text('{"made_with": ')
    assert kept.read("first") is None
    kept.keep("first", record())
    assert (tmp_path / "first.json").stat().st_mode & 0o077 == 0
    kept.clear()
    assert kept.read("first") is None


def test_a_step_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    def measured(step: Step) -> dict[str, Any]:
        if step.name == "second":
            raise Unavailable("the engine did not start")
        return {"claims": []}

    found = prover(tmp_path, measured)
    records = found.prove(STEPS)
    assert [each.get("failed") for each in records] == [None, "the engine did not start", None, None]
    assert found.kept.read("second") is None
    assert broken_claims({"steps": records}) == ["the engine did not start"]


def test_a_step_during_which_the_machine_slept_is_measured_again(tmp_path: Path) -> None:
    sleeps, begun, lines = iter([0.0, 30.0, 30.0, 30.0, *[30.0] * 6]), list[str](), list[str]()
    found = prover(
        tmp_path,
        lambda step: begun.append(step.name) or {},  # type: ignore[func-returns-value]
        slept=lambda: next(sleeps),
        report=lines.append,
    )
    records = found.prove(STEPS)
    assert begun == ["first", *NAMES]
    assert records[0]["slept_s"] == 0.0
    assert any("slept for 30 s" in line for line in lines)


def test_the_rest_is_estimated_by_the_pace_of_the_finished_steps(tmp_path: Path) -> None:
    kept = KeptSteps(tmp_path, {})
    assert remaining_s([], STEPS, ProofScope(), kept) == 8.0
    assert remaining_s([record()], STEPS, ProofScope(), kept) == 12.0
    kept.keep("third", record())
    assert remaining_s([record()], STEPS, ProofScope(), kept) == 8.0
    assert remaining_s([record()], STEPS, ProofScope(is_quick=True), kept) == 4.0


def test_a_home_has_one_proof_at_a_time(tmp_path: Path) -> None:
    with only_proof(tmp_path / "prove"), pytest.raises(FailedPrecondition, match="already running"):
        with only_proof(tmp_path / "prove"):
            pass
    with only_proof(tmp_path / "prove"):
        assert (tmp_path / "prove").stat().st_mode & 0o077 == 0


def test_every_step_waits_before_it_is_measured(tmp_path: Path) -> None:
    order: list[str] = []
    found = prover(tmp_path, lambda step: order.append(step.name) or {}, wait=lambda: order.append("wait"))  # type: ignore[func-returns-value]
    found.prove(STEPS)
    assert order == [each for name in NAMES for each in ("wait", name)]


# Its result.


def test_a_result_has_no_names_and_no_paths_of_a_person() -> None:
    steps = [
        record(
            why="/Users/anna/my models/x has no config.json, says Annas-Mac (see ~/.kvasir/logs/engine.log)",
            value={"who": "anna", "rates": "12 tokens/s, K/V and http://host/a/b"},
        )
    ]
    found = json.dumps(result(*steps, words={"anna", "Annas-Mac"})["steps"])
    assert "Users" not in found
    assert "Mac" not in found
    assert ".kvasir" not in found
    assert "12 tokens/s, K/V and http://host/a/b" in found
    for path in ("at:/Users/anna/x", "file:///Users/anna/x", "~/secret", "~ben/secret/x", "/Users/anna/my models/x"):
        assert re.fullmatch(r"no model (at:)?PATH, sorry", impersonal(f"no model {path}, sorry", {"anna"}))
    assert impersonal("anna", {"anna"}) == "anna"  # no sentence: a value of a program
    assert impersonal(["a b anna.", "annals of x"], {"anna"}) == ["a b NAME.", "annals of x"]


def test_a_signed_result_is_read_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    key, file = tmp_path / "key", tmp_path / "result.json"
    first, second = signed(result(), key), signed(result(record("machine")), key)
    assert first["public_key"] == second["public_key"] != signed(result(), tmp_path / "other")["public_key"]
    assert key.stat().st_mode & 0o077 == 0
    file.write_text(json.dumps(first, indent=3))
    assert read_result(file) == first
    changed = json.loads(json.dumps(first))
    changed["steps"][0]["seconds"] = 0.1
    forged = {**changed, "digest": signed(changed, key)["digest"]}
    for wrong, why in (
        (changed, "digest differs"),
        (forged, "signature is not"),
        ({**first, "public_key": signed(result(), tmp_path / "other")["public_key"]}, "signature is not"),
        ({**first, "format": 2}, "expected the JSON of `kvasir prove`"),
        (signed({**result(), "day": "../../x"}, key), "expected the JSON"),
        (signed({**result(), "steps": [{"value": 1}]}, key), "expected the JSON"),
        ({**first, "public_key": f"<{first['public_key']}>"}, "expected the JSON"),
        ({"steps": []}, "expected the JSON"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(InvalidArgument, match=why) as refused:
            read_result(file)
        assert str(file) in str(refused.value)


def test_a_signed_result_with_other_values_is_refused_with_the_step(tmp_path: Path) -> None:
    """Anybody can sign: figures of a step are made of what its record has."""
    file = tmp_path / "result.json"
    for value in ({"cores": 4}, {"chip": "M4", "cores": 4, "memory_bytes": "much"}, {"chip": "M4", "cores": []}):
        file.write_text(json.dumps(signed(result(record(), record("machine", value=value)), tmp_path / "key")))
        with pytest.raises(InvalidArgument, match=r"steps\[1\].value \(machine\) has other fields") as refused:
            read_shown(file)
        assert refused.value.field == "steps[1].value"


def test_a_key_whose_writing_was_cut_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(descriptor: int) -> None:
        os.truncate(descriptor, 0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(credentials, "sync", cut_off)
        with pytest.raises(KeyboardInterrupt):
            signed(result(), tmp_path / "key")
    (tmp_path / "result.json").write_text(json.dumps(signed(result(), tmp_path / "key")))
    read_result(tmp_path / "result.json")


def test_a_kernel_that_the_engines_check_refuses_breaks_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the check of a device with kernels would report it, which a CPU has not."""
    policies = {"q4": "", "q8": "rows are written differently from the reference"}
    kernels = {"attention": "fused (Metal)", "failure": "", "policies": policies}
    facts = {"device": "gpu", "blas": "", "policy": {"layer_count": 8}, "kernels": kernels}
    monkeypatch.setattr(exactness, "run_program", lambda *_: facts)
    value = exactness.kernels(ProofScope(), lambda _: None)
    [broken] = broken_claims(result(record("kernels", value=value)))
    assert "pages of q8" in broken
    assert value["attention"] == "fused (Metal)"
    kernels |= {"failure": "products of few rows: products differ", "policies": {"q4": ""}}
    [broken] = broken_claims(result(record("kernels", value=exactness.kernels(ProofScope(), lambda _: None))))
    assert "products of few rows" in broken


@pytest.mark.long(2)
def test_a_suite_whose_time_is_over_counts_the_tests_that_it_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends their fixtures. A failure before that breaks the claim."""
    tests = tmp_path / "test_it.py"
    tests.write_text(
        "import pathlib, pytest, time\n"
        "@pytest.fixture\ndef service():\n    yield\n    pathlib.Path('ended').touch()\n"
        "def test_first(): assert {}\n"
        "def test_long(service):\n    pathlib.Path('began').touch()\n    time.sleep(60)\n"
    )
    text = tests.read_text()
    (tmp_path / "pyproject.toml").write_text("")
    communicate = subprocess.Popen.communicate

    def until_it_sleeps(self: Any, given: Any = None, timeout: float | None = None) -> Any:
        if timeout is None:
            return communicate(self, given)
        eventually((tmp_path / "began").exists)
        raise subprocess.TimeoutExpired("pytest", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", until_it_sleeps)
    for passes in (True, False):
        for name in ("began", "ended"):
            (tmp_path / name).unlink(missing_ok=True)
        tests.write_text(text.format(passes))
        value = exactness._counted(tmp_path, ["test_it.py"], lambda _: None)
        assert value["is_cut_short"]
        assert [each["is_met"] for each in value["claims"]] == [passes], value
        assert (tmp_path / "ended").exists()
    assert value["failed_tests"] == ["test_it.py::test_first"]


@pytest.mark.long(10)
@pytest.mark.parametrize("by", ["a signal", "a terminal"])
def test_a_step_that_is_ended_ends_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """A suite has no limit of its own: it would go on for hours behind a proof that was killed. A terminal interrupts
    the tests, too: their fixtures, and so their services, end all the same."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "test_it.py").write_text(
        "import pathlib, pytest, time\n@pytest.fixture\ndef service():\n    yield\n    pathlib.Path('ending').touch()\n"
        "    time.sleep(0.3)\n    pathlib.Path('ended').touch()\n"
        "def test_it(service):\n    pathlib.Path('began').touch()\n    time.sleep(30)\n"
    )

    def ended(running: "subprocess.Popen[str]", **_: Any) -> Any:
        eventually((tmp_path / "began").exists)
        if by == "a terminal":
            running.send_signal(signal.SIGINT)
            eventually((tmp_path / "ending").exists)
        raise SystemExit(1)

    monkeypatch.setattr(subprocess.Popen, "communicate", ended)
    began = time.monotonic()
    with pytest.raises(SystemExit):
        exactness._counted(tmp_path, ["test_it.py"], lambda _: None)
    assert time.monotonic() - began < 20
    assert (tmp_path / "ended").exists()


def test_a_reply_that_a_loss_changes_breaks_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def met(*are_exact: bool) -> bool:
        found = {"rows": [{"is_exact": each} for each in are_exact]}
        monkeypatch.setattr(proof_steps, "measured_services", lambda *_, **__: nullcontext())
        monkeypatch.setattr(proof_steps, "measure_path", lambda *_: found)
        [step] = [each for each in REAL_STEPS if each.name == "memory-path"]
        [claim] = step.measure(ProofScope(is_quick=True), lambda _: None)["claims"]
        return bool(claim["is_met"])

    assert met(True, True)
    assert not met(True, False)


def test_the_estimates_of_a_whole_proof_are_about_fifteen_minutes() -> None:
    assert 12 * 60 < sum(step.expected_s(ProofScope()) for step in REAL_STEPS) < 15.5 * 60


def test_agents_that_decode_other_tokens_or_not_together_break_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def met(tokens: list[int], beginning: float) -> bool:
        agents = {1: [[Decoded(0, 1, [5, 6, 4])], [Decoded(1, 2, [7, 8, 4])]]}
        agents[4] = [agents[1][0], [Decoded(beginning, 2, tokens)]]
        monkeypatch.setattr(exactness, "_decoded", lambda *_, at_once: agents[at_once])
        [found] = exactness.batch_as_alone(ProofScope(is_quick=True), lambda _: None)["claims"]
        return bool(found["is_met"])

    assert met([7, 8, 4], 0.5)
    assert not met([7, 9, 4], 0.5)
    assert not met([7, 8, 4], 1.0)


def test_the_page_is_self_contained_and_names_all_that_failed(tmp_path: Path) -> None:
    broken = {"claims": [{"what": "rows <equal>", "is_met": False}]}
    steps = (record("kill", value=broken), record("decode", failed="no <model>"), record("of a later version"))
    assert broken_claims(result(*steps)) == ["no <model>", "rows <equal>"]
    text = page(signed(result(*steps), tmp_path / "key"))
    assert "✗ rows &lt;equal&gt;" in text
    assert "✗ no &lt;model&gt;" in text
    assert "1 of 2 claims" in text
    assert "it holds" in text
    assert not re.search(r"<script|<link|src=\"(?!data:)|https?:", text)


def test_machines_stand_side_by_side_and_lack_what_they_did_not_measure() -> None:
    chip = {"chip": "M4", "cores": 10, "memory_bytes": 16e9, "system": "macOS", "load": 9.0}
    chip["times_mean_something"] = False
    day = record("first-day", value={"synced_write_s": 0.02, "engine_ready_s": 3.0})
    rows = side_by_side([result(record("machine", value=chip), day), result(record(), day)])
    assert ("a synced write", "–", "20 ms") in rows
    assert ("load at the start", "9: too high, times are left out", "–") in rows
    assert rows[0] == ("", "M4", "–")
    assert ("cores", "10", "–") in rows
    assert ("claims met", "0 of 0", "1 of 1") in rows


def test_a_kind_of_machine_has_the_whole_runs_of_its_last_day_and_their_misses_are_bold(tmp_path: Path) -> None:
    def kept(day: int, chip: str, is_quick: bool, *records: dict[str, Any]) -> None:
        machine = {"chip": chip, "cores": 10, "memory_bytes": 16e9, "system": "macOS", "load": 0.1}
        about = record("machine", value={**machine, "times_mean_something": True})
        made_with, on = {**MADE_WITH, "is_quick": is_quick}, datetime.date(2026, 11, day)
        found = signed(result_of([about, *records], made_with, on, set()), tmp_path / "key")
        (tmp_path / f"machines/{len(list(tmp_path.glob('machines/*')))}.json").write_text(json.dumps(found))

    (tmp_path / "machines").mkdir()
    broken = record(value={"claims": [{"what": "it holds", "is_met": False}], "targets": [{"is_met": True}]})
    kept(1, "M4", False, record())
    kept(2, "M4", False, broken)
    kept(2, "M4", False, record(value={"targets": [{"is_met": True}, {"is_met": False}]}))
    kept(3, "M4", True, record())
    kept(1, "M5", True, record())
    rows = measured_pages.page(tmp_path).splitlines()
    assert "|  | M4 | M4 | M5 |" in rows
    assert "| day | 2026-11-02 | 2026-11-02 | 2026-11-01, quick |" in rows
    assert "| claims met | **0 of 1** | 0 of 0 | 1 of 1 |" in rows
    assert "| steps failed or claims broken | **1** | 0 | 0 |" in rows
    assert "| targets met | 1 of 1 | **1 of 2** | – |" in rows


def test_a_result_is_taken_in_by_one_command_and_a_changed_one_leaves_no_trace(tmp_path: Path) -> None:
    good, bad, here = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "here"
    here.mkdir()
    good.write_text(json.dumps(signed(result(), tmp_path / "key")))
    bad.write_text(good.read_text().replace("it holds", "it does"))
    with pytest.raises(InvalidArgument, match="bad"):
        measured_pages.add([good, bad], here)
    assert list(here.iterdir()) == []
    [added] = measured_pages.add([good], here)
    assert measured_pages.add([added], here) == [added]
    assert (here / "machines.md").read_text() == measured_pages.page(here)


def test_kept_results_are_as_they_were_signed_and_every_step_is_shown() -> None:
    for file in (measured_pages.HERE / "machines").glob("*.json"):
        found = read_result(file)
        assert {each["name"] for each in found["steps"]} <= {step.name for step in REAL_STEPS}
        assert all(shown(each)[0] for each in found["steps"] if "value" in each)


def test_the_page_of_machines_is_that_of_the_kept_results() -> None:
    assert (measured_pages.HERE / "machines.md").read_text() == measured_pages.page()
