"""What the service knows of an agent's memory beside its KV: text, messages, the turn that made it, where it is kept.

It is read from a manifest, or made at a turn's end and attached to the engine's hot memory. KV itself is the engine's
or the store's; the digests here name it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.digest import Digest

from inference_svc.memory.outcomes import SnapshotOutcome
from inference_svc.memory.remote_cache import Head, Heard
from inference_svc.memory.trust import Claim, Version
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.conversation import of_caller
from inference_svc.text.prefix_matching import RememberedText


@dataclass(slots=True)
class Kept:
    """How much of a memory the store holds. Changed by publication alone, on the event loop.

    `head` is the newest version in the store as far as this engine knows (None: it could not be asked); the memory
    either is that version or extends it.
    """

    head: Head | None
    is_head: bool
    # Its words are the store's, under another KV identity: nothing is lost with it, and it is no version here.
    is_elsewhere: bool = False
    # The version that the turn's caller named as its parent, when the store could not be asked at once.
    expected_version: int | None = None
    blocks: list[Digest] = field(default_factory=list)  # the memory's leading full blocks that are in the store
    tail: Digest | None = None
    states: dict[int, Digest] = field(default_factory=dict)  # of its points, those that are in the store
    # Set when a commit was sent and its answer was lost: if this version is the newest, it is ours after all.
    attempted: Version | None = None
    # The same of the memories that this one extends: if one of them is the newest, it is this one's parent.
    attempted_before: frozenset[Version] = frozenset()
    # Of the lease under which it was made: its commit is refused once the line was somebody else's, or was taken back.
    generation: int = 0
    # Until where it was known what happened in the store when the turn began.
    heard: Heard | None = None
    # Manifests that this engine stored of the agent lately, for a turn that could not ask what is newest.
    stored_before: frozenset[Digest] = frozenset()
    # Another writer's version that came first: neither this memory nor one that extends it may follow it.
    lost_to: str = ""
    # Of the first publication. One that is tried again names the same manifest, so that the store knows it again.
    created_unix_ms: int = 0
    publication: "asyncio.Task[SnapshotOutcome] | None" = None

    @property
    def is_safe(self) -> bool:
        """Whether the store has what the agent remembers, under this KV identity or another."""
        return self.is_head or self.is_elsewhere

    @property
    def is_being_published(self) -> bool:
        return self.publication is not None and not self.publication.done()

    @property
    def attempts(self) -> frozenset[Version]:
        """Versions that a commit was sent for and whose answer was not heard: its own, and those before it."""
        return self.attempted_before | ({self.attempted} if self.attempted is not None else frozenset())

    @property
    def is_begun(self) -> bool:
        """Whether the agent's first commit was sent, and nobody knows yet whether it took effect."""
        return self.head is not None and not self.head.version and bool(self.attempts)

    @property
    def claim(self) -> Claim:
        follows = self.head.identity if self.head is not None else None
        itself = follows if self.is_head else self.attempted
        return Claim(follows, self.attempts, bool(self.lost_to), itself, self.generation)

    def learn(self, newest: Head) -> None:
        """Take what the store calls newest for the answer that a commit never had, if it is that."""
        if self.attempted == newest.identity:
            self.head, self.is_head, self.attempted = newest, True, None
        elif not self.is_head and newest.identity in self.attempted_before:
            self.head = newest


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """An agent's memory as of one whole turn."""

    words: RememberedText  # text, token ids, token chars
    messages: tuple[manifest_pb2.Message, ...]  # empty when the agent was addressed by raw prompts
    turn: manifest_pb2.Turn
    shareable_tokens: int
    tokenizer_digest: str
    kept: Kept
    points: tuple[int, ...] = ()  # token counts, ascending, that a model with states can go back to
    is_brought: bool = False  # its KV, or what it was computed on, came by an archive or from another store
    ahead: "Ahead | None" = None  # what the hot KV is of, if not of this


@dataclass(frozen=True, slots=True)
class Ahead:
    """A prompt that was computed before its turn. The agent does not remember it, the engine has its KV."""

    words: RememberedText
    blocks: tuple[Digest, ...]  # its leading full blocks that are in the store
    shareable_tokens: int
    points: tuple[int, ...]


def as_hot(memory: AgentMemory) -> AgentMemory:
    """The memory as the engine's KV has it, to hold a prompt against."""
    if (ahead := memory.ahead) is None:
        return memory
    kept = replace(memory.kept, blocks=list(ahead.blocks), tail=None, states={})
    shareable_tokens, points = ahead.shareable_tokens, ahead.points
    return replace(memory, words=ahead.words, shareable_tokens=shareable_tokens, points=points, kept=kept)


def nothing_yet(head: Head | None, tokenizer_digest: str) -> AgentMemory:
    """Of an agent that remembers nothing."""
    return AgentMemory(
        RememberedText("", (), ()), (), manifest_pb2.Turn(), 0, tokenizer_digest, Kept(head, is_head=True)
    )


def from_manifest(manifest: manifest_pb2.Manifest, head: Head) -> AgentMemory:
    """The memory that a checked manifest describes."""
    blocks = [Digest.from_proto(block) for block in manifest.blocks]
    tail = Digest.from_proto(manifest.tail) if manifest.HasField("tail") else None
    states = {int(point.tokens): Digest.from_proto(point.digest) for point in manifest.states}
    return AgentMemory(
        words=RememberedText(manifest.text, tuple(manifest.token_ids), tuple(manifest.token_chars)),
        messages=of_caller(manifest.messages) if head.is_brought else tuple(manifest.messages),
        turn=manifest.turn,
        # What was brought here may say of itself what it likes: it serves its own agent and nobody else.
        shareable_tokens=0 if head.is_brought else manifest.shareable_tokens,
        tokenizer_digest=manifest.tokenizer_digest,
        kept=Kept(head, is_head=True, blocks=blocks, tail=tail, states=states),
        points=tuple(states),
        is_brought=head.is_brought,
    )


def to_manifest(
    memory: AgentMemory,
    model: ModelInfo,
    blocks: Sequence[Digest],
    tail: Digest | None,
    states: Mapping[int, Digest],
) -> bytes:
    """The manifest of a memory whose tensors are stored under these digests; `states` by their points' tokens."""
    head = memory.kept.head
    return manifests.build(
        kv_identity=model.kv_identity,
        token_ids=memory.words.token_ids,
        text=memory.words.text,
        token_chars=memory.words.token_chars,
        blocks=blocks,
        tail=tail,
        states=sorted(states.items()),
        shareable_tokens=memory.shareable_tokens,
        messages=memory.messages,
        tokenizer_digest=model.tokenizer_digest,
        template_digest=model.template_digest,
        parent_manifest=head.manifest.hash if head is not None and head.manifest is not None else "",
        turn=memory.turn,
        created_unix_ms=memory.kept.created_unix_ms,
    )
