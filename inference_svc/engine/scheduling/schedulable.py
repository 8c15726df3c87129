"""What the scheduler must know about a turn, what it notes about one, and the numbers of the schedule."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from inference_svc.engine.api import AgentKey, Priority
from inference_svc.engine.grid import Cells

SourceT = TypeVar("SourceT")


class Status(Enum):
    """Where a turn is in its life. It holds a reservation in the states of `RUNNING`."""

    __hash__ = object.__hash__  # Enum's is slow, and every step looks each turn up in the sets below

    WAITING = "waiting"  # for room
    RESTORING = "restoring"  # has room, and waits for files of its KV
    LOADING = "loading"  # files of its KV are here, and become KV some at a time
    PREFILLING = "prefilling"  # prompt tokens are left to compute
    DECODING = "decoding"
    HELD = "held"  # stopped between two tokens, with its KV, until it is released or goes to another engine
    PREEMPTED = "preempted"  # gave up its room and waits for it again
    FINISHED = "finished"


NOT_BEGUN = frozenset({Status.WAITING, Status.PREEMPTED})
WITH_KV = frozenset({Status.PREFILLING, Status.DECODING})
RUNNING = WITH_KV | {Status.RESTORING, Status.LOADING, Status.HELD}


@dataclass(frozen=True)
class PrefixSource(Generic[SourceT]):
    """KV that a turn may begin with: its source (a running turn, or a hot memory) and its leading tokens."""

    source: SourceT
    shared_tokens: int


@dataclass
class ScheduleRecord:
    """What the scheduler notes about a turn. Nobody else reads or writes it."""

    waits_since_s: float = 0.0  # since then it waits to begin, or for its next cell
    overtaken_tokens: int = 0  # of prompts that came later and were computed while it waited
    served: int = 0  # when it was last served: twice the number of cells that all turns had got by then
    awaits: PrefixSource[Any] | None = None
    prefix_wait_since_s: float | None = None
    prefix_wait_is_over: bool = False
    began_aged: bool = False
    preemptions: int = 0
    found_no_room: bool = False  # at the last try


class Schedulable(Hashable, Protocol):
    """What the scheduler must know about a turn. It changes `schedule` alone."""

    schedule: ScheduleRecord
    namespace: str | None  # turns of one namespace may share KV; a turn without a namespace shares with none
    priority: Priority
    longest_gap_s: float | None  # its own, or that of the rules
    cells: Cells

    @property
    def is_cancelled(self) -> bool:
        """It must end: it gets no more cells and tokens."""

    @property
    def agent_key(self) -> AgentKey | None:
        """Turns with one key run one after another; a turn without a key runs beside all others."""

    @property
    def status(self) -> Status: ...

    @property
    def memory_key(self) -> Hashable | None:
        """The hot memory that the turn's plan extends."""

    @property
    def can_be_preempted(self) -> bool:
        """It may be asked to give up its rows, because they can be swapped out."""

    @property
    def is_ending(self) -> bool:
        """Its last token is sampled; only the KV of it is to be computed yet."""

    @property
    def is_masked(self) -> bool:
        """Its next token is sampled within a reply format."""

    @property
    def masks_s(self) -> float:
        """Seconds that its masks have taken so far."""

    @property
    def chain(self) -> Sequence[str]:
        """Chain hashes of the prompt's full blocks."""

    @property
    def reusable_tokens(self) -> int:
        """Leading tokens that the turn's plan reuses by itself."""

    @property
    def shares_passes(self) -> bool:
        """Whether its cells may be computed in one pass with others' cells."""

    @property
    def next_files(self) -> int:
        """How many files it can load at once."""

    @property
    def awaits_bytes(self) -> bool:
        """Its files come to the device by themselves: to load now would be to wait for them."""


TurnT = TypeVar("TurnT", bound=Schedulable)


@dataclass(frozen=True)
class SharedPass:
    """Where cells of several turns are computed in one pass, which has the tokens of a cell in all."""

    row_tokens: int
    """Each cell takes whole rows of so many."""
    most_tokens: int
    """Of a cell: they stay in every window."""
    longest_s: float = 0.1
    """A cancel waits for the whole pass, so on a slow device fewer cells share one."""
    even_tokens: int = 256
    """A pass takes as long as one of the next multiple of these: on an H100 896 tokens as long as 1,024."""

    def even(self, tokens: int) -> int:
        """The most tokens of a pass that are worth its time, where so many fit. Where it has few, its time hardly
        depends on their number.
        """
        return tokens if tokens < 3 * self.even_tokens else tokens // self.even_tokens * self.even_tokens

    def in_rows(self, tokens: int) -> int:
        """The tokens of rows that hold so many."""
        return -(-tokens // self.row_tokens) * self.row_tokens


@dataclass(frozen=True)
class BesideOthers:
    company_s: float = 30.0
    """A namespace counts as alone once no other has had a turn for this long, because KV is slow to take back."""
    kept_part: int = 8
    """One of so many parts of the KV is left to namespaces that hold no bytes yet."""
    rows: int = 4
    """Rows of one namespace that decode in a step while others have turns, and for a moment afterwards. On a CPU a step
    of 4 rows takes 1.0 to 1.5 times as long as a step of one row, 8 rows take twice as long, 16 four times, 192 forty
    times (kvasir-tiny, two cores)."""
    seat_steps: int = 16
    """Steps after which other rows of the namespace decode. A row that joins a batch has its context decoded into it.
    With 2,000 tokens that takes about half a step: a tenth of the time at 16 steps."""


@dataclass(frozen=True, slots=True)
class DraftRules:
    most: int | None = None  # tokens that a step tries ahead where the turn has no number; None: the device's
    from_others: bool = True  # text that other agents of the turn's namespace have in memory is tried, too


@dataclass(frozen=True)
class Rules:
    cell_tokens: int = 256
    shared_pass: SharedPass | None = None
    """None: each cell has a pass of its own."""
    least_tokens: int = 256
    """A cell is cut, while any turn decodes or where it takes too long, but not to less; at multiples of this."""
    longest_cell_s: float = 0.5
    """A cell that takes longer is cut while no turn decodes, too: a turn that comes, or a cancel, waits for it."""
    longest_gap_s: float = 0.05
    """For how long a stream that a person reads, and that has no gap of its own, waits for its next token while prompts
    are computed and KV is loaded beside it; a step's first piece of work, and a foresight that was wrong, may take
    longer. Where a step alone takes most of it, the work may take as long as `stalled_steps` of them, but no longer
    than this."""
    background_gap_s: float = 0.5
    """The same while only background turns decode."""
    stalled_steps: float = 1.25
    ageing_s: float = 5.0
    """A turn that has waited this long, to begin or for its next cell, counts as interactive in its own namespace,
    while no other namespace has an interactive turn that could go on instead."""
    prefix_wait_s: float = 10.0
    """A turn waits at most this long for siblings to prefill the prefix that it shares; 0: it never waits."""
    patience_s: float = 5.0
    """For this long a waiting turn does not drop hot memories that other waiting turns extend; those may begin first.
    """
    max_preemptions: int = 2
    """No turn is preempted more often."""
    beside_others: BesideOthers = BesideOthers()
    most_drafts: int = 16
    """Tokens that a step tries ahead for a turn that says nothing of them."""
    drafts_from_others: bool = True
    """Text that other agents of the turn's namespace have in memory is tried, too."""
