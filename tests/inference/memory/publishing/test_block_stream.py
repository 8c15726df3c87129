"""Blocks that go to the store while their turn runs: in order, several pieces at once, and none for another."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import Unavailable
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.memory.agent_memory import AgentMemory, Publication, StoredFiles
from inference_svc.memory.lines.line_states import Standing
from inference_svc.memory.publishing import sending
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.copies import Copies
from inference_svc.memory.publishing.sending import Sending
from inference_svc.memory.store.answers import NO_HEAD
from inference_svc.text.prefix_matching import NO_TEXT
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds

DIGESTS = [Digest.of(b"block %d" % block) for block in range(20)]
STORED = DIGESTS[:3]


class Turn:
    """A running turn, so many blocks a piece, and a store that takes what `arrives` lets go."""

    def __init__(self, room: int = 10, previous: AgentMemory | None = None, piece_blocks: int = 1) -> None:
        self.asked: list[bytes] = []
        self.copied: list[int] = []  # blocks of each piece
        self.most_held = 0
        self.arrives: Callable[[bytes], Awaitable[None]] = self._at_once
        self.held = SharedRoom(room)
        engine: Any = SimpleNamespace(memories=SimpleNamespace(snapshot=self._snapshot))
        copies: Any = SimpleNamespace(
            held=self.held,
            piece_blocks=piece_blocks,
            piece_bytes=piece_blocks,
            block_bytes=1,
            blocks=Copies(engine, self.held).blocks,
        )
        engine.model = SimpleNamespace(kv_bytes_per_token=1 << 20)
        self.store: Any = SimpleNamespace(
            blobs=SimpleNamespace(write_tensors=self._write), connection=SimpleNamespace(is_reachable=True)
        )
        self.stream = BlockStream(copies, AgentKey("default", "a"), self.store, STORED, 1.0, previous)

    def _snapshot(self, _key: object, first: int, *, max_blocks: int = 1, **_how: object) -> "Future[Snapshot]":
        copied: Future[Snapshot] = Future()
        identity: Any = None
        self.copied.append(max_blocks)
        self.most_held = max(self.most_held, self.held.held_units)
        blocks = tuple((identity, b"block %d" % block) for block in range(first, first + max_blocks))
        copied.set_result(Snapshot(first, blocks, None, SequenceState(TokenIds(), TokenChars(), 0)))
        return copied

    async def _at_once(self, _data: bytes) -> None:
        pass

    async def _write(self, files: list[bytes], _stall_s: float, *_known: object) -> tuple[list[Digest], int]:
        self.asked += files
        for data in files:
            await self.arrives(data)
        return [Digest.of(data) for data in files], 7


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 10)

    asyncio.run(bounded())


def test_a_piece_on_its_way_is_not_counted_where_its_blocks_are_computed_again() -> None:
    async def scenario() -> None:
        turn, asked, arrived = Turn(), asyncio.Event(), asyncio.Event()

        async def arrives(_data: bytes) -> None:
            asked.set()
            await arrived.wait()

        turn.arrives = arrives
        turn.stream.blocks_full(4)
        await asked.wait()
        turn.stream.keeps(1, 0)
        arrived.set()
        assert await turn.stream.drain() == STORED[:1]

    run(scenario)


@pytest.mark.parametrize(("room", "expected"), [(10, 4), (1, 1)])
def test_the_next_pieces_are_copied_while_the_ones_before_are_on_their_way_as_far_as_there_is_room(
    room: int, expected: int
) -> None:
    async def scenario() -> None:
        turn, may_arrive = Turn(room), asyncio.Event()

        async def arrives(data: bytes) -> None:
            await may_arrive.wait()
            await asyncio.sleep(0.01 if data == b"block 3" else 0)  # the first comes last

        turn.arrives = arrives
        turn.stream.blocks_full(12)
        await asyncio.sleep(0.05)
        assert turn.asked == [b"block %d" % block for block in range(3, 3 + expected)]
        may_arrive.set()
        assert await turn.stream.drain() == DIGESTS[:12]
        assert turn.most_held <= room
        assert turn.held.held_units == 0

    run(scenario)


def test_a_piece_has_as_many_blocks_as_are_full_and_takes_room_for_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_MOST_BYTES", 8)

    async def scenario() -> None:
        turn, may_arrive = Turn(room=20, piece_blocks=4), asyncio.Event()

        async def arrives(_data: bytes) -> None:
            await may_arrive.wait()

        turn.arrives = arrives
        turn.stream.blocks_full(4)
        await asyncio.sleep(0.01)
        assert (len(turn.copied), turn.held.held_units) == (1, 1)
        turn.stream.blocks_full(20)
        await asyncio.sleep(0.01)
        assert (turn.copied, turn.held.held_units) == ([1, 4], 5), "two large pieces under way"
        may_arrive.set()
        assert await turn.stream.drain() == DIGESTS
        assert turn.copied == [1, 4, 4, 4, 4]
        assert turn.held.held_units == 0

    run(scenario)


def test_what_came_behind_a_piece_that_failed_does_not_count_and_goes_again() -> None:
    async def scenario() -> None:
        turn = Turn()

        async def arrives(data: bytes) -> None:
            if data == b"block 5" and turn.asked.count(data) == 1:
                await asyncio.sleep(0.01)
                raise Unavailable("away")

        turn.arrives = arrives
        turn.stream.blocks_full(8)
        await asyncio.sleep(0.05)
        assert turn.stream.stored == DIGESTS[:5]
        turn.stream.blocks_full(9)
        await turn.stream.drain()
        assert turn.stream.stored == DIGESTS[:9]
        assert turn.held.held_units == 0

    run(scenario)


def test_a_turn_sends_nothing_that_its_memory_before_it_is_still_sending() -> None:
    async def scenario() -> None:
        publication, files, may_end = Publication(Standing(NO_HEAD)), StoredFiles(STORED[:1]), asyncio.Event()
        previous = AgentMemory(NO_TEXT, (), manifest_pb2.Turn(), 0, "", publication, files)

        async def publish() -> Any:
            await may_end.wait()
            files.blocks = DIGESTS[:7]

        publication.task = asyncio.create_task(publish())
        turn = Turn(previous=previous)
        turn.stream.keeps(3, 6)
        turn.stream.blocks_full(8)
        await asyncio.sleep(0.02)
        assert not turn.asked
        may_end.set()
        await turn.stream.drain()
        # The seventh block is the turn's own: it was computed anew.
        assert turn.asked == [b"block 6", b"block 7"]
        assert turn.stream.stored == DIGESTS[:8]

    run(scenario)


def test_a_piece_that_is_cancelled_before_its_first_step_gives_its_room_back() -> None:
    async def scenario() -> None:
        turn = Turn()
        copies: Any = SimpleNamespace(held=turn.held)
        one = Sending(copies, "default", turn.store, (), 1.0)
        turn.held.take("default", 7)
        one.begin(await asyncio.wrap_future(turn._snapshot("a", 0)), 7)
        one.cancel()
        await one.drain()
        assert (turn.held.held_units, turn.asked) == (0, [])

    run(scenario)
