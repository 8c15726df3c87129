"""OpenAI's chat completions: the request as a turn, and the turn's events as a completion or as its chunks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from kvasir.clients import Choice, Reply
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import Field

from kvasir_gateway import turn as turns
from kvasir_gateway.chunks import Chunks
from kvasir_gateway.reading.thinking import BUDGET, EFFORT, MODE, SETTINGS, Thinking, effort_of, settings_of
from kvasir_gateway.reading.tolerance import Reading

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ANY_OBJECT = '{"type": "object"}'
DONE = "data: [DONE]\n\n"
# Fields of a Sampling that have its names.
_PENALTIES = {"repetition_penalty", "frequency_penalty", "presence_penalty"}
_AS_THE_ENGINE = {"temperature", "top_p", "n", "top_k", "min_p", *_PENALTIES}

Content = str | list[turns.FreeObject] | None


class CalledFunction(turns.Lenient):
    name: str
    arguments: str


class MadeCall(turns.Lenient):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(turns.Lenient):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = Field(None, description="The assistant's thoughts, a string; also as `reasoning`.")
    reasoning: Any = None
    function_call: None = Field(None, description="Refused unless null; see tool_calls.")
    audio: None = Field(None, description="Refused unless null: this model reads text alone.")


class OfferedFunction(turns.Body):
    name: Annotated[str, MinLen(1), MaxLen(128)]
    description: str | None = None
    parameters: turns.FreeObject | None = None
    strict: bool | None = Field(None, description="Arguments fit the schema, where the model's format allows it.")


class ChatTool(turns.Body):
    type: Literal["function"]
    function: OfferedFunction


class StreamOptions(turns.Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SchemaFormat(turns.Body):
    name: str
    schema_: turns.FreeObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(turns.Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class ThinkingSetting(turns.Body):
    """How much the model reasons. A budget ends its thoughts after so many tokens."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: turns.TokenBudget | None = None

    @property
    def is_on(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class SamplingFields(turns.Body):
    """The settings that chat completions and completions share."""

    model: Annotated[str, MinLen(1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: turns.TokenCount | None = None
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Ge(0), Le(1)] | None = None
    n: Annotated[int, Ge(1), Le(8)] | None = None
    stop: str | Annotated[list[str], MaxLen(16)] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    user: str | None = None
    # Of this engine alone.
    top_k: turns.TopK | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: float | None = None
    speculation: turns.Speculation | None = Field(None, description='"off", "auto", or most tokens ahead.')
    return_token_ids: bool | None = Field(None, description="Also the tokens of prompt and reply.")

    def sampling(self, reading: Reading, max_tokens: int | None) -> dict[str, Any]:
        given = turns.given(
            **self.model_dump(include=_AS_THE_ENGINE),
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            seed=self.seed & (1 << 64) - 1 if self.seed is not None else None,
            logit_bias=_biases(self.logit_bias),
        )
        return reading.length(max_tokens) | given | turns.speculated(self.speculation)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(SamplingFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], MinLen(1)]
    max_completion_tokens: turns.TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(20)] | None = None
    tools: Annotated[list[ChatTool], MaxLen(128)] | None = None
    tool_choice: str | turns.FreeObject | None = Field(
        None, description='"auto", "none", "required", the function to call, or allowed_tools.'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call, which ends the reply.")
    response_format: ResponseFormat | None = None
    continue_final_message: bool | None = Field(None, description="The reply goes on from the last message.")
    reasoning_effort: str | None = Field(None, description="none is off; a degree is the template's, if it reads one.")
    thinking: ThinkingSetting | None = Field(None, description="As in /v1/messages.")
    enable_thinking: bool | None = None
    thinking_budget: turns.TokenBudget | None = Field(None, description="Most tokens of thoughts.")
    chat_template_kwargs: turns.FreeObject | None = Field(None, description="Settings that the chat template reads.")
    verbosity: str | None = Field(None, description="Ignored.")
    modalities: list[str] | None = Field(None, description='["text"] alone.')
    service_tier: str | None = None
    store: bool | None = None
    metadata: turns.FreeObject | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    def turn(self, reading: Reading) -> turns.Turn:
        """The engine's request. Raises InvalidArgument."""
        reading.ignore_unless(("medium",), verbosity=self.verbosity)
        turns.refuse_unless((["text"],), {"modalities": self.modalities})
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument.of("top_logprobs", "only with logprobs")
        tools = [
            turns.function_tool(t.function.name, t.function.description, t.function.parameters, t.function.strict)
            for t in self.tools or ()
        ]
        tools, tool_choice = offered(tools, self.tool_choice, self.parallel_tool_calls)
        messages, begun = said(self.messages, reading), None
        if self.continue_final_message:
            messages, begun = turns.begun_reply(messages)
        return turns.Turn(
            model=self.model,
            messages=messages,
            begun=begun,
            tools=tuple(tools),
            tool_choice=tool_choice,
            sampling={
                **self.sampling(reading, self.max_completion_tokens or self.max_tokens),
                **turns.given(logprobs=self.logprobs, top_logprobs=self.top_logprobs),
            },
            thinking=self._thinking(reading),
            json_schema=turns.format_of_text(_schema(self.response_format), tool_choice),
            is_streamed=bool(self.stream),
            returns_token_ids=bool(self.return_token_ids),
            hint=self.prompt_cache_key or "",
        )

    def _thinking(self, reading: Reading) -> Thinking | None:
        """Of several fields for one thing the most definite counts."""
        by_effort, effort = effort_of(self.reasoning_effort, "reasoning_effort", reading)
        asked = self.thinking or ThinkingSetting(type="adaptive")
        switches = {"enable_thinking": self.enable_thinking, "thinking": asked.is_on, "reasoning_effort": by_effort}
        switch = next((name for name, value in switches.items() if value is not None), "thinking")
        budgets = {"thinking_budget": self.thinking_budget, "thinking.budget_tokens": asked.budget_tokens}
        budget = next((name for name, value in budgets.items() if value is not None), "thinking_budget")
        settings = settings_of(self.chat_template_kwargs, "chat_template_kwargs", reading)
        if all(value is None for value in (*switches.values(), *budgets.values())) and not (effort or settings):
            return None
        return Thinking(
            is_on=switches[switch],
            most_tokens=budgets[budget],
            effort=effort,
            settings=settings,
            names={MODE: switch, BUDGET: budget, EFFORT: "reasoning_effort", SETTINGS: "chat_template_kwargs."},
            is_strict=reading.is_strict,
        )


def said(messages: Sequence[ChatMessage], reading: Reading, field: str = "messages") -> tuple[turns.Said, ...]:
    """The messages as the engine knows them. Raises InvalidArgument that names what is no text."""
    return tuple(
        turns.Said(
            role=(role := _ROLES[message.role]),
            content=reading.content(role, turns.texts_of(message.content, f"{field}[{number}].content")),
            name=message.name or "",
            tool_calls=tuple(_made_calls(message.tool_calls or (), f"{field}[{number}].tool_calls")),
            tool_call_id=message.tool_call_id or "",
            reasoning=_thoughts(message),
        )
        for number, message in enumerate(messages)
    )


def _made_calls(calls: Sequence[MadeCall], where: str) -> Iterator[turns.ToolUse]:
    for number, call in enumerate(calls):
        place = f"{where}[{number}].function.arguments"
        yield turns.ToolUse(call.id, call.function.name, call.function.arguments, place)


def _thoughts(message: ChatMessage) -> str:
    """Other servers have objects in these fields, which mean nothing here."""
    given = (each for each in (message.reasoning_content, message.reasoning) if isinstance(each, str) and each)
    return next(given, "") if message.role == "assistant" else ""


def offered(tools: list[pb.Tool], choice: object, parallel: bool | None) -> tuple[list[pb.Tool], pb.ToolChoice | None]:
    """The tools that the model may call, and what it must. Raises InvalidArgument for what cannot be enforced."""
    if choice == "none":
        return tools, turns.NO_CALLS if tools else None
    one_call = parallel is False
    if choice == "required":
        return tools, turns.forced_calls(None, one_call=one_call)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return tools, turns.forced_calls(_name_of(choice), one_call=True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # the Responses API has them beside the type
        where = "tool_choice" if allowed is choice else "tool_choice.allowed_tools"
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
            raise InvalidArgument.of(f"{where}.tools", "expected a list of tools")
        turns.refuse_unless(("auto", "required"), {f"{where}.mode": allowed.get("mode")})
        names = _names_among(tools, allowed["tools"], f"{where}.tools")
        if allowed.get("mode") == "required":
            return tools, turns.forced_calls(None, one_call=one_call, names=names)
        return tools, turns.free_calls(tools, one_call=one_call, names=names)
    turns.refuse_unless(("auto", {"type": "auto"}), {"tool_choice": choice})
    return tools, turns.free_calls(tools, one_call=one_call)


def _names_among(tools: Sequence[pb.Tool], given: Sequence[object], where: str) -> list[str]:
    """Raises InvalidArgument for a name of none. Without tools there is nothing to choose."""
    names, known = [_name_of(each) for each in given], {tool.name for tool in tools}
    for number, name in enumerate(names):
        if known and name not in known:
            raise InvalidArgument.of(f"{where}[{number}]", f"expected one of the tools, got {name[:128]!r}")
    return names


def _name_of(tool: object) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None  # the Responses API has the name beside
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgument.of("tool_choice.name", "expected a string")
    return str(function["name"])


def whole(asked: turns.Asked, reply: Reply, *, wants_ids: bool = False) -> dict[str, Any]:
    ids = {"prompt_token_ids": list(reply.started.prompt_token_ids)} if wants_ids else {}
    return {
        **head("chatcmpl", "chat.completion", asked, reply.started),
        "choices": [
            {**_choice(number, choice), **token_ids(choice.token_ids, wants_ids)}
            for number, choice in enumerate(reply.choices)
        ],
        "usage": usage(reply),
        **ids,
    }


class CompletionsChunks(Chunks):
    """What chat completions and completions have in common as chunks. `kind`: how their ids begin, and their object."""

    kind = ("", "")

    def __init__(self, asked: turns.Asked, *, wants_usage: bool, wants_ids: bool = False) -> None:
        super().__init__(asked)
        self._wants_usage, self._wants_ids = wants_usage, wants_ids

    def end(self) -> str:
        return (self._frame([], usage(self._reply)) if self._wants_usage else "") + DONE

    def _wait(self) -> str:
        return turns.comment("prefill")

    def _frame(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None, **more: Any) -> str:
        chunk = {**head(*self.kind, self._asked, self._reply.started), "choices": choices, **more}
        return turns.sse({**chunk, "usage": used} if self._wants_usage else chunk)


class ChatChunks(CompletionsChunks):
    kind = ("chatcmpl", "chat.completion.chunk")

    def __init__(self, asked: turns.Asked, **wants: bool) -> None:
        super().__init__(asked, **wants)
        self._begun: set[int] = set()

    def _begin(self) -> str:
        told = {"prompt_token_ids": list(self._reply.started.prompt_token_ids)} if self._wants_ids else {}
        return self._chunk(0, self._opened(0), told=told)

    def _delta(self, delta: pb.Delta) -> str:
        fields = self._opened(delta.choice)
        if delta.text:
            fields["content"] = delta.text
        if delta.reasoning_text:
            fields["reasoning_content"] = delta.reasoning_text
        ids = token_ids(delta.token_ids, self._wants_ids)
        if not fields and not delta.logprobs and not any(ids.values()):
            return ""
        return self._chunk(delta.choice, {**fields}, logprobs=_logprobs(delta.logprobs), ids=ids)

    def _finish(self, finished: pb.Finished) -> str:
        fields, frames = self._opened(finished.choice), ""
        if finished.tool_calls:
            fields["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls(finished))]
        if fields:
            frames = self._chunk(finished.choice, fields)
        told = turns.not_stored(finished)
        return frames + self._chunk(finished.choice, {}, turns.finish_reason(finished), told=told)

    def _opened(self, choice: int) -> dict[str, Any]:
        if choice in self._begun:
            return {}
        self._begun.add(choice)
        return {"role": "assistant", "content": ""}

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        ids: Mapping[str, Any] = MappingProxyType({}),
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        each = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **ids}
        return self._frame([each], **told)


def head(prefix: str, kind: str, asked: turns.Asked, started: pb.Started) -> dict[str, Any]:
    """What completions and their chunks begin with."""
    facts = {"id": f"{prefix}-{asked.request_id}", "object": kind, "created": asked.created}
    return {**facts, "model": started.model or asked.model}


def usage(reply: Reply) -> dict[str, Any]:
    """Tokens of the prompt once, and of all choices together."""
    prompt_tokens, used = reply.started.prompt_tokens, [choice.finished.usage for choice in reply.choices]
    completion_tokens = sum(each.completion_tokens for each in used)
    drafted, right = (sum(each.drafted_tokens for each in used), sum(each.accepted_draft_tokens for each in used))
    details = {"accepted_prediction_tokens": right, "rejected_prediction_tokens": drafted - right} if drafted else {}
    if reasoning_tokens := sum(choice.reasoning_tokens for choice in reply.choices):
        details["reasoning_tokens"] = reasoning_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.started.cached_tokens},
        **({"completion_tokens_details": details} if details else {}),
    }


def calls(finished: pb.Finished) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
        for call in finished.tool_calls
    ]


def token_ids(ids: Sequence[int], wanted: bool) -> dict[str, Any]:
    return {"token_ids": list(ids)} if wanted else {}


def schema_text(schema: dict[str, Any] | None) -> str:
    return json.dumps(schema) if schema is not None else _ANY_OBJECT


def _choice(number: int, choice: Choice) -> dict[str, Any]:
    made = calls(choice.finished)
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if made else ""), "refusal": None}
    if choice.reasoning_text:
        message["reasoning_content"] = choice.reasoning_text
    if made:
        message["tool_calls"] = made
    reason = turns.finish_reason(choice.finished)
    return {"index": number, "message": message, "logprobs": _logprobs(choice.logprobs), "finish_reason": reason}


def _logprobs(told: Sequence[pb.TokenLogprobs]) -> dict[str, Any] | None:
    """None where they were not requested."""
    return {"content": spelled(told), "refusal": None} if told else None


def spelled(told: Sequence[pb.TokenLogprobs]) -> list[dict[str, Any]]:
    """Tokens, each with the likeliest in its place."""
    return [{**_spelled(each), "top_logprobs": list(map(_spelled, each.top))} for each in told]


def _spelled(token: pb.TokenLogprobs | pb.TokenLogprob) -> dict[str, Any]:
    """A token may be a part of a character: its bytes show that, and its text cannot."""
    text = token.spelling.decode("utf-8", "replace")
    return {"token": text, "logprob": token.logprob, "bytes": list(token.spelling)}


def _schema(asked: ResponseFormat | None) -> str | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _ANY_OBJECT
    if asked.json_schema is None:
        raise InvalidArgument.of("response_format.json_schema", "expected a schema")
    return schema_text(asked.json_schema.schema_)


def _biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    if not biases:
        return None
    if any(not token.isascii() or not token.isdigit() or len(token) > 10 or int(token) >= 1 << 32 for token in biases):
        raise InvalidArgument.of("logit_bias", "expected token ids as keys")
    return {int(token): bias for token, bias in biases.items()}
