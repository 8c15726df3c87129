"""The judge of histories: it takes what has an order, and notices a lost commit, a late reader, and two owners."""

import math
from dataclasses import replace

import pytest

from tests.campaigns.history import linear
from tests.campaigns.history.linear import (
    Act,
    Deletion,
    Missing,
    Read,
    Span,
    UndecidedError,
    Write,
    unexplained,
    with_two_owners,
)
from tests.campaigns.history.record import Record


def wrote(at: float, version: int, memory: str, took: float = 1.0) -> Write:
    return Write(at, at + took, "a", version, memory)


def read(at: float, version: int, memory: str = "", took: float = 1.0) -> Read:
    return Read(at, at + took, "b", version, memory)


TWO = [wrote(0, 1, "first"), wrote(2, 2, "second")]


@pytest.mark.parametrize(
    "then",
    [
        [read(4, 2, "second"), replace(read(6, 1, "first"), is_newest=False)],
        [read(2, 1, "first"), read(2.1, 2, "second")],  # beside the second commit
        [wrote(4, 3, "first"), read(6, 3, "first"), Missing(6, 7, "b", 2)],  # a rollback; old versions go
        [Deletion(4, 5, "a"), read(6, 0), wrote(8, 1, "other"), read(10, 1, "other")],
        [Write(4, math.inf, "a"), read(5, 2, "second"), read(20, 3, "unheard"), read(30, 3, "unheard")],
        [Write(4, math.inf, "a"), read(5, 2, "second"), wrote(30, 3, "third")],  # it never took effect
        [Deletion(4, math.inf, "a"), read(5, 2, "second"), read(9, 0)],
    ],
)
def test_a_history_that_has_an_order_is_right(then: list[Act]) -> None:
    assert unexplained([*TWO, *then]) is None


@pytest.mark.parametrize(
    ("then", "wrong"),
    [
        ([read(4, 1, "first")], "a reader lacks an acknowledged commit"),
        ([read(4, 0)], "no agent, and nobody deleted it"),
        ([Missing(4, 5, "b", 2)], "the newest is not found"),
        ([wrote(4, 2, "other")], "two commits as one version: two owners"),
        ([wrote(4, 4, "third")], "a version of which nobody knows"),
        ([wrote(4, 3, "first"), read(6, 2, "second")], "the newest is one that was taken back"),
        ([wrote(4, 3, "first"), replace(read(6, 3, "second"), is_newest=False)], "a rollback to another memory"),
        ([read(4, 2, "other")], "another memory"),
        ([Deletion(4, 5, "a"), read(6, 2, "second")], "a reader of what was deleted"),
        ([read(2, 2, "second", 0.2), read(2.4, 1, "first", 0.2)], "the second reader is older than the first"),
        ([Write(6, math.inf, "a"), read(4, 3, "unheard")], "known before it was asked for"),
        ([Write(4, math.inf, "a"), read(5, 3, "one"), read(7, 3, "other")], "unheard, and two memories"),
    ],
)
def test_a_history_without_an_order_is_noticed(then: list[Act], wrong: str) -> None:
    assert unexplained([*TWO, *then]) is not None, wrong


def test_a_history_of_many_acts_without_answers_is_judged_and_one_of_too_many_orders_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unheard = [Write(number, math.inf, "a") for number in range(20)]
    acts = [*unheard, *(read(30 + number, number, f"memory {number}") for number in range(1, 15))]
    assert unexplained(acts) is None
    assert unexplained([*acts, read(60, 3, "memory 3")]) is not None
    beside = [Read(0, 100, "b", 99, f"memory {number}") for number in range(8)]
    endless = [*(Write(0, 100, "a", 0, f"{number}") for number in range(12)), *beside]
    monkeypatch.setattr(linear, "_MOST_STEPS", 5000)
    with pytest.raises(UndecidedError):
        unexplained(endless)
    record = Record()
    record.acts.update(judged=acts, ada=endless)
    assert [(record.problems(), record.undecided) for _ in range(2)] == [([], 1)] * 2


def test_two_owners_of_a_lease_at_one_time_are_noticed_and_one_behind_the_other_are_not() -> None:
    first, behind = Span("ada", "engine-1", 0, 10), Span("ada", "engine-2", 10.5, 20)
    assert with_two_owners([first, behind, Span("bob", "engine-2", 1, 9)], 1.0) == []
    assert with_two_owners([first, Span("ada", "engine-1", 5, 15), replace(behind, since=15.5)], 1.0) == []
    for since in (1.0, 8.0):
        early = replace(behind, since=since)
        assert with_two_owners([early, first], 1.0) == [(first, early)]
    within = [first, Span("ada", "engine-1", 1, 3), replace(behind, since=4)]
    assert with_two_owners(within, 1.0) == [(first, within[2])]
