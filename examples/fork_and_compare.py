"""One conversation, two futures: a fork copies nothing, and each side goes on from the same memory.

kvasir up -d; python fork_and_compare.py
"""

from contextlib import suppress
from pathlib import Path

from kvasir.clients import InferenceClient
from kvasir.errors import NotFound


def ask(engine: InferenceClient, agent: str, text: str) -> str:
    reply = engine.reply(agent_id=agent, append_messages=[{"role": "user", "content": text}], max_tokens=50)
    return f"{reply.text}  ({reply.started.cached_tokens} tokens reused)"


with InferenceClient.connect(f"unix:{Path.home()}/.kvasir/run/engine.sock") as engine:
    for agent in ("examples/plan", "examples/plan-b"):
        with suppress(NotFound):
            engine.delete_agent(agent)  # of an earlier run
    print(ask(engine, "examples/plan", "My name is Anna. My favourite colour is blue."))
    engine.fork_agent("examples/plan", "examples/plan-b")
    print(ask(engine, "examples/plan-b", "No, my favourite colour is green."))
    for agent in ("examples/plan", "examples/plan-b"):
        print(f"{agent}: {ask(engine, agent, 'What is my favourite colour?')}")
