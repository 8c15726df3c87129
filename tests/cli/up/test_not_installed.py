"""Commands where only a part of Kvasir is installed: what is there works, and what lacks is said by its extra."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from kvasir.cli import failures, main
from kvasir.cli.caller import Caller

from tests.cli.running import in_process


def without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in absent else find(name, *more))


OF_THE_STORE = (
    ("pair",),
    ("peers", "ls"),
    ("keys", "ls"),
    ("store", "check"),
    ("store", "recover"),
    ("store", "serve"),
    ("bench", "store", "--quick"),
)
OF_THE_ENGINE = (("models", "pull", "an/owner"), ("models", "ls", "--fetched"))
OF_BOTH = (("up",), ("demo", "--quick"))


@pytest.mark.parametrize(
    ("words", "absent", "extra"),
    [
        *((words, "spake2", "store") for words in OF_THE_STORE),
        *((words, "mlx", "engine") for words in OF_THE_ENGINE),
        *((words, absent, "all") for words in OF_BOTH for absent in ("spake2", "mlx")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_a_command_reports_which_extra_it_needs(
    words: tuple[str, ...], absent: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_program(*_: Any) -> None:
        raise AssertionError("it was not looked at first")

    without(monkeypatch, absent)
    monkeypatch.setattr(os, "execv", no_program)
    ended = in_process("--home", tmp_path / "home", *words)
    assert ended.code == 4, ended.err
    assert f"({absent} missing); install kvasir[{extra}]" in ended.err


@pytest.mark.long(3)
def test_a_store_alone_is_paired_without_what_an_engine_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without(monkeypatch, "mlx")
    ended = in_process("--home", tmp_path / "home", "peers", "ls", "--json")
    assert (ended.code, ended.value["peers"]) == (0, []), ended.err


def test_bench_names_its_extra_whatever_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kvasir_bench.commands.tree", None)
    app = typer.Typer()
    app.callback()(lambda: None)
    main.add_bench(app)
    caller = Caller(as_json=False)
    words = ["bench", "store", "--quick"]
    assert failures.code_of(lambda: app(words, obj=caller, standalone_mode=False), caller) == 4
    assert "install kvasir[bench]" in capsys.readouterr().err
