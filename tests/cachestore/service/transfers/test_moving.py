"""Transfers on a store in this process, where a part or a piece can be just so."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvasir.formats.archive import pack
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from cachestore_svc.facts.records import BlobKind, SnapshotVersion
from cachestore_svc.moving.bringing import Bringing
from cachestore_svc.moving.outbound import BlobReader
from cachestore_svc.moving.peering.peer_limits import PeerLimits
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.moving.transfer import Progress, PullOrder, Transfers
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Clock, Lab, write_all
from tests.cachestore.service.running import RunningStore, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Lab(tmp_path / "data").open() as opened:
        yield opened


def transfers(store: Store, address: str = "unix:/nowhere") -> Transfers:
    threads = StoreThreads()
    aio = AioStore(store, threads)
    peers = Peers(lambda: PeerBook({"mac": PeerSettings(name="mac", address=address)}))
    bringing = Bringing(aio, peers, PeerLimits(time.monotonic))
    return Transfers(aio, BlobReader(aio, SharedRoom(MIB)), peers, bringing, 5.0)


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
    with store.blobs.open_writer(NS, first, BlobKind.TENSORS) as writer:
        writer.write(0, data if is_right else data[:-1] + bytes((data[-1] ^ 1,)))
    version = asyncio.run(asyncio.wait_for(pulled(transfers(store, shared_store.address)), 30))
    assert version.manifest == turn.manifest_digest
    for digest in turn.digests:
        assert Digest.of(store.blobs.read(NS, digest)) == digest


def wrong_part(store: Store, digest: Digest, data: bytes, kind: BlobKind) -> None:
    """What a writer of wrong bytes leaves when it is cut: all but the blob's end."""
    with store.blobs.open_writer(NS, digest, kind) as writer:
        writer.write(0, data[:-9] + bytes((data[-9] ^ 1,)))


@pytest.mark.parametrize("kind", [BlobKind.MANIFEST, BlobKind.TENSORS])
def test_a_pull_is_not_refused_for_wrong_bytes_of_an_earlier_writer(
    store: Store, shared_store: RunningStore, kind: BlobKind
) -> None:
    turn = SyntheticAgent(SMALL, 33).turn(600)
    with shared_store.client() as theirs:
        if [agent for agent in theirs.list_agents(name_prefix="moving").agents if agent.agent_id == "moving"]:
            theirs.delete_agent("moving")
        publish(theirs, "moving", turn, 0)
    first = turn.digests[0]
    is_manifest = kind is BlobKind.MANIFEST
    part = (turn.manifest_digest, turn.manifest_bytes) if is_manifest else (first, turn.new_blobs[first])
    wrong_part(store, *part, kind)
    version = asyncio.run(asyncio.wait_for(pulled(transfers(store, shared_store.address)), 30))
    assert version.manifest == turn.manifest_digest
    assert Digest.of(store.blobs.read(NS, part[0])) == part[0]


@pytest.mark.parametrize("tokens", [256, 300])
def test_an_import_is_not_refused_for_wrong_bytes_of_earlier_writers(store: Store, tokens: int) -> None:
    turn = SyntheticAgent(SMALL, 34).turn(tokens)
    wrong_part(store, turn.manifest_digest, turn.manifest_bytes, BlobKind.MANIFEST)
    for digest in turn.digests:
        wrong_part(store, digest, turn.new_blobs[digest], BlobKind.TENSORS)

    async def archive() -> AsyncIterator[bytes]:
        yield b"".join(pack(turn.manifest, turn.new_blobs, agent_id="ada"))

    version = asyncio.run(asyncio.wait_for(transfers(store).import_archive(NS, "ada", False, archive()), 60))
    assert version.manifest == turn.manifest_digest


def test_an_import_takes_any_number_of_known_blobs_in_one_piece(store: Store) -> None:
    turn = SyntheticAgent(SMALL, 32).turn(256 * 300)
    for start in range(0, 300, 100):
        write_all(store, {digest: turn.new_blobs[digest] for digest in turn.digests[start : start + 100]})

    async def archive() -> AsyncIterator[bytes]:
        yield b"".join(pack(turn.manifest, turn.new_blobs, agent_id="ada"))

    version = asyncio.run(asyncio.wait_for(transfers(store).import_archive(NS, "ada", False, archive()), 60))
    assert version.manifest == turn.manifest_digest


@dataclass
class RealClock(Clock):
    """The machine's own."""

    def __call__(self) -> float:
        return time.time()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Store]:
    """A store that keeps what nothing names for two seconds."""
    with Lab(tmp_path / "hasty", RealClock()).open(grace_period_s=2.0) as opened:
        yield opened


async def collected(store: Store) -> None:
    """The next part takes its time."""
    await asyncio.sleep(0.3)
    await asyncio.to_thread(store.care.collect_garbage)


@pytest.mark.long(5)
def test_a_pull_that_lasts_for_longer_than_the_grace_period_keeps_what_has_come(
    hasty: Store, shared_store: RunningStore
) -> None:
    turn = SyntheticAgent(SMALL, 33).turn(256 * 15)
    with shared_store.client() as theirs:
        publish(theirs, "long", turn, 0)

    async def pulled_slowly() -> SnapshotVersion:
        async for step in transfers(hasty, shared_store.address).pull(PullOrder(NS, "mac", "long", "ada", "")):
            if isinstance(step, SnapshotVersion):
                return step
            await collected(hasty)
        raise AssertionError("it ended without a version")

    assert asyncio.run(asyncio.wait_for(pulled_slowly(), 30)).manifest == turn.manifest_digest
    assert hasty.care.check().is_clean


@pytest.mark.long(5)
def test_an_import_that_lasts_for_longer_than_the_grace_period_keeps_what_has_come(hasty: Store) -> None:
    turn = SyntheticAgent(SMALL, 34).turn(256 * 15)

    async def archive() -> AsyncIterator[bytes]:
        whole = b"".join(pack(turn.manifest, turn.new_blobs, agent_id="ada"))
        for start in range(0, len(whole), -(-len(whole) // 15)):
            yield whole[start : start + -(-len(whole) // 15)]
            await collected(hasty)

    version = asyncio.run(asyncio.wait_for(transfers(hasty).import_archive(NS, "ada", False, archive()), 30))
    assert version.manifest == turn.manifest_digest
    assert hasty.care.check().is_clean
