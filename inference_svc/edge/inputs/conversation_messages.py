"""Converts messages between the wire's form and the one that is remembered."""

from collections.abc import Iterable, Sequence

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.common.v1 import message_pb2
from kvasir.errors import InvalidArgument

_MAX_PARTS = 10_000  # an empty one takes four bytes of a request, and a microsecond of every caller's time
_ROLES = {
    message_pb2.ROLE_SYSTEM: "system",
    message_pb2.ROLE_USER: "user",
    message_pb2.ROLE_ASSISTANT: "assistant",
    message_pb2.ROLE_TOOL: "tool",
}


def read_messages(given: Sequence[message_pb2.Message], field: str) -> tuple[manifest_pb2.Message, ...]:
    """Messages of a caller: none is a reply of this engine. Raises InvalidArgument that names the role or the part."""
    if (parts := sum(len(message.parts) for message in given)) > _MAX_PARTS:
        raise InvalidArgument.of(field, f"expected at most {_MAX_PARTS} parts in all, got {parts}")
    return tuple(_read(message, f"{field}[{index}]") for index, message in enumerate(given))


def write_calls(calls: Iterable[manifest_pb2.ToolCall]) -> list[message_pb2.ToolCall]:
    return [message_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json) for call in calls]


def _read(message: message_pb2.Message, where: str) -> manifest_pb2.Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidArgument.of(f"{where}.role", f"expected one of {', '.join(_ROLES.values())}, got {message.role}")
    if message.reasoning and role != "assistant":
        raise InvalidArgument.of(f"{where}.reasoning", "only an assistant's message has it")
    return manifest_pb2.Message(
        role=role,
        content="".join(_text(part, f"{where}.parts[{number}]") for number, part in enumerate(message.parts)),
        name=message.name,
        tool_calls=[
            manifest_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _text(part: message_pb2.Part, where: str) -> str:
    kind = part.WhichOneof("content")
    if kind == "text":
        return part.text
    if kind is None:
        raise InvalidArgument.of(where, "expected a text")
    raise InvalidArgument.of(f"{where}.{kind}", "the model takes text alone", reason="PART_NOT_SUPPORTED", kind=kind)
