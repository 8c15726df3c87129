"""Requests leave no memory, thread or file behind in either service."""

import asyncio
from pathlib import Path

import pytest

from tests.campaigns.soak.memory_slope import Readings, Soak, open_soak

THREADS_AT_MOST = 10  # pools fill up when they are first needed; gRPC's own grew by up to 8 of 13
FILES_AT_MOST = 8  # sockets of clients that come and go, and databases' journals


def run(directory: Path, requests: int, seed: int) -> Soak:
    async def soak_it() -> Soak:
        async with open_soak(directory, seed) as soak:
            await soak.run(requests)
            return soak

    return asyncio.run(soak_it())


def check(name: str, readings: Readings, warm_up: int, most_bytes: float) -> None:
    line = readings.line_after(warm_up)
    print(f"{name}: {line}; {readings.threads[-1]} threads, {readings.open_files[-1]} open files")
    assert line.slope - line.half_width < most_bytes, f"{name}: {line}"
    assert readings.grown(readings.threads, warm_up) <= THREADS_AT_MOST, readings.threads
    assert readings.grown(readings.open_files, warm_up) <= FILES_AT_MOST, readings.open_files


@pytest.mark.long(14)
@pytest.mark.timeout(120)
def test_short_requests_leave_memory_threads_and_files_where_they_were(tmp_path: Path) -> None:
    soak = run(tmp_path, 140, seed=1)
    # So few requests cannot tell a small leak from caches that fill: what every turn's KV would leave, they can.
    check("engine", soak.engine, 40, most_bytes=120_000)
    check("store", soak.store, 40, most_bytes=120_000)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_2000_requests_leave_memory_where_it_was(tmp_path: Path) -> None:
    soak = run(tmp_path, 2_300, seed=2)
    check("engine", soak.engine, 300, most_bytes=2_000)
    # The database's page cache is full after some 4,000 new agents; until then it grows.
    check("store", soak.store, 300, most_bytes=4_000)


def test_the_slope_and_its_confidence_are_those_of_a_known_line() -> None:
    exact, rough = Readings(), Readings()
    for number in range(40):
        exact.requests.append(10 * number)
        exact.resident_bytes.append(1_000_000 + 7_000 * number)
        rough.requests.append(10 * number)
        rough.resident_bytes.append(1_000_000 + 7_000 * number + (-1) ** number * 50_000)
    assert exact.line_after(0).slope == pytest.approx(700)
    assert exact.line_after(0).half_width == pytest.approx(0, abs=1)
    line = rough.line_after(0)
    assert line.slope == pytest.approx(700, abs=line.half_width)
    assert line.half_width > 50
