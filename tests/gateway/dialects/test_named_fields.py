"""What the engine refuses is named as the caller's own API names it, where the caller wrote it."""

from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Front
from tests.gateway.dialects.test_tolerance import CHAT, COMPLETIONS, HELLO, LEAST, MESSAGES, RESPONSES
from tests.gateway.serving import MODEL

OLLAMA = "/api/chat"
NONE = {"type": "object", "properties": {"a": {"type": "nothing"}}}
CUT = '{"place": "Os'
CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": CUT}}]}
ITEMS: list[Any] = [
    *({"role": "user", "content": "Look."}, {"type": "reasoning", "content": []}),
    *(
        {"type": "function_call", "call_id": name, "name": "look", "arguments": text}
        for name, text in zip("ab", ("{}", CUT), strict=True)
    ),
]


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (CHAT, {"messages": [*HELLO, CALLED, *HELLO]}, "messages[1].tool_calls[0].function.arguments"),
        (CHAT, {"stop": ["", "a"]}, "stop[0]"),
        (CHAT, {"repetition_penalty": 3}, "repetition_penalty"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NONE}}},
            "response_format.json_schema.schema",
        ),
        (COMPLETIONS, {"prompt": [99_999_999]}, "prompt"),
        (RESPONSES, {"instructions": "Be brief.", "input": ITEMS}, "input[3].arguments"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": NONE}}}, "text.format.schema"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": NONE}}},
            "output_config.format.schema",
        ),
        (OLLAMA, {"options": {"stop": [""]}}, "options.stop[0]"),
        (OLLAMA, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        (OLLAMA, {"format": NONE}, "format"),
    ],
)
def test_an_engines_refusal_names_the_field_that_the_caller_wrote(
    front: Front, path: str, change: dict[str, Any], field: str
) -> None:
    body = {**LEAST.get(path, {"model": MODEL, "messages": HELLO}), **change}
    answer = httpx.post(front.gateway.url + path, json=body, headers=front.bearer(), timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error if path == OLLAMA else error["message"]).startswith(f"{field}: "), error
    if path in (CHAT, COMPLETIONS, RESPONSES):
        assert error["param"] == field
    assert CUT not in front.gateway.log + front.house.engine.log
