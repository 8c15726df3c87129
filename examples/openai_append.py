"""A named agent over OpenAI's SDK: each call sends its new message alone, and the agent knows the rest.

pip install openai; kvasir up -d; python openai_append.py
"""

import json
from pathlib import Path

from openai import OpenAI

home = Path.home() / ".kvasir"
client = OpenAI(
    base_url=json.loads((home / "run/up.json").read_text())["http_url"],
    api_key=(home / "tokens/client.token").read_text().strip(),
    default_headers={"x-agent-id": "examples/append", "x-agent-memory": "append"},
)


def ask(text: str) -> str:
    messages = [{"role": "user", "content": text}]
    raw = client.chat.completions.with_raw_response.create(model="kvasir-tiny", messages=messages)
    print(f"memory {raw.headers['x-agent-memory']}: ", end="")  # new, then extended
    return raw.parse().choices[0].message.content


print(ask("My sister lives in Oslo."))
print(ask("Where does my sister live?"))
