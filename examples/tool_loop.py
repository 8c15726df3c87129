"""A loop of tool calls with OpenAI's SDK: the model calls, the program answers, and no token is computed twice.

pip install openai; kvasir up -d; python tool_loop.py
"""

import json
from pathlib import Path

from openai import OpenAI

home = Path.home() / ".kvasir"
client = OpenAI(
    base_url=json.loads((home / "run/up.json").read_text())["http_url"],
    api_key=(home / "tokens/client.token").read_text().strip(),
)


def weather(place: str) -> dict[str, str]:
    return {"weather": "sunny" if place == "Oslo" else "cloudy"}


TOOLS = {"weather": weather}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
DESCRIBED = {"name": "weather", "description": "Says the weather in a place.", "parameters": PLACE}
messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
while True:
    answer = client.chat.completions.create(
        model="kvasir-tiny", messages=messages, tools=[{"type": "function", "function": DESCRIBED}]
    )
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        print(f"{call.function.name}({call.function.arguments})")
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
print(f"{message.content}  ({answer.usage.prompt_tokens_details.cached_tokens} tokens cached)")
