"""Fifty turns in the background: they share one batch, and give way to whoever talks at the moment.

kvasir up -d; python background_batch.py
"""

import asyncio
from pathlib import Path

from kvasir.clients import AioInferenceClient, GenerateOptions

QUIETLY = GenerateOptions(priority="PRIORITY_BACKGROUND", max_tokens=30)
NAMES = [f"{first}{last}" for first in ("Ma", "Lo", "Ti", "Sa", "Be") for last in ("ra", "la", "na", "no", "li")] * 2


async def main() -> None:
    places = asyncio.Semaphore(16)  # an engine refuses more than its queue holds
    async with AioInferenceClient.connect(f"unix:{Path.home()}/.kvasir/run/engine.sock") as engine:

        async def ask(name: str) -> bool:
            message = {"role": "user", "content": f"My name is {name}. What is my name?"}
            async with places:  # without an agent's name nothing is kept
                reply = await engine.reply(messages=[message], options=QUIETLY)
            return name in reply.text

        right = await asyncio.gather(*map(ask, NAMES))
    print(f"{sum(right)} of {len(right)} answers have the name")


asyncio.run(main())
