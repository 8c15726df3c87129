"""A request's input from the wire: prompt, messages and tools are checked, measured, and given the digest by which a
retry is recognized.
"""

from collections.abc import Sequence

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.conversation_messages import read_messages
from inference_svc.edge.sampling_messages import settings
from inference_svc.text.conversation import (
    Tool,
    check_counts,
    check_tool_count,
    check_tools,
    input_digest,
    json_of_messages,
    json_of_tools,
    tool_bytes,
)
from inference_svc.text.given_json import GivenJson
from inference_svc.text.literal_text import utf8_bytes
from inference_svc.turns.turn_data import MessagesInput, PromptInput


def read_tools(given: Sequence[pb.Tool]) -> list[Tool]:
    check_tool_count(len(given))
    return [Tool(tool.name, tool.description, tool.parameters_json) for tool in given]


def read_objects(given: PromptInput | MessagesInput, tools: Sequence[Tool]) -> GivenJson:
    """The JSON of an input, short enough to be parsed."""
    if isinstance(given, PromptInput):
        if tools:
            raise InvalidArgument("tools: only with messages; a prompt holds its tools in its text", field="tools")
        return GivenJson()
    check_tools(tools)
    objects = GivenJson([*json_of_messages(given.messages, f"{given.name}.messages"), *json_of_tools(tools)])
    objects.check_size()
    return objects


def input_bytes(given: PromptInput | MessagesInput, tools: Sequence[Tool]) -> int:
    if isinstance(given, PromptInput):
        return utf8_bytes(given.prompt)
    return sum(message.ByteSize() for message in given.messages) + sum(map(tool_bytes, tools))


def read_input(
    request: pb.GenerateRequest | pb.CountTokensRequest | pb.WarmRequest, max_prompt_bytes: int
) -> PromptInput | MessagesInput:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input: expected prompt, messages or append_messages", field="input")
    if kind == "prompt":
        prompt = request.prompt  # read once: each access decodes it anew
        if not prompt:
            raise InvalidArgument("prompt: expected text, got none", field="prompt")
        _check_size("prompt", utf8_bytes(prompt), max_prompt_bytes)
        return PromptInput(prompt)
    field = f"{kind}.messages"
    check_counts(getattr(request, kind).messages, field)
    given = MessagesInput(read_messages(getattr(request, kind).messages, field), is_append=kind == "append_messages")
    _check_size(kind, sum(message.ByteSize() for message in given.messages), max_prompt_bytes)
    return given


def _check_size(field: str, size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise InvalidArgument(
            f"{field}: expected at most {max_bytes} bytes, got {size_bytes}",
            reason="PROMPT_TOO_LARGE",
            field=field,
            metadata={"size_bytes": str(size_bytes), "max_prompt_bytes": str(max_bytes)},
        )


def turn_input_digest(request: pb.GenerateRequest, given: PromptInput | MessagesInput, tools: Sequence[Tool]) -> str:
    """The input's digest, sampling included: with other settings the reply is another."""
    given_settings = settings(request)
    if request.HasField("base_version"):
        given_settings.append(("base_version", str(request.base_version)))
    if request.renew_template_date:
        given_settings.append(("renew_template_date", "True"))
    if isinstance(given, PromptInput):
        return input_digest("prompt", given.prompt, (), tools, given_settings)
    return input_digest("append" if given.is_append else "messages", "", given.messages, tools, given_settings)
