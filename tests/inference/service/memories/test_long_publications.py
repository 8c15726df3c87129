"""A memory that is larger than what may wait goes to the store in pieces, and holds no room that another needs."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.memory.agent_memory import AgentMemory, Publication, StoredFiles
from inference_svc.memory.lines import commit
from inference_svc.memory.lines.line_states import Standing
from inference_svc.memory.outcomes import SnapshotState
from inference_svc.memory.publishing import copies
from inference_svc.memory.store.answers import NO_HEAD
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from tests.inference.memory.publication_world import (
    KEY,
    Engine,
    House,
    Pinned,
    remembered,
    run,
)


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
        return SequenceState(self.ids, TokenChars((1,) * len(self.ids)), 0)

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
    house.line._parts = house.line.publications._parts = house.line.lease._parts = parts
    transcript = RememberedText("x" * len(engine.ids), engine.ids, TokenChars((1,) * len(engine.ids)))
    memory = AgentMemory(transcript, (), manifest_pb2.Turn(), 0, "", Publication(Standing(NO_HEAD)))
    engine.hot = SimpleNamespace(tag=memory)
    return house, memory


def publish_long(house: House, memory: AgentMemory) -> asyncio.Task[Any]:
    return house.line.publications.publish(memory, house.copies.pin(KEY, len(memory.files.blocks), {}))


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
        second = house.line.publications.publish(later, asked, memory)
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
        outcome = await house.line.publications.publish(memory, asked, first)
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
