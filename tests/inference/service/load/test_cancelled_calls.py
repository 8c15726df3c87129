"""A call that is cancelled, at whatever moment, leaves no handler, no place and no agent's memory behind."""

import asyncio
import random
import time
from pathlib import Path

import pytest
from kvasir.clients import AioInferenceClient
from kvasir.errors import ResourceExhausted

from tests.running.system_fixtures import running_house

PLACES = 5  # of seven: one caller does not get all of them
STORY = "Every door has a key, and the seventh key is missing since the flood. " * 60


async def cancelled(client: AioInferenceClient, number: int, after_s: float) -> None:
    """A long turn whose caller goes away after so long."""
    turn = client.reply(agent_id=f"gone {number}", prompt=f"{number} {STORY}", sampling={"max_tokens": 400})
    with pytest.raises((TimeoutError, ResourceExhausted)):
        await asyncio.wait_for(turn, after_s)


async def all_places(client: AioInferenceClient) -> None:
    """As many short turns at once as there are places."""
    turns = (client.reply(prompt=f"{place} hello", sampling={"max_tokens": 2}) for place in range(PLACES))
    await asyncio.gather(*turns)


@pytest.mark.long(6)
def test_cancelled_calls_leave_no_handler_behind(model: Path, tmp_path: Path) -> None:
    """(LESSONS 28, 25) In the queue, while the prompt is computed, and while it generates; then every place is free,
    no page is lost, and nothing holds up the end of the process.
    """
    chance = random.Random(28)

    async def cancel_many(address: str) -> None:
        async with AioInferenceClient.connect(address) as client:
            await all_places(client)
            for start in range(0, 10 * PLACES, PLACES):
                numbers = range(start, start + PLACES)
                await asyncio.gather(*(cancelled(client, number, chance.uniform(0.01, 0.6)) for number in numbers))
            give_up = time.monotonic() + 20
            while await client.list_turns():  # a busy machine hears of the last cancels late
                assert time.monotonic() < give_up, "a place was never freed"
                await asyncio.sleep(0.02)
            await all_places(client)

    with running_house(
        tmp_path, model, engine_options=("--max-turns", str(PLACES + 2), "--stop-grace-s", "600")
    ) as house:
        asyncio.run(cancel_many(house.engine.address))
        assert house.engine.stop() == 0  # a handler that was left would be waited for
        assert "pages_leaked" not in house.engine.log
