"""An upload is given up for the time without progress, and never for its length."""

import asyncio
import time
from collections.abc import Callable, Mapping

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import AioStoreClient, StoreClient
from kvasir.errors import DeadlineExceeded
from kvasir.formats.digest import Digest

from tests.cachestore.service.proxy import Proxy, proxy_to
from tests.cachestore.service.running import StoreHome
from tests.made_models.synthetic import TINY, SyntheticAgent

Put = Callable[[str, Mapping[Digest, bytes], float, Callable[[pb.TransferProgress], None]], None]
STALL_S = 0.6


def put(
    address: str, blobs: Mapping[Digest, bytes], stall_s: float, on_progress: Callable[[pb.TransferProgress], None]
) -> None:
    with StoreClient.connect(address) as client:
        client.put_blobs(blobs, stall_timeout_s=stall_s, on_progress=on_progress)


def aio_put(
    address: str, blobs: Mapping[Digest, bytes], stall_s: float, on_progress: Callable[[pb.TransferProgress], None]
) -> None:
    async def work() -> None:
        async with AioStoreClient.connect(address) as client:
            await client.put_blobs(blobs, stall_timeout_s=stall_s, on_progress=on_progress)

    asyncio.run(work())


@pytest.mark.long(5)
@pytest.mark.parametrize("put", [put, aio_put])
def test_an_upload_that_is_slow_for_longer_than_the_timeout_is_stored(home: StoreHome, put: Put) -> None:
    turn = SyntheticAgent(TINY, 1).turn(256 * 16)
    with proxy_to(home.start().address) as proxy:
        proxy.pause_s = 2.5 * STALL_S / (sum(digest.size_bytes for digest in turn.digests) >> 14)
        began = time.monotonic()
        put(proxy.address, turn.new_blobs, STALL_S, lambda _: None)
        assert time.monotonic() - began > 2 * STALL_S


@pytest.mark.parametrize("put", [put, aio_put])
def test_an_upload_that_stands_still_is_given_up(home: StoreHome, put: Put) -> None:
    turn = SyntheticAgent(TINY, 2).turn(256 * 40)
    with proxy_to(home.start().address) as proxy, pytest.raises(DeadlineExceeded, match="made no progress"):
        put(proxy.address, turn.new_blobs, STALL_S, lambda progress: _part_once_begun(proxy, progress))


@pytest.mark.parametrize("put", [put, aio_put])
def test_a_store_that_does_not_even_answer_which_blobs_it_lacks_is_given_up(home: StoreHome, put: Put) -> None:
    with proxy_to(home.start().address) as proxy:
        proxy.part()
        with pytest.raises(DeadlineExceeded, match="made no progress"):
            put(proxy.address, SyntheticAgent(TINY, 3).turn(256).new_blobs, 0.1, lambda _: None)


def _part_once_begun(proxy: Proxy, progress: pb.TransferProgress) -> None:
    if progress.blobs_done:
        proxy.part()
