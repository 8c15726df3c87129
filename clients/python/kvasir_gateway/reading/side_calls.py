"""Which requests are side calls: a client requests a title or a summary beside its conversation, and never goes on
from the reply. They leave no memory: else each would be an agent, or push its conversation aside.

A rule reads where such prompts name their purpose: the beginnings of the system's texts and of the user's. A request
that is wrongly taken for a side call loses little: its next turn has the reply in it, and becomes a memory from there.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvasir.options.gateway import side_calls_of

from kvasir_gateway.turn import Said, Turn

_HEAD_CHARS = 600  # Claude Code's request for a summary begins with 413 characters about tools and tags
# Longer ones are worth a memory, unless a system's text shows their kind: somebody may go on about a long text.
_SHORT_CHARS = 8000
_PROBE_CHARS = 100
_MOST_HEADS = 16  # of a request of 10,000 messages the search would hold the event loop
_OF_TALK = r"(conversations?|chat|session|thread|discussion|messages?|context|history|task)"
# No pattern crosses a NUL: it stands between the beginning of a text and its end.
_TITLE = re.compile(
    rf"\btitles?\b[^\0]{{0,160}}\b{_OF_TALK}\b|\b{_OF_TALK}\b[^\0]{{0,160}}\btitles?\b"
    rf"|\b(tags|follow-?up questions)\b[^\0]{{0,160}}\b{_OF_TALK}\b|\bnew (conversation )?topic\b",
    re.IGNORECASE,
)
_SUMMARY = re.compile(
    rf"\b(summar(y|ies|i[sz]\w+)|compaction|handoff)\b[^\0]{{0,80}}\b{_OF_TALK}\b"
    rf"|\b{_OF_TALK}\b[^\0]{{0,40}}\b(summar(y|i[sz]\w+)|compaction)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class SideRule:
    """`kvasir.options.gateway` has what a rule applies to, and why."""

    name: str
    is_it: Callable[[Turn], bool]


def _asks(pattern: re.Pattern[str]) -> Callable[[Turn], bool]:
    return lambda turn: any(pattern.search(head) for head in _heads(turn))


def _is_probe(turn: Turn) -> bool:
    is_short = len(turn.messages) == 1 and len(turn.messages[0].content) <= _PROBE_CHARS
    return is_short and turn.sampling.get("max_tokens") == 1


SUMMARY = "summary"
SIDE_RULES: Mapping[str, SideRule] = {
    rule.name: rule
    for rule in (SideRule("title", _asks(_TITLE)), SideRule(SUMMARY, _asks(_SUMMARY)), SideRule("probe", _is_probe))
}


def side_rules_of(text: str) -> Sequence[SideRule]:
    """RULE,… or none. Raises ValueError for a name that is no rule's."""
    return [SIDE_RULES[name] for name in side_calls_of(text)]


def side_call_of(turn: Turn, rules: Sequence[SideRule]) -> str:
    """The name of the first rule that takes the turn for a side call; else nothing."""
    if turn.is_append or turn.is_stored or not turn.messages or turn.messages[-1].role != "user":
        return ""
    return next((rule.name for rule in rules if rule.is_it(turn)), "")


def _heads(turn: Turn) -> Iterator[str]:
    """Where a side call's request stands: with replies before it, in the last text only, and not beside calls."""
    said = turn.messages
    if any(message.role == "assistant" for message in said):
        yield said[-1].content[:_HEAD_CHARS]
    elif not turn.may_call:
        is_short = sum(len(message.content) for message in said) <= _SHORT_CHARS
        read = said if len(said) <= _MOST_HEADS else (*said[: _MOST_HEADS - 1], said[-1])
        yield from (_head(message) for message in read if is_short or message.role == "system")


def _head(message: Said) -> str:
    """A user's text may quote the conversation before its own question."""
    text = message.content
    return text[:_HEAD_CHARS] if message.role == "system" else f"{text[:_HEAD_CHARS]}\0{text[-_HEAD_CHARS:]}"
