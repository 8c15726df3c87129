"""Blocks that go to the store while their turn runs: those that are computed anew are not taken for those that went."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.text.sequence_state import SequenceState
from inference_svc.text.token_ids import TokenIds

STORED = [Digest.of(b"block %d" % block) for block in range(3)]


def test_a_piece_on_its_way_is_not_counted_where_its_blocks_are_computed_anew() -> None:
    async def sent_while_the_turn_loses_its_files() -> list[Digest]:
        asked, arrived = asyncio.Event(), asyncio.Event()

        def snapshot(_key: object, first: int, **_how: object) -> "Future[Snapshot]":
            copied: Future[Snapshot] = Future()
            identity: Any = None
            copied.set_result(Snapshot(first, ((identity, b"block 3"),), None, SequenceState(TokenIds(), (), 0)))
            return copied

        async def write_tensors(files: list[bytes], _timeout_s: float) -> tuple[list[Digest], int]:
            asked.set()
            await arrived.wait()
            return [Digest.of(data) for data in files], 7

        engine: Any = SimpleNamespace(snapshot=snapshot)
        copies: Any = SimpleNamespace(held=SharedRoom(10), piece_bytes=1, piece_blocks=1)
        store: Any = SimpleNamespace(write_tensors=write_tensors, is_reachable=True)
        stream = BlockStream(engine, copies, AgentKey("default", "a"), store, STORED, 1.0)
        stream.blocks_full(4)
        await asked.wait()
        stream.keeps(1)
        arrived.set()
        await stream.drain()
        return stream.stored

    assert asyncio.run(sent_while_the_turn_loses_its_files()) == STORED[:1]
