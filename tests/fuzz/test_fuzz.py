"""Whatever is sent to either service, it answers by its contract and serves on: the sample of `make campaigns`."""

from pathlib import Path

import pytest

from tests.fuzz.__main__ import run
from tests.fuzz.campaign import Findings

MEANINGFUL = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNAUTHENTICATED", "PERMISSION_DENIED")


def check(findings: Findings) -> None:
    print(findings.summary())
    assert findings.problems == []
    assert [status for status in MEANINGFUL if not findings.counts[status]] == [], "it no longer meets what it should"


@pytest.mark.long(11)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("service", "requests", "seed"), [("store", 150, 3), ("engine", 50, 10)])
def test_a_service_answers_hostile_requests_by_its_contract(
    service: str, requests: int, seed: int, tmp_path: Path
) -> None:
    check(run(service, tmp_path, seed=seed, numbers=range(requests)))
