"""One turn with an engine, heard to its end and timed by the one who waits for it."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvasir.clients import Reply
from kvasir.errors import Internal
from kvasir.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Heard:
    """What a turn said and what it reused. `first_token_s` is from asking to the first words, on the asker's clock."""

    reply: str
    token_ids: tuple[int, ...]
    source: str  # cold, hot, warm, shared or replay
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float
    version: int  # of the agent's memory that the turn made; 0 when none
    snapshot_state: str  # none, committed, pending or failed
    snapshot_reason: str

    @property
    def is_durable(self) -> bool:
        return self.snapshot_state == "committed"


def hear(
    events: Iterable[pb.GenerateResponse],
    *,
    on_started: Callable[[pb.Started], None] = lambda _started: None,
    on_progress: Callable[[pb.PrefillProgress], None] = lambda _progress: None,
    on_text: Callable[[str], None] = lambda _text: None,
    on_reasoning: Callable[[str], None] = lambda _text: None,
) -> Heard:
    """Listen to a turn that is asked by iterating over `events`. Raises what the engine refuses."""
    began = time.monotonic()
    first_token_s = 0.0
    reply = Reply()
    for event in events:
        reply.add(event)
        if event.HasField("started"):
            on_started(event.started)
        elif event.HasField("prefill_progress"):
            on_progress(event.prefill_progress)
        elif event.HasField("delta"):
            first_token_s = first_token_s or time.monotonic() - began
            if event.delta.reasoning_text:
                on_reasoning(event.delta.reasoning_text)
            if event.delta.text:
                on_text(event.delta.text)
        elif event.HasField("finished"):
            return _heard(reply, first_token_s)
    raise Internal("the engine ended the turn without saying how")


def _heard(reply: Reply, first_token_s: float) -> Heard:
    started, finished = reply.started, reply.finished
    return Heard(
        reply=reply.text,
        token_ids=tuple(reply.token_ids),
        source=_word(pb.CacheSource.Name(started.source), "CACHE_SOURCE_"),
        reason=started.reason,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_tokens,
        completion_tokens=finished.usage.completion_tokens,
        first_token_s=first_token_s,
        version=finished.snapshot.version,
        snapshot_state=_word(pb.SnapshotState.Name(finished.snapshot.state), "SNAPSHOT_STATE_"),
        snapshot_reason=finished.snapshot.reason,
    )


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
