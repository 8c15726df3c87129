"""Messages in, text out: conversations through the model's chat template, and replies back into messages.

The whole conversation is rendered each time; what of it is already remembered, the character match finds. A template
is asked for text and never for tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blake3 import blake3
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument

from inference_svc.prefix_matching import common_prefix_length

ROLES = ("system", "user", "assistant", "tool")

_INPUT_TAG = b"kvasir.turn_input.v1"
_MAX_MESSAGES = 10_000
_MAX_TOOLS = 128
_MAX_TOOLS_BYTES = 1 << 20  # parsing nested JSON holds up everything else, a second for a few MiB


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the template may offer to the model; `parameters_json` is a JSON schema object."""

    name: str
    description: str
    parameters_json: str


class ChatTemplate(Protocol):
    """Renders messages and tools, in the form of Hugging Face templates, to text. Raises anything when it cannot."""

    def __call__(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str: ...


def check_messages(messages: Sequence[manifest_pb2.Message], field: str) -> None:
    """Raise InvalidArgument, the field named, unless these are messages that may be rendered."""
    if not messages:
        raise InvalidArgument(f"{field}: expected at least one message", field=field)
    if len(messages) > _MAX_MESSAGES:
        raise InvalidArgument(f"{field}: expected at most {_MAX_MESSAGES} messages, got {len(messages)}", field=field)
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            where = f"{field}[{index}].role"
            raise InvalidArgument(
                f"{where}: expected one of {', '.join(ROLES)}, got {message.role[:40]!r}", field=where
            )
        for number, call in enumerate(message.tool_calls):
            _json_object(call.arguments_json, f"{field}[{index}].tool_calls[{number}].arguments_json")


def check_no_control_tokens(messages: Sequence[manifest_pb2.Message], field: str, special_texts: Sequence[str]) -> None:
    """Raise InvalidArgument, the field named, when a message spells one of the model's special tokens: rendered, it
    would be that token, and a user's words could end their message and begin a system's.

    What assistants said is not looked at: a model may have said such a token itself.
    """
    for index, message in enumerate(messages):
        content = "" if message.role == "assistant" else message.content
        parts = (("content", content), ("name", message.name), ("tool_call_id", message.tool_call_id))
        for part, text in parts:
            if found := next((special for special in special_texts if special in text), None):
                where = f"{field}[{index}].{part}"
                raise InvalidArgument(
                    f"{where}: expected plain text, got {found!r}, a special token of the model", field=where
                )


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise InvalidArgument, the field named, unless every tool has a name and a schema that is a JSON object."""
    if len(tools) > _MAX_TOOLS:
        raise InvalidArgument(f"tools: expected at most {_MAX_TOOLS}, got {len(tools)}", field="tools")
    if (size_bytes := sum(map(tool_bytes, tools))) > _MAX_TOOLS_BYTES:
        raise InvalidArgument(f"tools: expected at most {_MAX_TOOLS_BYTES} bytes, got {size_bytes}", field="tools")
    for index, tool in enumerate(tools):
        if not 1 <= len(tool.name) <= 128:
            raise InvalidArgument(
                f"tools[{index}].name: expected 1 to 128 characters, got {len(tool.name)}", field=f"tools[{index}].name"
            )
        _json_object(tool.parameters_json or "{}", f"tools[{index}].parameters_json")


def tool_bytes(tool: Tool) -> int:
    return sum(len(text.encode()) for text in (tool.name, tool.description, tool.parameters_json))


def render(
    template: ChatTemplate,
    messages: Sequence[manifest_pb2.Message],
    tools: Sequence[Tool],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation. Raises InvalidArgument when the template refuses it, or what it makes is no text."""
    try:
        text = template(
            [_message_fields(message) for message in messages],
            tool_fields(tools) or None,
            add_generation_prompt,
        )
        text.encode()  # half of a surrogate pair is no text, and what comes after this counts on text
        return text
    except InvalidArgument:
        raise
    except Exception as error:  # noqa: BLE001 - a template is a program from outside and may raise anything
        # The template's own words may quote the conversation: only the kind of its error is told.
        raise InvalidArgument(
            f"messages: the model's chat template refused them ({type(error).__name__})", field="messages"
        ) from None


def lasting_chars(
    template: ChatTemplate, messages: Sequence[manifest_pb2.Message], tools: Sequence[Tool], text: str
) -> int | None:
    """Characters of the conversation's prompt `text` that the next prompt surely begins with: all but what asks for the
    reply, which templates often write otherwise once the reply is there. None when the template does not say.
    """
    try:
        told = render(template, messages, tools, add_generation_prompt=False)
    except InvalidArgument:
        return None  # some templates render only what is to be answered
    return common_prefix_length(told, text)


def reply_message(
    template: ChatTemplate,
    messages: Sequence[manifest_pb2.Message],
    tools: Sequence[Tool],
    *,
    reply: str,
    told_text: str,
    tool_calls: Sequence[manifest_pb2.ToolCall],
    tool_start: str,
) -> manifest_pb2.Message:
    """The assistant's message to remember: the form that the template renders back to what was said, `told_text`.

    Structured tool calls where they render to the same characters; else the reply as it was, so that the next turn
    extends the memory instead of diverging from it. `tool_start` stands before the calls.
    """
    plain = manifest_pb2.Message(role="assistant", content=reply)
    if not tool_calls:
        return plain
    said = reply[: max(reply.find(tool_start), 0)]
    structured = manifest_pb2.Message(role="assistant", content=said, tool_calls=tool_calls)
    try:
        rendered = render(template, [*messages, structured], tools, add_generation_prompt=False)
    except (InvalidArgument, ValueError):
        return plain  # what the model wrote as arguments is no JSON object, or the template dislikes it
    return structured if rendered.startswith(told_text) else plain


def input_digest(
    kind: str,
    prompt: str,
    messages: Sequence[manifest_pb2.Message],
    tools: Sequence[Tool],
    settings: Sequence[tuple[str, str]],
) -> str:
    """BLAKE3-256 over a request's input, in hex: every field prefixed with its length as 8 bytes little-endian.

    In order: a tag, the kind of input, the prompt, each message's fields, each tool's fields, and each setting's name
    and value; counts stand before repeated fields.
    """
    fields = [kind, prompt, str(len(messages))]
    for message in messages:
        fields += [message.role, message.content, message.name, message.tool_call_id, str(len(message.tool_calls))]
        for call in message.tool_calls:
            fields += [call.id, call.name, call.arguments_json]
    fields.append(str(len(tools)))
    for tool in tools:
        fields += [tool.name, tool.description, tool.parameters_json]
    for setting in settings:
        fields += setting
    hasher = blake3()
    for data in (_INPUT_TAG, *(field.encode() for field in fields)):
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def _message_fields(message: manifest_pb2.Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments_json or "{}")},
            }
            for call in message.tool_calls
        ]
    return fields


def tool_fields(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates and parsers know them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters_json or "{}"),
            },
        }
        for tool in tools
    ]


def _json_object(text: str, field: str) -> None:
    try:
        value = json.loads(text or "{}")
        if isinstance(value, dict):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair (\ud800); no prompt can hold it.
        raise InvalidArgument(f"{field}: expected text, got half of a surrogate pair", field=field) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field}: expected a JSON object", field=field)
