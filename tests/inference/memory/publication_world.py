"""An engine with a memory, a store and a house of lines, as values in RAM: for tests of publications."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from kvasir import errors
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.clients import Lineage
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.memory.agent_memory import AgentMemory, Publication
from inference_svc.memory.lines.line_parts import PublishingLimits
from inference_svc.memory.lines.line_states import Standing
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.publishing.copies import Copies
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.answers import NO_HEAD, AgentHeads, Head, LeaseGrant, Version
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from tests.inference.turns.parts import line_parts

KEY = AgentKey("default", "a")


LAYER = identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=1, key_dim=64, value_dim=64)


POLICY = identity_pb2.KvPolicy(
    key_bits=4, value_bits=4, group_size=64, scale_type="SCALE_TYPE_FLOAT16", key_rotation="KEY_ROTATION_NONE"
)


IDENTITY = identity_pb2.KvIdentity(weights_digest="ab" * 32, layers=[LAYER], policy=POLICY)


OTHERS = Head(7, Digest.of(b"another writer's"), 6)


class Pinned:
    """A memory that the engine keeps, whole in its first piece."""

    def __init__(self, first: Snapshot) -> None:
        self.state = first.state
        self.first: Snapshot | None = first
        self.is_released = False
        self.piece: Any = lambda *_asked: _done(first)

    def take_first(self) -> Snapshot | None:
        first, self.first = self.first, None
        return first

    def goes_as(self, _owed: object) -> None:
        pass

    def release(self) -> None:
        self.is_released = True


def _done(piece: Snapshot) -> "Future[Snapshot]":
    copied: Future[Snapshot] = Future()
    copied.set_result(piece)
    return copied


class Engine:
    """One hot memory, and whatever snapshot it is told to give."""

    is_copied_by_threads = False

    def __init__(self) -> None:
        self.memories = self
        self.model = SimpleNamespace(
            kv_identity=IDENTITY,
            kv_identity_hash="cd" * 32,
            kv_bytes_per_token=100,
            tokenizer_digest="",
            template_digest="",
        )
        self.hot: Any = None
        self.taken: Future[Snapshot | None] = Future()

    def get(self, _key: AgentKey) -> Any:
        return self.hot

    def drop(self, _key: AgentKey) -> None:
        self.hot = None

    def tag_of(self, _key: AgentKey) -> Any:
        return self.hot.tag if self.hot is not None else None

    def sizes(self) -> dict[AgentKey, int]:
        return {KEY: 1} if self.hot is not None else {}

    def pin(self, _key: AgentKey, _first_block: int, _most: int, stored_windows: Mapping[int, range]) -> "Future[Any]":
        assert not stored_windows
        return pinning(self.taken)


def pinning(taken: "Future[Snapshot | None]") -> "Future[Any]":
    """What the engine answers who asks for a memory whose only piece is this."""
    asked: Future[Any] = Future()
    if taken.cancelled():
        asked.cancel()
    elif taken.exception() is not None:
        asked.set_exception(cast("BaseException", taken.exception()))
    else:
        piece = taken.result()
        asked.set_result(None if piece is None else Pinned(piece))
    return asked


class Store:
    """A line with a compare-and-swap; `lost_answers` commits take effect and are not heard of."""

    is_reachable = True

    def __init__(self, head: Head = NO_HEAD) -> None:
        self.head = head
        self.lost_answers = 0
        self.goes_away = False  # with the answer
        self.refusals: list[Exception] = []
        self.taken_back = False
        self.stored: list[Digest] = []  # by turns, since any turn of a test began
        self.leases_of_commits: list[object] = []
        self.bases: list[object] = []  # of commits
        self.manifests = 0  # written
        self.generation = 2  # of the lease that it grants
        self.features = frozenset[str]()
        self.awaited: list[Sequence[Digest]] = []  # of commits
        self.up = asyncio.Event()
        self.up.set()
        self.connection = self.bulk = self.agents = self.leases = self.blobs = self.events = self
        self.breaker = SimpleNamespace(closed=self.up, opened=asyncio.Event())

    def has_moved_within(self, _seconds: float) -> bool:
        return False

    async def acquire(self, *_asked: object, **_how: object) -> LeaseGrant:
        return LeaseGrant(self.generation, self.head)

    async def write_tensors(
        self, files: list[bytes], _timeout_s: float, _hashing: object = None, naming: Awaitable[bytes] | None = None
    ) -> tuple[list[Digest], int]:
        self.manifests += bool(await naming) if naming is not None else 0
        return [Digest.of(data) for data in files], 0

    async def write_manifest(self, _manifest: bytes, _timeout_s: float) -> None:
        self.manifests += 1

    async def heads(self, *_asked: object) -> AgentHeads:
        return AgentHeads(self.head, None)

    async def was_taken_back(self, *_asked: object) -> bool:
        return self.taken_back

    async def was_changed(self, _agent: str, _since: object, own: Collection[Digest]) -> bool:
        return not set(self.stored) <= set(own)

    async def commit(self, _agent: str, digest: Digest, parent: int, *, lineage: Lineage, **how: object) -> Head:
        self.leases_of_commits.append(how["lease"])
        self.bases.append(lineage.base_version)
        self.awaited.append(cast("Sequence[Digest]", how["awaited"]))
        if self.refusals:
            raise self.refusals.pop()
        if (self.head.manifest, self.head.parent_version) == (digest, parent):
            return self.head
        if Version(parent, lineage.parent_manifest) != self.head.identity:
            raise errors.Conflict("moved", metadata={"head_version": str(self.head.version)})
        self.head = Head(parent + 1, digest, parent)
        self.stored.append(digest)
        if self.lost_answers:
            self.lost_answers -= 1
            if self.goes_away:
                self.up.clear()
            raise errors.Unavailable("the answer was lost")
        return self.head


class House:
    def __init__(self, head: Head = NO_HEAD, timeout_s: float = 5.0, max_held_bytes: int = 1 << 20) -> None:
        self.engine: Any = Engine()
        self.store: Any = Store(head)
        ticks = iter(range(1, 1000))
        limits = PublishingLimits(commit_wait_s=3, timeout_s=timeout_s, head_budget_s=2)
        self.copies, self.stats = Copies(self.engine, SharedRoom(max_held_bytes)), ServiceStats(0.0)
        parts = line_parts(
            engine=self.engine, copies=self.copies, limits=limits, stats=self.stats, now_ms=lambda: next(ticks)
        )
        self.lines = Lines(KEY.namespace, self.store, parts)
        self.line = self.lines.line(KEY.agent_id)

    def publish(self, memory: AgentMemory, previous: AgentMemory | None = None) -> asyncio.Task[Any]:
        asked: Future[Snapshot | None] = Future()
        asked.set_result(taken(memory))
        return self.line.publications.publish(memory, pinning(asked), previous)


def remembered(text: str, head: Head | None, expected_version: int | None = None) -> AgentMemory:
    publication = Publication(Standing(head, expected_version=expected_version))
    transcript = RememberedText(text, TokenIds([1] * len(text)), TokenChars([1] * len(text)))
    return AgentMemory(transcript, (), manifest_pb2.Turn(), 0, "", publication)


def taken(memory: AgentMemory) -> Any:
    state = SequenceState(memory.transcript.token_ids, memory.transcript.token_chars, 0)
    tail: Any = (None, memory.transcript.text.encode())
    return Snapshot(0, (), tail, state)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 10)

    asyncio.run(bounded())
