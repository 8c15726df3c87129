"""One turn with an engine, followed to its end and timed by the caller."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvasir.clients import Reply, enum_word
from kvasir.errors import Cancelled, Internal
from kvasir.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Stored:
    """The version that a turn made of the agent's memory; 0 when none."""

    version: int
    state: str  # none, committed, pending or failed
    reason: str


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A turn's reply and what it reused. `first_token_s` is the caller's time from the request to the first token."""

    reply: str
    token_ids: tuple[int, ...]
    source: str  # cold, hot, warm, shared or replay
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float
    stored: Stored
    memory_tokens: int = 0  # that the agent remembers now; 0 where nothing is kept
    context_tokens: int = 0
    left_out: int = 0  # messages, because the conversation is too long
    kept: tuple[str, ...] = ()  # rules by which the prompt had what the memory has
    parted: str = ""  # where the prompt parted from the memory

    @property
    def computed_prompt_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def is_durable(self) -> bool:
        return self.stored.state == "committed"


def follow_turn(
    events: Iterable[pb.GenerateResponse],
    *,
    on_started: Callable[[pb.Started], None] = lambda _started: None,
    on_progress: Callable[[pb.PrefillProgress], None] = lambda _progress: None,
    on_text: Callable[[str], None] = lambda _text: None,
    on_reasoning: Callable[[str], None] = lambda _text: None,
) -> TurnResult:
    """Follow a turn, which begins when `events` are iterated over. Raises the engine's refusals, and Cancelled for
    a turn that another call ended: what there is of its reply is not all of it."""
    began = time.monotonic()
    first_token_s = 0.0
    has_started, reply = False, Reply()
    for event in events:
        reply.add(event)
        if event.HasField("started"):
            has_started = True
            on_started(event.started)
        elif event.HasField("prefill_progress"):
            on_progress(event.prefill_progress)
        elif event.HasField("delta"):
            first_token_s = first_token_s or time.monotonic() - began
            if event.delta.reasoning_text:
                on_reasoning(event.delta.reasoning_text)
            if event.delta.text:
                on_text(event.delta.text)
        elif event.finished.reason == pb.FINISH_REASON_CANCELLED:
            raise Cancelled("the turn was cancelled by another call")
        elif event.HasField("finished") and has_started:
            return _result(reply, first_token_s)
    raise Internal("the engine ended the turn without a result")


def _result(reply: Reply, first_token_s: float) -> TurnResult:
    started, finished = reply.started, reply.finished
    return TurnResult(
        reply=reply.text,
        token_ids=tuple(reply.token_ids),
        source=enum_word(started, "source"),
        reason=started.reason,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_tokens,
        completion_tokens=finished.usage.completion_tokens,
        first_token_s=first_token_s,
        stored=Stored(
            version=finished.snapshot.version,
            state=enum_word(finished.snapshot, "state"),
            reason=finished.snapshot.reason,
        ),
        memory_tokens=finished.memory_tokens,
        context_tokens=finished.context_tokens,
        left_out=finished.shortening.dropped_messages,
        kept=(*started.kept, *(["newest-untold"] if started.is_time_untold else [])),
        parted=parted_words(started.difference) if started.HasField("difference") else "",
    )


def parted_words(place: pb.Difference) -> str:
    """Where a prompt parted from the memory, for people."""
    where = f"message {place.message} ({place.role})" if place.HasField("message") else place.role or "the text"
    what = f" ({place.what})" if place.what else ""
    helps = f"; the rule {', '.join(place.rules)} helps" if place.rules else ""
    return f"parted at {where}: {place.given!r} in place of {place.remembered!r}{what}{helps}"
