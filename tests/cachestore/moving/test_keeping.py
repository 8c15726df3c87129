"""Unfinished moves are looked after on a store in this process, also while a peer of some of them does not answer."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvasir.server.shared_room import SharedRoom
from structlog.testing import capture_logs

from cachestore_svc.moving.arrivals import Receiving
from cachestore_svc.moving.bringing import Bringing
from cachestore_svc.moving.handing_over import HandingOver
from cachestore_svc.moving.moves import Moves
from cachestore_svc.moving.outbound import BlobReader
from cachestore_svc.moving.peering.peer_limits import PeerLimits
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.moving.transfer import Transfers
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, anybody
from tests.cachestore.core.lab import publish as publish_in
from tests.cachestore.service.running import publish, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent

TURN = SyntheticAgent(SMALL, 1).turn(30)


@contextmanager
def silent_peer() -> Iterator[str]:
    """Where connections are taken, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def kept(
    store: Store,
    lab: Lab,
    addresses: dict[str, str],
    until: Callable[[], bool],
    within_s: float,
    formerly: tuple[str, ...] = (),
) -> None:
    """Look after the store's moves until that holds. `formerly`: earlier names of each peer."""
    threads = StoreThreads()
    aio = AioStore(store, threads)
    book = {name: PeerSettings(name=name, address=at, formerly=formerly) for name, at in addresses.items()}
    peers, limits = Peers(lambda: PeerBook(book)), PeerLimits(time.monotonic)
    bringing = Bringing(aio, peers, limits)
    copies = Transfers(aio, BlobReader(aio, SharedRoom(1)), peers, bringing, 5.0).copies
    handing_over = HandingOver(aio, peers, limits, patience_s=0.2, steady=time.monotonic)
    receiving = Receiving(aio, copies, bringing)
    task = asyncio.create_task(Moves(receiving, peers, handing_over, lab.chance).keep())
    async with asyncio.timeout(within_s):
        while not until():  # noqa: ASYNC110  what it waits for is in the store
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    threads.close()


def test_a_peer_that_does_not_answer_keeps_no_agent_of_others_waiting(lab: Lab, tmp_path: Path) -> None:
    """Neither one that is to come back from a silent destination, nor one of which another peer is to hear."""
    with lab.open() as store, silent_peer() as gone, store_home(tmp_path / "there") as home:
        there = home.start()
        with there.client() as client:
            publish(client, "told", TURN, 0)
        for name in ("a1", "a2", "a3", "a4", "told", "zed"):
            publish_in(store, name, TURN, 0)
        for name in ("a1", "a2", "a3", "a4"):
            store.owners.claim(NS, name, 1, tells=["gone"])
        store.owners.claim(NS, "told", 1, tells=["there"])
        store.moves.offer(NS, "zed", "gone", "ab" * 8, 0, anybody)
        addresses = {"gone": gone, "there": there.address}

        def is_done() -> bool:
            return store.owners.of(NS, "zed").is_owned and not store.owners.of(NS, "told").tells

        asyncio.run(kept(store, lab, addresses, is_done, 10))


def test_a_peer_hears_under_the_name_that_it_had_when_the_claim_was_made(lab: Lab, tmp_path: Path) -> None:
    """A claim or a move that runs while its peer is renamed notes the earlier name after all others were changed."""
    with lab.open() as store, store_home(tmp_path / "there") as home:
        there = home.start()
        with there.client() as client:
            publish(client, "ada", TURN, 0)
        publish_in(store, "ada", TURN, 0)
        store.owners.claim(NS, "ada", 1, tells=["there"])

        def is_told() -> bool:
            return not store.owners.of(NS, "ada").tells

        asyncio.run(kept(store, lab, {"studio": there.address}, is_told, 10, formerly=("there",)))


@pytest.mark.long(3)
@pytest.mark.parametrize("addresses", [{}, {"gone": ""}])
def test_a_peer_that_was_removed_or_has_no_address_is_not_complained_about_every_second(
    lab: Lab, addresses: dict[str, str]
) -> None:
    with lab.open() as store, capture_logs() as lines:
        publish_in(store, "ada", TURN, 0)
        store.owners.claim(NS, "ada", 1, tells=["gone"])
        began = time.monotonic()
        asyncio.run(kept(store, lab, addresses, lambda: time.monotonic() - began > 1.3, 10))
        assert store.owners.of(NS, "ada").tells == ("gone",)  # it hears of it if it is paired again
    assert [line for line in lines if line["event"] == "move.unfinished"] == []
