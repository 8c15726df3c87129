"""LiteLLM, unmodified but for api_base, through both APIs: turns, a stream, a tool, structured output."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def main() -> None:
    url, model = os.environ["KVASIR_URL"], os.environ["KVASIR_MODEL"]
    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
        common: dict[str, Any] = {
            "model": f"{provider}/{model}",
            "api_base": base,
            "api_key": os.environ["KVASIR_KEY"],
            "max_tokens": 40,
        }
        kept = Path(f"{os.environ['KVASIR_TOLD']}.{provider}")
        if sys.argv[1:]:
            asked_again = [*json.loads(kept.read_text()), {"role": "user", "content": "And now?"}]
            used = litellm.completion(messages=asked_again, **common).usage
            assert used.prompt_tokens_details.cached_tokens > 30, used
            print(f"LiteLLM ({provider}): after kill -9, cached {used.prompt_tokens_details.cached_tokens}")
            continue
        told: list[Any] = [{"role": "user", "content": f"My name is Anna. I speak through {provider}."}]
        first = litellm.completion(messages=told, **common)
        told += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "What is my name?"},
        ]
        second = litellm.completion(messages=told, **common)
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert "Anna" in second.choices[0].message.content, second
        kept.write_text(json.dumps([*told, {"role": "assistant", "content": second.choices[0].message.content}]))
        assert cached > 15, second.usage
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=told, stream=True, **common)
        )
        assert streamed == second.choices[0].message.content, streamed
        asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
        calling = litellm.completion(messages=asked, tools=[WEATHER], **common).choices[0].message
        assert calling.tool_calls[0].function.name == "weather", calling
        asked += [calling, {"role": "tool", "tool_call_id": calling.tool_calls[0].id, "content": "sunny"}]
        assert litellm.completion(messages=asked, tools=[WEATHER], **common).choices[0].message.content
        if provider == "openai":
            schema = {"name": "colour", "schema": COLOUR, "strict": True}
            said = litellm.completion(
                messages=[{"role": "user", "content": "My favourite colour is red."}],
                response_format={"type": "json_schema", "json_schema": schema},
                **common,
            )
            assert said.choices[0].message.content == '{"colour": "red"}', said
        print(f"LiteLLM ({provider}): turns, stream, tool; cached {cached}")


if __name__ == "__main__":
    main()
