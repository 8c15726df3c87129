"""OpenAI's SDK, unchanged: only what is new of a conversation is computed, also after a restart of everything.

pip install openai; kvasir up -d; python openai_memory.py
"""

import json
from pathlib import Path

from openai import OpenAI

home = Path.home() / ".kvasir"
client = OpenAI(
    base_url=json.loads((home / "run/up.json").read_text())["http_url"],  # http://127.0.0.1:8642/v1
    api_key=(home / "tokens/client.token").read_text().strip(),
)
messages = []
for question in ("My name is Anna. My dog is called Rex.", "What is my dog called?", "What is my name?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model="kvasir-tiny", messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    usage = answer.usage
    print(f"{messages[-1]['content']}  ({usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} cached)")
