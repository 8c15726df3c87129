"""What the steps expect in the same words: refusals, limits, and what comes true in time."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conformance.testee import Refused

Message = dict[str, str]

RULES = json.loads((Path(__file__).parents[2] / "proto/client_rules.json").read_text())
WITHIN_S = 30.0


def user(text: str) -> list[Message]:
    return [{"role": "user", "text": text}]


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < give_up, f"it is not so after {WITHIN_S:.0f} s"
        time.sleep(0.02)


@contextmanager
def refusal(code: str, reason: str | None = None, field: str | None = None, **metadata: str) -> Iterator[None]:
    """The call inside is refused in this way; what is None is not looked at."""
    try:
        yield
    except Refused as refused:
        assert refused.code == code, refused
        assert reason is None or refused.reason == reason, refused
        assert field is None or refused.field == field, refused
        assert metadata.items() <= refused.metadata.items(), refused
        # RetryInfo comes with these two and no others; what the runtime says itself has none.
        assert refused.retry_after_s is None or code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"), refused
    else:
        raise AssertionError(f"expected {code} {reason or ''} {field or ''}, got an answer")
