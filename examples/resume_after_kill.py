"""`kill -9` of engine and store in the middle of a conversation: the agent goes on where it was.

kvasir up -d; python resume_after_kill.py
"""

import json
import os
import signal
import time
from pathlib import Path

from kvasir.clients import InferenceClient
from kvasir.errors import Unavailable

home = Path.home() / ".kvasir"


def ask(text: str) -> None:
    with InferenceClient.connect(f"unix:{home}/run/engine.sock") as engine:
        reply = engine.reply(agent_id="examples/survivor", append_messages=[{"role": "user", "content": text}])
    cached, all_tokens = reply.started.cached_tokens, reply.started.prompt_tokens
    print(f"{reply.text}  ({cached} of {all_tokens} tokens remembered)")


ask("My name is Anna.")
ask("The code of the door is 4711.")
up = json.loads((home / "run/up.json").read_text())
for service in ("engine_pid", "store_pid"):
    os.kill(up[service], signal.SIGKILL)
print("both services are killed; `kvasir up` starts them again")
for _ in range(120):
    time.sleep(0.5)
    try:
        ask("What is the code of the door?")  # was stored before the kill
        break
    except Unavailable:
        continue  # not started yet, or still loading
else:
    raise SystemExit("they did not come back within a minute: `kvasir status` shows why")
