"""A reply as a value of a type: the grammar of its JSON schema admits nothing else.

pip install openai; kvasir up -d; python structured_output.py
"""

import json
from pathlib import Path
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

home = Path.home() / ".kvasir"
client = OpenAI(
    base_url=json.loads((home / "run/up.json").read_text())["http_url"],
    api_key=(home / "tokens/client.token").read_text().strip(),
)


class Favourite(BaseModel):
    colour: Literal["red", "green", "blue"]


messages = [
    {"role": "user", "content": "My favourite colour is blue."},
    {"role": "assistant", "content": "I will remember that."},
    {"role": "user", "content": "What is my favourite colour?"},
]
answer = client.chat.completions.parse(model="kvasir-tiny", messages=messages, response_format=Favourite)
print(repr(answer.choices[0].message.parsed))
