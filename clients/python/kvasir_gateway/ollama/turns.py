"""Ollama's chat and generate: requests as turns, and the turn's events as lines of JSON."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from google.protobuf.duration_pb2 import Duration
from kvasir.clients import Reply
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import Field

from kvasir_gateway import turn as turns
from kvasir_gateway.chunks import Chunks
from kvasir_gateway.openai.chat import schema_text, spelled
from kvasir_gateway.reading.thinking import EFFORT, MODE, Thinking, effort_of
from kvasir_gateway.reading.tolerance import Reading

_REASONS = {**turns.REASONS, pb.FINISH_REASON_TOOL_CALLS: "stop"}
_MOST_TOKENS = 1 << 24  # that the engine can apply
_MAX_REPEAT_LAST_N = 4096
# Fields of a Sampling that have its names.
_AS_THE_ENGINE = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"}
_ONE_ALONE = Field(None, description="1 alone.")
_NO_IMAGES = Field(None, description="Refused unless empty: this model reads text alone.")

ModelName = Annotated[str, MinLen(1)]


class OllamaFunction(turns.Lenient):
    name: str
    arguments: turns.FreeObject


class OllamaCall(turns.Lenient):
    id: str = ""
    function: OllamaFunction


class OllamaMessage(turns.Lenient):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = _NO_IMAGES
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOffer(turns.Lenient):
    name: Annotated[str, MinLen(1), MaxLen(128)]
    description: str | None = None
    parameters: turns.FreeObject | None = None


class OllamaTool(turns.Lenient):
    type: Literal["function"] = "function"
    function: OllamaOffer


class OllamaOptions(turns.Body):
    """What has no line here (num_ctx, num_gpu, …) is ignored and reported."""

    num_predict: int | None = Field(default=None, description="Below 0, or omitted: as many as fit.")
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Ge(0), Le(1)] | None = None
    top_k: turns.TopK | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    seed: int | None = Field(default=None, description="-1: random.")
    stop: str | Annotated[list[str], MaxLen(16)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Ge(-1), Le(turns.MAX_INT32)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    speculation: turns.Speculation | None = None
    mirostat: float | None = Field(default=None, description="0 alone.")
    typical_p: float | None = _ONE_ALONE
    tfs_z: float | None = _ONE_ALONE

    def sampling(self, reading: Reading) -> dict[str, Any]:
        turns.refuse_unless((0,), {"options.mirostat": self.mirostat})
        turns.refuse_unless((1,), {"options.typical_p": self.typical_p, "options.tfs_z": self.tfs_z})
        return {
            **self._length(reading),
            **turns.given(
                **self.model_dump(include=_AS_THE_ENGINE),
                seed=self.seed & (1 << 64) - 1 if self.seed not in (None, -1) else None,
                stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            ),
            **self._penalty(),
            **turns.speculated(self.speculation),
        }

    def _length(self, reading: Reading) -> dict[str, Any]:
        if self.num_predict is not None and self.num_predict > 0:
            return reading.length(min(self.num_predict, _MOST_TOKENS))
        if self.num_predict == 0 or (self.num_predict is not None and reading.is_strict):
            raise InvalidArgument.of("options.num_predict", "expected 1 or more")
        return {} if reading.is_strict else reading.length(_MOST_TOKENS)

    def _penalty(self) -> dict[str, Any]:
        """-1 counts the whole context, and here the most that is counted; 0 none of it."""
        if self.repeat_penalty is None or self.repeat_last_n == 0:
            return {}
        last = self.repeat_last_n
        tokens = None if last is None else min(last, _MAX_REPEAT_LAST_N) if last > 0 else _MAX_REPEAT_LAST_N
        return turns.given(repetition_penalty=self.repeat_penalty, repetition_tokens=tokens)


class OllamaRequest(turns.Body):
    """What chat and generate have in common."""

    model: ModelName
    stream: bool | None = Field(None, description="Left out: true.")
    format: Literal["", "json"] | turns.FreeObject | None = Field(None, description='"json", or a JSON schema.')
    options: OllamaOptions | None = None
    think: bool | str | None = Field(None, description="true, false, or an effort.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(20)] | None = None
    keep_alive: float | str | None = Field(None, description="Ignored: models stay loaded.")

    @property
    def shows_thinking(self) -> bool:
        return self.think is not False

    def thinking(self, reading: Reading) -> Thinking | None:
        is_on, effort = effort_of(self.think, "think", reading) if isinstance(self.think, str) else (self.think, "")
        if is_on is None:
            return None
        return Thinking(is_on=is_on, effort=effort, names={MODE: "think", EFFORT: "think"}, is_strict=reading.is_strict)

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    def sampling(self, reading: Reading) -> dict[str, Any]:
        reading.ignore_unless((), keep_alive=self.keep_alive)
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument.of("top_logprobs", "only with logprobs")
        options = self.options or OllamaOptions()
        return options.sampling(reading) | turns.given(logprobs=self.logprobs, top_logprobs=self.top_logprobs)

    @property
    def reply_schema(self) -> str | None:
        if not self.format and self.format != {}:
            return None
        return schema_text(None if self.format == "json" else self.format)  # type: ignore[arg-type]  # not a text


class OllamaChat(OllamaRequest):
    """The body of /api/chat."""

    messages: list[OllamaMessage] | None = Field(None, description="None: whether the model is there.")
    tools: Annotated[list[OllamaTool], MaxLen(128)] | None = None

    def turn(self, reading: Reading) -> turns.Turn | None:
        """What the engine is asked; None: nothing is to be generated. Raises InvalidArgument."""
        if not self.messages:
            return None
        messages, begun = tuple(said(self.messages, reading)), None
        if self.messages[-1].role == "assistant":
            messages, begun = turns.begun_reply(messages)
        offers = [tool.function for tool in self.tools or ()]
        tools = tuple(turns.function_tool(each.name, each.description, each.parameters) for each in offers)
        return turns.Turn(
            model=named(self.model),
            messages=messages,
            begun=begun,
            tools=tools,
            sampling=self.sampling(reading),
            thinking=self.thinking(reading),
            json_schema=self.reply_schema,
            is_streamed=self.is_streamed,
        )


class OllamaGenerate(OllamaRequest):
    """The body of /api/generate."""

    prompt: str = Field("", description="Empty: whether the model is there.")
    system: str | None = None
    raw: bool | None = Field(None, description="true: the prompt as it is, without the model's template.")
    suffix: str | None = Field(None, description="Refused.")
    template: str | None = Field(None, description="Refused.")
    context: list[int] | None = Field(None, description="Refused unless empty; see /api/chat.")
    images: list[str] | None = _NO_IMAGES

    def turn(self, reading: Reading) -> turns.Turn | None:
        """What the engine is asked; None: nothing is to be generated. Raises InvalidArgument."""
        turns.refuse_unless(("",), {"suffix": self.suffix, "template": self.template})
        turns.refuse_unless(([],), {"context": self.context, "images": self.images})
        if not self.prompt:
            return None
        system = reading.content("system", [self.system]) if self.system else ""
        if self.raw:
            turns.refuse_unless(("",), {"system": self.system})
            reading.ignore_unless((), think=self.think)
        opening = (turns.Said("system", system),) if system else ()
        return turns.Turn(
            model=named(self.model),
            messages=() if self.raw else (*opening, turns.Said("user", self.prompt)),
            prompt=self.prompt if self.raw else "",
            sampling=self.sampling(reading),
            thinking=None if self.raw else self.thinking(reading),
            json_schema=self.reply_schema,
            is_streamed=self.is_streamed,
        )


def named(model: str) -> str:
    """Clients add this tag to names that have none."""
    return model.removesuffix(":latest") or model


def said(messages: Sequence[OllamaMessage], reading: Reading) -> Iterator[turns.Said]:
    """The messages as the engine knows them. Calls and results without ids belong together in their order."""
    unanswered: list[str] = []
    made = 0
    for number, message in enumerate(messages):
        turns.refuse_unless(([],), {f"messages[{number}].images": message.images})
        calls = []
        for call in message.tool_calls or ():
            # Nine letters and digits, as the strictest template wants them.
            call_id, made = call.id or f"call{made:05d}", made + 1
            calls.append(
                turns.ToolUse(call_id, call.function.name, json.dumps(call.function.arguments, ensure_ascii=False))
            )
        answers = message.tool_call_id or ""
        if message.role == "tool" and not answers and unanswered:
            answers = unanswered.pop(0)
        unanswered = [call.id for call in calls] or unanswered
        content = reading.content(message.role, [message.content or ""])
        thoughts = message.thinking or "" if message.role == "assistant" else ""
        yield turns.Said(message.role, content, message.tool_name or "", tuple(calls), answers, thoughts)


def whole(asked: turns.Asked, reply: Reply, *, is_chat: bool, shows_thinking: bool) -> dict[str, Any]:
    choice = reply.choices[0]
    thought = choice.reasoning_text if shows_thinking else ""
    return {
        **_head(asked.created, reply.started.model or asked.model),
        **_said(is_chat, choice.text, thought, choice.finished.tool_calls),
        **_ending(reply.started, choice.finished),
        **_logprobs(choice),
    }


class OllamaLines(Chunks):
    """A reply as objects, a line each."""

    def __init__(self, asked: turns.Asked, *, is_chat: bool, shows_thinking: bool) -> None:
        super().__init__(asked)
        self._is_chat, self._shows_thinking = is_chat, shows_thinking

    def _wait(self) -> str:
        return self._line("")

    def _delta(self, delta: pb.Delta) -> str:
        thought = delta.reasoning_text if self._shows_thinking else ""
        is_empty = not (delta.text or thought or delta.logprobs)
        return "" if is_empty else self._line(delta.text, thought, **_logprobs(delta))

    def _finish(self, finished: pb.Finished) -> str:
        calls = self._line("", calls=finished.tool_calls) if finished.tool_calls and self._is_chat else ""
        return calls + self._line("", **_ending(self._reply.started, finished), **turns.not_stored(finished))

    def _line(self, text: str, thought: str = "", calls: Sequence[Any] = (), **more: Any) -> str:
        head = _head(self._asked.created, self._model)
        return turns.json_line({**head, **_said(self._is_chat, text, thought, calls), "done": False, **more})


def loaded(created: int, model: str, *, is_chat: bool) -> dict[str, Any]:
    """The answer to a request that names nothing but the model."""
    return {**_head(created, model), **_said(is_chat, "", "", ()), "done": True, "done_reason": "load"}


def _head(created: int, model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")}


def _said(is_chat: bool, text: str, thought: str, calls: Sequence[Any]) -> dict[str, Any]:
    thinking = {"thinking": thought} if thought else {}
    if not is_chat:
        return {"response": text, **thinking}
    message: dict[str, Any] = {"role": "assistant", "content": text, **thinking}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": turns.arguments_object(call.arguments_json)}}
            for call in calls
        ]
    return {"message": message}


def _ending(started: pb.Started, finished: pb.Finished) -> dict[str, Any]:
    """Durations are whole nanoseconds. What a memory took to be read back is what its load took."""
    timings = finished.timings
    return {
        "done": True,
        "done_reason": turns.finish_reason(finished, _REASONS),
        "total_duration": _ns(timings.first_token) + _ns(timings.decode),
        "load_duration": _ns(timings.restore),
        "prompt_eval_count": started.prompt_tokens,
        "prompt_eval_duration": _ns(timings.prefill),
        "eval_count": finished.usage.completion_tokens,
        "eval_duration": _ns(timings.decode),
    }


def _ns(duration: Duration) -> int:
    return duration.seconds * 1_000_000_000 + duration.nanos


def _logprobs(part: Any) -> dict[str, Any]:
    return {"logprobs": spelled(part.logprobs)} if part.logprobs else {}
