"""A request's input from the wire: checked, measured, and given the digest by which a retry is recognized."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.inputs.conversation_messages import read_messages
from inference_svc.edge.inputs.sampling_messages import settings
from inference_svc.edge.inputs.thinking_messages import thinking_settings
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
from inference_svc.text.token_ids import TokenIds
from inference_svc.turns.turn_data import MessagesInput, PromptInput, TokensInput, TurnRequest

Input: TypeAlias = PromptInput | TokensInput | MessagesInput
_TOKEN_BYTES = 4


def read_tools(given: Sequence[pb.Tool]) -> list[Tool]:
    check_tool_count(len(given))
    return [Tool(tool.name, tool.description, tool.parameters_json) for tool in given]


def read_objects(given: Input, tools: Sequence[Tool]) -> GivenJson:
    if not isinstance(given, MessagesInput):
        if tools:
            raise InvalidArgument.of("tools", "only with messages; a prompt holds its tools in its text")
        return GivenJson()
    check_tools(tools)
    objects = GivenJson([*json_of_messages(given.messages, f"{given.name}.messages"), *json_of_tools(tools)])
    objects.check_size()
    return objects


def input_bytes(given: Input, tools: Sequence[Tool]) -> int:
    if isinstance(given, PromptInput):
        return utf8_bytes(given.prompt)
    if isinstance(given, TokensInput):
        return _TOKEN_BYTES * len(given.token_ids)
    return sum(message.ByteSize() for message in given.messages) + sum(map(tool_bytes, tools))


def read_input(request: pb.GenerateRequest | pb.CountTokensRequest | pb.WarmRequest, max_prompt_bytes: int) -> Input:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument.of("input", "expected prompt, prompt_token_ids, messages or append_messages")
    if kind == "prompt_token_ids":
        tokens = TokenIds(request.prompt_token_ids.ids)
        check_token_ids(tokens, kind)
        check_size(kind, _TOKEN_BYTES * len(tokens), max_prompt_bytes)
        return TokensInput(tokens)
    if kind == "prompt":
        prompt = request.prompt  # read once: each access decodes it again
        if not prompt:
            raise InvalidArgument.of("prompt", "expected text, got none")
        check_size("prompt", utf8_bytes(prompt), max_prompt_bytes)
        return PromptInput(prompt)
    field = f"{kind}.messages"
    check_counts(getattr(request, kind).messages, field)
    given = MessagesInput(read_messages(getattr(request, kind).messages, field), is_append=kind == "append_messages")
    check_size(kind, sum(message.ByteSize() for message in given.messages), max_prompt_bytes)
    return given


def check_size(field: str, size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise InvalidArgument.of(
            field,
            f"expected at most {max_bytes} bytes, got {size_bytes}",
            reason="PROMPT_TOO_LARGE",
            size_bytes=size_bytes,
            max_prompt_bytes=max_bytes,
        )


def begun_reply(
    request: pb.GenerateRequest | pb.CountTokensRequest, given: Input
) -> tuple[Input, manifest_pb2.Message | None]:
    """The input without a reply that the caller has begun, and that. Raises InvalidArgument where there is none."""
    if not request.continue_final_message:
        return given, None
    field = "continue_final_message"
    if not isinstance(given, MessagesInput):
        raise InvalidArgument.of(field, "only with messages")
    *before, last = given.messages
    if last.role != "assistant" or not last.content.strip() or last.tool_calls:
        raise InvalidArgument.of(field, "expected a text of the assistant's as the last message")
    if not before:
        raise InvalidArgument.of(field, "expected a message before the assistant's")
    return replace(given, messages=tuple(before)), last


def check_token_ids(given: TokenIds, field: str, vocabulary_size: int = 1 << 32) -> None:
    """Raise InvalidArgument for no tokens, and for one that the model does not have."""
    if not given:
        raise InvalidArgument.of(field, "expected at least one token")
    if given.largest >= vocabulary_size:
        raise InvalidArgument.of(field, f"expected token ids below {vocabulary_size}, got {given.largest}")


def check_known_tokens(turn: TurnRequest, vocabulary_size: int) -> TurnRequest:
    """The turn. Raises InvalidArgument for a prompt of tokens that the model does not have."""
    if isinstance(turn.input, TokensInput):
        check_token_ids(turn.input.token_ids, turn.input.name, vocabulary_size)
    return turn


def turn_input_digest(request: pb.GenerateRequest, given: Input, tools: Sequence[Tool]) -> str:
    """The input's digest, sampling included: with other settings the reply is another."""
    given_settings = settings(request)
    if request.HasField("base_version"):
        given_settings.append(("base_version", str(request.base_version)))
    if request.HasField("volatile"):
        given_settings.append(("volatile", ",".join(sorted(set(request.volatile.names)))))
    given_settings += thinking_settings(request)
    if request.continue_final_message:
        given_settings.append(("continue_final_message", "True"))
    if isinstance(given, PromptInput):
        return input_digest("prompt", given.prompt, (), tools, given_settings)
    if isinstance(given, TokensInput):
        return input_digest("tokens", " ".join(map(str, given.token_ids)), (), tools, given_settings)
    return input_digest("append" if given.is_append else "messages", "", given.messages, tools, given_settings)
