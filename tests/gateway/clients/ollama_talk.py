"""Ollama's own client, unmodified but for its host: models, turns, a stream, a tool, structured output."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from ollama import Client, ResponseError

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def weather(place: str) -> str:
    """The weather of a place."""
    return f"sunny in {place}"


def main() -> None:
    model = os.environ["KVASIR_MODEL"]
    client = Client(os.environ["KVASIR_URL"], headers={"authorization": f"Bearer {os.environ['KVASIR_KEY']}"})
    kept = Path(os.environ["KVASIR_TOLD"])
    messages: list[Any] = [{"role": "user", "content": "My name is Anna. I speak through a llama."}]
    if sys.argv[1:]:
        again = client.chat(model, json.loads(kept.read_text()))
        assert "Anna" in str(again.message.content), again
        print("Ollama: goes on after kill -9")
        return
    assert [each.model for each in client.list().models] == [model]
    assert [each.model for each in client.ps().models] == [model]
    assert "tools" in (client.show(model).capabilities or ())
    first = client.chat(model, messages)
    messages += [first.message.model_dump(exclude_none=True), {"role": "user", "content": "What is my name?"}]
    second = client.chat(f"{model}:latest", messages, options={"num_ctx": 4096}, keep_alive="5m")
    assert "Anna" in str(second.message.content), second
    kept.write_text(json.dumps(messages))
    parts = list(client.chat(model, messages, stream=True))
    assert "".join(part.message.content or "" for part in parts) == second.message.content
    assert parts[-1].done
    assert parts[-1].eval_count == second.eval_count
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    calling = client.chat(model, asked, tools=[weather])
    [call] = calling.message.tool_calls or ()
    asked += [calling.message, {"role": "tool", "tool_name": call.function.name, "content": weather("Paris")}]
    assert client.chat(model, asked, tools=[weather]).message.content
    assert [len(vector) > 0 for vector in client.embed(model, ["A dog.", "A cat."]).embeddings] == [True, True]
    red = client.generate(model, "My favourite colour is red.", format=COLOUR)
    assert red.response == '{"colour": "red"}', red
    refusal = ""
    try:
        client.generate(model, "?", suffix=".")
    except ResponseError as error:
        refusal = f"{error.status_code} {error.error}"
    assert refusal.startswith("400 suffix: "), refusal
    print(f"Ollama: models, turns, stream, tool, format; {second.eval_count} tokens in {second.eval_duration} ns")


if __name__ == "__main__":
    main()
