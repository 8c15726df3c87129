"""What a service is made of: a part that fails is logged, without what it said."""

import asyncio
import logging

import pytest
from kvasir.server.parts import Parts


async def failing() -> None:
    raise ValueError("a secret")


async def ending() -> None:
    """Nothing is wrong with it."""


async def test_a_part_that_fails_is_logged_by_its_name_and_one_that_ends_or_is_stopped_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with Parts() as parts:
            parts.running(failing())
            parts.running(ending())
            parts.running(asyncio.sleep(60))
            await asyncio.sleep(0)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("part.failed part=failing error=ValueError at=")
    assert "secret" not in line
