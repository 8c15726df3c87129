"""Waits until something is so."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(claim: Callable[[], T], within_s: float = 30) -> T:
    """Wait until the claim is true, and return its value."""
    end = time.monotonic() + within_s
    while not (value := claim()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return value
