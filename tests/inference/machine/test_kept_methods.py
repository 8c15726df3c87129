"""Dataclasses whose methods' code was kept are those whose methods are compiled."""

import dataclasses
import os
import sys
from dataclasses import FrozenInstanceError, InitVar, asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from inference_svc.machine.kept_methods import KeptMethods, keep_methods

GLOBAL = 7


def _classes() -> list[Any]:
    @dataclass(frozen=True, slots=True, order=True)
    class Frozen:
        left: int
        right: tuple[int, ...] = (1, 2)

    @dataclass
    class Plain:
        name: str
        kept: list[int] = field(default_factory=list)
        hidden: int = field(default=3, repr=False, compare=False)
        given: InitVar[int] = GLOBAL
        every: ClassVar[int] = 5

        def __post_init__(self, given: int) -> None:
            self.hidden += given

    @dataclass(frozen=True, kw_only=True)
    class Named(Frozen):
        third: str = "'\"\n"

    return [Frozen(1), Frozen(0, (9,)), Plain("ünd"), Plain("b", [2], 4, given=5), Named(left=2, third="x")]


def _shown(values: list[Any]) -> list[Any]:
    frozen, other, plain, last, named = values
    with pytest.raises(FrozenInstanceError, match="left"):
        frozen.left = 2
    methods = [
        (name, method.__qualname__.rpartition(".<locals>.")[2], method.__module__, repr(method.__annotations__))
        for each in values
        for name, method in vars(type(each)).items()
        if hasattr(method, "__annotations__") and name.startswith("__")
    ]
    facts = [repr(values), frozen > other, hash(frozen), hash(named), plain == last, plain.hidden, last.hidden]
    return [*facts, [asdict(each) for each in values], [type(each).__doc__ for each in values], methods]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "kept").mkdir(mode=0o700)
    return tmp_path / "kept"


def test_classes_of_kept_methods_are_those_of_compiled_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = _shown(_classes())
    first = KeptMethods(folder)
    monkeypatch.setattr(dataclasses, "exec", first.execute, raising=False)
    assert _shown(_classes()) == compiled
    first.keep()
    second = KeptMethods(folder)
    assert second._kept
    monkeypatch.setattr(dataclasses, "exec", second.execute, raising=False)
    monkeypatch.setattr("builtins.exec", None)  # nothing is compiled
    values = _classes()
    monkeypatch.undo()
    assert _shown(values) == compiled
    assert type(values[2]).__init__.__globals__ is globals()


def test_methods_that_others_may_write_are_not_believed(folder: Path) -> None:
    first = KeptMethods(folder)
    first.execute("def __create_fn__():\n return 1", {}, {})
    first.keep()
    assert KeptMethods(folder)._kept
    folder.chmod(0o770)
    [path] = folder.glob("*.py")
    path.write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    refused = KeptMethods(folder)
    assert not refused._kept
    refused.execute("def __create_fn__():\n return 2", {}, {})
    refused.keep()
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("content", ["KEPT = {", ""])
def test_a_module_that_is_none_costs_a_start_its_time_alone(folder: Path, content: str) -> None:
    methods = KeptMethods(folder)
    methods.execute(text := "def __create_fn__():\n return 1", {}, {})
    methods.keep()
    [path] = folder.glob("*.py")
    path.write_text(content)
    os.utime(path, (1, 1))
    damaged, found = KeptMethods(folder), dict[str, Any]()
    damaged.execute(text, {}, found)
    assert found["__create_fn__"]() == 1
    damaged.keep()
    assert list(KeptMethods(folder)._kept) == [text]


def test_none_are_kept_where_python_keeps_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert keep_methods() is None
    assert "exec" not in vars(dataclasses)
