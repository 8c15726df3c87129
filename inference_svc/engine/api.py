"""The engine's language: plans of turns in, events out. Frozen plain data that may cross threads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from kvasir.errors import FailedPrecondition, KvasirError, ResourceExhausted
from kvasir.formats.block_file import FileBytes, FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.engine.files.incoming import Incoming
from inference_svc.formats.constraint import Constraint
from inference_svc.kv.damage import DamagedFile as DamagedFile
from inference_svc.model.embedding.pooling import Pooling, Vector
from inference_svc.text.replies.reasoning_limit import ReasoningLimit
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds

MOST_DRAFTS = 64  # of a turn in one step


@dataclass(frozen=True, slots=True)
class AgentKey:
    """The agent that a memory belongs to. The namespace comes from the caller's credential."""

    namespace: str
    agent_id: str


class Priority(Enum):
    """Which turns are served first when not all can be. A waiting turn ages, so that none waits for ever."""

    INTERACTIVE = "interactive"  # a person waits for it
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class Pace:
    """How soon a turn is served, and how long its stream waits for a token beside others' prompts."""

    priority: Priority = Priority.INTERACTIVE
    longest_gap_s: float | None = None  # None: as the engine has it for the priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What makes tokens less likely because the prompt or the reply has them."""

    repetition_penalty: float = 1.0  # above 1, tokens among the last `repetition_tokens` become less likely
    repetition_tokens: int = 64
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that the reply has it
    presence_penalty: float = 0.0  # subtracted once from the logit of each token that the reply has


@dataclass(frozen=True, slots=True)
class SamplingParams(Penalties):
    """How the next token is chosen. Already validated: the engine refuses only values that do not fit the model."""

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    logprobs: int | None = None  # report each token's log probability and so many of the likeliest; None: neither
    constraint: Constraint | None = None
    reasoning_limit: ReasoningLimit | None = None
    most_drafts: int | None = None  # tried ahead in one step; None: as the engine is set


@dataclass(frozen=True, slots=True)
class Cold:
    """The turn reuses no KV."""


@dataclass(frozen=True, slots=True)
class Hot:
    """The engine's own memory of the plan's key is reused: its first `keep_tokens` tokens, which must equal the plan's.
    `keep_tokens` may lie anywhere (DIVERGE). If the memory was dropped in between, the engine refuses with
    HotMemoryGone; the turn has had no effect then, and may be planned again.
    """

    keep_tokens: int


class HotMemoryGone(FailedPrecondition):
    reason = "HOT_MEMORY_GONE"

    def __init__(self) -> None:
        super().__init__("the agent's hot memory is not the one planned with")


@dataclass(frozen=True, slots=True)
class Restored:
    """KV read from outside: `blobs` are tensor files' bytes, in order from position 0, the last one full or a tail.
    `token_ids` are all tokens of the files (a block's chain hash covers the whole block). The first `keep_tokens` of
    them are reused and must equal the plan's; `keep_tokens` may cut inside the last file (DIVERGE). `shareable_tokens`
    is the manifest's number or, for blocks found by block hash, all of the tokens. Every file is checked before MLX
    sees it. A wrong file raises DamagedFile; live state is untouched then, and the turn may be planned again.
    """

    blobs: tuple[FileBytes, ...]
    token_ids: TokenIds
    keep_tokens: int
    shareable_tokens: int = 0
    state: FileBytes | None = None  # state file of exactly `keep_tokens` tokens; models with states need it
    windows: tuple["RestoredWindow", ...] = ()  # one for each window of the layout
    # Instead of `blobs`, where all layers keep all tokens: if not all of them come, fewer tokens are reused.
    incoming: Incoming | None = None


@dataclass(frozen=True, slots=True)
class RestoredWindow:
    """The files of one window's layers, from a block that the token at `keep_tokens` sees to the last token."""

    window: int
    first_block: int
    blobs: tuple[FileBytes, ...]


Reuse: TypeAlias = Cold | Hot | Restored


@dataclass(frozen=True, slots=True)
class CarriedTurn:
    """Where a turn stands between two tokens, without its KV: an engine with the same model goes on from it."""

    token_ids: TokenIds  # the prompt and the reply so far; the last one's KV is not computed
    computed: int  # leading tokens whose KV is in the turn's files
    cached: int
    shareable: int  # leading tokens that were computed on the grid
    sampler_key: tuple[int, ...]  # 32-bit words; the next draw's
    rewind_points: tuple[int, ...]  # token counts, ascending; the last is `computed`, if there is any
    first_blocks: Mapping[int, int]  # by group of layers, in the order of the files: the first block that is there
    spent: "Timings"


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """A turn stopped between two tokens. `files`: its KV by group, then states, without blocks that left before."""

    carried: CarriedTurn
    files: tuple[FileBytes, ...]


class Keeps(Enum):
    """What a turn leaves as its key's memory."""

    WHOLE = "whole"  # prompt and reply; after a cancel what was there before
    PARTIAL = "partial"  # after a cancel prompt and reply as far as they came
    NOTHING = "nothing"  # the key's memory is only read


@dataclass(frozen=True, slots=True)
class Replay:
    """A reply that is computed again, token by token, without a draw; empty for a prompt alone."""

    reply: tuple[int, ...]
    borrows: bool = True  # False: the turn reuses no rows but those that `reuse` names


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn: the whole prompt as tokens, the KV that it reuses, and how to generate."""

    token_ids: TokenIds
    token_chars: TokenChars  # code points that each prompt token completes, as in manifest.proto
    sampling: SamplingParams
    reuse: Reuse = field(default_factory=Cold)
    key: AgentKey | None = None  # None: the turn reads and leaves no memory
    keeps: Keeps = Keeps.WHOLE
    pace: Pace = Pace()
    namespace: str | None = None  # turns of one namespace may share prefilled KV; None: it shares with none
    # Prompt tokens after which a model with states records a rewind point: the next prompt will begin with them too.
    # None: all but the last, which is computed in any case.
    rewind_point_tokens: int | None = None
    # While another turn needs the room, the turn's KV may be given to its listener (`Preempted`). If the turn extends a
    # hot memory, that memory may be dropped then: the store has all of it.
    can_be_preempted: bool = False
    # The prompt's hidden rows become an embedding (`Ended`). All of them are needed, so the turn shares no KV. Only for
    # turns that generate nothing and leave no memory.
    pooling: Pooling | None = None
    # Another engine began the turn. Its files are requested (`Wanted`); then it is held until `TurnHandle.release`.
    carried: CarriedTurn | None = None
    is_own: bool = False  # the engine's own turn, which no count has
    replay: Replay | None = None

    @property
    def replayed(self) -> tuple[int, ...]:
        return self.replay.reply if self.replay is not None else ()

    @property
    def is_remembered(self) -> bool:
        return self.keeps is not Keeps.NOTHING

    @property
    def keep_partial(self) -> bool:
        return self.keeps is Keeps.PARTIAL

    @property
    def most_tokens(self) -> int:
        return len(self.token_ids) + self.sampling.max_tokens

    @property
    def leaves_memory(self) -> bool:
        return self.key is not None and self.is_remembered

    @property
    def generates(self) -> bool:
        """False, with max_tokens 0, for a turn that only leaves its prompt as the key's hot memory."""
        return self.sampling.max_tokens > 0


class FinishReason(Enum):
    STOP = "stop"  # an end token: the model's own or the request's
    LENGTH = "length"
    STOP_SEQUENCE = "stop_sequence"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a turn: from submit in the engine; for a caller from arrival, with reading from the store."""

    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The turn begins with `cached_tokens` reused tokens. `is_shared`: of another turn or memory than planned. Else
    they may be more than planned: those behind all of the planned memory were computed by a turn that was cancelled.
    """

    cached_tokens: int
    is_shared: bool = False
    queue_s: float = field(default=0.0, compare=False)  # from submit until the engine began
    restore_s: float = field(default=0.0, compare=False)  # until the KV was there


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A cell of the prompt is computed. Both counts include the reused tokens."""

    tokens_done: int
    tokens_total: int


@dataclass(frozen=True, slots=True)
class BlocksFull:
    """The sequence has `count` full blocks. Their rows stay during this turn, so they may be published meanwhile."""

    count: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log of a sampled token's probability before temperature and filters, and that of the likeliest tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens generated since the last event, and the text that now certainly belongs to the reply. The text may lag
    behind: a character is held back until it is whole, a possible stop string until it is ruled out. A stop token is
    among `ids`, its text is not in `text`.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if they were requested


@dataclass(frozen=True, slots=True)
class Preempted:
    """The turn gave up its rows for another turn. `files` are the tensor files of its first `tokens` tokens: full
    blocks and the tail. The listener must keep them, and calls `TurnHandle.files_stored` once they have left this
    machine's memory. The turn goes on after `Wanted`.
    """

    files: tuple[FileBytes, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """There is room again for a preempted turn; it is reserved until `TurnHandle.resume` brings the files."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A preempted turn goes on: KV of `tokens` tokens came back, that of `lost_tokens` more is computed again."""

    tokens: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class Held:
    """The turn stands between two tokens. `TurnHandle.hold` is answered once the listener has this event."""


@dataclass(frozen=True, slots=True)
class MaskPasses:
    """What a model that fills masks computed for a reply. A reply has so many tokens a row, and a pass."""

    passes: int = 0
    rows: int = 0  # committed tokens, kept ones and masks, each as often as a pass had it


@dataclass(frozen=True, slots=True)
class Ended:
    """The turn is over. With a key, its sequence is the key's hot memory now. A cancel with keep_partial ends so too; a
    cancel without it is `Failed(Cancelled)`, and the memory stays as it was before the turn. `state` is what a snapshot
    taken now holds: the prompt, the reply, and its stop token, but no tokens that only spell a stop string.
    `generated_text` is the text of all tokens of `state` behind the prompt, special tokens included, so that prompt
    text + generated_text is the text of the state. `text` is the whole reply as the client saw it. `embedding`: the
    prompt's, if the plan requested it.
    """

    finish_reason: FinishReason
    matched_stop: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    text: str
    generated_text: str
    state: SequenceState
    embedding: Vector = ()
    drafted_tokens: int = 0  # tried ahead
    accepted_draft_tokens: int = 0
    mask_passes: MaskPasses = MaskPasses()


@dataclass(frozen=True, slots=True)
class Failed:
    error: KvasirError


Event: TypeAlias = Started | Prefilled | BlocksFull | Tokens | Preempted | Wanted | Resumed | Held | Ended | Failed
Listener: TypeAlias = Callable[[list[Event]], None]


@dataclass(frozen=True, slots=True)
class HotMemory:
    """An agent's memory in the engine, as of its last whole turn. Nothing in the engine looks into `tag`."""

    state: SequenceState
    tag: object = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Tensor files of a sequence: blocks from `first_block` on; with its end the tail, windows, and states."""

    first_block: int
    blocks: tuple[tuple[FileIdentity, FileBytes], ...]
    tail: tuple[FileIdentity, FileBytes] | None
    state: SequenceState  # as of the snapshot; of a memory the tokens that have KV
    states: tuple[tuple[FileIdentity, FileBytes], ...] = ()
    windows: tuple["WindowFiles", ...] = ()


@dataclass(frozen=True, slots=True)
class WindowFiles:
    """Files of one window's layers: of the sequence's full blocks those that the asker lacks; and the tail."""

    window: int
    held: tuple[int, ...]  # full blocks, ascending: those of the last tokens, and of rewind points before them
    blocks: tuple[tuple[FileIdentity, FileBytes], ...]
    tail: tuple[FileIdentity, FileBytes] | None

    @property
    def by_block(self) -> dict[int, FileBytes]:
        files = (*self.blocks, *((self.tail,) if self.tail is not None else ()))
        return {identity.start // BLOCK_TOKENS: data for identity, data in files}


class ContextExceeded(ResourceExhausted):
    reason = "CONTEXT_EXCEEDED"
