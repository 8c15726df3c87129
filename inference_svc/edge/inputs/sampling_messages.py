"""Sampling settings from the wire: every field is checked, and is part of the input's digest."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.inputs.tool_calls import bound_calls
from inference_svc.engine.api import MOST_DRAFTS, SamplingParams
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.turns.turn_data import TurnRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 300
MAX_BIAS = 100.0
MAX_PENALTY = 2
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 8
MAX_REPETITION_TOKENS = 4096
MAX_FORMAT_BYTES = {ConstraintKind.JSON_SCHEMA: 64 << 10, ConstraintKind.REGEX: 16 << 10}
_MAX_TOKENS = 1 << 24
_DEFAULT_MAX_TOKENS = 512


class _Range(NamedTuple):
    """The values that a setting may have. NaN is in no range: every comparison with it is false."""

    low: float
    high: float = math.inf
    is_open: bool = False  # `low` itself is too low

    def has(self, value: float) -> bool:
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.is_open:
            return f"above {self.low}, at most {self.high}"
        return f"{self.low} or more" if self.high == math.inf else f"{self.low} to {self.high}"


_PENALTIES = _Range(-MAX_PENALTY, MAX_PENALTY)
_RANGES = {
    "max_tokens": _Range(1, _MAX_TOKENS),
    "temperature": _Range(0, 2),
    "top_p": _Range(0, 1, is_open=True),
    "top_k": _Range(0),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0, 2, is_open=True),
    "repetition_tokens": _Range(1, MAX_REPETITION_TOKENS),
    "frequency_penalty": _PENALTIES,
    "presence_penalty": _PENALTIES,
    "most_drafts": _Range(0, MOST_DRAFTS),
    "top_logprobs": _Range(0, MAX_TOP_LOGPROBS),
}
# How many there may be of each.
_MOST = {"stop": MAX_STOPS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "logit_bias": MAX_BIASES}


def sampling_params(request: pb.GenerateRequest, new_seed: Callable[[], int]) -> SamplingParams:
    """The request's settings, or their defaults. Raises InvalidArgument that names the field and its range."""
    given = request.sampling
    numbers = [name for name in _RANGES if name != "top_logprobs" and given.HasField(name)]  # type: ignore[arg-type]
    defaults = SamplingParams(
        max_tokens=_DEFAULT_MAX_TOKENS,
        seed=given.seed if given.HasField("seed") else new_seed(),
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        logit_bias=tuple(sorted(given.logit_bias.items())),
        logprobs=given.top_logprobs if given.logprobs else None,
        constraint=bound_calls(request, _reply_format(request)),
    )
    params = replace(defaults, **{name: getattr(given, name) for name in numbers})
    _check_ranges(given, params)
    _check_companions(given)
    return params


def with_defaults(turn: TurnRequest, defaults: Mapping[str, Any]) -> TurnRequest:
    """The turn, with the model's own settings where its request leaves them out: absent is not 0."""
    assert isinstance(turn.origin.message, pb.GenerateRequest)
    given = turn.origin.message.sampling
    chosen = {name: value for name, value in defaults.items() if not given.HasField(name)}
    return replace(turn, sampling=replace(turn.sampling, **chosen))


def clamps_max_tokens(request: pb.GenerateRequest) -> bool:
    """Whether max_tokens gives way to the context instead of being refused; the default always does."""
    return request.sampling.clamp_max_tokens or not request.sampling.HasField("max_tokens")


def choice_count(request: pb.GenerateRequest) -> int:
    count = request.sampling.n if request.sampling.HasField("n") else 1
    if not 1 <= count <= MAX_CHOICES:
        raise _refused("n", f"1 to {MAX_CHOICES}", count)
    if count > 1 and request.agent_id:
        raise InvalidArgument.of(
            "sampling.n", f"expected 1 with an agent_id, got {count}: an agent remembers one reply"
        )
    return count


def settings(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    """Names and values of the settings that were given, for the input's digest. An absent seed is absent."""
    sampling = request.sampling
    repeated = ("stop", "stop_token_ids", "logit_bias")
    given = [
        (field.name, repr(getattr(sampling, field.name)))
        for field, _ in sampling.ListFields()
        if field.name not in repeated
    ]
    given += [("stop", stop) for stop in sampling.stop]
    given += [("stop_token_id", str(token)) for token in sampling.stop_token_ids]
    # A map has no order of its own.
    given += [("logit_bias", f"{token} {bias!r}") for token, bias in sorted(sampling.logit_bias.items())]
    if (kind := request.WhichOneof("response_format")) is not None:
        given.append((kind, getattr(request, kind)))
    if choice := request.tool_choice.ListFields():
        given.append(("tool_choice", repr([(field.name, value) for field, value in choice])))
    given += [("strict_tool", str(place)) for place, tool in enumerate(request.tools) if tool.strict]
    return given


def _check_ranges(given: pb.Sampling, params: SamplingParams) -> None:
    for name, allowed in _RANGES.items():
        got = given.top_logprobs if name == "top_logprobs" else getattr(params, name)
        if got is not None and not allowed.has(got):
            raise _refused(name, str(allowed), got)
    for name, most in _MOST.items():
        if (count := len(getattr(params, name))) > most:
            raise _refused(name, f"at most {most}", count)
    for index, stop in enumerate(params.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _refused(f"stop[{index}]", f"1 to {MAX_STOP_CHARS} characters", len(stop))
    for token, bias in params.logit_bias:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _refused(f"logit_bias[{token}]", f"{-MAX_BIAS:g} to {MAX_BIAS:g}", bias)


def _check_companions(given: pb.Sampling) -> None:
    """A setting that would have no effect is refused, not ignored."""
    needs = (
        ("top_logprobs", given.top_logprobs > 0, "logprobs", given.logprobs),
        (
            "repetition_tokens",
            given.HasField("repetition_tokens"),
            "repetition_penalty",
            given.HasField("repetition_penalty"),
        ),
    )
    for name, is_given, other, is_other_given in needs:
        if is_given and not is_other_given:
            raise InvalidArgument.of(f"sampling.{name}", f"needs sampling.{other}")


def _reply_format(request: pb.GenerateRequest) -> Constraint | None:
    if (field := request.WhichOneof("response_format")) is None:
        return None
    kind, text = ConstraintKind(field), getattr(request, field)
    if not text:
        raise InvalidArgument.of(field, "expected text, got none")
    if (size := len(text.encode())) > MAX_FORMAT_BYTES[kind]:
        raise InvalidArgument.of(field, f"expected at most {MAX_FORMAT_BYTES[kind]} bytes, got {size}")
    return Constraint(kind, text)


def _refused(name: str, expected: str, got: object) -> InvalidArgument:
    return InvalidArgument.of(f"sampling.{name}", f"expected {expected}, got {got}")
