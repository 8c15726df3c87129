"""Whatever is sent to a service, it answers by its contract and serves on: the sample of `make campaigns`."""

from pathlib import Path

import pytest

from tests.campaigns.fuzz.__main__ import run
from tests.campaigns.fuzz.campaign import Findings

_OF_GRPC = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNAUTHENTICATED", "PERMISSION_DENIED")
MEANINGFUL = {"store": _OF_GRPC, "engine": _OF_GRPC, "gateway": ("200", "400", "401", "403", "404", "405")}


def check(service: str, findings: Findings) -> None:
    print(findings.summary())
    assert findings.problems == []
    unmet = [status for status in MEANINGFUL[service] if not findings.counts[status]]
    assert unmet == [], "it no longer meets what it should"


@pytest.mark.long(22)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("service", "requests", "seed"), [("store", 150, 3), ("engine", 50, 4), ("gateway", 96, 5)])
def test_a_service_answers_hostile_requests_by_its_contract(
    service: str, requests: int, seed: int, tmp_path: Path
) -> None:
    check(service, run(service, tmp_path, seed=seed, numbers=range(requests)))
