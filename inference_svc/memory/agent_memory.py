"""An agent's memory without its KV: text, messages, the turn that made it, and the state of its publication.

It is read from a manifest, or made at a turn's end and attached to the engine's hot memory. The KV itself is in the
engine or in the store, under the digests that are here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest

from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.owing import Owing
from inference_svc.memory.store.answers import NO_SETTINGS, AgentSettings, EventCursor, Head
from inference_svc.memory.stored_windows import StoredWindow, listed_windows, stored_windows
from inference_svc.memory.trust import Claim, Version
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.conversation import of_caller
from inference_svc.text.prefix_matching import NO_TEXT, RememberedText
from inference_svc.text.token_ids import TokenIds

Publication: TypeAlias = asyncio.Task[SnapshotOutcome]


@dataclass(slots=True)
class PublicationState:
    """How much of a memory the store holds, and which commits of it have no answer yet. On the event loop.

    `head` is the newest version in the store as far as this engine knows (None: the store could not be asked). The
    memory either is that version or extends it. `Committing`, `MemoryFiles` and `Publisher` change this object, and
    `Recall` calls `learn`.
    """

    head: Head | None
    is_head: bool
    # `head` is this text under another KV identity: to drop the memory loses nothing, and it is no version of its line.
    is_elsewhere: bool = False
    # The parent version that the turn's caller named, when the store could not be asked at once.
    expected_version: int | None = None
    # The earlier version that the turn went on from; 0: its parent.
    base_version: int = 0
    handed_over_by: str = ""  # the peer from whose store the agent came with the turn
    blocks: list[Digest] = field(default_factory=list)  # the memory's leading full blocks that are in the store
    tail: Digest | None = None
    windows: dict[int, StoredWindow] = field(default_factory=dict)  # by window, those of its files in the store
    states: dict[int, Digest] = field(default_factory=dict)  # by rewind point, those that are in the store
    # The version that a commit was sent for and whose answer was lost: if it is the newest, it is ours after all.
    attempted: Version | None = None
    # The same for the memories that this one extends: if one of these is the newest, it is this memory's parent.
    attempted_before: frozenset[Version] = frozenset()
    # Generation of the lease under which the memory was made. The store refuses the commit if another engine held the
    # line since, or if it was rolled back.
    generation: int = 0
    # The place in the store's history up to which events were known when the turn began.
    event_cursor: EventCursor | None = None
    # Whether the memory goes on from the one that the store has, where the turn could not read that one.
    may_follow: "Callable[[AgentMemory], bool] | None" = None
    # Manifests of the agent that this engine stored lately, for a turn that could not ask for the newest version.
    stored_before: frozenset[Digest] = frozenset()
    # Another writer's version that came first: neither this memory nor one that extends it may follow it.
    lost_to: str = ""
    # Set at the first attempt to publish. Retries reuse it, so that the manifest's bytes and digest stay the same.
    created_unix_ms: int = 0
    task: Publication | None = None  # the publication that runs, or the last one
    reported: SnapshotState | None = None  # that it is pending, or that it failed
    owing: Owing | None = None  # for the engine; None: nothing is published from here

    @property
    def is_safe(self) -> bool:
        """Whether the store has this memory, under this KV identity or another."""
        return self.is_head or self.is_elsewhere

    @property
    def is_being_published(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def attempts(self) -> frozenset[Version]:
        """Versions whose commits were sent without an answer: this memory's, and those of memories before it."""
        return self.attempted_before | ({self.attempted} if self.attempted is not None else frozenset())

    @property
    def is_begun(self) -> bool:
        """Whether the agent's first commit was sent, and it is not known yet whether it took effect."""
        return self.head is not None and not self.head.version and bool(self.attempts)

    @property
    def claim(self) -> Claim:
        is_known = self.head is not None and self.may_follow is None
        follows = self.head.identity if is_known and self.head is not None else None
        itself = follows if self.is_head else self.attempted
        return Claim(follows, self.attempts, bool(self.lost_to), itself, self.generation)

    def learn(self, newest: Head) -> None:
        """If the store's newest version is one whose commit had no answer, note that the commit took effect."""
        if self.attempted == newest.identity:
            self.head, self.is_head, self.attempted = newest, True, None
        elif not self.is_head and newest.identity in self.attempted_before:
            self.head = newest


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """An agent's memory as of one whole turn."""

    transcript: RememberedText  # text, token ids, token chars
    messages: tuple[manifest_pb2.Message, ...]  # empty when the agent's turns are raw prompts
    turn: manifest_pb2.Turn
    shareable_tokens: int
    tokenizer_digest: str
    publication: PublicationState
    rewind_points: tuple[int, ...] = ()  # token counts, ascending, that a model with states can go back to
    is_brought: bool = False  # its KV, or KV that it was computed on, came by an archive or from another store
    ahead: "Ahead | None" = None  # the prompt that the hot KV holds, if it holds more than this memory
    shortened: manifest_pb2.Shortened | None = None  # what `messages` lack; None: nothing
    template_time_ms: int = 0  # the time that the template got; 0: it reads no clock
    tools_order: manifest_pb2.ToolsOrder | None = None  # as the template was given them; None: none, or not known
    settings: AgentSettings = NO_SETTINGS  # the agent's when the turn began, for turns that cannot ask the store

    @property
    def unstored_tokens(self) -> int:
        """Tokens behind the blocks that the store has."""
        return len(self.transcript.token_ids) - len(self.publication.blocks) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Ahead:
    """A prompt that was computed before its turn. The engine has its KV; the agent does not remember it."""

    transcript: RememberedText
    blocks: tuple[Digest, ...]  # its leading full blocks that are in the store
    shareable_tokens: int
    rewind_points: tuple[int, ...]


def as_hot(memory: AgentMemory) -> AgentMemory:
    """The memory that the engine's KV holds, for comparison with a prompt."""
    if (ahead := memory.ahead) is None:
        return memory
    publication = replace(memory.publication, blocks=list(ahead.blocks), tail=None, windows={}, states={})
    shareable_tokens, rewind_points = ahead.shareable_tokens, ahead.rewind_points
    return replace(
        memory,
        transcript=ahead.transcript,
        shareable_tokens=shareable_tokens,
        rewind_points=rewind_points,
        publication=publication,
    )


def nothing_yet(head: Head | None, tokenizer_digest: str) -> AgentMemory:
    """The empty memory of a new agent."""
    publication = PublicationState(head, is_head=True)
    return AgentMemory(NO_TEXT, (), manifest_pb2.Turn(), 0, tokenizer_digest, publication)


def from_manifest(manifest: manifest_pb2.Manifest, head: Head, tokenizer_digest: str) -> AgentMemory:
    """The memory that a checked manifest describes, for a model with this tokenizer."""
    # Another tokenizer's replies have no guards in what are special tokens here.
    may_claim_replies = head.is_text_own and manifest.tokenizer_digest == tokenizer_digest
    blocks = [Digest.from_proto(block) for block in manifest.blocks]
    tail = Digest.from_proto(manifest.tail) if manifest.HasField("tail") else None
    states = {int(point.tokens): Digest.from_proto(point.digest) for point in manifest.states}
    windows = stored_windows(manifest.windows)
    return AgentMemory(
        transcript=RememberedText(manifest.text, TokenIds(manifest.token_ids), tuple(manifest.token_chars)),
        messages=tuple(manifest.messages) if may_claim_replies else of_caller(manifest.messages),
        turn=manifest.turn,
        # An imported manifest may claim anything: it serves its own agent only.
        shareable_tokens=0 if head.is_brought else manifest.shareable_tokens,
        tokenizer_digest=manifest.tokenizer_digest,
        publication=PublicationState(head, is_head=True, blocks=blocks, tail=tail, windows=windows, states=states),
        rewind_points=tuple(states),
        is_brought=head.is_brought,
        shortened=manifest.shortened if manifest.HasField("shortened") else None,
        template_time_ms=manifest.template_time_ms,
        tools_order=manifest.tools_order if manifest.HasField("tools_order") else None,
    )


def to_manifest(
    memory: AgentMemory,
    model: ModelInfo,
    blocks: Sequence[Digest],
    tail: Digest | None,
    windows: Mapping[int, StoredWindow],
    states: Mapping[int, Digest],
) -> bytes:
    """The manifest of a memory whose tensors are stored under these digests; `windows` by window, `states` by their
    points' tokens.
    """
    head = memory.publication.head
    return manifests.build(
        kv_identity=model.kv_identity,
        token_ids=memory.transcript.token_ids,
        text=memory.transcript.text,
        token_chars=memory.transcript.token_chars,
        blocks=blocks,
        tail=tail,
        states=sorted(states.items()),
        windows=listed_windows(windows),
        shareable_tokens=memory.shareable_tokens,
        messages=memory.messages,
        tokenizer_digest=model.tokenizer_digest,
        template_digest=model.template_digest,
        parent_manifest=head.manifest.hash if head is not None and head.manifest is not None else "",
        turn=memory.turn,
        created_unix_ms=memory.publication.created_unix_ms,
        shortened=memory.shortened,
        template_time_ms=memory.template_time_ms,
        tools_order=memory.tools_order,
    )
