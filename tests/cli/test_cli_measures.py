"""The commands that measure and examine: the self-test tells, kills and asks; the bench says rates and targets."""

import tempfile
from pathlib import Path

from tests.cli.running import Cli


def test_the_self_test_finds_that_memory_comes_back(tmp_path: Path) -> None:
    report = Cli(tmp_path)("doctor", "--self-test", "--json", timeout_s=240)
    assert report.code == 0, report.out
    steps = report.value["self_test"]["steps"]
    assert any("killed with -9" in step for step in steps)
    assert any("came warm" in step for step in steps)
    assert not any("wrong" in step for step in steps)


def test_the_bench_says_rates_and_targets_as_json() -> None:
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as home:
        results = Cli(Path(home)).done("bench", "store", "--quick", "--json").value
    assert [size["name"] for size in results["sizes"]] == ["kvasir-tiny", "llama-3.1-8b"]
    assert all(size["mb_per_s"][name] > 0 for size in results["sizes"] for name in ("put", "get", "pull", "tcp"))
    assert {"what", "found", "wanted", "is_met"} == set(results["targets"][0])
