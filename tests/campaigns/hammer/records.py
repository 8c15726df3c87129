"""What is known of one turn: what was asked, what the engine said it reused, and what it answered."""

from dataclasses import asdict, dataclass, field
from typing import Any

from inference_svc.memory.reuse_planning import FEWEST_RESTORED


@dataclass
class TurnRecord:
    """One turn, as the agent that asked it saw it.

    `messages` is the whole conversation, whichever part of it was sent. `heard` are the tokens that came, `kept` those
    that the store holds behind the prompt if they were read there. `limit_tokens`: the turn was cut after so many
    tokens. `is_remembered`: the agent goes on from it. `is_told_again`: what was heard is what
    is remembered of it, without what only spelled a stop string.
    """

    agent: str
    number: int
    request_id: str = ""
    kind: str = ""
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: it was not heard
    source: str = ""
    match: str = ""
    miss: str = ""
    heard: list[int] = field(default_factory=list)
    kept: list[int] | None = None
    text: str = ""
    limit_tokens: int | None = None
    is_remembered: bool = True
    is_told_again: bool = False
    began_s: float = 0.0
    ended_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Alone:
    """The same turn, done alone. `expected_cached`: what its memory could have served."""

    tokens: list[int]
    kept: list[int]
    text: str
    prompt_tokens: int
    expected_cached: int


@dataclass
class Problem:
    """Something that must not be."""

    sort: str  # mismatch, canary, cached, prompt, version, error
    agent: str
    what: str
    record: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


def difference(record: TurnRecord, alone: Alone) -> str:
    """How a turn differs from the same turn alone; "" if it does not. A turn that was cut is a beginning."""
    if record.prompt_tokens and record.prompt_tokens != alone.prompt_tokens:
        return f"prompt: {record.prompt_tokens} tokens, alone {alone.prompt_tokens}"
    if record.kept is not None and record.kept != alone.kept:
        return f"memory: kept {record.kept}, alone {alone.kept}"
    if record.is_told_again:
        return "" if record.heard == alone.kept else f"told again: {record.heard}, alone {alone.kept}"
    expected = alone.tokens[: len(record.heard)] if record.limit_tokens is not None else alone.tokens
    return f"tokens: {record.heard}, alone {expected}" if record.heard != expected else ""


def reuse_problem(record: TurnRecord, alone: Alone) -> str:
    """What is wrong with what a turn said that it reused; "" if nothing. A miss of the store may cost any part, and so
    few tokens of a memory that is not hot are computed.
    """
    cached, expected = record.cached_tokens, alone.expected_cached
    if cached is None or record.source == "REPLAY" or record.miss.startswith(("STORE_", "BLOB_")):
        return ""
    if record.source == "SHARED":
        return "" if cached % 256 == 0 and cached < alone.prompt_tokens else f"{cached} tokens of shared blocks"
    if record.source == "HOT" and cached > expected and cached % 256 == 0:
        return ""  # what a cut turn of the agent has computed behind its memory
    if record.source == "COLD" and expected < FEWEST_RESTORED:
        return ""
    return "" if cached == expected else f"{cached} tokens reused ({record.source}), the memory has {expected} of them"
