"""Thinking and the chat template's settings from the wire, and as the loaded model applies them."""

import math
import re
from dataclasses import replace

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.model.prompting import Prompting
from inference_svc.text.literal_text import from_outside
from inference_svc.text.templates.template_settings import EFFORTS, AskedThinking, Scalar
from inference_svc.turns.turn_data import TurnRequest

Request = pb.GenerateRequest | pb.WarmRequest | pb.CountTokensRequest

MAX_SETTINGS, MAX_SETTING_CHARS = 16, 256
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MODES = {pb.THINKING_MODE_UNSPECIFIED: None, pb.THINKING_MODE_ON: True, pb.THINKING_MODE_OFF: False}


def read_thinking(request: Request) -> AskedThinking | None:
    """None where nothing is requested. Raises InvalidArgument that names the field."""
    given, settings = request.thinking, request.template_settings
    if not (given.ListFields() or settings):
        return None
    if request.WhichOneof("input") not in ("messages", "append_messages"):
        field = "thinking" if given.ListFields() else "template_settings"
        raise InvalidArgument.of(field, "only with messages: a prompt is as its caller made it")
    if given.mode not in _MODES:
        raise InvalidArgument.of("thinking.mode", f"expected one of the enum's, got {given.mode}")
    if given.effort and given.effort not in EFFORTS:
        raise InvalidArgument.of("thinking.effort", f"expected one of {', '.join(EFFORTS)}")
    most = given.budget_tokens if given.HasField("budget_tokens") else None
    if most is not None and (most < 0 or given.mode == pb.THINKING_MODE_OFF):
        expected = "0 or more" if most < 0 else "none with THINKING_MODE_OFF"
        raise InvalidArgument.of("thinking.budget_tokens", f"expected {expected}")
    if len(settings) > MAX_SETTINGS:
        raise InvalidArgument.of("template_settings", f"expected at most {MAX_SETTINGS}")
    values = {name: _value(name, settings[name]) for name in sorted(settings)}
    return AskedThinking(_MODES[given.mode], most, given.effort, values, request.ignore_unread_settings)


def thinking_settings(request: Request) -> list[tuple[str, str]]:
    given = [(f"thinking.{field.name}", repr(value)) for field, value in request.thinking.ListFields()]
    values = {name: request.template_settings[name] for name in sorted(request.template_settings)}
    return given + [(f"template_settings.{name}", repr(_value(name, value))) for name, value in values.items()]


async def with_thinking(turn: TurnRequest, prompting: Prompting) -> TurnRequest:
    """The turn, with the settings that the model applies. Raises InvalidArgument that names one that it cannot."""
    asked, settings = turn.prompt.thinking, turn.prompt
    if asked is None:
        return turn
    constraint = turn.sampling.constraint
    begins_with_answer = constraint is not None and constraint.begins_reply
    found = await prompting.run(
        turn.namespace,
        lambda: prompting.applied(asked, has_tools=bool(settings.tools), begins_with_answer=begins_with_answer),
    )
    settings = replace(
        settings,
        template_settings=found.settings,
        most_reasoning_tokens=found.most_tokens,
        ignored_settings=found.ignored,
    )
    return replace(turn, prompt=settings)


def _value(name: str, given: pb.TemplateValue) -> Scalar:
    field = f"template_settings.{name}" if _NAME.fullmatch(name) else "template_settings"
    if field == "template_settings":
        raise InvalidArgument("template_settings: expected names of at most 64 letters, digits and _", field=field)
    kind = given.WhichOneof("value")
    if kind is None:
        raise InvalidArgument.of(field, "expected a value")
    value: Scalar = getattr(given, kind)
    if isinstance(value, str) and len(value) > MAX_SETTING_CHARS:
        raise InvalidArgument.of(field, f"expected at most {MAX_SETTING_CHARS} characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument.of(field, "expected a finite number")
    return from_outside(value) if isinstance(value, str) else value
