"""RPCs of agents, their versions and their leases, through the Python client."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import field_mask_pb2
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.clients.aio import agent_client
from kvasir.errors import AlreadyExists, Conflict, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from kvasir.formats.block_hash import kv_identity_hash

from tests.cachestore.service.running import assert_whole, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent

KV = kv_identity_hash(SMALL)


def test_versions_are_listed_newest_first_in_pages(client: StoreClient) -> None:
    ada = SyntheticAgent(SMALL, 11)
    for parent in range(5):
        publish(client, "pages", ada.turn(10), parent)
    versions: list[int] = []
    token = ""
    while True:
        page = client.list_snapshots("pages", page_size=2, page_token=token)
        versions += [snapshot.version for snapshot in page.snapshots]
        token = page.next_page_token
        if not token:
            break
    assert versions == [5, 4, 3, 2, 1]


def test_agents_are_listed_by_name_label_and_prefix(client: StoreClient) -> None:
    for seed, name in enumerate(("list/a", "list/b", "list/c"), start=20):
        publish(client, name, SyntheticAgent(SMALL, seed).turn(20), 0)
    client.update_agent("list/b", labels={"team": "red"}, is_pinned=True, retained_versions=3)
    page = client.list_agents(name_prefix="list/", page_size=2)
    assert [each.agent_id for each in page.agents] == ["list/a", "list/b"]
    rest = client.list_agents(name_prefix="list/", page_size=2, page_token=page.next_page_token)
    assert [each.agent_id for each in rest.agents] == ["list/c"]
    [red] = client.list_agents(labels={"team": "red"}).agents
    assert (red.agent_id, red.is_pinned, red.retained_versions) == ("list/b", True, 3)
    assert client.update_agent("list/b", labels={"team": ""}).labels == {}
    assert client.get_agent("list/b").is_pinned


def test_every_agent_and_every_version_come_whatever_a_page_holds(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_client, "_PAGE", 2)
    ada = SyntheticAgent(SMALL, 25)
    for parent in range(5):
        publish(client, "every/a", ada.turn(10), parent)
    for seed, name in enumerate(("every/b", "every/c"), start=26):
        publish(client, name, SyntheticAgent(SMALL, seed).turn(20), 0)
    assert [each.agent_id for each in client.every_agent(name_prefix="every/")] == ["every/a", "every/b", "every/c"]
    assert [each.version for each in client.every_snapshot("every/a")] == [5, 4, 3, 2, 1]
    client.update_agent("every/c", labels={"team": "blue"})
    assert [each.agent_id for each in client.every_agent(labels={"team": "blue"})] == ["every/c"]


def test_an_update_changes_what_its_mask_names_and_nothing_else(client: StoreClient) -> None:
    publish(client, "masked", SyntheticAgent(SMALL, 29).turn(20), 0)

    def update(paths: list[str], **fields: Any) -> pb.Agent:
        mask = field_mask_pb2.FieldMask(paths=paths)
        changed = pb.Agent(agent_id="masked", **fields)
        response = client.call_rpc("UpdateAgent", pb.UpdateAgentRequest(agent=changed, update_mask=mask), 10)
        return response.agent  # type: ignore[no-any-return]

    assert update(["labels"], labels={"a": "1", "b.c": "2"}, is_pinned=True).labels == {"a": "1", "b.c": "2"}
    assert not client.get_agent("masked").is_pinned
    assert update(["labels.b.c", "is_pinned"], is_pinned=True).labels == {"a": "1"}
    assert update(["labels"], labels={"d": "4"}).labels == {"d": "4"}
    for paths, fields in (([], {}), (["used_at"], {}), (["labels"], {"labels": {"empty": ""}})):
        with pytest.raises(InvalidArgument) as refused:
            update(paths, **fields)
        assert refused.value.field in ("update_mask", "agent.labels")
    found = client.get_agent("masked")
    assert (found.labels, found.is_pinned, found.retained_versions) == ({"d": "4"}, True, 8)


def test_a_fork_starts_with_the_others_memory_and_goes_its_own_way(client: StoreClient) -> None:
    ada = SyntheticAgent(SMALL, 30)
    first = ada.turn(600)
    publish(client, "source", first, 0)
    forked = client.fork_agent("source", "fork")
    assert [(line.version, line.origin) for line in forked.lines] == [(1, pb.ORIGIN_FORK)]
    assert_whole(client, "fork", first)
    own = ada.fork(31).turn(30)
    publish(client, "fork", own, 1)
    assert_whole(client, "source", first)
    with pytest.raises(AlreadyExists):
        client.fork_agent("source", "fork")
    with pytest.raises(NotFound):
        client.fork_agent("nobody", "other")


def test_a_rollback_makes_an_old_version_the_newest(client: StoreClient) -> None:
    ada = SyntheticAgent(SMALL, 32)
    first, second = ada.turn(300), ada.turn(300)
    publish(client, "back", first, 0)
    publish(client, "back", second, 1)
    made = client.rollback_agent("back", 1, expected_version=2)
    assert (made.version, made.parent_version, made.origin) == (3, 2, pb.ORIGIN_ROLLBACK)
    assert_whole(client, "back", first)
    with pytest.raises(Conflict):
        client.rollback_agent("back", 1, expected_version=2)


def test_a_deleted_agent_is_gone_and_a_pinned_one_stays(client: StoreClient) -> None:
    publish(client, "gone", SyntheticAgent(SMALL, 33).turn(300), 0)
    client.update_agent("gone", is_pinned=True)
    with pytest.raises(FailedPrecondition):
        client.delete_agent("gone")
    deletion = client.delete_agent("gone", force=True)
    assert deletion.unshared_bytes > 0
    assert deletion.bytes_gone_by.seconds > time.time()
    with pytest.raises(NotFound):
        client.get_agent("gone")


def test_a_lease_refuses_others_and_its_generation_fences(client: StoreClient) -> None:
    held = client.acquire_lease("leased", KV, "engine-1", ttl_s=1)
    assert held.head_version == 0
    with pytest.raises(FailedPrecondition) as caught:
        client.acquire_lease("leased", KV, "engine-2")
    assert caught.value.metadata["owner"] == "engine-1"
    assert client.renew_lease("leased", KV, held.lease, ttl_s=1).expires_at.seconds >= held.expires_at.seconds
    time.sleep(1.2)
    taken = client.acquire_lease("leased", KV, "engine-2")
    assert taken.lease.generation > held.lease.generation
    with pytest.raises(Conflict):
        client.renew_lease("leased", KV, held.lease)
    turn = SyntheticAgent(SMALL, 35).turn(300)
    client.put_blobs(turn.new_blobs)
    manifest = client.put_manifest(turn.manifest_bytes)
    with pytest.raises(Conflict):
        client.commit("leased", manifest, 0, lease=held.lease)
    client.commit("leased", manifest, 0, lease=taken.lease)
    client.release_lease("leased", KV, taken.lease)
    with pytest.raises(InvalidArgument):
        client.acquire_lease("leased", KV, "engine-1", ttl_s=10_000)


@pytest.mark.parametrize("how", ["rollback", "delete", "fork over", "import"])
def test_what_takes_a_memory_back_asks_the_holder_of_the_lease_and_goes_on_when_it_lets_go(
    how: str, client: StoreClient, tmp_path: Path
) -> None:
    name = f"wanted for {how}"
    ada = SyntheticAgent(SMALL, 38)
    publish(client, f"source of {name}", ada.turn(300), 0)
    if how != "fork over":
        publish(client, name, ada.fork(39).turn(30), 0)
    client.export_to_file(f"source of {name}", tmp_path / "archive")
    held = client.acquire_lease(name, KV, "engine-1", ttl_s=20)
    assert held.head.version == held.head_version == (how != "fork over")
    with closing(client.watch()) as events, ThreadPoolExecutor() as pool:
        assert next(events).WhichOneof("event") == "started"
        call: Callable[[], object] = {
            "rollback": lambda: client.rollback_agent(name, 1),
            "delete": lambda: client.delete_agent(name),
            "fork over": lambda: client.fork_agent(f"source of {name}", name),
            "import": lambda: client.import_from_file(name, tmp_path / "archive", replace=True),
        }[how]
        taking = pool.submit(call)
        asked = next(events)
        assert (asked.lease_wanted.agent_id, asked.lease_wanted.kv_identity_hash) == (name, KV)
        assert asked.lease_wanted.takes_back
        assert not taking.done()
        lost = client.renew_leases("engine-1", KV, {name: held.lease.generation}, ttl_s=20).lost
        assert [each.agent_id for each in lost] == [name]
        began = time.monotonic()
        client.release_lease(name, KV, held.lease)
        taking.result(60)
        assert time.monotonic() - began < 15, "not as long as the lease"
    with pytest.raises(Conflict):
        client.renew_lease(name, KV, held.lease)


def test_what_takes_a_memory_back_is_told_to_retry_when_a_lease_outlasts_its_time(client: StoreClient) -> None:
    publish(client, "held for long", SyntheticAgent(SMALL, 40).turn(300), 0)
    held = client.acquire_lease("held for long", KV, "engine-1", ttl_s=60)
    impatient = StoreClient(client._channel, timeout_s=1.5)
    with pytest.raises(Unavailable) as refused:
        impatient.rollback_agent("held for long", 1)
    assert refused.value.reason == "LEASE_HELD"
    assert refused.value.retry_after_s
    assert client.get_agent("held for long").lines[0].version == 1
    client.release_lease("held for long", KV, held.lease)
    assert client.rollback_agent("held for long", 1).version == 2
