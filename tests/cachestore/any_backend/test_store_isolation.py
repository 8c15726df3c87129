"""One namespace never learns what another has: not by name, digest, block hash, cursor, count or quota."""

import inspect
from collections.abc import Callable

import pytest
from kvasir.errors import FailedPrecondition, NotFound, ResourceExhausted
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.records import BlobKind, HeldLease, Origin
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.store.blobs import NewBlob
from cachestore_svc.store.move_steps import ArrivingAgent
from cachestore_svc.store.store import Store
from tests.cachestore.any_backend.test_early_commits import begin
from tests.cachestore.core.lab import NS, Lab, anybody, assert_restores, damaged, prefix_of, publish, upload, write
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
    store.leases.acquire(THEIRS, "secret", KV, "engine", 60)
    return content


HASHES = SyntheticAgent(SMALL, 1)
HASHES.turn(300, is_prompt=True)


def not_found(call: Callable[[], object]) -> None:
    with pytest.raises(NotFound):
        call()


# Each method of the store and its parts, asked in our namespace for what is theirs.
PROBES: dict[str, Callable[[Store, SyntheticSnapshot], object]] = {
    "blobs.find_missing": lambda s, c: (
        s.blobs.find_missing(NS, c.digests) == c.digests or pytest.fail("their blobs were seen")
    ),
    "blobs.find_whole": lambda s, c: (
        s.blobs.find_whole(NS, [(each.hash, each.size_bytes) for each in c.digests]) and pytest.fail("seen")
    ),
    "blobs.open_writer": lambda s, c: (
        s.blobs.open_writer(NS, c.digests[0], BlobKind.TENSORS).is_stored and pytest.fail("seen")
    ),
    "blobs.open_writers": lambda s, c: (
        s.blobs.open_writers(NS, [NewBlob(c.digests[0], BlobKind.TENSORS)])[0].is_stored and pytest.fail("seen")
    ),
    "blobs.receive_files": lambda s, c: s.blobs.receive_files(NS),
    "blobs.write_status": lambda s, c: (
        s.blobs.write_status(NS, c.digests[0]).received_bytes == 0 or pytest.fail("seen")
    ),
    "blobs.read": lambda s, c: [
        not_found(lambda found=found: s.blobs.read(NS, c.digests[0], is_found=found)) for found in (False, True)
    ],
    "blobs.leading_stored": lambda s, c: not_found(lambda: s.blobs.leading_stored(NS, c.digests)),
    "blobs.named_blobs": lambda s, c: not_found(lambda: s.blobs.named_blobs(NS, c.manifest_digest, 1)),
    "snapshots.commit": lambda s, c: refused(lambda: s.snapshots.commit(NS, "mine", c.manifest_digest, 0)),
    "snapshots.commit_early": lambda s, c: commit_early_waits(s, c),
    "snapshots.get": lambda s, c: not_found(lambda: s.snapshots.get(NS, "secret")),
    "snapshots.has_had": lambda s, c: (
        not s.snapshots.has_had(NS, "secret", c.manifest_digest.hash) or pytest.fail("their version was seen")
    ),
    "snapshots.known": lambda s, c: refused(lambda: s.snapshots.known(NS, c.manifest_digest)),
    "snapshots.page": lambda s, c: not_found(lambda: s.snapshots.page(NS, "secret")),
    "prefixes.find": lambda s, c: (
        s.prefixes.find(NS, KV, HASHES.block_hashes(THEIRS), (0,)).tokens == 0 or pytest.fail("seen")
    ),
    "agents.page": lambda s, c: s.agents.page(NS).agents == () or pytest.fail("seen"),
    "agents.get": lambda s, c: not_found(lambda: s.agents.get(NS, "secret")),
    "agents.update": lambda s, c: not_found(lambda: s.agents.update(NS, "secret", is_pinned=True)),
    "agents.fork": lambda s, c: not_found(lambda: s.agents.fork(NS, "secret", "mine")),
    "agents.roll_back": lambda s, c: not_found(lambda: s.agents.roll_back(NS, "secret", 1)),
    "agents.delete": lambda s, c: not_found(lambda: s.agents.delete(NS, "secret", force=True)),
    "leases.acquire": lambda s, c: (
        s.leases.acquire(NS, "secret", KV, "mine", 10).token.generation == 1 or pytest.fail("x")
    ),
    "leases.renew_all": lambda s, c: (
        s.leases.renew_all(NS, "engine", KV, [HeldLease("secret", their_token(s).generation)], 10).lost
        or pytest.fail("x")
    ),
    "leases.renew": lambda s, c: not_found(lambda: s.leases.renew(NS, "secret", KV, their_token(s), 10)),
    "leases.release": lambda s, c: not_found(lambda: s.leases.release(NS, "secret", KV, their_token(s))),
    "events.after": lambda s, c: s.events.after(NS, None).cursor.sequence == 0 or pytest.fail("counted"),
    "care.verify": lambda s, c: not_found(lambda: list(s.care.verify(NS, "secret"))),
    "care.collect_garbage": lambda s, c: s.care.collect_garbage(NS).blobs_marked == 0 or pytest.fail("marked"),
    "agents.usage": lambda s, c: not_found(lambda: s.agents.usage(NS, "secret")),
    "blobs.kind_of": lambda s, c: s.blobs.kind_of(NS, c.digests[0]) is None or pytest.fail("their blob was seen"),
    "statistics.count_repair": lambda s, c: s.statistics.count_repair(NS),
    "owners.of": lambda s, c: s.owners.of(NS, "secret").generation == 0 or pytest.fail("their owner was seen"),
    "owners.claim": lambda s, c: not_found(lambda: s.owners.claim(NS, "secret", 1)),
    "moves.offer": lambda s, c: not_found(lambda: s.moves.offer(NS, "secret", "peer", "move", 0, anybody)),
    "moves.hand_over": lambda s, c: not_under_way(lambda: s.moves.hand_over(NS, "secret", "peer", "move", 1, anybody)),
    "moves.arrive": lambda s, c: not_under_way(lambda: s.moves.arrive(NS, "secret", "move")),
    "moves.receive": lambda s, c: not_found(
        lambda: s.moves.receive(NS, ArrivingAgent("secret", "peer", "move", 1, (), {}, False, 8))
    ),
    "moves.did_not_arrive": lambda s, c: s.moves.did_not_arrive(NS, "secret", "move"),
    "moves.undo": lambda s, c: s.moves.undo(NS, "secret", "peer", "move"),
    "moves.take_back": lambda s, c: s.moves.take_back(NS, "secret").is_owned or pytest.fail("their owner was seen"),
    "owners.fence": lambda s, c: s.owners.fence(NS, "secret", "peer", 3, anybody),
    "owners.told": lambda s, c: s.owners.told(NS, "secret", "peer", 3),
    "is_sealed": lambda s, c: s.is_sealed(NS),
    "owners.yield_to": lambda s, c: s.owners.yield_to(NS, "secret", "peer", 0, 3, anybody),
    "statistics.of": lambda s, c: (
        (s.statistics.of(NS).blob_count, s.statistics.of(NS).counters) == (0, {}) or pytest.fail("counted")
    ),
}
# These are of the whole store: no namespace asks them.
WHOLE_STORE = {
    *("open", "close", "events.watching", "owners.unfinished", "owners.known", "owners.rename_peers"),
    *("care.scrub", "care.known_damage", "care.check", "care.collect_own", "care.expire_agents", "has_job"),
    *("care.used_last", "care.read_ahead"),
    *("statistics.counted", "statistics.totals", "statistics.ailments", "statistics.written"),
}
# These leave something of ours, or see that others were counted: each gets a store of its own.
ALONE = {"blobs.open_writer", "statistics.count_repair", "snapshots.commit_early", "leases.acquire", "statistics.of"}
WITHIN_THE_STORE = {"leases.taking_back", "leases.watching_releases"}
SHARED_CATALOGS = {
    "moves.order",
    "moves.end_order",
    "moves.is_ordered",
}  # of these alone: see tests/cachestore/replicas


def their_token(store: Store) -> object:
    return store.leases.acquire(THEIRS, "secret", KV, "engine", 60).token


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(FailedPrecondition, match="not here"):
        call()


def commit_early_waits(store: Store, theirs: SyntheticSnapshot) -> None:
    """For blobs that are theirs alone; and what awaits ours is refused without theirs."""
    upload(store, ours := SyntheticAgent(SMALL, 3).turn(30))
    refused(lambda: begin(store, theirs, awaited=[ours.manifest_digest]).result(10))
    waits = begin(store, theirs, awaited=theirs.digests)
    write(store, theirs.manifest_digest, theirs.manifest_bytes, BlobKind.MANIFEST, THEIRS)
    assert not waits.done()
    assert waits.cancel()


def not_under_way(call: Callable[[], object]) -> None:
    with pytest.raises(FailedPrecondition, match="not under way"):
        call()


def methods_of(part: object) -> set[str]:
    return {name for name, _ in inspect.getmembers(type(part), callable) if not name.startswith("_")}


def test_every_method_of_the_store_is_probed(store: Store) -> None:
    parts = {name: part for name, part in vars(store).items() if not name.startswith("_")}
    methods = {f"{name}.{method}" for name, part in parts.items() for method in methods_of(part)} | methods_of(store)
    assert methods == set(PROBES) | WHOLE_STORE | WITHIN_THE_STORE | SHARED_CATALOGS


def seen_by_its_owner(store: Store) -> tuple[object, ...]:
    return (
        store.agents.get(THEIRS, "secret"),
        store.snapshots.page(THEIRS, "secret"),
        store.statistics.of(THEIRS).blob_count,
        store.owners.of(THEIRS, "secret"),
    )


def check(method: str, store: Store, content: SyntheticSnapshot) -> None:
    before = seen_by_its_owner(store)
    PROBES[method](store, content)
    assert before == seen_by_its_owner(store)
    assert_restores(store, store.snapshots.get(THEIRS, "secret"), content, THEIRS)


def test_what_is_theirs_does_not_exist_for_us(
    store: Store, content: SyntheticSnapshot, subtests: pytest.Subtests
) -> None:
    """One after the other in one store: one that leaves something of ours is seen by those that list."""
    for method in [name for name in PROBES if name not in ALONE]:
        with subtests.test(method):
            check(method, store, content)


@pytest.mark.parametrize("method", sorted(ALONE))
def test_theirs_does_not_exist_for_a_call_alone_in_a_store_either(
    store: Store, content: SyntheticSnapshot, method: str
) -> None:
    check(method, store, content)


def test_a_manifest_that_was_read_for_them_is_not_committed_for_us(store: Store, content: SyntheticSnapshot) -> None:
    known = store.snapshots.known(THEIRS, content.manifest_digest)
    refused(lambda: store.snapshots.commit(NS, "mine", content.manifest_digest, 0, known=known))


def test_a_manifest_of_ours_cannot_name_their_blobs(store: Store, content: SyntheticSnapshot) -> None:
    write(store, content.manifest_digest, content.manifest_bytes, BlobKind.MANIFEST)
    refused(lambda: store.snapshots.commit(NS, "mine", content.manifest_digest, 0))


def test_the_same_bytes_are_two_files_and_one_may_be_swept_or_damaged_alone(
    lab: Lab, store: Store, content: SyntheticSnapshot
) -> None:
    ours = SyntheticAgent(SMALL, 1).turn(300, is_prompt=True)
    publish(store, "secret", ours, 0)
    assert lab.stored_hashes.count(ours.digests[0].hash) == 2
    store.agents.delete(NS, "secret")
    store.care.collect_garbage()
    lab.clock.pass_s(100_000)
    assert store.care.collect_garbage(NS).blobs_swept == 3
    assert lab.stored_hashes.count(ours.digests[0].hash) == 1
    assert_restores(store, store.snapshots.get(THEIRS, "secret"), content, THEIRS)
    # Damage in one is none in the other.
    upload(store, ours)
    lab.overwrite(ours.digests[0], b"")
    list(store.care.verify(NS))
    assert damaged(store, THEIRS) == []


def test_deleting_our_agent_leaves_theirs_of_the_same_name(store: Store, content: SyntheticSnapshot) -> None:
    publish(store, "secret", SyntheticAgent(SMALL, 7).turn(20), 0)
    store.agents.update(NS, "secret", labels={"a": "b"}, is_pinned=True)
    store.agents.delete(NS, "secret", force=True)
    agent = store.agents.get(THEIRS, "secret")
    assert (dict(agent.labels), agent.is_pinned, agent.lines[0].version) == ({}, False, 2)


def test_a_binding_of_ours_is_not_found_by_them_even_with_our_hashes(store: Store, content: SyntheticSnapshot) -> None:
    agent = SyntheticAgent(SMALL, 9)
    publish(store, "mine", agent.turn(256, is_prompt=True), 0, bind_shared=True)
    assert prefix_of(store, NS, KV, agent.block_hashes(NS))
    assert prefix_of(store, THEIRS, KV, agent.block_hashes(NS)) == []
    assert agent.block_hashes(NS) != agent.block_hashes(THEIRS)


def test_a_binding_of_theirs_is_not_ours_even_where_we_hold_the_same_bytes(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 9)
    content = agent.turn(256, is_prompt=True)
    publish(store, "theirs", content, 0, THEIRS, bind_shared=True)
    publish(store, "ours", content, 0)
    assert prefix_of(store, THEIRS, KV, agent.block_hashes(THEIRS))
    assert prefix_of(store, NS, KV, agent.block_hashes(THEIRS)) == []


def test_what_was_imported_is_not_shared_by_the_turns_that_extend_it(store: Store) -> None:
    # The archive came from anyone, and says of its own blocks that they may be shared.
    agent = SyntheticAgent(SMALL, 11)
    upload(store, brought := agent.turn(300, is_prompt=True))
    store.snapshots.commit(NS, "brought", brought.manifest_digest, 0, CommitTerms(origin=Origin.IMPORT))
    publish(store, "brought", agent.turn(300, is_prompt=True), 1, bind_shared=True)
    assert prefix_of(store, NS, KV, agent.block_hashes(NS)) == []
    store.agents.fork(NS, "brought", "forked")
    publish(store, "forked", agent.turn(300, is_prompt=True), 1, bind_shared=True)
    assert prefix_of(store, NS, KV, agent.block_hashes(NS)) == []


def test_turns_go_on_sharing_what_turns_have_shared(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 12)
    publish(store, "ours", agent.turn(300, is_prompt=True), 0, bind_shared=True)
    publish(store, "ours", agent.turn(300, is_prompt=True), 1, bind_shared=True)
    store.agents.fork(NS, "ours", "forked")
    publish(store, "forked", agent.turn(300, is_prompt=True), 1, bind_shared=True)
    assert len(prefix_of(store, NS, KV, agent.block_hashes(NS))) == 3


def test_a_full_quota_of_theirs_refuses_them_and_not_us(lab: Lab) -> None:
    with lab.open(namespace_quota_bytes={THEIRS: 10_000}) as store:
        snapshot = SyntheticAgent(SMALL, 1).turn(300)
        with pytest.raises(ResourceExhausted):
            publish(store, "a", snapshot, 0, THEIRS)
        publish(store, "a", snapshot, 0)


def test_watchers_hear_of_their_namespace_alone(store: Store) -> None:
    heard: list[str] = []
    with store.events.watching(THEIRS, lambda: heard.append(THEIRS)):
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(3), 0)
        assert heard == []
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(3), 0, THEIRS)
        assert heard == [THEIRS]
        store._core.watchers.wake("")  # there may be events of any
        assert heard == [THEIRS] * 2
    publish(store, "b", SyntheticAgent(SMALL, 2).turn(3), 0, THEIRS)
    assert heard == [THEIRS] * 2
