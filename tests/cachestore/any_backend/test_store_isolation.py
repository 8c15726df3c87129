"""One namespace never learns what another has: not by name, digest, block hash, cursor, count or quota."""

import inspect
from collections.abc import Callable

import pytest
from kvasir.errors import FailedPrecondition, NotFound, ResourceExhausted
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.records import BlobKind, HeldLease, Origin
from cachestore_svc.store.owners import ArrivingAgent
from cachestore_svc.store.store import NewBlob, Store
from tests.cachestore.core.lab import NS, Lab, anybody, assert_restores, damaged, publish, upload, write
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot

KV = kv_identity_hash(SMALL)
THEIRS = "theirs"


@pytest.fixture
def content(store: Store) -> SyntheticSnapshot:
    """What the other namespace has: an agent of two versions with bound blocks, a lease and an event."""
    agent = SyntheticAgent(SMALL, 1)
    publish(store, "secret", agent.turn(300, is_prompt=True), 0, THEIRS, bind_shared=True)
    content = agent.turn(30)
    publish(store, "secret", content, 1, THEIRS)
    store.acquire_lease(THEIRS, "secret", KV, "engine", 60)
    return content


HASHES = SyntheticAgent(SMALL, 1)
HASHES.turn(300, is_prompt=True)


def not_found(call: Callable[[], object]) -> None:
    with pytest.raises(NotFound):
        call()


# Each method of the store, asked in our namespace for what is theirs.
PROBES: dict[str, Callable[[Store, SyntheticSnapshot], object]] = {
    "find_missing": lambda s, c: s.find_missing(NS, c.digests) == c.digests or pytest.fail("their blobs were seen"),
    "open_writer": lambda s, c: s.open_writer(NS, c.digests[0], BlobKind.TENSORS).is_stored and pytest.fail("seen"),
    "open_writers": lambda s, c: (
        s.open_writers(NS, [NewBlob(c.digests[0], BlobKind.TENSORS)])[0].is_stored and pytest.fail("seen")
    ),
    "receive_files": lambda s, c: s.receive_files(NS),
    "write_status": lambda s, c: s.write_status(NS, c.digests[0]).received_bytes == 0 or pytest.fail("seen"),
    "read_blob": lambda s, c: not_found(lambda: s.read_blob(NS, c.digests[0])),
    "read_found": lambda s, c: not_found(lambda: s.read_found(NS, c.digests[0])),
    "leading_stored": lambda s, c: not_found(lambda: s.leading_stored(NS, c.digests)),
    "named_blobs": lambda s, c: not_found(lambda: s.named_blobs(NS, c.manifest_digest, 1)),
    "commit": lambda s, c: refused(lambda: s.commit(NS, "mine", c.manifest_digest, 0)),
    "get_snapshot": lambda s, c: not_found(lambda: s.get_snapshot(NS, "secret")),
    "has_had": lambda s, c: (
        not s.has_had(NS, "secret", c.manifest_digest.hash) or pytest.fail("their version was seen")
    ),
    "list_snapshots": lambda s, c: not_found(lambda: s.list_snapshots(NS, "secret")),
    "find_prefix": lambda s, c: s.find_prefix(NS, KV, HASHES.block_hashes(THEIRS)) == [] or pytest.fail("seen"),
    "find_prefix_of": lambda s, c: (
        s.find_prefix_of(NS, KV, HASHES.block_hashes(THEIRS), (0,)).tokens == 0 or pytest.fail("seen")
    ),
    "list_agents": lambda s, c: s.list_agents(NS).agents == () or pytest.fail("seen"),
    "get_agent": lambda s, c: not_found(lambda: s.get_agent(NS, "secret")),
    "update_agent": lambda s, c: not_found(lambda: s.update_agent(NS, "secret", is_pinned=True)),
    "fork_agent": lambda s, c: not_found(lambda: s.fork_agent(NS, "secret", "mine")),
    "rollback_agent": lambda s, c: not_found(lambda: s.rollback_agent(NS, "secret", 1)),
    "delete_agent": lambda s, c: not_found(lambda: s.delete_agent(NS, "secret", force=True)),
    "acquire_lease": lambda s, c: (
        s.acquire_lease(NS, "secret", KV, "mine", 10).token.generation == 1 or pytest.fail("x")
    ),
    "renew_leases": lambda s, c: (
        s.renew_leases(NS, "engine", KV, [HeldLease("secret", their_token(s).generation)], 10).lost or pytest.fail("x")
    ),
    "renew_lease": lambda s, c: not_found(lambda: s.renew_lease(NS, "secret", KV, their_token(s), 10)),
    "release_lease": lambda s, c: not_found(lambda: s.release_lease(NS, "secret", KV, their_token(s))),
    "events_after": lambda s, c: s.events_after(NS, None).cursor.sequence == 0 or pytest.fail("counted"),
    "verify": lambda s, c: not_found(lambda: list(s.verify(NS, "secret"))),
    "collect_garbage": lambda s, c: s.collect_garbage(NS).blobs_marked == 0 or pytest.fail("marked"),
    "usage": lambda s, c: not_found(lambda: s.usage(NS, "secret")),
    "kind_of": lambda s, c: s.kind_of(NS, c.digests[0]) is None or pytest.fail("their blob was seen"),
    "count_repair": lambda s, c: s.count_repair(NS),
    "ownership": lambda s, c: s.ownership(NS, "secret").generation == 0 or pytest.fail("their owner was seen"),
    "claim": lambda s, c: not_found(lambda: s.claim(NS, "secret", 1)),
    "offer": lambda s, c: not_found(lambda: s.offer(NS, "secret", "peer", "move", 0, anybody)),
    "hand_over": lambda s, c: not_under_way(lambda: s.hand_over(NS, "secret", "peer", "move", 1)),
    "arrive": lambda s, c: not_under_way(lambda: s.arrive(NS, "secret", "move")),
    "receive": lambda s, c: not_found(
        lambda: s.receive(NS, ArrivingAgent("secret", "peer", "move", 1, (), {}, False, 8))
    ),
    "did_not_arrive": lambda s, c: s.did_not_arrive(NS, "secret", "move"),
    "undo_move": lambda s, c: s.undo_move(NS, "secret", "peer", "move"),
    "take_back": lambda s, c: s.take_back(NS, "secret").is_owned or pytest.fail("their owner was seen"),
    "fence": lambda s, c: s.fence(NS, "secret", "peer", 3, anybody),
    "told": lambda s, c: s.told(NS, "secret", "peer", 3),
    "is_sealed": lambda s, c: s.is_sealed(NS),
    "yield_to": lambda s, c: s.yield_to(NS, "secret", "peer", 0, 3, anybody),
    "stats": lambda s, c: (s.stats(NS).blob_count, s.stats(NS).counters) == (0, {}) or pytest.fail("counted"),
}
# These are of the whole store: no namespace asks them.
WHOLE_STORE = {"open", "close", "subscribe", "scrub", "check", "counted", "totals", "ailments"}
WHOLE_STORE |= {"expire_agents", "unfinished_moves", "owners", "rename_peers", "written"}


def their_token(store: Store) -> object:
    return store.acquire_lease(THEIRS, "secret", KV, "engine", 60).token


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(FailedPrecondition, match="not here"):
        call()


def not_under_way(call: Callable[[], object]) -> None:
    with pytest.raises(FailedPrecondition, match="not under way"):
        call()


def test_every_method_of_the_store_is_probed() -> None:
    methods = {name for name, _ in inspect.getmembers(Store, callable) if not name.startswith("_")}
    assert methods == set(PROBES) | WHOLE_STORE


def seen_by_its_owner(store: Store) -> tuple[object, ...]:
    return (
        store.get_agent(THEIRS, "secret"),
        store.list_snapshots(THEIRS, "secret"),
        store.stats(THEIRS).blob_count,
        store.ownership(THEIRS, "secret"),
    )


@pytest.mark.parametrize("method", PROBES)
def test_what_is_theirs_does_not_exist_for_us(store: Store, content: SyntheticSnapshot, method: str) -> None:
    before = seen_by_its_owner(store)
    PROBES[method](store, content)
    assert before == seen_by_its_owner(store)
    assert_restores(store, store.get_snapshot(THEIRS, "secret"), content, THEIRS)


def test_a_manifest_of_ours_cannot_name_their_blobs(store: Store, content: SyntheticSnapshot) -> None:
    write(store, content.manifest_digest, content.manifest_bytes, BlobKind.MANIFEST)
    refused(lambda: store.commit(NS, "mine", content.manifest_digest, 0))


def test_the_same_bytes_are_two_files_and_one_may_be_swept_or_damaged_alone(
    lab: Lab, store: Store, content: SyntheticSnapshot
) -> None:
    ours = SyntheticAgent(SMALL, 1).turn(300, is_prompt=True)
    publish(store, "secret", ours, 0)
    assert lab.stored_hashes.count(ours.digests[0].hash) == 2
    store.delete_agent(NS, "secret")
    store.collect_garbage()
    lab.clock.pass_s(100_000)
    assert store.collect_garbage(NS).blobs_swept == 3
    assert lab.stored_hashes.count(ours.digests[0].hash) == 1
    assert_restores(store, store.get_snapshot(THEIRS, "secret"), content, THEIRS)
    # Damage in one is none in the other.
    upload(store, ours)
    lab.overwrite(ours.digests[0], b"")
    list(store.verify(NS))
    assert damaged(store, THEIRS) == []


def test_deleting_our_agent_leaves_theirs_of_the_same_name(store: Store, content: SyntheticSnapshot) -> None:
    publish(store, "secret", SyntheticAgent(SMALL, 7).turn(20), 0)
    store.update_agent(NS, "secret", labels={"a": "b"}, is_pinned=True)
    store.delete_agent(NS, "secret", force=True)
    agent = store.get_agent(THEIRS, "secret")
    assert (dict(agent.labels), agent.is_pinned, agent.lines[0].version) == ({}, False, 2)


def test_a_binding_of_ours_is_not_found_by_them_even_with_our_hashes(store: Store, content: SyntheticSnapshot) -> None:
    agent = SyntheticAgent(SMALL, 9)
    publish(store, "mine", agent.turn(256, is_prompt=True), 0, bind_shared=True)
    assert store.find_prefix(NS, KV, agent.block_hashes(NS))
    assert store.find_prefix(THEIRS, KV, agent.block_hashes(NS)) == []
    assert agent.block_hashes(NS) != agent.block_hashes(THEIRS)


def test_a_binding_of_theirs_is_not_ours_even_where_we_hold_the_same_bytes(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 9)
    content = agent.turn(256, is_prompt=True)
    publish(store, "theirs", content, 0, THEIRS, bind_shared=True)
    publish(store, "ours", content, 0)
    assert store.find_prefix(THEIRS, KV, agent.block_hashes(THEIRS))
    assert store.find_prefix(NS, KV, agent.block_hashes(THEIRS)) == []


def test_what_was_imported_is_not_shared_by_the_turns_that_extend_it(store: Store) -> None:
    # The archive came from anyone, and says of its own blocks that they may be shared.
    agent = SyntheticAgent(SMALL, 11)
    upload(store, brought := agent.turn(300, is_prompt=True))
    store.commit(NS, "brought", brought.manifest_digest, 0, origin=Origin.IMPORT)
    publish(store, "brought", agent.turn(300, is_prompt=True), 1, bind_shared=True)
    assert store.find_prefix(NS, KV, agent.block_hashes(NS)) == []
    store.fork_agent(NS, "brought", "forked")
    publish(store, "forked", agent.turn(300, is_prompt=True), 1, bind_shared=True)
    assert store.find_prefix(NS, KV, agent.block_hashes(NS)) == []


def test_turns_go_on_sharing_what_turns_have_shared(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 12)
    publish(store, "ours", agent.turn(300, is_prompt=True), 0, bind_shared=True)
    publish(store, "ours", agent.turn(300, is_prompt=True), 1, bind_shared=True)
    store.fork_agent(NS, "ours", "forked")
    publish(store, "forked", agent.turn(300, is_prompt=True), 1, bind_shared=True)
    assert len(store.find_prefix(NS, KV, agent.block_hashes(NS))) == 3


def test_a_full_quota_of_theirs_refuses_them_and_not_us(lab: Lab) -> None:
    with lab.open(namespace_quota_bytes={THEIRS: 10_000}) as store:
        snapshot = SyntheticAgent(SMALL, 1).turn(300)
        with pytest.raises(ResourceExhausted):
            publish(store, "a", snapshot, 0, THEIRS)
        publish(store, "a", snapshot, 0)


def test_watchers_hear_which_namespace_and_only_of_what_is_durable(store: Store) -> None:
    heard: list[str] = []
    end = store.subscribe(heard.append)
    publish(store, "a", SyntheticAgent(SMALL, 1).turn(3), 0, THEIRS)
    assert heard == [THEIRS]
    end()
    publish(store, "a", SyntheticAgent(SMALL, 1).turn(3), 0)
    assert heard == [THEIRS]
