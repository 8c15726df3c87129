"""How a copy from a peer reports its progress, on a store in this process."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import AioStoreClient
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

    def __init__(self, blobs: Mapping[Digest, bytes]) -> None:
        self.blobs = blobs

    async def read_frames(
        self, digests: Sequence[Digest], first_offset: int
    ) -> AsyncGenerator[Sequence[CarriedFrame], None]:
        for digest in digests:
            yield [CarriedFrame(pb.BlobFrame(digest=digest.to_proto()), self.blobs[digest][first_offset:])]
            await asyncio.sleep(0.02)


async def test_blobs_that_come_quickly_are_reported_at_first_and_when_all_are_there(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message for each few blobs cost both ends a sixth of a pull's time."""
    monkeypatch.setattr(copying, "PAUSE_S", 60.0)
    threads = StoreThreads()
    with lab.open() as store:
        copies = LineCopies(AioStore(store, threads), ManifestRoom(), 5.0)
        peer, order = cast("AioStoreClient", SlowPeer(TURN.new_blobs)), LineOrder(NS, "mac", "ada", "")
        steps: Any = copies.fetch(peer, order, list(TURN.new_blobs))
        reported = [(step.blobs_done, step.bytes_done) async for step in steps]
        threads.close()
    assert reported[0] == (0, 0)
    assert 0 < reported[1][0] < 12
    assert reported[2:] == [(12, sum(digest.size_bytes for digest in TURN.new_blobs))]
