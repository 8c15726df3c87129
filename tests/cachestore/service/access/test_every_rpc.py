"""Every RPC of the contract, over a real socket, does what its comment says."""

import json
import tarfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import AioStoreClient, StoreClient
from kvasir.errors import AlreadyExists, Conflict, FailedPrecondition, InvalidArgument, NotFound
from kvasir.formats import manifest as manifests
from kvasir.formats.block_hash import block_hash_chain, kv_identity_hash
from kvasir.formats.digest import Digest

from tests.cachestore.service.running import RunningStore, StoreHome, assert_whole, publish
from tests.made_models.synthetic import MIXED, SMALL, WINDOWED, SyntheticAgent

KV = kv_identity_hash(SMALL)


def agent(seed: int) -> SyntheticAgent:
    return SyntheticAgent(SMALL, seed)


def test_a_turn_is_published_and_read_back_whole(client: StoreClient) -> None:
    ada = agent(1)
    first, second = ada.turn(700, is_prompt=True), ada.turn(50)
    assert publish(client, "whole", first, 0).version == 1
    made = publish(client, "whole", second, 1)
    assert (made.version, made.parent_version, made.token_count) == (2, 1, 750)
    assert made.origin == pb.ORIGIN_TURN
    assert made.kv_identity_hash == KV
    assert_whole(client, "whole", first, 1)
    assert_whole(client, "whole", second)


def test_windows_and_states_are_published_and_read_back(client: StoreClient) -> None:
    mixed = SyntheticAgent(MIXED, 2)
    turn = mixed.turn(300)
    publish(client, "mixed", turn, 0)
    assert_whole(client, "mixed", turn)
    assert len(turn.digests) == 5  # a block and a tail of each group, and a state


def test_find_missing_names_what_lacks_in_the_order_asked(client: StoreClient) -> None:
    turn = agent(3).turn(600)
    absent = [Digest.of(bytes([n])) for n in range(3)]
    client.put_blobs(turn.new_blobs)
    assert client.find_missing([absent[2], *turn.digests, absent[0]]) == [absent[2], absent[0]]


def test_what_is_already_stored_is_not_sent_again(client: StoreClient) -> None:
    turn = agent(4).turn(600)
    seen: list[tuple[int, int]] = []
    first = client.put_blobs(turn.new_blobs)
    again = client.put_blobs(turn.new_blobs, on_progress=lambda p: seen.append((p.bytes_done, p.bytes_total)))
    assert (first.blobs_done, first.blobs_skipped) == (3, 0)
    assert (again.blobs_done, again.blobs_skipped) == (3, 3)
    assert seen[-1][0] == seen[-1][1] == sum(digest.size_bytes for digest in turn.digests)


def test_write_status_tells_what_has_arrived(client: StoreClient) -> None:
    turn = agent(5).turn(256)
    [digest] = turn.digests
    assert client.write_status(digest).received_bytes == 0
    client.put_blobs(turn.new_blobs)
    status = client.write_status(digest)
    assert (status.received_bytes, status.is_complete) == (digest.size_bytes, True)


def test_an_absent_blob_is_not_found_and_named(client: StoreClient) -> None:
    absent = Digest.of(b"absent")
    with pytest.raises(NotFound) as caught:
        client.get_blob(absent)
    assert absent.hash in (caught.value.metadata.get("digest"), *caught.value.message.split())


def test_a_commit_on_an_old_head_is_aborted_and_names_the_head(client: StoreClient) -> None:
    ada = agent(6)
    first, second = ada.turn(300), ada.turn(20)
    publish(client, "cas", first, 0)
    publish(client, "cas", second, 1)
    other = agent(7).turn(300)
    client.put_blobs(other.new_blobs)
    client.put_manifest(other.manifest_bytes)
    with pytest.raises(Conflict) as caught:
        client.commit("cas", other.manifest_digest, 1)
    assert caught.value.metadata["head_version"] == "2"


def test_a_repeated_commit_answers_its_version(client: StoreClient) -> None:
    turn = agent(8).turn(300)
    made = publish(client, "repeat", turn, 0)
    assert client.commit("repeat", turn.manifest_digest, 0) == made


def test_a_commit_without_its_blobs_is_refused_and_names_one(client: StoreClient) -> None:
    turn = agent(9).turn(600)
    client.put_manifest(turn.manifest_bytes)
    with pytest.raises(FailedPrecondition) as caught:
        client.commit("lacking", turn.manifest_digest, 0)
    assert caught.value.metadata["digest"] in {digest.hash for digest in turn.digests}
    with pytest.raises(NotFound):
        client.get_agent("lacking")


def test_a_long_manifest_is_read_as_a_blob(client: StoreClient) -> None:
    grown = agent(10)
    turn = grown.turn(300)
    long = manifests.parse(turn.manifest_bytes)
    long.messages.add(role="user", content="x" * (3 << 20))
    data = long.SerializeToString(deterministic=True)
    client.put_blobs(turn.new_blobs)
    client.commit("long", client.put_manifest(data), 0)
    _, manifest_bytes = client.get_snapshot("long")
    assert manifest_bytes == data


def test_a_prompts_blocks_are_found_by_block_hash(client: StoreClient) -> None:
    turn = agent(34).turn(700, is_prompt=True)
    publish(client, "prefix", turn, 0)
    chain = block_hash_chain("default", KV, list(turn.manifest.token_ids))
    found = client.find_prefix(KV, [*chain, "0" * 64])
    assert [*map(Digest.from_proto, found.blocks)] == turn.digests[:2]
    assert (found.tokens, len(found.windows)) == (512, 0)
    assert client.find_prefix(KV, ["0" * 64]) == pb.FindPrefixResponse()


def test_an_exported_agent_is_imported_the_same_and_is_a_plain_tar(client: StoreClient, tmp_path: Path) -> None:
    mixed = SyntheticAgent(MIXED, 36)
    mixed.turn(600)
    turn = mixed.turn(5)
    publish(client, "exported", SyntheticAgent(MIXED, 36).turn(600), 0)
    publish(client, "exported", turn, 1)
    size_bytes = client.export_to_file("exported", tmp_path / "ada.kvasir")
    data = (tmp_path / "ada.kvasir").read_bytes()
    assert size_bytes == len(data)
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        names = archive.getnames()
        index = json.load(archive.extractfile("kvasir-archive.json"))  # type: ignore[arg-type]
    assert names == ["kvasir-archive.json", "manifest.pb", *(f"blobs/{digest.hash}" for digest in turn.digests)]
    assert index["agent_id"] == "exported"
    made = client.import_from_file("imported", tmp_path / "ada.kvasir")
    assert (made.version, made.origin, made.origin_detail) == (1, pb.ORIGIN_IMPORT, "exported")
    assert_whole(client, "imported", turn)
    with pytest.raises(AlreadyExists):
        client.import_from_file("imported", tmp_path / "ada.kvasir")
    client.export_to_file("imported", tmp_path / "again.kvasir")
    with tarfile.open(tmp_path / "again.kvasir") as archive:
        assert archive.getnames() == names


async def test_an_archive_that_cannot_be_read_ends_its_import_with_its_own_error(
    shared_store: RunningStore, client: StoreClient, tmp_path: Path
) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(100)
        raise ValueError("the disk has gone")

    with pytest.raises(ValueError, match="the disk has gone"):
        client.import_agent("unread", broken())
    with pytest.raises(FileNotFoundError):
        client.import_from_file("unread", tmp_path / "absent")
    async with AioStoreClient.connect(shared_store.address) as aio:
        with pytest.raises(ValueError, match="the disk has gone"):
            await aio.import_agent("unread", broken())
        with pytest.raises(FileNotFoundError):
            await aio.import_from_file("unread", tmp_path / "absent")
    with pytest.raises(NotFound):
        client.get_agent("unread")


def test_what_is_imported_binds_no_block_hash(client: StoreClient) -> None:
    turn = agent(37).turn(600, is_prompt=True)
    from kvasir.formats.archive import pack

    client.import_agent("unbound", pack(turn.manifest, turn.new_blobs, agent_id="x"))
    chain = block_hash_chain("default", KV, list(turn.manifest.token_ids))
    assert client.find_prefix(KV, chain).tokens == 0


def test_an_import_may_add_a_version_when_told(client: StoreClient, tmp_path: Path) -> None:
    ada = agent(38)
    publish(client, "replaced", ada.turn(300), 0)
    client.export_to_file("replaced", tmp_path / "old")
    publish(client, "replaced", ada.turn(300), 1)
    assert client.import_from_file("replaced", tmp_path / "old", replace=True).version == 3


def test_a_prefix_of_a_model_with_windows_is_found_in_each_group(client: StoreClient) -> None:
    turn = SyntheticAgent(WINDOWED, 41, more_window_blocks=1).turn(1100, is_prompt=True)
    publish(client, "windowed", turn, 0)
    kv = kv_identity_hash(WINDOWED)
    chain = block_hash_chain("default", kv, list(turn.manifest.token_ids))
    found = client.find_prefix(kv, chain, [0, 300, 512])
    assert (found.tokens, list(found.blocks)) == (1024, list(turn.manifest.blocks))
    for window, listed in zip(found.windows, turn.manifest.windows, strict=True):
        assert (window.window, window.first_block, window.HasField("tail")) == (listed.window, 2, False)
        assert list(window.blocks) == list(listed.blocks)[2 - listed.first_block :]
    alone = client.find_prefix(kv, chain)
    assert (alone.tokens, len(alone.blocks), len(alone.windows)) == (1024, 4, 0)
    with pytest.raises(InvalidArgument) as refused:
        client.find_prefix(kv, chain, [512, 0])
    assert refused.value.field == "groups"


def test_watching_begins_now_and_goes_on_from_a_cursor(client: StoreClient) -> None:
    events = client.watch(timeout_s=30)
    started = next(events)
    assert started.WhichOneof("event") == "started"
    publish(client, "watched", agent(39).turn(20), 0)
    client.update_agent("watched", labels={"a": "b"})
    client.delete_agent("watched")
    seen = [next(events) for _ in range(3)]
    assert [event.WhichOneof("event") for event in seen] == ["committed", "agent_updated", "agent_deleted"]
    events.close()
    again = client.watch(seen[0].cursor, timeout_s=30)
    assert [next(again).WhichOneof("event") for _ in range(3)] == ["started", "agent_updated", "agent_deleted"]
    again.close()


def test_a_cursor_of_another_incarnation_is_told_that_events_are_lost(client: StoreClient) -> None:
    events = client.watch(pb.EventCursor(incarnation="0" * 32, sequence=1), timeout_s=30)
    assert next(events).WhichOneof("event") == "lost"
    events.close()


def test_verifying_counts_and_finds_nothing_in_a_sound_agent(client: StoreClient) -> None:
    publish(client, "sound", agent(40).turn(600), 0)
    steps = list(client.verify_blobs("sound"))
    assert steps[-1].blobs_checked == steps[-1].blobs_total >= 3
    assert not [digest for step in steps for digest in step.damaged]
    with pytest.raises(NotFound):
        list(client.verify_blobs("nobody"))


def test_a_damaged_blob_is_named_and_never_served(home: StoreHome) -> None:
    running = home.start()
    turn = agent(41).turn(600)
    with running.client() as client:
        publish(client, "hurt", turn, 0)
        [path] = home.data_dir.glob(f"namespaces/*/blobs/*/{turn.digests[1].hash}")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        damaged = [digest.hash for step in client.verify_blobs("hurt") for digest in step.damaged]
        assert damaged == [turn.digests[1].hash]
        assert client.get_stats().damaged_blob_count == 1
        assert client.find_missing(turn.digests) == [turn.digests[1]]
        client.put_blobs(turn.new_blobs)
        assert_whole(client, "hurt", turn)


def test_a_blob_damaged_under_a_reader_is_data_loss_and_the_others_come(home: StoreHome) -> None:
    from kvasir.errors import DataLoss

    running = home.start()
    turn = agent(42).turn(700)
    with running.client() as client:
        publish(client, "hurt", turn, 0)
        [path] = home.data_dir.glob(f"namespaces/*/blobs/*/{turn.digests[1].hash}")
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        came: list[Digest] = []
        with pytest.raises(DataLoss) as caught:
            came += [digest for digest, _ in client.get_blobs(turn.digests)]
        assert caught.value.metadata["digest"] == turn.digests[1].hash
        assert [digest for digest, _ in client.get_blobs([turn.digests[0], turn.digests[2]])]


def test_garbage_rests_and_goes_on_a_second_pass(home: StoreHome) -> None:
    running = home.start("--grace-period-s", "0.5")
    turn = agent(43).turn(600)
    with running.client() as client:
        client.put_blobs(turn.new_blobs)
        time.sleep(0.6)
        assert client.collect_garbage(dry_run=True).blobs_swept == 0
        first = client.collect_garbage()
        time.sleep(0.6)
        second = client.collect_garbage()
        assert first.blobs_marked + second.blobs_swept >= 3
        assert client.find_missing(turn.digests) == turn.digests


def test_capabilities_report_who_i_am_and_what_fits(client: StoreClient) -> None:
    capabilities = client.get_capabilities()
    assert (capabilities.namespace, capabilities.block_tokens, capabilities.max_frame_bytes) == (
        "default",
        256,
        1 << 20,
    )
    assert list(capabilities.roles) == ["admin", "client", "engine", "handover", "peer"]
    assert capabilities.max_digests_per_request == 10_000


def test_stats_count_what_is_there(home: StoreHome) -> None:
    running = home.start()
    ada = agent(44)
    turn = ada.turn(600)
    with running.client() as client:
        publish(client, "counted", turn, 0)
        client.fork_agent("counted", "copy")
        stats = client.get_stats()
    assert (stats.agent_count, stats.snapshot_count, stats.blob_count) == (2, 2, 4)
    assert stats.blob_bytes == sum(d.size_bytes for d in [*turn.digests, turn.manifest_digest])
    assert stats.logical_bytes >= 2 * sum(d.size_bytes for d in turn.digests)


def test_the_service_reports_that_it_is_ready_and_what_it_serves(shared_store: RunningStore) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2

    with grpc.insecure_channel(shared_store.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvasir.cachestore.v1.CacheStoreService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        for version in ("v1alpha", "v1"):
            listing = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            [listed] = listing(iter([request]), timeout=60)
            names = {service.name for service in listed.list_services_response.service}
            served = {f"kvasir.cachestore.v1.{name}" for name in ("CacheStoreService", "AgentService", "MovingService")}
            assert {*served, "grpc.health.v1.Health"} <= names
            for name in names:
                asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
                [found] = listing(iter([asked]), timeout=60)
                assert found.HasField("file_descriptor_response"), name
