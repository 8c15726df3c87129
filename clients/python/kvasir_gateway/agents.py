"""Kvasir's own API over HTTP: agents by name, as JSON of the contract's messages, and their turns."""

import json
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from kvasir.clients import Reply
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import ConfigDict, Field

from kvasir_gateway import turn as turns
from kvasir_gateway.chunks import ReplyStream
from kvasir_gateway.openai.chat import ChatMessage, ChatTool, said
from kvasir_gateway.reading.thinking import Thinking, settings_of
from kvasir_gateway.reading.tolerance import Reading

_MAX_INT64 = (1 << 63) - 1
_json = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
# Fields of GenerateOptions.
_MEMORY = {"expected_version", "base_version", "expect_existing", "replace_memory", "keep_partial"}
Version = Annotated[int, Ge(1), Le(_MAX_INT64)]


class OwnBody(turns.Body):
    """A request of this API, which no other client knows: what is not listed is refused."""

    model_config = ConfigDict(extra="forbid")


class AgentSampling(OwnBody):
    """The settings of the contract's Sampling; what is absent takes the engine's default."""

    max_tokens: turns.TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: turns.TopK | None = None
    min_p: float | None = None
    seed: Annotated[int, Ge(0), Le((1 << 64) - 1)] | None = None
    stop: Annotated[list[str], MaxLen(16)] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    speculation: turns.Speculation | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of a Sampling."""
        return turns.given(**self.model_dump(exclude={"speculation"})) | turns.speculated(self.speculation)


class AgentThinking(OwnBody):
    """The contract's Thinking."""

    mode: Literal["ON", "OFF"] | None = None
    budget_tokens: turns.TokenBudget | None = None
    effort: str = ""


class AgentTurn(OwnBody):
    """The body of /v1/agents/{agent_id}/generate: exactly one of prompt, messages and append_messages."""

    model: str = Field("", description="Empty: the loaded model.")
    prompt: Annotated[str, MinLen(1)] | None = None
    messages: Annotated[list[ChatMessage], MinLen(1)] | None = Field(None, description="The whole conversation.")
    append_messages: Annotated[list[ChatMessage], MinLen(1)] | None = Field(
        None, description="The new messages, which follow the agent's memory."
    )
    expected_version: Annotated[int, Ge(0), Le(_MAX_INT64)] | None = None
    base_version: Version | None = Field(None, description="Go on from this version instead of the newest.")
    expect_existing: bool = Field(False, description="Refuse an agent that remembers nothing yet.")
    replace_memory: bool = Field(False, description="Messages of another conversation replace the agent's.")
    memory_mode: Literal["READ_WRITE", "READ_ONLY", "NONE"] | None = None
    sampling: AgentSampling | None = None
    thinking: AgentThinking | None = None
    template_settings: turns.FreeObject | None = Field(None, description="Settings that the chat template reads.")
    tools: Annotated[list[ChatTool], MaxLen(128)] | None = None
    json_schema: turns.FreeObject | None = None
    regex: str | None = None
    keep_partial: bool = Field(False, description="Remember what was generated before a disconnect.")
    continue_final_message: bool = Field(False, description="The reply goes on from the assistant's last message.")
    stream: bool = Field(False, description="Answer with the contract's events, as server-sent events.")

    def turn(self, reading: Reading) -> turns.Turn:
        """The engine's request. Raises InvalidArgument."""
        inputs = [each for each in (self.prompt, self.messages, self.append_messages) if each is not None]
        if len(inputs) != 1:
            raise InvalidArgument.of("input", "expected exactly one of prompt, messages and append_messages")
        if self.json_schema is not None and self.regex is not None:
            raise InvalidArgument.of("regex", "expected json_schema or regex, got both")
        functions = [tool.function for tool in self.tools or ()]
        messages = said(self.messages or (), reading) + said(self.append_messages or (), reading, "append_messages")
        begun = None
        if self.continue_final_message:
            messages, begun = turns.begun_reply(messages, "continue_final_message")
        return turns.Turn(
            model=self.model,
            prompt=self.prompt or "",
            messages=messages,
            begun=begun,
            is_append=self.append_messages is not None,
            memory={
                **self.model_dump(include=_MEMORY),
                "memory_mode": pb.MemoryMode.Value(f"MEMORY_MODE_{self.memory_mode or 'UNSPECIFIED'}"),
            },
            sampling=self.sampling.settings if self.sampling is not None else {},
            thinking=self._thinking(reading),
            tools=tuple(
                turns.function_tool(each.name, each.description, each.parameters, each.strict) for each in functions
            ),
            json_schema=self.json_schema,
            regex=self.regex,
            is_streamed=self.stream,
        )

    def _thinking(self, reading: Reading) -> Thinking | None:
        if self.thinking is None and not self.template_settings:
            return None
        asked = self.thinking or AgentThinking()
        return Thinking(
            is_on=None if asked.mode is None else asked.mode == "ON",
            most_tokens=asked.budget_tokens,
            effort=asked.effort,
            settings=settings_of(self.template_settings, "template_settings", reading),
            is_strict=True,
        )


class ForkRequest(OwnBody):
    """The body of /v1/agents/{agent_id}/fork."""

    agent_id: Annotated[str, MinLen(1), MaxLen(256)] = Field(description="The new agent's name.")
    version: Version | None = Field(None, description="The version to begin with; left out: the newest.")


class RollbackRequest(OwnBody):
    """The body of /v1/agents/{agent_id}/rollback."""

    version: Version = Field(description="The version to make newest again, as a new one.")
    expected_version: Version | None = Field(None, description="The newest version as the caller knows it.")


def shown(message: Message) -> dict[str, Any]:
    """A message of the contract as JSON. Numbers of 64 bits are strings there."""
    return MessageToDict(message, preserving_proto_field_name=True)


def written(page: Message) -> bytes:
    """A page of a list as JSON. In any thread: each item is a call into C of its own, for a long one would keep the
    interpreter from the event loop."""
    fields = [
        f"{_json(name)}:[{','.join(map(_json, value))}]" if isinstance(value, list) else f"{_json(name)}:{_json(value)}"
        for name, value in shown(page).items()
    ]
    return f"{{{','.join(fields)}}}".encode()


def whole(asked: turns.Asked, reply: Reply) -> dict[str, Any]:
    """A turn's answer: the contract's first and last event, and the text between them."""
    return {
        "agent_id": asked.agent_id,
        "started": shown(reply.started),
        "text": reply.text,
        "reasoning_text": reply.reasoning_text,
        "finished": shown(reply.finished),
    }


class AgentEvents(ReplyStream):
    """The contract's events as server-sent events."""

    def frames(self, event: pb.GenerateResponse) -> str:
        return turns.sse(shown(event), event.WhichOneof("event") or "unknown")
