"""What happens while a scenario runs, as values."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.errors import KvasirError

from kvasir_orchestrator.memory import Answer
from kvasir_orchestrator.model import Outcome
from kvasir_orchestrator.plan import Turn
from kvasir_orchestrator.transcript import Message


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The first event. `done` turns were done by an earlier process of this run."""

    run_id: str
    turns: int
    done: int


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A turn is requested; `new` is what its agent is shown."""

    turn: Turn
    new: Sequence[Message]


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """A piece of a turn's reply."""

    turn: Turn
    text: str


@dataclass(frozen=True, slots=True)
class TurnRetried:
    """A turn broke and is requested again, from its first word, after a while."""

    turn: Turn
    error: KvasirError
    attempt: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A turn is whole, and in the journal if there is one."""

    turn: Turn
    new: Sequence[Message]
    answer: Answer
    is_first: bool  # of its agent in this run
    is_from_journal: bool = False


@dataclass(frozen=True, slots=True)
class OutcomeChecked:
    """Whether an answer is what the scenario expects."""

    outcome: Outcome
    turn: Turn
    text: str
    is_met: bool


@dataclass(frozen=True, slots=True)
class RunDone:
    """The last event."""

    outcomes_met: int
    outcomes: int
    forgotten: Sequence[str]  # ephemeral agents, deleted
    extended: int  # turns after an agent's first whose prompt began with exactly what it remembered
    later_turns: int  # all turns after an agent's first
    prompt_tokens: int = 0  # of all turns
    new_tokens: int = 0  # of those: computed


Event = RunStarted | TurnStarted | ReplyPiece | TurnRetried | TurnDone | OutcomeChecked | RunDone
