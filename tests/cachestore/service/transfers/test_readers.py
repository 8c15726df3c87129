"""Slow callers on a real server: what is kept for one who is slow, and when one who takes nothing is given up."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.errors import NotFound
from kvasir.formats.digest import Digest
from kvasir.formats.frame_messages import MAX_FRAMES
from kvasir.server.serving import EdgeServer, Listening, Reports
from kvasir.server.shared_room import SharedRoom
from kvasir.status import from_rpc_error

from cachestore_svc.blobs.disk import Disk, StrPath
from cachestore_svc.edge.roles import ALLOWED_ROLES, SERVICE_NAME
from cachestore_svc.edge.service import CacheStoreService, ServiceLimits, StoreParts, add_to_server
from cachestore_svc.moving.bringing import Bringing
from cachestore_svc.moving.outbound import BlobReader, BlobSource
from cachestore_svc.moving.peering.peer_limits import PeerLimits
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.moving.repairing import Repairs
from cachestore_svc.moving.transfer import Transfers
from cachestore_svc.pairing.peers_file import PeerBook
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, write_all
from tests.made_models.synthetic import SMALL, SyntheticAgent, full_layers, kv_identity

MIB = 1 << 20
WIDE = kv_identity("wide", full_layers(16, 8, 128))  # its block is 4.7 MB: five frames
PAIRED = kv_identity("paired", full_layers(11, 2, 64))  # two of its blocks fit into a message


class CountingDisk(Disk):
    """Counts how often a file was read whole."""

    reads = 0

    def read(self, *args: Any) -> memoryview:
        self.reads += 1
        return super().read(*args)


@pytest.fixture(autouse=True)
def _private(tmp_path: Path) -> None:
    """A socket's directory is the owner's alone."""
    tmp_path.chmod(0o700)


@asynccontextmanager
async def served(
    root: Path, store: Store, budget_bytes: int, window_bytes: int = 65536, stall_s: float = 2.0
) -> AsyncIterator[Any]:
    """Its stub, over a connection that buffers next to nothing."""
    threads = StoreThreads()
    aio = AioStore(store, threads)
    edge = EdgeServer(Listening(f"unix:{root}/s"), [SERVICE_NAME], ALLOWED_ROLES, Reports(lambda: "r"))
    reader, peers = BlobReader(aio, SharedRoom(budget_bytes)), Peers(PeerBook)
    bringing = Bringing(aio, peers, PeerLimits(time.monotonic))
    transfers = Transfers(aio, reader, peers, bringing, 2.0)
    parts = StoreParts(aio, reader, transfers, peers, Repairs(aio, Peers(PeerBook), 2.0))
    service = CacheStoreService(parts, ServiceLimits(0, 64 * MIB, stall_s), edge.stopping)
    add_to_server(service, edge.grpc)
    await edge.start()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)]
    try:
        async with grpc.aio.insecure_channel(edge.address, options=options) as channel:
            yield cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
    finally:
        await edge.grpc.stop(0)
        threads.close()


async def drip(stub: Any, digest: Digest) -> bytes:
    """Read a blob, with a rest after each frame."""
    data = b""
    async for response in stub.ReadBlobs(pb.ReadBlobsRequest(digests=[digest.to_proto()])):
        data += response.frame.data
        await asyncio.sleep(0.8)
    return data


@pytest.mark.long(4)
async def test_a_blob_is_read_once_for_a_slow_reader_whom_nobody_waits_for(tmp_path: Path) -> None:
    disk = CountingDisk()
    turn = SyntheticAgent(WIDE, 1).turn(256)
    [digest] = turn.digests
    with Lab(tmp_path / "data").open(disk) as store:
        write_all(store, turn.new_blobs)
        disk.reads = 0
        async with asyncio.timeout(40):
            async with served(tmp_path, store, 16 * MIB) as stub:
                assert Digest.of(await drip(stub, digest)) == digest
                assert disk.reads == 1


class MeetingDisk(Disk):
    """Whose reads of blobs wait until three are under way."""

    def __init__(self) -> None:
        self.meeting = threading.Barrier(3)

    def read(self, path: StrPath, max_bytes: int) -> memoryview:
        if max_bytes > 1000 and len(Path(path).name) == 64:  # more than what a start looks at
            self.meeting.wait(20)
        return super().read(path, max_bytes)


class HoldingDisk(Disk):
    """Whose reads of blobs that are there end once they may."""

    def __init__(self) -> None:
        self.holds, self.may_end = threading.Event(), threading.Event()

    def read(self, path: StrPath, max_bytes: int) -> memoryview:
        data = super().read(path, max_bytes)
        if max_bytes > MIB and len(Path(path).name) == 64:
            self.holds.set()
            assert self.may_end.wait(20)
        return data


async def test_a_reader_who_leaves_while_a_failed_read_ends_keeps_no_room(tmp_path: Path) -> None:
    """What was read ahead is still on its way then. The room is all readers': each such reader took some for good."""
    turn, disk, room = SyntheticAgent(WIDE, 1).turn(512), HoldingDisk(), SharedRoom(64 * MIB)
    lost, _ = turn.digests

    async def read(source: BlobSource) -> None:
        async with source:
            await source.next_piece()

    lab = Lab(tmp_path / "data")
    with lab.open(disk) as store:
        write_all(store, turn.new_blobs)
        lab.file_of(lost).unlink()
        async with asyncio.timeout(40):
            threads = StoreThreads()
            source = BlobReader(AioStore(store, threads), room).open(NS, turn.digests)
            reading = asyncio.create_task(read(source))
            try:
                assert await asyncio.to_thread(disk.holds.wait, 20)
                while source._ahead:  # noqa: ASYNC110  another task ends it
                    await asyncio.sleep(0.01)
                reading.cancel()
                await asyncio.sleep(0.05)
                assert room.held_units
            finally:
                disk.may_end.set()
                threads.close()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert room.held_units == 0


async def test_groups_of_small_blobs_are_read_ahead_side_by_side(tmp_path: Path) -> None:
    turn = SyntheticAgent(PAIRED, 6).turn(256 * 6)
    with Lab(tmp_path / "data").open() as store:
        write_all(store, turn.new_blobs)
    with Lab(tmp_path / "data").open(MeetingDisk()) as store:
        async with asyncio.timeout(40):
            async with served(tmp_path, store, 16 * MIB) as stub:
                call = stub.ReadBlobs(pb.ReadBlobsRequest(digests=[digest.to_proto() for digest in turn.digests]))
                data = b"".join([response.frame.data async for response in call])
                assert data == b"".join(turn.new_blobs[digest] for digest in turn.digests)


async def test_a_reader_who_stops_makes_room_for_who_waits_and_may_go_on(tmp_path: Path) -> None:
    turn = SyntheticAgent(WIDE, 2).turn(512)
    first, second = turn.digests
    with Lab(tmp_path / "data").open() as store:
        write_all(store, turn.new_blobs)
        async with asyncio.timeout(40), served(tmp_path, store, 5 * MIB, stall_s=20) as stub:
            slow = stub.ReadBlobs(pb.ReadBlobsRequest(digests=[first.to_proto()]))
            data = (await slow.read()).frame.data
            call = stub.ReadBlobs(pb.ReadBlobsRequest(digests=[second.to_proto()]))
            assert Digest.of(b"".join([response.frame.data async for response in call])) == second
            while (response := await slow.read()) is not grpc.aio.EOF:
                data += response.frame.data
            assert Digest.of(data) == first


@pytest.mark.long(6)
async def test_who_takes_no_acknowledgements_is_given_up(tmp_path: Path) -> None:
    turn = SyntheticAgent(SMALL, 3).turn(256)
    [digest] = turn.digests
    ask = pb.WriteBlobsRequest(frame=pb.BlobFrame(digest=digest.to_proto(), kind=pb.BLOB_KIND_TENSORS))
    with Lab(tmp_path / "data").open() as store:
        write_all(store, turn.new_blobs)
        async with asyncio.timeout(40):
            async with served(tmp_path, store, MIB, window_bytes=1024) as stub:

                async def asks() -> AsyncIterator[pb.WriteBlobsRequest]:
                    while True:
                        yield ask

                call = stub.WriteBlobs(asks())
                # Nothing is read: the answers fill what lies between, and then nobody takes them.
                await asyncio.sleep(6)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    [_ async for _ in call]
                assert from_rpc_error(caught.value).reason == "READER_STALLED"


async def test_a_namespaces_blobs_are_verified_for_one_caller_at_a_time(tmp_path: Path) -> None:
    turn = SyntheticAgent(SMALL, 4).turn(256)

    async def checked(stub: Any) -> list[int]:
        """Of a call that is read to its end: only then its place is free for certain."""
        return [each.blobs_checked async for each in stub.VerifyBlobs(pb.VerifyBlobsRequest())]

    with Lab(tmp_path / "data").open() as store:
        write_all(store, turn.new_blobs)
        async with asyncio.timeout(40):
            async with served(tmp_path, store, MIB) as stub:
                results = await asyncio.gather(*(checked(stub) for _ in range(4)), return_exceptions=True)
                refused = [from_rpc_error(each) for each in results if isinstance(each, grpc.aio.AioRpcError)]
                assert 1 <= len(refused) < 4
                assert {error.reason for error in refused} == {"VERIFY_RUNNING"}
                async with asyncio.timeout(30):
                    assert await checked(stub) == [1]


async def test_a_digest_that_claims_bytes_takes_no_room_for_them(tmp_path: Path) -> None:
    """Two to the 62 bytes filled the budget of everybody until the look-up found that there was no such blob."""
    bogus = Digest("ab" * 32, 1 << 62)
    turn = SyntheticAgent(SMALL, 5).turn(256)
    with Lab(tmp_path / "data").open() as store:
        write_all(store, turn.new_blobs)
        threads, room = StoreThreads(), SharedRoom(MIB)
        aio = AioStore(store, threads)
        room.take("another", MIB)
        async with asyncio.timeout(30), BlobReader(aio, room).open(NS, [bogus]) as source:
            with pytest.raises(NotFound):
                await source.next_piece()
        room.give_back("another", MIB)
        async with (
            asyncio.timeout(30),
            BlobReader(aio, room).open(NS, [*turn.digests, bogus]) as source,
        ):
            assert await source.next_piece()
            with pytest.raises(NotFound):
                await source.next_piece()
        assert room.held_units == 0
        threads.close()


@pytest.mark.long(3)
async def test_one_namespaces_readers_leave_room_for_another(tmp_path: Path) -> None:
    turn = SyntheticAgent(WIDE, 6).turn(8 * 256)
    small = SyntheticAgent(SMALL, 7).turn(256)
    with Lab(tmp_path / "data").open() as store:
        write_all(store, turn.new_blobs)
        write_all(store, small.new_blobs, "other")
        async with asyncio.timeout(40):
            threads, room = StoreThreads(), SharedRoom(20 * MIB)
            aio = AioStore(store, threads)
            sources = [BlobReader(aio, room).open(NS, [digest]) for digest in turn.digests]
            pending = [asyncio.create_task(source.next_piece()) for source in sources]
            await asyncio.wait(pending, timeout=2)
            assert 0 < room.held(NS) <= 15 * MIB
            async with (
                asyncio.timeout(30),
                BlobReader(aio, room).open("other", small.digests) as source,
            ):
                assert await source.next_piece()
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for source in sources:
                await source.let_go()
            assert room.held_units == 0
            threads.close()


@pytest.mark.parametrize(("budget_mib", "many"), [(16, 1), (48, 2)])  # two MiB more each, of three parts of an eighth
async def test_large_messages_take_a_part_of_the_budget_and_other_readers_have_small_ones(
    tmp_path: Path, budget_mib: int, many: int
) -> None:
    """A stalled reader keeps its message, so not all may have large ones."""
    turn = SyntheticAgent(WIDE, 8).turn(3 * 256)
    large = [MIB] * 3

    async def sizes(source: BlobSource) -> list[int]:
        return [len(piece.data) for piece in await source.next_pieces(MAX_FRAMES)]

    with Lab(tmp_path / "data").open() as store:
        write_all(store, turn.new_blobs)
        async with asyncio.timeout(40):
            threads = StoreThreads()
            reader = BlobReader(AioStore(store, threads), SharedRoom(budget_mib * MIB))
            async with AsyncExitStack() as stack:
                *first, last = [await stack.enter_async_context(reader.open(NS, [digest])) for digest in turn.digests]
                for source in first[:many]:
                    assert await sizes(source) == large
                assert await sizes(last) == [MIB]  # the others' messages are on their way
                await first[0].__aexit__()
                assert await sizes(last) == large
                left_bytes = turn.digests[-1].size_bytes - 4 * MIB
                assert await sizes(last) == [left_bytes]
                assert await sizes(last) == []
            assert reader._more.held_units == 0
            threads.close()
