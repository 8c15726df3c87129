"""How much a model is to reason: each API's fields about it, in the engine's words, and the way back."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import renamed

MODE, BUDGET, EFFORT, SETTINGS = "thinking.mode", "thinking.budget_tokens", "thinking.effort", "template_settings."
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MODES = {None: pb.THINKING_MODE_UNSPECIFIED, True: pb.THINKING_MODE_ON, False: pb.THINKING_MODE_OFF}
_MAX_INT64 = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """What a turn requests. `names`: the API's field for each of the engine's."""

    is_on: bool | None = None
    most_tokens: int | None = None
    effort: str = ""
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    is_strict: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Fields of GenerateOptions."""
        most = self.most_tokens if self.is_on is not False else None
        thinking = pb.Thinking(mode=_MODES[self.is_on], effort=self.effort)
        if most is not None:
            thinking.budget_tokens = most
        return {"thinking": thinking, "template_settings": self.settings, "ignore_unread_settings": not self.is_strict}

    def name(self, engines: str) -> str:
        """The API's name of a field that the engine names."""
        name = engines.removeprefix(SETTINGS)
        return self.names.get(engines, engines) if name == engines else f"{self.names.get(SETTINGS, SETTINGS)}{name}"

    def refused(self, error: InvalidArgument) -> InvalidArgument:
        """The engine's refusal in the API's words."""
        engines = error.field or ""
        return error if (name := self.name(engines)) == engines else renamed(error, name)


def effort_of(effort: str | None, name: str, reading: Reading) -> tuple[bool | None, str]:
    """Whether an effort switches thinking, and the engine's word for it. One that nobody knows is ignored."""
    if effort == "none":
        return False, ""
    if effort is not None and effort not in _EFFORTS:
        reading.ignore(name)
    return (True, effort) if effort in _EFFORTS else (None, "")


def settings_of(given: Mapping[str, Any] | None, name: str, reading: Reading) -> dict[str, bool | int | float | str]:
    """Settings for the chat template: flags, numbers and texts. What else is there is ignored."""
    found = {}
    for key, value in (given or {}).items():
        is_number = isinstance(value, int) and abs(value) <= _MAX_INT64
        if _NAME.fullmatch(key) and (is_number or isinstance(value, float | str)):
            found[key] = value
        elif value is not None:
            reading.ignore(f"{name}.{key if _NAME.fullmatch(key) else '(unnamed)'}")
    return found
