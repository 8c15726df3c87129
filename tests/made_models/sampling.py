"""How much of a sampled property one run looks at: `make test` a part, `make campaigns` the whole."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

First, Second = TypeVar("First"), TypeVar("Second")

IS_WHOLE = bool(os.environ.get("KVASIR_WHOLE"))


def sampled(part: int, *, of: int) -> int:
    """Cases of a run: so many of those that a campaign tries (tests/CAMPAIGNS.md)."""
    return of if IS_WHOLE else part


def pairs(firsts: Sequence[First], seconds: Iterable[Second]) -> list[tuple[First, Second]]:
    """Each of `seconds` with one of `firsts`, in turn; the whole has each with each."""
    return [
        (first, second)
        for number, second in enumerate(seconds)
        for first in (firsts if IS_WHOLE else [firsts[number % len(firsts)]])
    ]


def one_of(values: Iterable[First], turn: int) -> list[First]:
    """The value whose turn it is among tests that take turns; the whole has them all."""
    every = list(values)
    return every if IS_WHOLE else [every[turn % len(every)]]


def first_and_in_turn(cases: Sequence[Any], seconds: float, first: int = 1) -> list[Any]:
    """Cases of one test. The first run at every commit; the others are long, and take so many seconds together."""
    assert not any(hasattr(each, "marks") for each in cases), "they have marks of their own"
    others = [each if isinstance(each, tuple) else (each,) for each in cases[first:]]
    return [*cases[:first], *(pytest.param(*each, marks=pytest.mark.long(seconds)) for each in others)]
