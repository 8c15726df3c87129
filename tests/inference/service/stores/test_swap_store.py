"""Files of a preempted turn, between an engine and a real store: kept as long as the turn waits, and no longer."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvasir.clients import AioStoreClient
from kvasir.formats.block_file import FileIdentity, encode
from kvasir.formats.block_hash import chain_hash, kv_identity_hash
from kvasir.formats.tensor_layouts import expected_tensors
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import Cold, Hot, Preempted, Resumed, Wanted
from inference_svc.engine.files.incoming import Incoming
from inference_svc.memory.agent_memory import Publication
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.outcomes import MissReason
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.memory.store.answers import NO_HEAD
from inference_svc.memory.store.connection import StoreClients
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.swap_store import SwapLimits, SwapRooms, SwapStore, may_be_preempted
from tests.made_models.synthetic import SMALL
from tests.running.system_fixtures import House

GRACE_S = 0.6
LIMITS = SwapLimits(write_stall_s=30, read_budget_s=2, min_bytes_per_s=20e6, renew_s=300, piece_files=1)


def tail(tokens: int) -> bytes:
    """A tensor file that the store takes."""
    identity_hash = kv_identity_hash(SMALL)
    identity = FileIdentity("tail", identity_hash, 0, tokens, chain_hash(identity_hash, "", [5] * tokens))
    return encode(identity, [(spec, bytes(spec.size_bytes)) for spec in expected_tensors(SMALL, tokens)])


FILES = (tail(40), tail(41))
HELD_BYTES = sum(map(len, FILES))


class Handle:
    """What the engine is told of the turn."""

    def __init__(self) -> None:
        self.are_stored = asyncio.Event()
        self.resumed: asyncio.Future[tuple[bytes, ...]] = asyncio.get_running_loop().create_future()
        """All files that came, once no other does."""

    def files_stored(self) -> None:
        self.are_stored.set()

    def resume(self, files: Iterable[bytes] | Incoming) -> None:
        incoming = files if isinstance(files, Incoming) else Incoming.of(files)

        def came() -> None:
            if incoming.has_ended and not self.resumed.done():
                self.resumed.set_result(tuple(map(incoming.take, range(incoming.ready))))

        incoming.watch(came)


class Scene:
    """A turn that is preempted when it begins."""

    def __init__(self, address: str, limits: SwapLimits) -> None:
        client = AioStoreClient.connect(address)
        self.store = RemoteCache(StoreClients(client, client, client), "default")
        self.handle = Handle()
        self.publishing, self.restoring = SharedRoom(1 << 20), SharedRoom(1 << 20)
        self.counters = NamespaceCounters()
        handle = cast("Any", self.handle)
        rooms = SwapRooms("ns", self.publishing, self.restoring)
        self.swap = SwapStore(handle, self.store, rooms, self.counters, limits, time.monotonic)

    async def begin(self) -> None:
        await self.store.connection.answers()
        self.swap.event(Preempted(FILES, 81))

    async def wanted(self) -> tuple[bytes, ...]:
        self.swap.event(Wanted())
        return await asyncio.wait_for(self.handle.resumed, 20)

    async def close(self) -> None:
        assert (self.publishing.held_units, self.restoring.held_units) == (0, 0)
        await self.store.connection.close()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A store alone, that soon forgets what nobody names."""
    house = House(tmp_path_factory.mktemp("forgetful"), Path("no model"))
    house.store.options += ["--grace-period-s", str(GRACE_S), "--gc-interval-s", "0.1"]
    house.store.start()
    yield house
    house.close()


def run(house: House, work: Callable[[Scene], Any], limits: SwapLimits | None = None) -> None:
    async def scene() -> None:
        one = Scene(house.store.address, limits or LIMITS)
        await one.begin()
        await work(one)
        await one.close()

    asyncio.run(scene())


@pytest.mark.long(7)
@pytest.mark.parametrize("is_renewed", [True, False])
def test_files_outlast_the_stores_patience_while_the_turn_waits_and_what_is_gone_is_a_miss(
    house: House, is_renewed: bool
) -> None:
    async def work(scene: Scene) -> None:
        await asyncio.wait_for(scene.handle.are_stored.wait(), 20)
        assert scene.publishing.held_units == 0
        await asyncio.sleep(6 * GRACE_S)
        blobs = await scene.wanted()
        assert blobs == (FILES if is_renewed else ())
        scene.swap.event(Resumed(81 if is_renewed else 0, 0 if is_renewed else 81))
        assert scene.counters.misses == ({} if is_renewed else {MissReason.BLOB_MISSING: 1})

    run(house, work, replace(LIMITS, renew_s=GRACE_S / 4 if is_renewed else 1000))


def test_a_turn_that_is_wanted_before_its_files_are_stored_gets_them_from_memory(house: House) -> None:
    async def work(scene: Scene) -> None:
        assert scene.publishing.held_units == HELD_BYTES
        assert await scene.wanted() == FILES
        assert not scene.handle.are_stored.is_set()
        scene.swap.event(Resumed(81, 0))

    run(house, work)


def test_a_store_that_is_away_takes_nothing_and_the_files_stay(house: House) -> None:
    house.store.kill()
    try:

        async def work(scene: Scene) -> None:
            await asyncio.wait_for(scene.store.connection.breaker.opened.wait(), 20)
            assert not scene.handle.are_stored.is_set()
            assert scene.publishing.held_units == HELD_BYTES
            assert await scene.wanted() == FILES
            scene.swap.event(Resumed(81, 0))
            assert not scene.counters.misses

        run(house, work)
    finally:
        house.store.start()


def test_a_turn_that_ends_while_its_files_come_back_leaves_nothing_held(house: House) -> None:
    async def work(scene: Scene) -> None:
        await asyncio.wait_for(scene.handle.are_stored.wait(), 20)
        scene.swap.event(Wanted())
        await asyncio.sleep(0)
        assert scene.restoring.held_units == HELD_BYTES
        scene.swap.close()
        await asyncio.sleep(0.05)
        assert await scene.handle.resumed == ()

    run(house, work)


async def test_only_a_turn_whose_agent_loses_nothing_by_it_may_be_preempted() -> None:
    """The hot memory that it extends goes with its rows: the store must have all of it."""

    stored, unstored = Standing(NO_HEAD, Stage.STORED), Standing(NO_HEAD)

    def may_wait(reuse: Cold | Hot, publication: Publication | None, *, is_reachable: bool = True) -> bool:
        memory = None if publication is None else SimpleNamespace(publication=publication)
        return may_be_preempted(
            cast("Any", SimpleNamespace(connection=SimpleNamespace(is_reachable=is_reachable))),
            cast("Any", memory),
            reuse,
        )

    assert may_wait(Cold(), None)
    assert not may_be_preempted(None, None, Cold())
    assert not may_wait(Cold(), None, is_reachable=False)
    assert may_wait(Hot(5), Publication(stored))
    assert may_wait(Cold(), Publication(unstored))
    assert not may_wait(Hot(5), Publication(unstored))
    publication = Publication(stored)
    publication.task = cast("Any", asyncio.get_running_loop().create_future())
    assert not may_wait(Hot(5), publication)
    assert not may_wait(Hot(5), Publication(stored), is_reachable=False)
