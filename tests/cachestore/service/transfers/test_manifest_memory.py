"""Large manifests, many at once: the service's resident memory stays under a bound, whoever asks for them."""

import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc, identity_pb2, manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.archive import pack

from tests.cachestore.service.running import RunningStore, StoreHome
from tests.made_models.synthetic import kv_identity

MIB = 1 << 20
# More than the messages of streams that one caller may wait for: its other calls do not wait for them.
CALLS = 40
# Idle it has about 90 MiB; 128 MiB wait for readers, 256 MiB are for manifests, and a call has up to 4 MiB on its way
# through gRPC; the allocator keeps as much again. When each kept manifest, message and preamble: 1,600 and 1,800.
BOUND_BYTES = 1000 * MIB
RECURRENT = kv_identity("recurrent", [identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_STATE)])


def large_archive() -> list[bytes]:
    """An archive of a manifest of 14 MiB that names no blob, in messages of 1 MiB.

    No layer has rows, and no state was recorded.
    """
    said = [manifest_pb2.Message(role="user", content="x" * 1400) for _ in range(10_000)]
    data = manifests.build(
        kv_identity=RECURRENT, token_ids=[1], text="a", token_chars=[1], messages=said, created_unix_ms=1
    )
    archive = b"".join(pack(manifests.parse(data), {}, agent_id="big"))
    return [archive[start : start + MIB] for start in range(0, len(archive), MIB)]


def importing(agent: str, pieces: list[bytes], may_end: threading.Event) -> Iterator[pb.ImportAgentRequest]:
    header = pb.ImportAgentHeader(agent_id=agent)
    yield pb.ImportAgentRequest(header=header)
    for piece in pieces[:-1]:
        yield pb.ImportAgentRequest(data=piece)
    # The manifest is there, but for the archive's end.
    yield pb.ImportAgentRequest(data=pieces[-1][:-1024])
    may_end.wait(60)
    yield pb.ImportAgentRequest(data=pieces[-1][-1024:])


def most_memory(store: RunningStore, seconds: float) -> int:
    most, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        most = max(most, store.memory_bytes())
        time.sleep(0.02)
    return most


@pytest.mark.long(14)
@pytest.mark.parametrize("kind", ["exports", "imports"])
def test_many_large_manifests_at_once_stay_within_their_room(home: StoreHome, kind: str) -> None:
    store = home.start()
    pieces = large_archive()
    may_end = threading.Event()
    with store.client() as client, grpc.insecure_channel(store.address) as channel:
        stub = cachestore_pb2_grpc.AgentServiceStub(channel)  # type: ignore[no-untyped-call]
        if kind == "exports":
            may_end.set()
            stub.ImportAgent(importing("big", pieces, may_end))
            # Read to the first message, and then not at all.
            calls = [stub.ExportAgent(pb.ExportAgentRequest(agent_id="big")) for _ in range(CALLS)]
            readers = [threading.Thread(target=next, args=(call,), daemon=True) for call in calls]
            for reader in readers:
                reader.start()
        else:
            calls = [stub.ImportAgent.future(importing(f"a{number}", pieces, may_end)) for number in range(CALLS)]
        most = most_memory(store, 6)
        print(f"{kind}: {most >> 20} MiB")
        assert most < BOUND_BYTES
        # Meanwhile the service answers.
        began = time.monotonic()
        client.get_stats()
        assert time.monotonic() - began < 5
        may_end.set()
        for call in calls:
            call.cancel()
