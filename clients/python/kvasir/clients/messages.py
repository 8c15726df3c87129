"""Messages of a conversation in Python's own terms: words for roles, and a text for its parts."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from kvasir.common.v1 import message_pb2
from kvasir.errors import InvalidArgument

GivenMessage = message_pb2.Message | Mapping[str, Any]
_ROLES = {
    "system": message_pb2.ROLE_SYSTEM,
    "user": message_pb2.ROLE_USER,
    "assistant": message_pb2.ROLE_ASSISTANT,
    "tool": message_pb2.ROLE_TOOL,
}


def message(
    role: str,
    content: str | Sequence[message_pb2.Part] = "",
    *,
    name: str = "",
    tool_calls: Iterable[message_pb2.ToolCall | Mapping[str, str]] = (),
    tool_call_id: str = "",
    reasoning: str = "",
) -> message_pb2.Message:
    """One message; `role` is system, user, assistant or tool. `reasoning`: what an assistant thought before it. Raises
    InvalidArgument for another role."""
    if role not in _ROLES:
        raise InvalidArgument.of("role", f"expected one of {', '.join(_ROLES)}, got {role[:40]!r}")
    calls = [call if isinstance(call, message_pb2.ToolCall) else message_pb2.ToolCall(**call) for call in tool_calls]
    # An answer that only calls tools has no text, not an empty one.
    parts = ([message_pb2.Part(text=content)] if content else []) if isinstance(content, str) else content
    return message_pb2.Message(
        role=_ROLES[role], parts=parts, name=name, tool_calls=calls, tool_call_id=tool_call_id, reasoning=reasoning
    )


_ARGUMENTS = tuple(inspect.signature(message).parameters)


def message_list(given: Sequence[GivenMessage], field_name: str) -> list[message_pb2.Message]:
    """Messages, or mappings of the arguments of `message`. Raises InvalidArgument that names the message."""
    found = []
    for index, each in enumerate(given):
        if not isinstance(each, message_pb2.Message | Mapping):
            problem = f"expected a message or a mapping, got {type(each).__name__}"
            raise InvalidArgument.of(f"{field_name}[{index}]", problem)
        try:
            found.append(each if isinstance(each, message_pb2.Message) else _of_mapping(each))
        except InvalidArgument as error:
            field = f"{field_name}[{index}].{error.field}"
            raise InvalidArgument(f"{field_name}[{index}].{error.message}", field=field) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument.of(f"{field_name}[{index}]", unheld(error)) from None
    return found


def _of_mapping(given: Mapping[str, Any]) -> message_pb2.Message:
    if unknown := given.keys() - _ARGUMENTS:
        raise InvalidArgument.of(str(min(unknown))[:40], f"a message has only {', '.join(_ARGUMENTS)}")
    if "role" not in given:
        raise InvalidArgument.of("role", f"expected one of {', '.join(_ROLES)}, got none")
    return message(**given)


def unheld(error: Exception) -> str:
    """Why a protobuf message does not hold a value."""
    if isinstance(error, UnicodeError):
        return "a text or a name is not valid UTF-8"
    return f"{type(error).__name__}: {str(error)[:200]}"


def text_of(said: message_pb2.Message) -> str:
    return "".join(part.text for part in said.parts)


def enum_word(said: ProtoMessage, field: str) -> str:
    """The value of an enum field in small letters, without its type's name: `SNAPSHOT_STATE_PENDING` as `pending`."""
    values = said.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number  # type: ignore[union-attr]
    return str(values[getattr(said, field)].name.removeprefix(values[0].name.removesuffix("UNSPECIFIED")).lower())
