"""What `make test-install` reports: how each part ended, and why one did not run. Parts themselves want the network."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.install import __main__ as installs
from tests.install.pages import Client
from tests.install.place import Failed, Place

NO_TOOL = Client("go", "no-such-tool", "main.go", "no-such-tool run .")


def passes(place: Place) -> None:
    assert place.run("echo $HOME").strip() == str(place.home)


def fails(place: Place) -> None:
    place.run("echo the last words >&2; exit 3")


@pytest.fixture(autouse=True)
def _without_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installs, "release", Path.mkdir)


def test_each_end_is_reported_and_a_missing_tool_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    parts = {"one": passes, "two": fails, "go": partial(installs.try_client, NO_TOOL)}
    assert installs.run(parts, tmp_path) == 1
    printed = capsys.readouterr().out
    assert "two: FAILED, 0 s: echo the last words" in printed
    assert "ended with 3: the last words" in printed
    assert "go: NOT RUN, 0 s: no no-such-tool here\n" in printed
    assert printed.endswith("passed: 1: one\nFAILED: 1: two\nNOT RUN: 1: go\n")


def test_a_run_without_a_failure_ends_well(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    assert installs.run({"one": passes, "go": partial(installs.try_client, NO_TOOL)}, tmp_path) == 0


def test_a_part_that_is_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["install", "goo"])
    assert installs.main() == 2
    assert (
        "not known: goo; expected some of uv, pipx, pip, python, go, typescript, rust, java" in capsys.readouterr().err
    )


def test_a_home_finds_nothing_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("KVASIR_HOME", "/somewhere")
    printed = Place(tmp_path).run("echo ${PYTHONPATH:-none} ${KVASIR_HOME:-none}; echo $PATH")
    assert printed.splitlines()[0] == "none none"
    assert str(Path(sys.prefix, "bin").resolve()) not in map(os.path.realpath, printed.splitlines()[1].split(":"))
    with pytest.raises(Failed, match="ended with 127"):
        Place(tmp_path).run("no-such-program")
