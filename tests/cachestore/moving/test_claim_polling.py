"""A store that serves hears of claims by itself: now and then, whatever else its peers and its agents do."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvasir.clients import StoreClient
from structlog.testing import capture_logs

from cachestore_svc.facts.ownership import OwnerState
from cachestore_svc.moving.claim_polling import ClaimPolling
from cachestore_svc.moving.handing_over import HandingOver
from cachestore_svc.moving.peering.peer_limits import PeerLimits
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, anybody
from tests.cachestore.core.lab import publish as publish_in
from tests.cachestore.moving.test_keeping import TURN
from tests.cachestore.service.running import publish, store_home


@contextmanager
def peer(root: Path) -> Iterator[tuple[str, StoreClient]]:
    with store_home(root) as home:
        running = home.start()
        with running.client() as client:
            yield running.address, client


def owned_by_both(store: Store, there: StoreClient, name: str) -> None:
    """An agent that came back here from a move, and an older copy of it there."""
    publish_in(store, name, TURN, 0)
    store.moves.offer(NS, name, "there", "ab" * 8, 0, anybody)
    store.moves.undo(NS, name, "there", "ab" * 8)
    publish(there, name, TURN, 0)


def has_moved(store: Store, name: str) -> bool:
    return store.owners.of(NS, name).state is OwnerState.MOVED


async def reached(until: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not until():  # noqa: ASYNC110  what it waits for is in the store
            await asyncio.sleep(0.01)


@dataclass
class CountingClock:
    """The uptime. It is read before and after the pause between two rounds of questions."""

    reads: int = 0

    def __call__(self) -> float:
        self.reads += 1
        return time.monotonic()


async def polled(
    store: Store,
    addresses: dict[str, str],
    steps: Sequence[tuple[Callable[[], object], Callable[[], bool]]],
    uptime: Callable[[], float] = time.monotonic,
) -> None:
    """Ask every 0.05 s. Each step is done, and what it leads to is waited for."""
    threads = StoreThreads()
    aio = AioStore(store, threads)
    book = {name: PeerSettings(name=name, address=at, gives=(f"{NS}=claim",)) for name, at in addresses.items()}
    peers, limits = Peers(lambda: PeerBook(book)), PeerLimits(time.monotonic)
    handing_over = HandingOver(aio, peers, limits, patience_s=60.0, steady=time.monotonic)
    polling = ClaimPolling(aio, peers, handing_over, uptime, every_s=0.05)
    task = asyncio.create_task(polling.run())
    try:
        for do, until in steps:
            await asyncio.to_thread(do)
            await reached(until)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        threads.close()


def test_an_owner_hears_of_claims_for_as_long_as_it_serves(lab: Lab, tmp_path: Path) -> None:
    with lab.open() as store, peer(tmp_path / "there") as (address, there):
        for name in ("ada", "bob"):
            owned_by_both(store, there, name)
        uptime = CountingClock()
        claims = [
            (lambda name=name: there.claim_agent(name, force=True), lambda name=name: has_moved(store, name))
            for name in ("ada", "bob")
        ]
        first_round = (lambda: None, lambda: uptime.reads >= 2)
        asyncio.run(polled(store, {"there": address}, [first_round, *claims], uptime))


def test_a_turn_under_way_delays_the_claim_of_its_own_agent_alone(lab: Lab, tmp_path: Path) -> None:
    """Its engine does not let go, so that agent waits for the lease's end."""
    with lab.open() as store, peer(tmp_path / "there") as (address, there):
        for name in ("ada", "bob"):
            owned_by_both(store, there, name)
            there.claim_agent(name, force=True)
        line = store.snapshots.get(NS, "ada")
        lease = store.leases.acquire(NS, "ada", line.kv_identity_hash, "engine").token

        def end_turn() -> None:
            assert not has_moved(store, "ada")
            store.leases.release(NS, "ada", line.kv_identity_hash, lease)

        steps = [
            (lambda: None, lambda: has_moved(store, "bob")),
            (end_turn, lambda: has_moved(store, "ada")),
        ]
        asyncio.run(polled(store, {"there": address}, steps))


@pytest.mark.long(2)
def test_a_peer_that_is_away_is_asked_again_and_is_one_line_of_the_log(lab: Lab, tmp_path: Path) -> None:
    """One without an address is none: it tells."""
    with lab.open() as store, store_home(tmp_path / "there") as home, capture_logs() as lines:
        publish_in(store, "ada", TURN, 0)
        store.moves.offer(NS, "ada", "there", "ab" * 8, 0, anybody)
        store.moves.undo(NS, "ada", "there", "ab" * 8)
        uptime = CountingClock()

        def come_back() -> None:
            with home.start().client() as client:
                publish(client, "ada", TURN, 0)
                client.claim_agent("ada", force=True)

        steps = [
            (lambda: None, lambda: uptime.reads >= 4),
            (come_back, lambda: has_moved(store, "ada")),
        ]
        asyncio.run(polled(store, {"there": home.socket, "elsewhere": ""}, steps, uptime))
    told = [(line["peer"], line["reason"]) for line in lines if line["event"] == "moves.not_asked"]
    assert told == [("there", "PEER_UNAVAILABLE")]
