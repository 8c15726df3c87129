"""How a copy from a peer stores its manifest and reports its progress, on a store in this process."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import AioStoreClient
from kvasir.errors import ResourceExhausted
from kvasir.formats.digest import Digest
from kvasir.formats.frame_messages import CarriedFrame

from cachestore_svc.moving import copying
from cachestore_svc.moving.copying import LineCopies, LineOrder
from cachestore_svc.moving.manifest_room import ManifestRoom
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab
from tests.made_models.synthetic import SMALL, SyntheticAgent

TURN = SyntheticAgent(SMALL, 1).turn(256 * 12)


class SlowPeer:
    """Sends each blob in a message of its own, and the next once there was time to store it."""

    async def get_snapshot(self, *_: object) -> tuple[Any, bytes]:
        return SimpleNamespace(version=1, manifest=TURN.manifest_digest.to_proto()), TURN.manifest_bytes

    async def read_frames(
        self, digests: Sequence[Digest], first_offset: int
    ) -> AsyncGenerator[Sequence[CarriedFrame], None]:
        for digest in digests:
            yield [CarriedFrame(pb.BlobFrame(digest=digest.to_proto()), TURN.new_blobs[digest][first_offset:])]
            await asyncio.sleep(0.02)


async def test_blobs_that_come_quickly_are_reported_at_first_and_when_all_are_there(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message for each few blobs cost both ends a sixth of a pull's time."""
    monkeypatch.setattr(copying, "PAUSE_S", 60.0)
    threads = StoreThreads()
    with lab.open() as store:
        copies = LineCopies(AioStore(store, threads), ManifestRoom(), 5.0)
        peer, order = cast("AioStoreClient", SlowPeer()), LineOrder(NS, "mac", "ada", "")
        async with AsyncExitStack() as room:
            offered = await copies.take_offer(peer, order, room)
            reported, stored = list[tuple[int, int]](), list[bool]()
            async for step in copies.fetch(peer, order, offered):
                reported.append((step.blobs_done, step.bytes_done))
                stored.append(not store.blobs.find_missing(NS, [offered.manifest]))
            assert not store.blobs.find_missing(NS, offered.everything)
        threads.close()
    assert offered.digests == list(TURN.new_blobs)
    assert stored == [False, True, True]  # beside the blobs: who stops at the first progress has none
    assert reported[0] == (0, 0)
    assert 0 < reported[1][0] < 12
    assert reported[2:] == [(12, sum(digest.size_bytes for digest in TURN.new_blobs))]


async def test_a_copy_fails_where_its_manifest_could_not_be_stored(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored beside the blobs, which arrive all the same."""

    async def refuse(*_: object) -> None:
        raise ResourceExhausted("no room for the manifest", reason="DISK_FULL")

    threads = StoreThreads()
    with lab.open() as store:
        copies = LineCopies(AioStore(store, threads), ManifestRoom(), 5.0)
        monkeypatch.setattr(copies, "store_bytes", refuse)
        peer, order = cast("AioStoreClient", SlowPeer()), LineOrder(NS, "mac", "ada", "")
        async with AsyncExitStack() as room:
            offered = await copies.take_offer(peer, order, room)
            with pytest.raises(ResourceExhausted, match="manifest"):
                [step async for step in copies.fetch(peer, order, offered)]
            assert not store.blobs.find_missing(NS, offered.digests)
        threads.close()
