"""Blobs that an engine writes as files of its host's store: their bytes go through no socket, and nothing unverified is
served, whoever dies in between."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import AioStoreClient
from kvasir.clients.aio import handed_upload
from kvasir.clients.aio.handed_upload import HandedUpload, send_by_files, upload_of
from kvasir.clients.channel import bearer
from kvasir.clients.handed_files import HandedFiles
from kvasir.formats.blob_place import handed_place
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FRAME_BYTES
from kvasir.status import from_rpc_error

from inference_svc.memory.store.connection import StoreClients
from inference_svc.memory.store.files import StoreFiles
from inference_svc.memory.store.remote_cache import RemoteCache
from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import ROOT, RunningStore, make_credentials, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent, full_layers, kv_identity

# Blocks of 2 MB.
LARGE = kv_identity("large", full_layers(8, 8, 128))
NEW = SyntheticAgent(LARGE, 7).turn(256 * 3 + 10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    with store_home(tmp_path / "h") as home:
        yield home.start()


def write(
    store: RunningStore,
    files: list[bytes],
    data_dir: Path | None = None,
    hashing: Callable[[], Awaitable[list[Digest]]] | None = None,
    naming: Callable[[], Awaitable[bytes]] | None = None,
) -> tuple[list[Digest], int, int]:
    """What an engine stores: digests, the bytes that the store lacked, and how many bytes went to its socket."""

    async def put(address: str) -> tuple[list[Digest], int]:
        client = AioStoreClient.connect(address)
        files_of_store = StoreFiles(data_dir or store.data_dir, "default")
        cache = RemoteCache(StoreClients(client, client, client), "default", files_of_store)
        assert await cache.connection.answers()
        try:
            hashed, named = hashing and hashing(), naming and naming()
            return await cache.blobs.write_tensors(files, 10.0, hashed, named)
        finally:
            await asyncio.sleep(0.05)  # a file that nobody takes is removed behind its last byte
            await cache.connection.close()

    with proxy_to(store.address) as proxy:
        return *asyncio.run(put(proxy.address)), proxy.sent_bytes


def read(store: RunningStore) -> list[bytes]:
    with store.client() as client:
        return [bytes(client.get_blob(digest)) for digest in NEW.digests]


def left(data_dir: Path) -> list[Path]:
    """Files that were handed over and not taken."""
    return list(handed_place(data_dir, "default").glob("*"))


def test_blobs_are_written_as_files_and_their_bytes_go_through_no_socket(store: RunningStore) -> None:
    files = list(NEW.new_blobs.values())
    total = sum(map(len, files))
    digests, lacked, sent = write(store, files)
    assert (digests, lacked) == (NEW.digests, total)
    assert sent < total / 20
    assert left(store.data_dir) == []
    assert read(store) == files
    assert write(store, files)[1] == 0


def test_a_store_that_finds_no_handed_file_is_sent_the_bytes(store: RunningStore, tmp_path: Path) -> None:
    """As where the configuration names the directory of another store."""
    elsewhere = tmp_path / "elsewhere"
    handed_place(elsewhere, "default").mkdir(parents=True)
    files = list(NEW.new_blobs.values())
    digests, _, sent = write(store, files, elsewhere)
    assert digests == NEW.digests
    assert sent > sum(map(len, files))
    assert left(elsewhere) == []
    assert read(store) == files


def test_one_file_is_handed_over_without_a_question_whatever_the_store_has_of_it(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, its first bytes, or all of it."""

    def written(blob: bytes) -> list[Digest]:
        with monkeypatch.context() as without:
            for question in ("find_missing", "write_status"):
                without.setattr(AioStoreClient, question, None)
            return write(store, [blob])[0]

    [(digest, data), (other, begun), *_] = NEW.new_blobs.items()
    assert [written(data), written(data)] == [[digest], [digest]]
    frame = pb.BlobFrame(digest=other.to_proto(), kind=pb.BLOB_KIND_TENSORS, data=begun[:FRAME_BYTES])
    with store.client() as client, grpc.insecure_channel(store.address) as channel:
        stub: Any = cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError, match="bytes arrived"):
            list(stub.WriteBlobs(iter([pb.WriteBlobsRequest(frame=frame)])))
        assert client.write_status(other).received_bytes == FRAME_BYTES < len(begun)
    assert written(begun) == [other]
    assert left(store.data_dir) == []
    with store.client() as client:
        assert [bytes(client.get_blob(each)) for each in (digest, other)] == [data, begun]


@pytest.mark.parametrize("way", ["a file", "bytes", "small bytes"])
def test_a_manifest_goes_with_the_files_that_it_names_in_one_call(
    store: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    snapshot = SyntheticAgent(SMALL if way == "small bytes" else LARGE, 3).turn(200)
    files, streams, send = list(snapshot.new_blobs.values()), list[Any](), AioStoreClient._send

    async def counted(client: AioStoreClient, *given: Any) -> None:
        streams.append(given)
        await send(client, *given)

    async def naming() -> bytes:
        return snapshot.manifest_bytes

    monkeypatch.setattr(AioStoreClient, "_send", counted)
    digests, lacked, _ = write(store, files, tmp_path if way == "bytes" else None, naming=naming)
    assert (digests, lacked) == (list(snapshot.new_blobs), sum(map(len, files)))
    assert len(streams) == 1
    with store.client() as client:
        assert client.commit("a", snapshot.manifest_digest, 0).version == 1


async def until_written(store: RunningStore, size_bytes: int) -> None:
    async with asyncio.timeout(10):
        while [path.stat().st_size for path in left(store.data_dir)] != [size_bytes]:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.001)


def test_a_turns_last_file_is_written_once_before_it_is_hashed(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then nothing but its token is left to be sent."""
    [(digest, data), *_] = NEW.new_blobs.items()
    written, write_file = list[str](), HandedFiles.write
    monkeypatch.setattr(HandedFiles, "write", lambda *given: written.append(given[1]) or write_file(*given))

    async def hashing() -> list[Digest]:
        await until_written(store, len(data))
        return [digest]

    digests, lacked, sent = write(store, [data], hashing=hashing)
    assert (digests, lacked, left(store.data_dir)) == ([digest], len(data), [])
    assert (len(written), sent < len(data) / 20) == (1, True)
    with store.client() as client:
        assert client.get_blob(digest) == data


@pytest.mark.parametrize("failure", [MemoryError, asyncio.CancelledError])
def test_a_file_that_gets_no_digest_is_removed(store: RunningStore, failure: type[BaseException]) -> None:
    data = NEW.new_blobs[NEW.digests[0]]

    async def hashing() -> list[Digest]:
        await until_written(store, len(data))
        raise failure

    with pytest.raises(failure):
        write(store, [data], hashing=hashing)
    assert left(store.data_dir) == []


def test_an_engine_killed_while_it_hands_files_over_leaves_nothing_that_is_served(store: RunningStore) -> None:
    child = subprocess.Popen([sys.executable, "-c", _HANDS_OVER, store.address, str(store.data_dir)], cwd=ROOT)
    while not left(store.data_dir):
        assert child.poll() is None
        time.sleep(0.001)
    child.kill()
    child.wait()
    with store.client() as client:
        present = [digest for digest in NEW.digests if digest not in client.find_missing(NEW.digests)]
        assert [Digest.of(client.get_blob(digest)) for digest in present] == present
        for _ in range(2):
            client.collect_garbage()
    assert left(store.data_dir) == []
    assert write(store, list(NEW.new_blobs.values()))[0] == NEW.digests


_HANDS_OVER = """
import asyncio, sys
from pathlib import Path
from tests.inference.service.memories.test_handed_blobs import NEW
from kvasir.clients import AioStoreClient
from kvasir.clients.aio.handed_upload import put_by_files
from kvasir.clients.handed_files import HandedFiles

async def main():
    async with AioStoreClient.connect(sys.argv[1]) as client:
        await client.get_capabilities()
        await put_by_files(client, NEW.new_blobs, [*NEW.new_blobs], HandedFiles(Path(sys.argv[2]), "default"))
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_stream_that_another_took_the_place_of_hands_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC lets its requests go on: they would write over the tokens of the stream behind it."""
    handed_place(tmp_path, "default").mkdir(parents=True)
    monkeypatch.setattr(handed_upload, "_MAX_HANDED_BYTES", 1)  # one file at a time
    upload = HandedUpload(NEW.new_blobs, list(NEW.new_blobs), HandedFiles(tmp_path, "default"), None)
    before, behind = (upload.requests(upload.pending, 0, in_groups=False) for _ in range(2))
    first = pb.WriteBlobsRequest.FromString(await anext(before))
    waiting = asyncio.ensure_future(anext(before, None))
    await asyncio.sleep(0)
    again = pb.WriteBlobsRequest.FromString(await anext(behind))
    assert await asyncio.wait_for(waiting, 10) is None
    assert again.frame.digest == first.frame.digest
    assert [path.name for path in handed_place(tmp_path, "default").iterdir()] == [again.handed] != [first.handed]
    await upload.take_back()
    assert list(handed_place(tmp_path, "default").iterdir()) == []


@pytest.mark.long(4)
def test_a_store_killed_in_the_middle_is_handed_the_rest_when_it_is_back(tmp_path: Path) -> None:
    turn = SyntheticAgent(kv_identity("large", full_layers(8, 8, 128)), 8).turn(256 * 40)
    with store_home(tmp_path / "h") as home:
        running = home.start()
        done: list[int] = []

        def kill_once(progress: pb.TransferProgress) -> None:
            done.append(progress.blobs_done)
            if progress.blobs_done >= 5 and len(home.started) == 1:
                running.kill()
                home.start()

        async def put() -> None:
            async with AioStoreClient.connect(running.address) as client:
                await client.get_capabilities()
                files = HandedFiles(running.data_dir, "default")
                upload = upload_of(turn.new_blobs, [*turn.new_blobs], files, kill_once)
                await send_by_files(client, upload, stall_timeout_s=20)

        asyncio.run(put())
        assert (len(home.started), done[-1]) == (2, 40)
        assert left(running.data_dir) == []
        with running.client() as client:
            assert [bytes(client.get_blob(digest)) for digest in turn.digests] == list(turn.new_blobs.values())
            assert client.find_missing(turn.digests) == []


def test_a_client_that_is_no_engine_hands_no_file_over(tmp_path: Path) -> None:
    with store_home(tmp_path / "h") as home:
        tokens = make_credentials(tmp_path / "credentials.toml")
        running = home.start("--credentials-file", str(tmp_path / "credentials.toml"))
        digest, data = next(iter(NEW.new_blobs.items()))
        with running.client(token=tokens["engine"]) as engine:
            assert "handed" in engine.get_capabilities().features
        files = HandedFiles(running.data_dir, "default")
        token = files.new_token()
        assert files.write(token, data)
        frame = pb.BlobFrame(digest=digest.to_proto(), kind=pb.BLOB_KIND_TENSORS)
        with grpc.insecure_channel(running.address) as channel:
            stub: Any = cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            for request, refusal in (
                (pb.WriteBlobsRequest(frame=frame, handed=token), errors.PermissionDenied),
                (pb.WriteBlobsRequest(frame=frame, handed="../" + token), errors.InvalidArgument),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    list(stub.WriteBlobs(iter([request]), metadata=bearer(tokens["client"])))
                assert isinstance(from_rpc_error(refused.value), refusal)
        with running.client(token=tokens["client"]) as client:
            assert "handed" not in client.get_capabilities().features
            assert client.find_missing([digest]) == [digest]
