"""An agent's memory without its KV: text, messages, the turn that made it, its files in the store, its publication."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest
from kvasir.waits import SILENCE_S

from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.replaying import Runs
from inference_svc.memory.store.answers import NO_SETTINGS, AgentSettings, Head
from inference_svc.memory.stored_windows import StoredWindow, stored_windows
from inference_svc.text.conversation import of_caller
from inference_svc.text.prefix_matching import NO_TEXT, RememberedText
from inference_svc.text.token_ids import TokenChars, TokenIds

PublicationTask: TypeAlias = asyncio.Task[SnapshotOutcome]
T = TypeVar("T")
_LONG_BYTES = 64 << 10  # A longer manifest takes the event loop more than a millisecond or two


@dataclass(slots=True)
class StoredFiles:
    """A memory's files in the store, and how their rows were computed."""

    blocks: list[Digest] = field(default_factory=list)  # the leading full blocks
    tail: Digest | None = None
    windows: dict[int, StoredWindow] = field(default_factory=dict)  # by window
    states: dict[int, Digest] = field(default_factory=dict)  # by rewind point
    runs: Runs | None = None  # None: not known
    asleep: manifest_pb2.Asleep | None = None  # of a version that names no file
    pending: int = 0  # the memory's last tokens that have no KV yet: 1, or none

    @property
    def rows(self) -> list[Digest]:
        """Of the layers that keep all tokens."""
        return [*self.blocks, *((self.tail,) if self.tail is not None else ())]

    @property
    def size_bytes(self) -> int:
        windows = (digest for window in self.windows.values() for digest in window.files.values())
        return sum(digest.size_bytes for digest in (*self.rows, *windows, *self.states.values()))


@dataclass(frozen=True, slots=True)
class Carrier:
    """What brings a memory to the store, as the MLX thread sees it."""

    clock: Callable[[], float]
    moves: Callable[[float], bool]  # whether the store has taken data within so many seconds
    hurry: Callable[[], object]  # begin the next try now


@dataclass(slots=True, eq=False)
class Publication:
    """A memory's way to the store. The event loop changes it; the MLX thread reads (`hot_memories.Owed`)."""

    standing: Standing
    # Whether the memory goes on from the one that the store has, where the turn could not read that one.
    may_follow: "Callable[[AgentMemory], bool] | None" = None
    # Set at the first attempt to publish. Retries reuse it, so that the manifest's bytes and digest stay the same.
    created_unix_ms: int = 0
    task: PublicationTask | None = None  # that runs, or the last one
    reported: SnapshotState | None = None  # that it is pending, or that it failed
    carrier: Carrier | None = None  # None: nothing is published from here
    is_copied: bool = False  # there are copies of all that the store lacks
    is_refused: bool = False  # the store does not take such a memory: no try can succeed
    _kept_until_s: float = 0.0
    _failed_s: float | None = None  # the last try, while none runs

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def has_failed(self) -> bool:
        return self._failed_s is not None

    def owe(self, carrier: Carrier) -> None:
        """From now on the engine waits with the memory's room for this carrier."""
        # Longer than a store takes to come back from a stall or a restart.
        self.carrier, self._kept_until_s = carrier, carrier.clock() + SILENCE_S

    def progressed(self) -> None:
        if self.carrier is not None:
            self._kept_until_s, self._failed_s = self.carrier.clock() + SILENCE_S, None

    def failed(self) -> None:
        """A try has failed: the memory may go now, and after a while not before one more try."""
        self._failed_s = self.carrier.clock() if self.carrier is not None else None
        self.is_copied = False

    # --- on the MLX thread ---

    @property
    def is_safe(self) -> bool:
        return self.standing.is_safe

    @property
    def is_owed(self) -> bool:
        return self.carrier is not None and self.standing.is_owed

    @property
    def is_awaited(self) -> bool:
        if (carrier := self.carrier) is None or not self.standing.is_owed or self.is_refused or self.is_copied:
            return False
        if (failed_s := self._failed_s) is not None:
            return carrier.clock() - failed_s >= SILENCE_S
        return carrier.clock() < self._kept_until_s or carrier.moves(SILENCE_S)

    def want(self) -> None:
        if self.carrier is not None and self._failed_s is not None:
            self.progressed()
            self.carrier.hurry()


@dataclass(frozen=True, slots=True)
class AgentMemory:
    transcript: RememberedText  # text, token ids, token chars
    messages: tuple[manifest_pb2.Message, ...]  # empty when the agent's turns are raw prompts
    turn: manifest_pb2.Turn
    shareable_tokens: int
    tokenizer_digest: str
    publication: Publication
    files: StoredFiles = field(default_factory=StoredFiles)
    rewind_points: tuple[int, ...] = ()  # token counts, ascending, that a model with states can go back to
    is_brought: bool = False  # its KV, or KV that it was computed on, came by an archive or from another store
    ahead: "Ahead | None" = None  # the prompt that the hot KV holds, if it holds more than this memory
    shortened: manifest_pb2.Shortened | None = None  # what `messages` lack; None: nothing
    template_time_ms: int = 0  # the time that the template got; 0: it reads no clock
    tools_order: manifest_pb2.ToolsOrder | None = None  # as the template was given them; None: none, or not known
    settings: AgentSettings = NO_SETTINGS  # the agent's when the turn began, for turns that cannot reach the store

    @property
    def computed_ids(self) -> TokenIds:
        """The tokens that have KV."""
        return self.transcript.token_ids[: len(self.transcript.token_ids) - self.files.pending]

    @property
    def unstored_tokens(self) -> int:
        return len(self.computed_ids) - len(self.files.blocks) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Ahead:
    """A prompt that was computed before its turn. The engine has its KV; the agent does not remember it."""

    transcript: RememberedText
    blocks: tuple[Digest, ...]  # its leading full blocks that are in the store
    shareable_tokens: int
    rewind_points: tuple[int, ...]
    runs: Runs | None = None


def as_hot(memory: AgentMemory) -> AgentMemory:
    """The memory that the engine's KV holds, for comparison with a prompt."""
    if (ahead := memory.ahead) is None:
        return memory
    return replace(
        memory,
        transcript=ahead.transcript,
        shareable_tokens=ahead.shareable_tokens,
        rewind_points=ahead.rewind_points,
        files=StoredFiles(list(ahead.blocks), runs=ahead.runs),
    )


def nothing_yet(head: Head | None, tokenizer_digest: str) -> AgentMemory:
    return AgentMemory(NO_TEXT, (), manifest_pb2.Turn(), 0, tokenizer_digest, Publication(Standing(head, Stage.STORED)))


def from_manifest(manifest: manifest_pb2.Manifest, head: Head, tokenizer_digest: str) -> AgentMemory:
    # Another tokenizer's replies have no guards in what are special tokens here.
    may_claim_replies = head.is_text_own and manifest.tokenizer_digest == tokenizer_digest
    files = StoredFiles(
        Digest.from_protos(manifest.blocks),
        Digest.from_proto(manifest.tail) if manifest.HasField("tail") else None,
        stored_windows(manifest.windows),
        {int(point.tokens): Digest.from_proto(point.digest) for point in manifest.states},
        tuple(manifest.computed.decoded) if manifest.HasField("computed") else None,
        manifest.asleep if manifest.HasField("asleep") else None,
        pending=int(manifest.HasField("pending")),
    )
    text, ids, chars = manifest.text, TokenIds(manifest.token_ids), TokenChars(manifest.token_chars)
    if files.pending:
        behind = manifest.pending
        text, ids, chars = text + behind.text, ids + TokenIds((behind.id,)), chars + TokenChars((len(behind.text),))
    return AgentMemory(
        transcript=RememberedText(text, ids, chars),
        messages=tuple(manifest.messages) if may_claim_replies else of_caller(manifest.messages),
        turn=manifest.turn,
        # An imported manifest may claim anything: it serves its own agent only.
        shareable_tokens=0 if head.is_brought else manifest.shareable_tokens,
        tokenizer_digest=manifest.tokenizer_digest,
        publication=Publication(Standing(head, Stage.STORED)),
        files=files,
        rewind_points=tuple(files.states),
        is_brought=head.is_brought,
        shortened=manifest.shortened if manifest.HasField("shortened") else None,
        template_time_ms=manifest.template_time_ms,
        tools_order=manifest.tools_order if manifest.HasField("tools_order") else None,
    )


async def parsed(data: bytes) -> manifest_pb2.Manifest:
    return await off_loop(len(data) > _LONG_BYTES, lambda: manifests.parse(data))


async def off_loop(is_long: bool, work: Callable[[], T]) -> T:
    """Do work in a thread if it takes milliseconds, so that it does not delay other turns' tokens."""
    return await asyncio.to_thread(work) if is_long else work()
