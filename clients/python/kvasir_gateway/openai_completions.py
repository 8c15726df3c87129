"""OpenAI's completions: a prompt as it is, without a chat template."""

from typing import Any

from kvasir.clients import Reply
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import Field

from kvasir_gateway.openai_chat import DONE, SamplingFields, usage
from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import Asked, Turn, comment, finish_reason, refuse_unless, sse


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    prompt: str | list[str] = Field(description="One text; special tokens in it are special.")
    suffix: str | None = Field(None, description="Refused.")
    echo: bool | None = Field(None, description="false alone.")
    best_of: int | None = Field(None, description="1 alone.")
    logprobs: int | None = Field(None, description="Refused: chat completions have them.")

    def turn(self, reading: Reading) -> Turn:
        """What the engine is asked. Raises InvalidArgument."""
        refuse_unless((False,), {"echo": self.echo})
        refuse_unless((1,), {"best_of": self.best_of})
        refuse_unless(("",), {"suffix": self.suffix})
        refuse_unless((), {"logprobs": self.logprobs})
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len(prompts) != 1 or not prompts[0]:
            raise InvalidArgument("prompt: expected one text, not empty", field="prompt")
        return Turn(
            model=self.model,
            prompt=prompts[0],
            sampling=self.sampling(reading, self.max_tokens),
            is_streamed=bool(self.stream),
        )


def whole(asked: Asked, reply: Reply) -> dict[str, Any]:
    """A completion."""
    choices = [
        _choice(number, choice.text, finish_reason(choice.finished)) for number, choice in enumerate(reply.choices)
    ]
    return {**_head(asked, reply.started), "choices": choices, "usage": usage(reply)}


class CompletionChunks:
    """A completion as chunks."""

    def __init__(self, asked: Asked, *, wants_usage: bool) -> None:
        self._asked = asked
        self._wants_usage = wants_usage
        self._reply = Reply()

    def frames(self, event: pb.GenerateResponse) -> str:
        match event.WhichOneof("event"):
            case "started":
                self._reply.started = event.started
                return comment("started")
            case "prefill_progress":
                return comment("prefill")
            case "delta":
                return self._frame([_choice(event.delta.choice, event.delta.text, None)])
            case _:
                self._reply.add(event)
                return self._frame([_choice(event.finished.choice, "", finish_reason(event.finished))])

    def end(self) -> str:
        return (self._frame([], usage(self._reply)) if self._wants_usage else "") + DONE

    def _frame(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> str:
        chunk = {**_head(self._asked, self._reply.started), "choices": choices}
        return sse({**chunk, "usage": used} if self._wants_usage else chunk)


def _head(asked: Asked, started: pb.Started) -> dict[str, Any]:
    model = started.model or asked.model
    return {"id": f"cmpl-{asked.request_id}", "object": "text_completion", "created": asked.created, "model": model}


def _choice(number: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": reason}
