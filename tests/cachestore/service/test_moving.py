"""Transfers on a store in this process, where a part or a piece can be just so."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kvasir.formats.archive import pack
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from cachestore_svc.moving.outbound import BlobReader
from cachestore_svc.moving.peers import Peers
from cachestore_svc.moving.transfer import Progress, PullOrder, Transfers
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings
from cachestore_svc.records import BlobKind, SnapshotVersion
from cachestore_svc.store import Store
from cachestore_svc.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, write_all
from tests.cachestore.service.running import RunningStore, publish
from tests.synthetic import SMALL, SyntheticAgent

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Lab(tmp_path / "data").open() as opened:
        yield opened


def transfers(store: Store, address: str = "unix:/nowhere") -> Transfers:
    threads = StoreThreads()
    peers = Peers(lambda: PeerBook({"mac": PeerSettings(name="mac", address=address)}))
    return Transfers(store, threads, BlobReader(store, threads, SharedRoom(MIB)), peers, 5.0)


async def pulled(moving: Transfers) -> SnapshotVersion:
    last: Progress | SnapshotVersion | None = None
    async for step in moving.pull(PullOrder(NS, "mac", "moving", "ada", "")):
        last = step
    assert isinstance(last, SnapshotVersion)
    return last


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("tokens", [256, 600])
def test_a_pull_goes_on_with_a_part_that_lacks_only_its_end(
    store: Store, shared_store: RunningStore, tokens: int, is_right: bool
) -> None:
    turn = SyntheticAgent(SMALL, 31).turn(tokens)
    with shared_store.client() as theirs:
        head = [agent.lines[0].version for agent in theirs.list_agents(name_prefix="moving").agents]
        if head:
            theirs.delete_agent("moving")
        publish(theirs, "moving", turn, 0)
    first = turn.digests[0]
    data = turn.new_blobs[first]
    with store.open_writer(NS, first, BlobKind.TENSORS) as writer:
        writer.write(0, data if is_right else data[:-1] + bytes((data[-1] ^ 1,)))
    version = asyncio.run(asyncio.wait_for(pulled(transfers(store, shared_store.address)), 30))
    assert version.manifest == turn.manifest_digest
    for digest in turn.digests:
        assert Digest.of(store.read_blob(NS, digest)) == digest


def test_an_import_takes_any_number_of_known_blobs_in_one_piece(store: Store) -> None:
    turn = SyntheticAgent(SMALL, 32).turn(256 * 300)
    for start in range(0, 300, 100):
        write_all(store, {digest: turn.new_blobs[digest] for digest in turn.digests[start : start + 100]})

    async def archive() -> AsyncIterator[bytes]:
        yield b"".join(pack(turn.manifest, turn.new_blobs, agent_id="ada"))

    version = asyncio.run(asyncio.wait_for(transfers(store).import_archive(NS, "ada", False, archive()), 60))
    assert version.manifest == turn.manifest_digest
