"""Conversations through the model's chat template, whole each time. A template gives text and never tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from blake3 import blake3
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.common.v1 import message_pb2
from kvasir.errors import InvalidArgument

from inference_svc.text.given_json import GivenJson, JsonField
from inference_svc.text.literal_text import Specials, utf8_bytes, without_guards
from inference_svc.text.prefix_matching import common_prefix_length
from inference_svc.text.templates.template_names import REASONING

_INPUT_TAG = b"kvasir.turn_input.v1"
_MAX_MESSAGES = 10_000
_MAX_TOOLS = 128
_MAX_TOOLS_BYTES = 1 << 20
_MARK = "\ufdd1kvasir goes on here "


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


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation in the form of templates: JSON parsed, and guards in callers' texts (`literal_text`)."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    specials: Specials
    begun: dict[str, Any] | None = None  # the reply as far as its caller has written it; its prompt ends with that

    def with_message(self, message: manifest_pb2.Message, objects: GivenJson) -> "Dialogue":
        return replace(self, messages=(*self.messages, _message_fields(message, objects, self.specials)), begun=None)


def dialogue(
    messages: Sequence[manifest_pb2.Message],
    tools: Sequence[Tool],
    objects: GivenJson,
    specials: Specials,
    begun: manifest_pb2.Message | None = None,
) -> Dialogue:
    """`objects`: all JSON of these messages and tools, parsed."""
    return Dialogue(
        tuple(_message_fields(message, objects, specials) for message in messages),
        tuple(tool_fields(tools, objects, specials.guarded_value)),
        specials,
        None if begun is None else _message_fields(begun, objects, specials),
    )


def check_counts(messages: Sequence[manifest_pb2.Message | message_pb2.Message], field: str) -> None:
    """Raise InvalidArgument for too many messages or calls: an empty one takes two bytes, and a microsecond of all."""
    if not messages:
        raise InvalidArgument.of(field, "expected at least one message")
    if len(messages) > _MAX_MESSAGES:
        raise InvalidArgument.of(field, f"expected at most {_MAX_MESSAGES} messages, got {len(messages)}")
    if (calls := sum(len(message.tool_calls) for message in messages)) > _MAX_MESSAGES:
        raise InvalidArgument.of(field, f"expected at most {_MAX_MESSAGES} tool calls in all, got {calls}")


def of_caller(messages: Iterable[manifest_pb2.Message]) -> tuple[manifest_pb2.Message, ...]:
    """Messages that a caller sent: none is a reply of this engine, whatever they claim."""
    return tuple(unclaimed(message) if message.is_reply else message for message in messages)


def json_of_messages(messages: Iterable[manifest_pb2.Message], field: str) -> Iterator[JsonField]:
    for index, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls):
            yield f"{field}[{index}].tool_calls[{number}].arguments_json", call.arguments_json


def json_of_tools(tools: Iterable[Tool]) -> Iterator[JsonField]:
    for index, tool in enumerate(tools):
        yield f"tools[{index}].parameters_json", tool.parameters_json


def check_tool_count(count: int) -> None:
    if count > _MAX_TOOLS:
        raise InvalidArgument.of("tools", f"expected at most {_MAX_TOOLS}, got {count}")


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise InvalidArgument, the field named, unless there are few enough tools and every one has a name."""
    check_tool_count(len(tools))
    if (size_bytes := sum(map(tool_bytes, tools))) > _MAX_TOOLS_BYTES:
        raise InvalidArgument.of("tools", f"expected at most {_MAX_TOOLS_BYTES} bytes, got {size_bytes}")
    for index, tool in enumerate(tools):
        if not 1 <= len(tool.name) <= 128:
            raise InvalidArgument.of(f"tools[{index}].name", f"expected 1 to 128 characters, got {len(tool.name)}")


def tool_bytes(tool: Tool) -> int:
    return sum(utf8_bytes(text) for text in (tool.name, tool.description, tool.parameters_json))


def render(template: ChatTemplate, conversation: Dialogue, *, add_generation_prompt: bool = True) -> str:
    """The text of a conversation; before a reply that was begun its own text takes the generation prompt's place.
    Raises InvalidArgument when the template refuses it or returns invalid text. A template may refuse a call that has
    both reasoning and an answer before it (gpt-oss): then these lose their reasoning.
    """
    if add_generation_prompt and conversation.begun is not None:
        return _begun_prompt(template, conversation, conversation.begun)
    try:
        return _rendered(template, conversation, conversation.messages, add_generation_prompt)
    except InvalidArgument:
        fewer = tuple(_without_both(message) for message in conversation.messages)
        if fewer == conversation.messages:
            raise
        return _rendered(template, conversation, fewer, add_generation_prompt)


def _begun_prompt(template: ChatTemplate, conversation: Dialogue, begun: dict[str, Any]) -> str:
    """The conversation up to the last message's text, and whether the template trims: its mark's space shows that."""
    marked = {**begun, "content": begun["content"] + _MARK}
    text = _rendered(template, conversation, (*conversation.messages, marked), False, is_settled=False)
    end = text.rfind(_MARK.strip())
    if end < 0:
        raise InvalidArgument.of("messages", "the model's chat template leaves out a begun reply")
    return conversation.specials.settled(text[:end] if text.startswith(_MARK, end) else text[:end].rstrip())


def _rendered(
    template: ChatTemplate,
    conversation: Dialogue,
    messages: Sequence[dict[str, Any]],
    add_generation_prompt: bool,
    *,
    is_settled: bool = True,
) -> str:
    try:
        text = template(list(messages), list(conversation.tools) or None, add_generation_prompt)
        text.encode()  # raises for half of a surrogate pair; later steps rely on valid text
        return conversation.specials.settled(text) if is_settled else text
    except InvalidArgument:
        raise
    except Exception as error:  # noqa: BLE001 - a template is a program from outside and may raise anything
        # The template's message may quote the conversation, so that only the kind of its error is reported.
        raise InvalidArgument.of(
            "messages", f"the model's chat template refused them ({type(error).__name__})"
        ) from None


def _without_both(message: dict[str, Any]) -> dict[str, Any]:
    is_both = REASONING in message and message["content"] and "tool_calls" in message
    return {key: value for key, value in message.items() if key != REASONING} if is_both else message


def lasting_chars(template: ChatTemplate, conversation: Dialogue, text: str) -> int | None:
    """Characters of the conversation's prompt `text` with which the next prompt will begin: all but the generation
    prompt, because templates often render it differently once the reply exists. None when the template hides it.
    """
    try:
        lasting = render(template, conversation, add_generation_prompt=False)
    except InvalidArgument:
        return None  # some templates render only conversations that need a reply
    return common_prefix_length(lasting, text)


def input_digest(
    kind: str,
    prompt: str,
    messages: Sequence[manifest_pb2.Message],
    tools: Sequence[Tool],
    settings: Sequence[tuple[str, str]],
) -> str:
    """BLAKE3-256 over a request's input, in hex: every field prefixed with its length as 8 bytes little-endian. In
    order: a tag, the kind of input, the prompt, each message's fields (reasoning where there is some), each tool's
    fields, and each setting's name and value; counts stand before repeated fields.
    """
    fields = [kind, prompt, str(len(messages))]
    for message in messages:
        fields += [message.role, message.content, message.name, message.tool_call_id, str(len(message.tool_calls))]
        for call in message.tool_calls:
            fields += [call.id, call.name, call.arguments_json]
        if message.reasoning:
            fields += ["reasoning", message.reasoning]
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


def tool_fields(
    tools: Sequence[Tool], objects: GivenJson, guarded: Callable[[Any], Any] = lambda value: value
) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": guarded(tool.name),
                "description": guarded(tool.description),
                "parameters": guarded(objects.object(tool.parameters_json)),
            },
        }
        for tool in tools
    ]


def _message_fields(message: manifest_pb2.Message, objects: GivenJson, specials: Specials) -> dict[str, Any]:
    guarded = specials.guarded_value
    # A reply is rendered as the model generated it: it may hold special tokens that the model generated itself.
    said: Callable[[Any], Any] = (lambda value: value) if message.is_reply else guarded
    fields: dict[str, Any] = {"role": message.role, "content": said(message.content)}
    if message.reasoning:
        fields[REASONING] = said(message.reasoning)
    if message.name:
        fields["name"] = guarded(message.name)
    if message.tool_call_id:
        fields["tool_call_id"] = guarded(message.tool_call_id)
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": guarded(call.id),  # a reply's too: it once began with its request's id, a caller's words
                "function": {"name": said(call.name), "arguments": said(objects.object(call.arguments_json))},
            }
            for call in message.tool_calls
        ]
    return fields


def unclaimed(message: manifest_pb2.Message) -> manifest_pb2.Message:
    found = manifest_pb2.Message()
    found.CopyFrom(message)
    found.ClearField("is_reply")
    found.content = without_guards(found.content)
    found.reasoning = without_guards(found.reasoning)
    return found
