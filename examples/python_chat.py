"""Kvasir's own SDK: a streamed turn, and what was reused for it.

kvasir up -d; python python_chat.py
"""

from pathlib import Path

from kvasir.clients import InferenceClient

with InferenceClient.connect(f"unix:{Path.home()}/.kvasir/run/engine.sock") as engine:
    for question in ("My name is Anna. My dog is called Rex.", "What is my dog called?"):
        message = {"role": "user", "content": question}
        for event in engine.generate(agent_id="examples/chat", append_messages=[message], max_tokens=50):
            match event.WhichOneof("event"):
                case "started":
                    print(
                        f"[{event.started.cached_tokens} of {event.started.prompt_tokens} tokens remembered]", end=" "
                    )
                case "delta":
                    print(event.delta.text, end="", flush=True)
                case "finished":
                    print(f"  version {event.finished.snapshot.version}")
