"""A team of agents with the same long instructions: they are computed once, and kept once.

kvasir up -d; python team_on_one_prefix.py
"""

import asyncio
from pathlib import Path

from kvasir.clients import AioInferenceClient

RULES = "You are one of a team. " + " ".join(f"Rule {number}: be brief, and remember names." for number in range(60))
TEAM = {"ada": "Anna", "bob": "Bruno", "eve": "Elena"}


async def main() -> None:
    async with AioInferenceClient.connect(f"unix:{Path.home()}/.kvasir/run/engine.sock") as engine:

        async def meet(agent: str, name: str) -> None:
            messages = [
                {"role": "system", "content": RULES},
                {"role": "user", "content": f"My name is {name}. What is my name?"},
            ]
            reply = await engine.reply(
                agent_id=f"examples/team/{agent}", messages=messages, replace_memory=True, max_tokens=50
            )
            cached, all_tokens = reply.started.cached_tokens, reply.started.prompt_tokens
            print(f"{agent}: {reply.text}  ({cached} of {all_tokens} tokens shared)")

        (first, name), *others = TEAM.items()
        await meet(first, name)  # computes the instructions
        await asyncio.gather(*(meet(agent, name) for agent, name in others))  # in one batch, behind the same prefix


asyncio.run(main())
