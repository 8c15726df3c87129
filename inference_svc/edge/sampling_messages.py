"""Sampling settings from the wire: every field is checked, and is part of the input's digest."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.tool_calls import bound_calls
from inference_svc.engine.api import SamplingParams
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.turns.turn_data import TurnRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 300
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 8
MAX_REPETITION_TOKENS = 4096
MAX_FORMAT_BYTES = {ConstraintKind.JSON_SCHEMA: 64 << 10, ConstraintKind.REGEX: 16 << 10}
_MAX_TOKENS = 1 << 24
_DEFAULT_MAX_TOKENS = 512


def sampling_params(request: pb.GenerateRequest, new_seed: Callable[[], int]) -> SamplingParams:
    """The request's settings, or their defaults. Raises InvalidArgument that names the field and its range."""
    given = request.sampling
    defaults = SamplingParams(max_tokens=_DEFAULT_MAX_TOKENS)

    def chosen(name: str) -> float:
        return getattr(given if given.HasField(name) else defaults, name)  # type: ignore[arg-type, no-any-return]

    params = SamplingParams(
        max_tokens=int(chosen("max_tokens")),
        temperature=chosen("temperature"),
        top_p=chosen("top_p"),
        top_k=int(chosen("top_k")),
        min_p=chosen("min_p"),
        seed=given.seed if given.HasField("seed") else new_seed(),
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        repetition_penalty=chosen("repetition_penalty"),
        repetition_tokens=int(chosen("repetition_tokens")),
        frequency_penalty=chosen("frequency_penalty"),
        presence_penalty=chosen("presence_penalty"),
        logit_bias=tuple(sorted(given.logit_bias.items())),
        logprobs=given.top_logprobs if given.logprobs else None,
        constraint=_constraint(request),
    )
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
    """The number of replies. Raises InvalidArgument for too many, and for several replies with an agent."""
    count = request.sampling.n if request.sampling.HasField("n") else 1
    if not 1 <= count <= MAX_CHOICES:
        raise _refused("n", f"1 to {MAX_CHOICES}", count)
    if count > 1 and request.agent_id:
        raise InvalidArgument(
            f"sampling.n: expected 1 with an agent_id, got {count}: an agent remembers one reply", field="sampling.n"
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
    # NaN is in no range: every comparison with it is false.
    ranges = (
        ("max_tokens", 1 <= params.max_tokens <= _MAX_TOKENS, f"1 to {_MAX_TOKENS}", params.max_tokens),
        ("temperature", 0 <= params.temperature <= 2, "0 to 2", params.temperature),
        ("top_p", 0 < params.top_p <= 1, "above 0, at most 1", params.top_p),
        ("top_k", params.top_k >= 0, "0 or more", params.top_k),
        ("min_p", 0 <= params.min_p <= 1, "0 to 1", params.min_p),
        ("stop", len(params.stop) <= MAX_STOPS, f"at most {MAX_STOPS}", len(params.stop)),
        (
            "stop_token_ids",
            len(params.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"at most {MAX_STOP_TOKEN_IDS}",
            len(params.stop_token_ids),
        ),
        ("repetition_penalty", 0 < params.repetition_penalty <= 2, "above 0, at most 2", params.repetition_penalty),
        (
            "repetition_tokens",
            1 <= params.repetition_tokens <= MAX_REPETITION_TOKENS,
            f"1 to {MAX_REPETITION_TOKENS}",
            params.repetition_tokens,
        ),
        (
            "frequency_penalty",
            -MAX_PENALTY <= params.frequency_penalty <= MAX_PENALTY,
            f"{-MAX_PENALTY:g} to {MAX_PENALTY:g}",
            params.frequency_penalty,
        ),
        (
            "presence_penalty",
            -MAX_PENALTY <= params.presence_penalty <= MAX_PENALTY,
            f"{-MAX_PENALTY:g} to {MAX_PENALTY:g}",
            params.presence_penalty,
        ),
        ("logit_bias", len(params.logit_bias) <= MAX_BIASES, f"at most {MAX_BIASES}", len(params.logit_bias)),
        (
            "top_logprobs",
            0 <= given.top_logprobs <= MAX_TOP_LOGPROBS,
            f"0 to {MAX_TOP_LOGPROBS}",
            given.top_logprobs,
        ),
    )
    for name, is_right, expected, got in ranges:
        if not is_right:
            raise _refused(name, expected, got)
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
            raise InvalidArgument(f"sampling.{name}: needs sampling.{other}", field=f"sampling.{name}")


def _constraint(request: pb.GenerateRequest) -> Constraint | None:
    return bound_calls(request, _reply_format(request))


def _reply_format(request: pb.GenerateRequest) -> Constraint | None:
    if (field := request.WhichOneof("response_format")) is None:
        return None
    kind, text = ConstraintKind(field), getattr(request, field)
    if not text:
        raise InvalidArgument(f"{field}: expected text, got none", field=field)
    if (size := len(text.encode())) > MAX_FORMAT_BYTES[kind]:
        raise InvalidArgument(f"{field}: expected at most {MAX_FORMAT_BYTES[kind]} bytes, got {size}", field=field)
    return Constraint(kind, text)


def _refused(name: str, expected: str, got: object) -> InvalidArgument:
    return InvalidArgument(f"sampling.{name}: expected {expected}, got {got}", field=f"sampling.{name}")
