"""`kvasir prove` on this machine: a quick proof is killed, goes on, and leaves a signed result and a page."""

import getpass
import json
import socket
import tempfile
from pathlib import Path

import psutil
import pytest
from kvasir_bench.prove.result import broken_claims, claims, read_result
from kvasir_bench.prove.step import ProofScope
from kvasir_bench.prove.steps import steps_of

from tests.cli.running import Cli, in_process
from tests.running.waiting import eventually


@pytest.mark.long(47)
def test_a_quick_proof_goes_on_after_a_kill_whose_services_end(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as home:
        cli, command = Cli(Path(home)), ("prove", "--quick", "--no-pause", "--out", tmp_path)
        with cli.running(*command) as killed:
            eventually(lambda: "4 agents, 4 at once" in killed.err, within_s=120)
            programs = psutil.Process(killed.process.pid).children(recursive=True)
            killed.process.kill()
        assert any("inference_svc" in "".join(name) for name in map(_words, programs)) or len(programs) >= 3
        _, alive = psutil.wait_procs(programs, timeout=60)
        assert alive == []
        assert not (tmp_path / "kvasir-prove.json").exists()
        ended = cli(*command, timeout_s=280)
        assert ended.code == 0, ended.out + ended.err
        assert "The machine: finished before" in ended.err
        assert "A batch as alone: finished before" not in ended.err
        assert [path.name for path in (Path(home) / "prove").iterdir()] == ["signing.key"]
    result = read_result(tmp_path / "kvasir-prove.json")
    assert [step["name"] for step in result["steps"]] == [step.name for step in steps_of(ProofScope(is_quick=True))]
    assert broken_claims(result) == []
    assert len(claims(result)) >= 3
    text = json.dumps(result)
    assert not [word for word in (home, str(tmp_path), socket.gethostname()) if word in text.split('"')]
    assert not [word for word in ("/tmp/", "/root", f"/{getpass.getuser()}/") if word in text]
    assert (tmp_path / "kvasir-prove.html").read_text().count("data:image/png") > 3
    shown = in_process("prove", "--results", tmp_path / "kvasir-prove.json")
    assert (shown.code, "✓ 4 agents at once decode" in shown.out) == (0, True)


def _words(program: psutil.Process) -> list[str]:
    try:
        return program.cmdline()
    except psutil.Error:
        return []


def test_flags_of_a_proof_are_refused_where_a_result_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("{}")
    for flag in (("--quick",), ("--fresh",), ("--no-pause",), ("--out", tmp_path), ("--model", "x")):
        refused = in_process("prove", "--results", file, *flag)
        assert (refused.code, f"{flag[0]}: --results shows a proof" in refused.err) == (2, True), refused.err


def test_a_result_that_was_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"kind": "kvasir-prove", "format": 1, "steps": []}))
    refused = in_process("prove", "--results", file)
    assert (refused.code, f"{file}: expected the JSON of `kvasir prove`" in refused.err) == (4, True), refused.err
