"""An upload whose store process is killed goes on at another one by itself, and its part does not stay."""

from pathlib import Path

import grpc
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import StoreClient
from kvasir.formats.frames import frames_of

from tests.cachestore.bucket.test_over_s3 import pytestmark  # noqa: F401
from tests.cachestore.replicas.processes import Replicas
from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import assert_whole
from tests.made_models.synthetic import SyntheticAgent, full_layers, kv_identity
from tests.running.waiting import eventually

_LARGE = kv_identity("large", full_layers(24, 8, 128))  # one block is 7 MB: several frames


def parts_of(replicas: Replicas, name: str) -> list[Path]:
    return [path for path in replicas.home(name).data_dir.rglob("*.part") if path.is_file()]


def test_an_upload_whose_store_is_killed_goes_on_at_another_one(replicas: Replicas) -> None:
    turn = SyntheticAgent(_LARGE, 1).turn(256 * 3)
    first, *_ = sizes = [digest.size_bytes for digest in turn.digests]
    a, b = replicas.start("a"), replicas.start("b")
    with proxy_to(a.address) as proxy, StoreClient.connect(proxy.address) as client:

        def kill(_: pb.TransferProgress) -> None:
            if proxy.sent_bytes > first + first // 2 and a.process.poll() is None:
                proxy.target = b.address
                a.kill()
                assert parts_of(replicas, "a")

        client.put_blobs(turn.new_blobs, on_progress=kill)
        assert a.process.poll() is not None
        assert proxy.sent_bytes < 3 * sum(sizes)
        client.put_manifest(turn.manifest_bytes)
        client.commit("ada", turn.manifest_digest, 0)
    with b.client() as at_b:
        assert_whole(at_b, "ada", turn)
    with replicas.start("a").client() as again:
        assert parts_of(replicas, "a") == []
        assert_whole(again, "ada", turn)


def test_an_upload_that_nobody_ends_leaves_nothing_at_either_store(replicas: Replicas) -> None:
    """One of the two collects garbage for both, and knows nothing of the other's parts."""
    [(digest, data)] = SyntheticAgent(_LARGE, 1).turn(256).new_blobs.items()
    [first, *_] = frames_of(digest, data, pb.BLOB_KIND_TENSORS)
    for name in ("a", "b"):
        replicas.start(name, "--grace-period-s", "0", "--gc-interval-s", "0.2")
    for name, home in replicas.homes.items():
        with StoreClient.connect(home.socket) as client:
            stub = cachestore_pb2_grpc.CacheStoreServiceStub(client._channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.RpcError, match="bytes arrived"):
                list(stub.WriteBlobs(iter([pb.WriteBlobsRequest(frame=first)]), timeout=20))
            eventually(lambda: client.get_stats().reserved_bytes == 0)
            assert parts_of(replicas, name) == []
