"""Anthropic's SDK, streamed: its usage says how much of the prompt was remembered.

pip install anthropic; kvasir up -d; python anthropic_chat.py
"""

import json
from pathlib import Path

from anthropic import Anthropic

home = Path.home() / ".kvasir"
client = Anthropic(
    base_url=json.loads((home / "run/up.json").read_text())["http_url"].removesuffix("/v1"),
    api_key=(home / "tokens/client.token").read_text().strip(),
)
messages = []
for question in ("My name is Bob. I live in Lima.", "Where do I live?"):
    messages.append({"role": "user", "content": question})
    with client.messages.stream(model="kvasir-tiny", max_tokens=64, messages=messages) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": answer.content})
    print(f"  ({answer.usage.cache_read_input_tokens} tokens read from memory)")
