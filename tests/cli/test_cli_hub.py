"""`kvasir models pull` and `rm` against a hub of a local directory, through mlx-lm's own loader."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_svc.model import kvasir_tiny
from tests.cli.local_hub import local_hub
from tests.cli.running import KVASIR, QUIET, Ended, in_process


class Hub:
    """A hub with one model, and `kvasir` as people begin it: the loader reads its environment when it is imported."""

    def __init__(self, environment: dict[str, str], home: Path) -> None:
        self._environment = QUIET | environment
        self._home = home

    def __call__(self, *arguments: str) -> Ended:
        command = [KVASIR, "--home", self._home, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, timeout=120)
        return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = tmp_path / "hub" / "kvasir" / "tiny"
    model.mkdir(parents=True)
    for file in kvasir_tiny.path().iterdir():
        shutil.copy(file, model)
    with local_hub(tmp_path / "hub", tmp_path / "cache") as environment:
        yield Hub(environment, tmp_path / "home")


@pytest.mark.long(8)
def test_a_model_is_fetched_once_listed_and_removed(hub: Hub) -> None:
    pulled = hub("models", "pull", "kvasir/tiny", "--json")
    assert pulled.code == 0, pulled.err
    weights = Path(pulled.value["path"]) / "model.safetensors"
    assert weights.read_bytes() == (kvasir_tiny.path() / "model.safetensors").read_bytes()
    again = hub("models", "pull", "kvasir/tiny", "--json", "--progress")
    told = [json.loads(line) for line in again.err.splitlines()]
    assert told
    assert {each["done"] == each["total"] > weights.stat().st_size for each in told} == {True}
    assert [row["name"] for row in hub("models", "ls", "--fetched", "--json").value] == ["kvasir/tiny"]
    removed = hub("models", "rm", "kvasir/tiny", "--json")
    assert removed.value["freed_bytes"] >= (kvasir_tiny.path() / "model.safetensors").stat().st_size
    assert not weights.exists()
    assert hub("models", "rm", "kvasir/tiny").code == 5


@pytest.mark.long(2)
def test_only_a_fetch_takes_options_of_progress() -> None:
    for words in (("ls",), ("rm", "kvasir/tiny")):
        program = [sys.executable, "-m", "inference_svc.model.hub", *words]
        refused = subprocess.run([*program, "--progress"], capture_output=True, text=True, timeout=120)
        assert (refused.returncode, "--progress" in refused.stderr) == (2, True)


@pytest.mark.long(4)
def test_a_model_that_the_hub_lacks_is_not_found_before_anything_starts(hub: Hub, tmp_path: Path) -> None:
    refused = hub("up", "--model", "kvasir/nothing", "--json")
    assert (refused.code, refused.value["error"]["reason"]) == (5, "MODEL_NOT_FOUND")
    assert not (tmp_path / "home").exists()
    [problem] = hub("doctor", "--model", "kvasir/nothing", "--json").value["problems"]
    assert problem.startswith(
        "the model cannot be used: model: neither a directory nor a repository that can be fetched ("
    )
    assert in_process("models", "pull", "no repository").code == 2
