"""Publications against a store that loses answers, is late, or talks nonsense: no version is lost, none is overrun."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvasir import errors
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.memory.agent_memory import AgentMemory, Publication, StoredFiles
from inference_svc.memory.lines import commit, line
from inference_svc.memory.lines.line_parts import PublishingLimits
from inference_svc.memory.lines.line_states import Standing
from inference_svc.memory.lines.lines import Lines, store_owed
from inference_svc.memory.outcomes import SnapshotState
from inference_svc.memory.publishing import copies
from inference_svc.memory.publishing.copies import Copies
from inference_svc.memory.recall import Recall
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.answers import NO_HEAD, AgentHeads, Head, LeaseGrant, Version
from inference_svc.model.model_host import MemoriesLeft
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.sequence_state import SequenceState
from inference_svc.text.token_ids import TokenIds
from inference_svc.turns.turn_ending import TurnEnding
from tests.inference.turns.parts import line_parts, parts_of

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
        self.model = SimpleNamespace(
            kv_identity=IDENTITY,
            kv_identity_hash="cd" * 32,
            kv_bytes_per_token=100,
            tokenizer_digest="",
            template_digest="",
        )
        self.hot: Any = None
        self.taken: Future[Snapshot | None] = Future()

    def hot_memory(self, _key: AgentKey) -> Any:
        return self.hot

    def drop_hot(self, _key: AgentKey) -> None:
        self.hot = None

    def hot_tag(self, _key: AgentKey) -> Any:
        return self.hot.tag if self.hot is not None else None

    def hot_keys(self) -> set[AgentKey]:
        return {KEY} if self.hot is not None else set()

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
        self.leases: list[object] = []  # that commits brought
        self.bases: list[object] = []  # likewise
        self.manifests = 0  # written
        self.generation = 2  # of the lease that it grants
        self.up = asyncio.Event()
        self.up.set()

    def has_moved_within(self, _seconds: float) -> bool:
        return False

    async def acquire_lease(self, *_asked: object, **_how: object) -> LeaseGrant:
        return LeaseGrant(self.generation, self.head)

    async def until_reachable(self) -> None:
        await self.up.wait()

    async def until_unreachable(self) -> None:
        await asyncio.Event().wait()

    async def write_tensors(self, files: list[bytes], _timeout_s: float, *_known: object) -> tuple[list[Digest], int]:
        return [Digest.of(data) for data in files], 0

    async def write_manifest(self, _manifest: bytes, _timeout_s: float) -> None:
        self.manifests += 1

    async def heads(self, *_asked: object) -> AgentHeads:
        return AgentHeads(self.head, None)

    async def was_taken_back(self, *_asked: object) -> bool:
        return self.taken_back

    async def was_changed(self, _agent: str, _since: object, own: Collection[Digest]) -> bool:
        return not set(self.stored) <= set(own)

    async def commit(self, _agent: str, digest: Digest, parent: Version, _timeout_s: float, **how: object) -> Head:
        self.leases.append(how.get("lease"))
        self.bases.append(how.get("base_version"))
        if self.refusals:
            raise self.refusals.pop()
        if (self.head.manifest, self.head.parent_version) == (digest, parent.number):
            return self.head
        if parent != self.head.identity:
            raise errors.Conflict("moved", metadata={"head_version": str(self.head.version)})
        self.head = Head(parent.number + 1, digest, parent.number)
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
        return self.line.publish(memory, pinning(asked), previous)


def remembered(text: str, head: Head | None, expected_version: int | None = None) -> AgentMemory:
    publication = Publication(Standing(head, expected_version=expected_version))
    transcript = RememberedText(text, TokenIds([1] * len(text)), [1] * len(text))
    return AgentMemory(transcript, (), manifest_pb2.Turn(), 0, "", publication)


def taken(memory: AgentMemory) -> Any:
    state = SequenceState(memory.transcript.token_ids, tuple(memory.transcript.token_chars), 0)
    tail: Any = (None, memory.transcript.text.encode())
    return Snapshot(0, (), tail, state)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 10)

    asyncio.run(bounded())


def test_a_commit_whose_answer_was_lost_is_not_another_writers() -> None:
    async def scenario() -> None:
        house = House()
        house.store.lost_answers = 2
        outcome = await house.publish(remembered("one", NO_HEAD))
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 1)
        assert outcome.manifest == house.store.head.manifest

    run(scenario)


def test_a_conflict_with_ones_own_version_is_a_commit() -> None:
    async def scenario() -> None:
        house = House()
        house.store.lost_answers = 1
        real = house.store.commit

        async def forgetful(agent: str, manifest: Digest, parent: Version, timeout_s: float, **_how: object) -> Head:
            if parent != house.store.head.identity:
                raise errors.Conflict("moved", metadata={"head_version": "1"})
            return cast("Head", await real(agent, manifest, parent, timeout_s))

        house.store.commit = forgetful
        outcome = await house.publish(remembered("one", NO_HEAD))
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 1)

    run(scenario)


def test_a_version_whose_answer_never_came_is_the_next_turns_parent() -> None:
    async def scenario() -> None:
        house = House(timeout_s=0.05)
        house.store.lost_answers, house.store.goes_away = 1, True
        first, second = remembered("one", NO_HEAD), remembered("one two", NO_HEAD)
        assert (await house.publish(first)).state is SnapshotState.FAILED
        assert house.store.head.version == 1
        house.store.up.set()
        outcome = await house.publish(second, first)
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 2)

    run(scenario)


def test_a_turn_that_ended_while_its_predecessor_committed_follows_it() -> None:
    async def scenario() -> None:
        house = House()
        first = remembered("one", NO_HEAD)
        publishing = house.publish(first)
        second = remembered("one two", first.publication.standing.head)
        await publishing
        outcome = await house.publish(second, first)
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 2)

    run(scenario)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_turn_has_its_predecessors_base_only_if_that_one_never_became_a_version(is_stored: bool) -> None:
    async def scenario() -> None:
        house = House(OTHERS, timeout_s=5.0 if is_stored else 0.05)
        first, second = remembered("one", OTHERS), remembered("one two", OTHERS)
        first.publication.standing = replace(first.publication.standing, base_version=3)
        house.store.up.clear()
        publishing = [house.publish(first)]
        if not is_stored:
            assert (await publishing[0]).state is SnapshotState.FAILED
        publishing.append(house.publish(second, first))
        house.store.up.set()
        assert (await publishing[1]).state is SnapshotState.COMMITTED
        assert house.store.bases == ([3, 0] if is_stored else [3])

    run(scenario)


def test_what_extends_a_memory_that_lost_loses_too() -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        house.store.up.clear()
        first, second = remembered("one", None, expected_version=5), remembered("one two", None)
        both = house.publish(first), house.publish(second, first)
        house.store.up.set()
        assert [outcome.state for outcome in await asyncio.gather(*both)] == [SnapshotState.FAILED] * 2
        assert house.store.head == OTHERS
        assert first.publication.standing.head is None
        assert not second.publication.standing.is_current(OTHERS.identity)

    run(scenario)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_memory_that_lost_is_hot_no_longer_and_a_newer_turns_stays(is_replaced: bool) -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        memory, newer = remembered("one", None, expected_version=5), remembered("one two", None)
        house.engine.hot = SimpleNamespace(tag=newer if is_replaced else memory)
        assert (await house.publish(memory)).state is SnapshotState.FAILED
        assert (house.engine.hot is not None) is is_replaced

    run(scenario)


@pytest.mark.parametrize(("expected_version", "expected"), [(None, True), (7, True), (5, False), (0, False)])
def test_a_memory_made_without_the_store_is_stored_after_the_version_that_its_caller_named(
    expected_version: int | None, expected: bool
) -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        memory = remembered("one", None, expected_version)
        # The number alone does not say which memory it follows: as hot memory it is not used until it is stored.
        assert not memory.publication.standing.is_current(OTHERS.identity)
        outcome = await house.publish(memory)
        assert outcome.state is (SnapshotState.COMMITTED if expected else SnapshotState.FAILED)
        assert memory.publication.standing.is_current(house.store.head.identity) is expected

    run(scenario)


def test_a_version_that_was_lost_and_brought_back_is_not_the_one_that_the_next_turn_extends() -> None:
    """Its number is another: between the two the agent remembered something else, and the next turn's words with it."""

    async def scenario() -> None:
        house = House(timeout_s=0.05)
        house.store.lost_answers, house.store.goes_away = 1, True
        first, second = remembered("one", NO_HEAD), remembered("one two", NO_HEAD)
        assert (await house.publish(first)).state is SnapshotState.FAILED
        made = house.store.head
        house.store.head = Head(3, made.manifest, 2)  # others committed, and rolled back to it
        house.store.up.set()
        outcome = await house.publish(second, first)
        assert outcome.state is SnapshotState.FAILED
        assert house.store.head == Head(3, made.manifest, 2)

    run(scenario)


@pytest.mark.parametrize("taken_back", [True, False])
def test_a_line_that_was_taken_back_is_not_extended_under_the_lease_that_came_after(taken_back: bool) -> None:
    """What was deleted and forked back has the number and the manifest that the memory follows."""

    async def scenario() -> None:
        house = House(OTHERS)
        house.store.taken_back = taken_back
        memory = remembered("one", OTHERS)
        memory.publication.standing = memory.publication.standing.under(1)
        await house.line.lease.obtain(1)
        await house.publish(memory)
        assert house.store.leases == [("engine-1", 1 if taken_back else 2)]

    run(scenario)


@pytest.mark.parametrize("taken_back", [True, False])
def test_a_turn_whose_line_was_given_back_is_stored_only_if_nothing_was_taken_back(taken_back: bool) -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        house.store.taken_back = taken_back
        outcome = await house.publish(remembered("one", OTHERS))
        assert outcome.state is (SnapshotState.FAILED if taken_back else SnapshotState.COMMITTED)
        assert house.store.leases == ([] if taken_back else [("engine-1", 2)])

    run(scenario)


@pytest.mark.parametrize(
    ("is_changed", "expected_version", "is_stored"), [(True, None, False), (True, 7, True), (False, None, True)]
)
def test_a_turn_that_could_not_ask_does_not_replace_one_that_another_engine_stored_meanwhile(
    is_changed: bool, expected_version: int | None, is_stored: bool
) -> None:
    """Unless its caller named that version: then it is to follow it."""

    async def scenario() -> None:
        house = House(OTHERS)
        house.store.stored = [Digest.of(b"another engine's")] if is_changed else []
        outcome = await house.publish(remembered("one", None, expected_version))
        assert (outcome.state is SnapshotState.COMMITTED) is is_stored

    run(scenario)


def test_turns_of_one_outage_are_all_stored_in_their_order() -> None:
    """None could ask. What this engine stored itself is no reason not to store the next."""

    async def scenario() -> None:
        house = House(OTHERS)
        house.store.up.clear()
        turns = [house.publish(remembered("one" + " more" * count, None)) for count in range(4)]
        house.store.up.set()
        outcomes = await asyncio.gather(*turns)
        assert [outcome.version for outcome in outcomes] == [8, 9, 10, 11]

    run(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_a_memory_that_is_on_its_way_when_its_model_goes_is_stored_once(fails: bool) -> None:
    """A second version of the same turn would make a caller that names the first one lose. If that fails, it is stored
    after it: RAM has its only copy.
    """

    async def scenario() -> None:
        house, memory, may_write = House(), remembered("one", NO_HEAD), asyncio.Event()
        write_tensors = house.store.write_tensors

        async def slow(files: list[bytes], timeout_s: float, *_known: object) -> tuple[list[Digest], int]:
            await may_write.wait()
            return cast("tuple[list[Digest], int]", await write_tensors(files, timeout_s))

        house.store.write_tensors = slow
        house.store.refusals = [errors.ResourceExhausted("no room now")] if fails else []
        house.engine.hot = SimpleNamespace(tag=memory)
        house.engine.taken.set_result(taken(memory))
        first = house.publish(memory)
        storing = asyncio.create_task(store_owed(house.engine, {KEY.namespace: house.lines}, 9, lambda: 0.0))
        await asyncio.sleep(0.05)
        may_write.set()
        assert await storing == MemoriesLeft(stored=1)
        assert (first.result().state is SnapshotState.FAILED, house.store.head.version) == (fails, 1)

    run(scenario)


@pytest.mark.parametrize("last", ["write_tensors", "write_manifest"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_files_and_manifest_go_at_once_and_nothing_is_committed_before_both_are_there(last: str, is_cut: bool) -> None:
    async def scenario() -> None:
        house, memory, began = House(), remembered("one", NO_HEAD), list[str]()
        may_end, both_began = asyncio.Event(), asyncio.Event()

        def watched(name: str) -> None:
            write = getattr(house.store, name)

            async def watch(*given: Any) -> object:
                began.append(name)
                both_began.set() if len(began) == 2 else None
                if name == last and not may_end.is_set():
                    await may_end.wait()
                    if is_cut:
                        raise errors.Unavailable("cut")
                return await write(*given)

            setattr(house.store, name, watch)

        watched("write_tensors")
        watched("write_manifest")
        publication = house.publish(memory)
        await both_began.wait()
        await asyncio.sleep(0.01)
        assert (sorted(began), house.store.head) == (["write_manifest", "write_tensors"], NO_HEAD)
        may_end.set()
        assert (await publication).state is SnapshotState.COMMITTED
        assert began.count(last) == 1 + is_cut
        assert memory.files.tail == Digest.of(b"one")

    run(scenario)


def test_a_malformed_answer_to_a_commit_is_a_failed_snapshot_with_a_reason() -> None:
    async def scenario() -> None:
        house = House()
        house.store.refusals = [ValueError("hash: expected 64 hex")]
        memory = remembered("one", NO_HEAD)
        house.publish(memory)
        outcome = await house.line.outcome(memory.publication)
        assert outcome.state is SnapshotState.FAILED
        assert "ValueError" in outcome.reason

    run(scenario)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_memory_that_cannot_be_copied_is_a_failed_snapshot_with_a_reason(is_cancelled: bool) -> None:
    async def scenario() -> None:
        house = House()
        house.engine.taken.cancel() if is_cancelled else house.engine.taken.set_exception(RuntimeError("device"))
        ending = TurnEnding(parts_of(recall=Recall(house.engine, {KEY.namespace: house.lines})))
        outcome = await ending._keep(KEY, remembered("one", NO_HEAD))
        assert outcome.state is SnapshotState.FAILED
        assert "copied" in outcome.reason

    run(scenario)


@pytest.mark.parametrize(("hot_text", "expected"), [("one", SnapshotState.COMMITTED), ("two!", SnapshotState.FAILED)])
def test_what_a_newer_turn_wrote_is_never_sent_under_an_older_memorys_words(
    hot_text: str, expected: SnapshotState
) -> None:
    async def scenario() -> None:
        house = House()
        house.store.refusals = [errors.FailedPrecondition("a block is gone")]
        memory = remembered("one", NO_HEAD)
        house.engine.hot = SimpleNamespace(tag=memory)
        house.engine.taken.set_result(taken(remembered(hot_text, NO_HEAD)))
        assert (await house.publish(memory)).state is expected

    run(scenario)


class LongMemory(Engine):
    """A hot memory of many blocks, copied in pieces, and what was held whenever a piece was taken."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.ids = TokenIds(range(blocks * BLOCK_TOKENS + 1))
        self.most_held = 0
        self.held: SharedRoom | None = None
        self.pins: list[Any] = []

    def pin(self, _key: AgentKey, first_block: int, most: int, _stored_windows: Mapping[int, range]) -> "Future[Any]":
        asked: Future[Any] = Future()
        first = self._piece(first_block, most).result()
        assert first is not None
        pinned: Any = Pinned(first)
        pinned.piece = lambda first, most, _windows: self._piece(None if pinned.is_released else first, most)
        self.pins.append(pinned)
        asked.set_result(pinned)
        return asked

    @property
    def _state(self) -> SequenceState:
        return SequenceState(self.ids, (1,) * len(self.ids), 0)

    def _piece(self, first_block: int | None, most: int) -> "Future[Snapshot | None]":
        asked: Future[Snapshot | None] = Future()
        if first_block is None:
            asked.set_result(None)
            return asked
        assert self.held is not None
        self.most_held = max(self.most_held, self.held.held_units)
        end = len(self.ids) // BLOCK_TOKENS
        last = min(first_block + most, end)
        files: Any = tuple((None, bytes([block]) * 1000) for block in range(first_block, last))
        tail: Any = (None, b"tail") if last == end else None
        asked.set_result(Snapshot(first_block, files, tail, self._state))
        return asked


def long_house(blocks: int, max_held_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[House, AgentMemory]:
    """Pieces of two blocks, and room for five."""
    house = House(max_held_bytes=max_held_bytes)
    engine: Any = LongMemory(blocks)
    engine.held = house.copies.held
    engine.model.kv_bytes_per_token = 1000 // BLOCK_TOKENS + 1
    monkeypatch.setattr(copies, "_PIECE_BYTES", 2 * BLOCK_TOKENS * engine.model.kv_bytes_per_token)
    house.engine = house.copies._engine = engine
    parts = replace(house.lines._parts, engine=engine)
    house.line._parts = house.line.lease._parts = parts
    transcript = RememberedText("x" * len(engine.ids), engine.ids, (1,) * len(engine.ids))
    memory = AgentMemory(transcript, (), manifest_pb2.Turn(), 0, "", Publication(Standing(NO_HEAD)))
    engine.hot = SimpleNamespace(tag=memory)
    return house, memory


def publish_long(house: House, memory: AgentMemory) -> asyncio.Task[Any]:
    return house.line.publish(memory, house.copies.pin(KEY, len(memory.files.blocks), {}))


BLOCKS = [Digest.of(bytes([block]) * 1000) for block in range(40)]


def test_a_memory_larger_than_what_may_wait_goes_to_the_store_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        house, memory = long_house(40, 5000, monkeypatch)
        outcome = await publish_long(house, memory)
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 1)
        assert house.engine.most_held <= 5000
        assert memory.files.blocks == BLOCKS
        assert memory.files.tail == Digest.of(b"tail")
        assert house.copies.held.held_units == 0
        assert all(pinned.is_released for pinned in house.engine.pins)

    run(scenario)


def test_a_store_that_cuts_each_piece_in_turn_gets_the_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it has is sent again, and none of it is kept in RAM meanwhile."""

    async def scenario() -> None:
        house, memory = long_house(40, 5000, monkeypatch)
        write_tensors, cut = house.store.write_tensors, set[bytes]()

        async def cutting(files: list[bytes], stall_s: float, *_known: object) -> tuple[list[Digest], int]:
            if files[0] not in cut:
                cut.add(files[0])
                raise errors.Unavailable("cut")
            return cast("tuple[list[Digest], int]", await write_tensors(files, stall_s))

        house.store.write_tensors = cutting
        monkeypatch.setattr(commit, "LOOK_S", 0.001)
        monkeypatch.setattr(commit, "RETRY_S", 0.001)
        assert (await publish_long(house, memory)).state is SnapshotState.COMMITTED
        assert memory.files.blocks == BLOCKS
        assert house.engine.most_held <= 5000
        assert house.copies.held.held_units == 0

    run(scenario)


def test_memories_that_wait_for_the_one_before_hold_no_room_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        house, memory = long_house(40, 3000, monkeypatch)
        house.store.up.clear()
        first = publish_long(house, memory)
        later = replace(memory, publication=Publication(Standing(NO_HEAD)), files=StoredFiles())
        asked = house.copies.pin(KEY, 0, {})
        second = house.line.publish(later, asked, memory)
        await asyncio.sleep(0.01)
        house.store.up.set()
        assert [(await task).version for task in (first, second)] == [1, 2]
        assert house.copies.held.held_units == 0

    run(scenario)


def test_a_memory_whose_room_was_wanted_fails_with_a_reason_and_its_successor_knows_what_it_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        house, memory = long_house(40, 5000, monkeypatch)
        first = remembered("one", NO_HEAD)
        assert (await house.publish(first)).version == 1
        house.engine.hot = None
        asked = house.copies.pin(KEY, 0, {})
        house.engine.pins[-1].release()
        outcome = await house.line.publish(memory, asked, first)
        assert outcome.state is SnapshotState.FAILED
        assert "dropped" in outcome.reason
        assert house.copies.held.held_units == 0
        # The version that is there is the one that it, and whatever extends it, follows.
        assert memory.publication.standing.head == first.publication.standing.head == house.store.head
        following = remembered("two", NO_HEAD)
        assert (await house.publish(following, memory)).version == 2
        counters = house.stats.of(KEY.namespace)
        assert counters.publications == {SnapshotState.COMMITTED: 2, SnapshotState.FAILED: 1}

    run(scenario)


@pytest.mark.parametrize("is_hot", [True, False])
def test_what_failed_is_tried_again_while_it_is_hot_and_its_success_is_told(
    is_hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "RETRY_S", 0.01)

    async def scenario() -> None:
        house, memory = House(), remembered("one", NO_HEAD)
        house.engine.hot = SimpleNamespace(tag=memory if is_hot else remembered("one two", NO_HEAD))
        house.engine.taken.set_result(taken(memory))
        house.store.refusals = [errors.ResourceExhausted("no room now")] * 3
        assert (await house.publish(memory)).state is SnapshotState.FAILED
        counters = house.stats.of(KEY.namespace)
        for _ in range(500 if is_hot else 5):
            if memory.publication.standing.is_stored:
                break
            await asyncio.sleep(0.01)
        assert counters.publications == {
            SnapshotState.FAILED: 1,
            **({SnapshotState.COMMITTED: 1} if is_hot else {}),
        }
        assert counters.made_good == ({SnapshotState.FAILED: 1} if is_hot else {})
        assert memory.publication.standing.is_stored is is_hot
        assert house.store.refusals == ([] if is_hot else [house.store.refusals[0]] * 2)

    run(scenario)


def test_what_the_store_refuses_for_good_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "RETRY_S", 0.001)

    async def scenario() -> None:
        house, memory = House(), remembered("one", NO_HEAD)
        house.engine.hot = SimpleNamespace(tag=memory)
        house.engine.taken.set_result(taken(memory))
        house.store.refusals = [errors.InvalidArgument("no such memory")] * 2
        assert (await house.publish(memory)).state is SnapshotState.FAILED
        await asyncio.sleep(0.05)
        assert len(house.store.refusals) == 1

    run(scenario)
