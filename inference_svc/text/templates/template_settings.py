"""A request's settings of thinking and of the chat template, and which of them a model applies. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvasir.errors import InvalidArgument

Scalar = bool | int | float | str

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
# Templates that print an effort know three.
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
EFFORTS = tuple(_EFFORTS)


@dataclass(frozen=True, slots=True)
class AskedThinking:
    is_on: bool | None = None  # None: as the template has it
    most_tokens: int | None = None
    effort: str = ""
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    ignores_unread: bool = False


@dataclass(frozen=True, slots=True)
class AppliedThinking:
    """One model's form of it: the template's settings, a limit of reasoning tokens, and settings that it ignores."""

    settings: Mapping[str, Scalar] = field(default_factory=dict)
    most_tokens: int | None = None
    ignored: tuple[str, ...] = ()


def applied(asked: AskedThinking, reads: frozenset[str], *, thinks: bool, begins_with_answer: bool) -> AppliedThinking:
    """`reads`: settings that the template reads. `thinks`: the model marks reasoning. Raises InvalidArgument."""
    unread = dict(_unread(asked, reads, thinks=thinks, begins_with_answer=begins_with_answer))
    if unread and not asked.ignores_unread:
        name, why = next(iter(unread.items()))
        raise InvalidArgument.of(name, why)
    settings: dict[str, Scalar] = {}
    switch = next((name for name in _SWITCHES if name in reads), None)
    if asked.is_on is not None and switch is not None:
        settings[switch] = asked.is_on
    if asked.effort and _EFFORT in reads:
        settings[_EFFORT] = _EFFORTS[asked.effort]
    settings |= {name: value for name, value in asked.settings.items() if name in reads}
    most = asked.most_tokens if "thinking.budget_tokens" not in unread else None
    if asked.is_on is False and switch is None and thinks and not begins_with_answer:
        most = 0
    return AppliedThinking(settings, most, tuple(unread))


def _unread(
    asked: AskedThinking, reads: frozenset[str], *, thinks: bool, begins_with_answer: bool
) -> Iterator[tuple[str, str]]:
    if asked.is_on and not thinks and reads.isdisjoint(_SWITCHES):
        yield "thinking.mode", "this model does not reason"
    if asked.most_tokens is not None and not thinks:
        yield "thinking.budget_tokens", "this model does not reason"
    elif asked.most_tokens is not None and begins_with_answer:
        yield "thinking.budget_tokens", "the reply has a format, and no reasoning before it"
    if asked.effort and _EFFORT not in reads:
        yield "thinking.effort", "the model's chat template reads none"
    for name in asked.settings:
        if name not in reads:
            yield f"template_settings.{name}", "the model's chat template does not read it"
