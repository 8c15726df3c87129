"""A turn's last event reaches its reader before the engine tells its operator of the turn."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from inference_svc.engine.api import FinishReason, Timings
from inference_svc.turns import turn_ending
from inference_svc.turns.progress import Outbox, ReaderLimits
from inference_svc.turns.turn_data import TurnFinished
from inference_svc.turns.turn_ending import TurnEnding


def test_the_last_event_is_read_before_the_turn_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def read(outbox: Outbox) -> None:
        async for _, event in outbox.events():
            seen.append(type(event).__name__)

    async def scenario() -> None:
        outbox = Outbox(ReaderLimits(1 << 20, 10.0), lambda: 0.0)
        reader = asyncio.create_task(read(outbox))
        await asyncio.sleep(0)
        turn, remembered = MagicMock(), MagicMock()
        turn.emit, turn.request.key = outbox.put, None
        turn.times = SimpleNamespace(queue_s=0.0, restore_s=0.0, first_token_at=1.0, last_token_at=2.0, arrived=0.0)
        remembered.ran.ended.finish_reason, remembered.ran.ended.timings = FinishReason.STOP, Timings()
        remembered.ran.calls, remembered.memory = (), None
        parts: Any = MagicMock()
        parts.clock = lambda: 3.0
        await TurnEnding(parts).finish(remembered, turn)
        outbox.close()
        await reader
        await asyncio.sleep(0)

    monkeypatch.setattr(turn_ending, "_LOG", SimpleNamespace(info=lambda event, **_: seen.append(event)))
    asyncio.run(scenario())
    assert seen == [TurnFinished.__name__, "turn.finished"]
