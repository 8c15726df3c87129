"""OpenAI's completions: a prompt as it is, text or tokens, without a chat template."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

from annotated_types import Ge, Le
from kvasir.clients import Reply
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import Field

from kvasir_gateway.openai.chat import CompletionsChunks, SamplingFields, head, token_ids, usage
from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import Asked, Turn, comment, finish_reason, given, not_stored, refuse_unless

_KIND = ("cmpl", "text_completion")

TokenId = Annotated[int, Ge(0), Le((1 << 32) - 1)]


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="One text, in which special tokens are special, or one list of token ids."
    )
    suffix: str | None = Field(None, description="Refused.")
    echo: bool | None = Field(None, description="false alone.")
    best_of: int | None = Field(None, description="1 alone.")
    logprobs: Annotated[int, Ge(0), Le(20)] | None = None

    def turn(self, reading: Reading) -> Turn:
        """The engine's request. Raises InvalidArgument."""
        refuse_unless((False,), {"echo": self.echo})
        refuse_unless((1,), {"best_of": self.best_of})
        refuse_unless(("",), {"suffix": self.suffix})
        logprobs = {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        return Turn(
            model=self.model,
            prompt=self._only_prompt(),
            sampling={**self.sampling(reading, self.max_tokens), **given(**logprobs)},
            is_streamed=bool(self.stream),
            returns_token_ids=bool(self.return_token_ids),
        )

    def _only_prompt(self) -> str | Sequence[int]:
        prompts: Sequence[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if len(prompts) != 1 or not prompts[0]:
            raise InvalidArgument.of("prompt", "expected one prompt that is not empty: a text, or a list of token ids")
        only: str | Sequence[int] = prompts[0]
        return only


def whole(asked: Asked, reply: Reply, *, wants_ids: bool = False) -> dict[str, Any]:
    choices = []
    for number, choice in enumerate(reply.choices):
        ids = token_ids(choice.token_ids, wants_ids) | _prompt_ids(reply.started, wants_ids)
        logprobs = _logprobs(choice.logprobs, 0)
        choices.append(_choice(number, choice.text, finish_reason(choice.finished), logprobs, ids))
    return {**head(*_KIND, asked, reply.started), "choices": choices, "usage": usage(reply)}


class CompletionChunks(CompletionsChunks):
    kind = _KIND

    def __init__(self, asked: Asked, **wants: bool) -> None:
        super().__init__(asked, **wants)
        self._spelled: dict[int, int] = {}  # by choice, characters of the tokens that were sent

    def _begin(self) -> str:
        if not self._wants_ids:
            return comment("started")
        return self._frame([_choice(0, "", None, None, _prompt_ids(self._reply.started, True))])

    def _delta(self, delta: pb.Delta) -> str:
        logprobs = _logprobs(delta.logprobs, self._spelled.get(delta.choice, 0))
        if logprobs is not None:
            self._spelled[delta.choice] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        ids = token_ids(delta.token_ids, self._wants_ids)
        return self._frame([_choice(delta.choice, delta.text, None, logprobs, ids)])

    def _finish(self, finished: pb.Finished) -> str:
        return self._frame([_choice(finished.choice, "", finish_reason(finished), None, {})], **not_stored(finished))


def _choice(
    number: int, text: str, reason: str | None, logprobs: dict[str, Any] | None, ids: dict[str, Any]
) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason, **ids}


def _prompt_ids(started: pb.Started, wanted: bool) -> dict[str, Any]:
    return {"prompt_token_ids": list(started.prompt_token_ids)} if wanted else {}


def _logprobs(told: Sequence[pb.TokenLogprobs], offset: int) -> dict[str, Any] | None:
    """In the form of completions, or None. What is a part of a character alone is U+FFFD."""
    if not told:
        return None
    tokens = [_text(each) for each in told]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in told],
        "top_logprobs": [{_text(one): one.logprob for one in each.top} for each in told],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }


def _text(token: pb.TokenLogprobs | pb.TokenLogprob) -> str:
    return token.spelling.decode("utf-8", "replace")
