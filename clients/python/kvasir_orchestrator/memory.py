"""How the runner gets a reply: the one seam behind which ways to remember stand."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.on_full import OnFull

from kvasir_orchestrator.plan import Turn
from kvasir_orchestrator.transcript import Message


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """One turn as it is requested; requested again, after a break, it is the same in every field."""

    turn: Turn
    agent_id: str  # the agent's name at the engine
    namespace: str  # empty: the caller's own
    request_id: str
    new: Sequence[Message]  # what the agent has not seen yet
    transcript: Sequence[Message]  # what it saw and said before, from its persona on
    version: int | None  # of its memory after its last turn; None: its first turn of this run
    max_tokens: int
    temperature: float
    seed: int
    regex: str | None
    on_full: OnFull | None = None  # None: that of the agent's label


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply, and what it cost."""

    text: str
    prompt_tokens: int
    cached_tokens: int  # whose KV was reused
    completion_tokens: int
    source: str  # cold, hot, warm, shared or replay
    match: str  # how the prompt stands to what was remembered: none, exact, extend or diverge
    reason: str  # why not everything was reused; empty for a full hit
    first_token_s: float
    total_s: float
    version: int  # of the agent's memory now; 0: none is kept
    left_out: int = 0  # messages, because the memory outgrew its context: turns go on without them
    model: str = ""  # its name

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens


class Memory(Protocol):
    """Answers turns, and remembers what it likes of them."""

    def ask(self, asked: ReplyRequest) -> AsyncGenerator[str | Answer, None]:
        """The reply's pieces, and the whole at the end. Closing cancels the turn. Raises types of `kvasir.errors`."""
        ...

    async def forget(self, agent_id: str, namespace: str) -> None:
        """Delete an agent; one that does not exist is no error."""
        ...
