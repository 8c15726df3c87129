"""Garbage, promises and quotas: what is unheld goes after its rest, what is promised stays, and quotas hold."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext

import pytest
from kvasir.errors import Conflict, FailedPrecondition, KvasirError, NotFound, ResourceExhausted
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.records import AgentDeleted, AgentUpdated, BlobKind
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import (
    NS,
    Lab,
    assert_restores,
    damaged,
    prefix_of,
    publish,
    snapshot_digests,
    upload,
    write,
)
from tests.made_models.synthetic import SMALL, TINY, SyntheticAgent, SyntheticSnapshot

KV = kv_identity_hash(SMALL)
GRACE_S = 100.0
REST_S = 113.0  # a grace period and the eighth by which a promise may be older than it was told


def opened(lab: Lab, **settings: object) -> Store:
    return lab.open(grace_period_s=GRACE_S, **settings)


def test_unheld_blobs_are_marked_rest_and_are_swept_by_a_later_pass(lab: Lab) -> None:
    with opened(lab) as store:
        content = SyntheticAgent(SMALL, 1).turn(300)
        upload(store, content)
        assert store.care.collect_garbage(dry_run=True).blobs_marked == 3
        assert store.care.collect_garbage().blobs_marked == 3
        lab.clock.pass_s(GRACE_S - 1)
        assert store.care.collect_garbage().blobs_swept == 0
        lab.clock.pass_s(2)
        ready = store.care.collect_garbage(dry_run=True)
        report = store.care.collect_garbage()
        size = sum(map(len, content.new_blobs.values())) + len(content.manifest_bytes)
        assert (report.blobs_swept, report.bytes_freed) == (ready.blobs_swept, ready.bytes_freed) == (3, size)
        assert lab.stored_hashes == []
        assert store.statistics.of(NS).blob_bytes == store.statistics.of(NS).unreferenced_bytes == 0
        assert set(store.blobs.find_missing(NS, content.digests)) == set(content.digests)


def test_what_a_version_holds_is_never_marked(lab: Lab) -> None:
    with opened(lab) as store:
        content = SyntheticAgent(SMALL, 1).turn(300)
        done = publish(store, "a", content, 0)
        for _ in range(3):
            assert store.care.collect_garbage().blobs_marked == 0
            lab.clock.pass_s(REST_S)
        assert_restores(store, done, content)


@pytest.mark.parametrize("ask", ["find_missing", "open_writer"])
def test_naming_a_blob_extends_its_life_by_the_grace_period(lab: Lab, ask: str) -> None:
    with opened(lab) as store:
        content = SyntheticAgent(SMALL, 1).turn(30)
        upload(store, content)
        store.care.collect_garbage()
        lab.clock.pass_s(GRACE_S - 1)
        everything = [*content.digests, content.manifest_digest]
        if ask == "find_missing":
            assert store.blobs.find_missing(NS, everything) == []
        else:
            assert all(store.blobs.open_writer(NS, digest, BlobKind.TENSORS).is_stored for digest in everything)
        lab.clock.pass_s(GRACE_S - 1)
        assert store.care.collect_garbage().blobs_swept == 0
        store.snapshots.commit(NS, "a", content.manifest_digest, 0)


def test_a_prefix_that_was_found_extends_the_life_of_its_blocks(lab: Lab) -> None:
    with opened(lab) as store:
        agent = SyntheticAgent(SMALL, 1)
        publish(store, "a", agent.turn(256, is_prompt=True), 0, bind_shared=True)
        store.agents.delete(NS, "a")
        lab.clock.pass_s(GRACE_S - 1)
        [block] = prefix_of(store, NS, KV, agent.block_hashes(NS))
        lab.clock.pass_s(GRACE_S - 1)
        store.care.collect_garbage()
        assert store.blobs.read(NS, block)
        lab.clock.pass_s(REST_S)
        store.care.collect_garbage()
        assert prefix_of(store, NS, KV, agent.block_hashes(NS)) == []


def test_a_writer_frozen_across_two_collections_fails_cleanly_and_may_begin_again(lab: Lab) -> None:
    with opened(lab) as store:
        content = SyntheticAgent(SMALL, 1).turn(300)
        upload(store, content)
        store.care.collect_garbage()
        lab.clock.pass_s(REST_S)
        store.care.collect_garbage()
        with pytest.raises(FailedPrecondition) as refused:
            store.snapshots.commit(NS, "a", content.manifest_digest, 0)
        assert refused.value.reason == "BLOB_MISSING"
        with pytest.raises(NotFound):
            store.agents.get(NS, "a")
        assert_restores(store, publish(store, "a", content, 0), content)


def test_a_writer_frozen_for_less_than_its_rest_commits_whole(lab: Lab) -> None:
    with opened(lab) as store:
        content = SyntheticAgent(SMALL, 1).turn(300)
        upload(store, content)
        store.care.collect_garbage()
        lab.clock.pass_s(GRACE_S - 1)
        store.care.collect_garbage()
        done = store.snapshots.commit(NS, "a", content.manifest_digest, 0)
        lab.clock.pass_s(REST_S)
        store.care.collect_garbage()
        assert_restores(store, done, content)


def test_a_commit_gives_its_blobs_a_whole_rest_when_they_are_let_go(lab: Lab) -> None:
    """A mark from before the commit must not make the first collection after it sweep at once."""
    with opened(lab, retained_versions=1) as store:
        agent = SyntheticAgent(SMALL, 1)
        content = agent.turn(30)
        upload(store, content)
        store.care.collect_garbage()
        store.snapshots.commit(NS, "a", content.manifest_digest, 0)
        lab.clock.pass_s(REST_S)
        publish(store, "a", agent.turn(30), 1)
        assert store.care.collect_garbage().blobs_swept == 0
        assert store.blobs.read(NS, content.digests[0])


@pytest.mark.long(3)
def test_writers_and_a_collector_without_grace_never_make_a_row_without_bytes(lab: Lab) -> None:
    with lab.open(grace_period_s=0.0) as store:
        is_over = threading.Event()

        def work(number: int) -> None:
            content = SyntheticAgent(SMALL, number % 2).turn(300)
            for _ in range(25):
                try:
                    done = publish(store, f"agent-{number}", content, 0)
                    assert_restores(store, done, content)
                    store.agents.delete(NS, f"agent-{number}")
                except KvasirError as error:
                    if error.reason not in ("BLOB_MISSING", "WRITE_IN_PROGRESS"):
                        raise

        def collect() -> None:
            while not is_over.is_set():
                store.care.collect_garbage()

        with ThreadPoolExecutor(5) as threads:
            collector, *workers = threads.submit(collect), *(threads.submit(work, number) for number in range(4))
            wait(workers)
            is_over.set()
        for each in (collector, *workers):
            each.result()
        assert damaged(store, NS) == []
        assert store.care.check().is_clean
        stats = store.statistics.of(NS)
    with lab.open() as store:
        assert store.statistics.of(NS).blob_bytes == stats.blob_bytes


def test_deleting_an_agent_reports_when_its_bytes_go_and_they_do(lab: Lab) -> None:
    with opened(lab) as store:
        agent = SyntheticAgent(SMALL, 1)
        publish(store, "a", agent.turn(300), 0)
        publish(store, "a", agent.turn(300), 1)
        store.agents.fork(NS, "a", "b", version=1)
        before = store.statistics.of(NS).blob_bytes
        deletion = store.agents.delete(NS, "a")
        assert deletion.unshared_bytes == store.statistics.of(NS).unreferenced_bytes > 0
        lab.clock.now_s = deletion.bytes_gone_by_unix_ms / 1000
        assert store.care.collect_garbage().bytes_freed == deletion.unshared_bytes
        assert store.statistics.of(NS).blob_bytes == before - deletion.unshared_bytes


@pytest.mark.parametrize("is_promised", [False, True])
def test_garbage_of_a_time_when_the_clock_was_ahead_goes_a_rest_after_it_was_set_right(
    lab: Lab, is_promised: bool
) -> None:
    """A machine that starts with a wrong clock must not keep it for as many years."""
    with opened(lab) as store:
        content = SyntheticAgent(SMALL, 1).turn(300)
        upload(store, content)
        lab.clock.set_by_s = 20 * 365 * 86_400
        store.care.collect_garbage()
        if is_promised:
            assert store.blobs.find_missing(NS, content.digests) == []
        lab.clock.set_by_s = 0
        store.care.collect_garbage()
        lab.clock.pass_s(GRACE_S - 1)
        assert store.care.collect_garbage().blobs_swept == 0
        lab.clock.pass_s(REST_S - GRACE_S + 2)
        assert store.care.collect_garbage().blobs_swept == 3


@pytest.mark.long(12)
def test_a_pass_over_more_blobs_than_a_batch_sweeps_them_all(lab: Lab) -> None:
    with lab.open(grace_period_s=0.0) as store:
        for number in range(300):
            upload(store, SyntheticAgent(SMALL, number).turn(2))
        store.care.collect_garbage()
        assert store.care.collect_garbage().blobs_swept == 600
        assert store.statistics.of(NS).blob_count == 0


# --- quotas ---


def size_of(content: SyntheticSnapshot) -> int:
    return sum(map(len, content.new_blobs.values())) + len(content.manifest_bytes)


def test_a_full_quota_refuses_with_numbers_and_what_was_acknowledged_stays(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open(quota_bytes=size_of(content)) as store:
        done = publish(store, "a", content, 0)
        more = SyntheticAgent(SMALL, 2).turn(300)
        with pytest.raises(ResourceExhausted) as refused:
            upload(store, more)
        assert refused.value.reason == "QUOTA_FULL"
        assert refused.value.metadata["quota_bytes"] == str(size_of(content))
        assert refused.value.retry_after_s
        assert_restores(store, done, content)
        assert store.statistics.of(NS).reserved_bytes == 0
    with lab.open(quota_bytes=size_of(content) + size_of(more)) as store:
        publish(store, "b", more, 0)


def test_concurrent_writers_together_never_exceed_the_quota(lab: Lab) -> None:
    """Bytes are reserved before they are written: eight at once cannot each see the same room."""
    contents = [SyntheticAgent(SMALL, number).turn(256) for number in range(8)]
    [size] = {len(data) for content in contents for data in content.new_blobs.values()}
    quota = 3 * size + size // 2
    with lab.open(quota_bytes=quota) as store:
        ready = threading.Barrier(8)
        refusals: list[str] = []

        def work(content: SyntheticSnapshot) -> None:
            [(digest, data)] = content.new_blobs.items()
            ready.wait()
            try:
                with store.blobs.open_writer(NS, digest, BlobKind.TENSORS) as writer:
                    writer.write(0, data)
                    ready.wait()
                    writer.finish()
            except ResourceExhausted as error:
                refusals.append(error.reason)
                ready.wait()

        threads = [threading.Thread(target=work, args=(content,)) for content in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert refusals == ["QUOTA_FULL"] * 5
        assert store.statistics.of(NS).blob_bytes == 3 * size <= quota


def test_what_interrupted_writes_left_counts_and_is_given_up_first(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(256)
    [(digest, data)] = content.new_blobs.items()
    with lab.open(quota_bytes=len(data) + 100) as store:
        with store.blobs.open_writer(NS, digest, BlobKind.TENSORS) as writer:
            writer.write(0, data[:9000])
        assert store.statistics.of(NS).reserved_bytes == 9000
        other, other_data = next(iter(SyntheticAgent(SMALL, 2).turn(256).new_blobs.items()))
        write(store, other, other_data, BlobKind.TENSORS)
        assert store.statistics.of(NS).reserved_bytes == 0
        assert not lab.part_hashes


def test_old_parts_are_collected(lab: Lab) -> None:
    [(digest, data)] = SyntheticAgent(SMALL, 1).turn(256).new_blobs.items()
    with opened(lab) as store:
        with store.blobs.open_writer(NS, digest, BlobKind.TENSORS) as writer:
            writer.write(0, data[:9000])
        store.care.collect_garbage()
        assert lab.part_hashes
        lab.clock.pass_s(GRACE_S)
        store.care.collect_garbage()
        assert not lab.part_hashes
        assert store.statistics.of(NS).reserved_bytes == 0


def test_a_full_quota_gives_up_old_versions_and_never_a_head(lab: Lab) -> None:
    agents = {name: SyntheticAgent(SMALL, seed) for seed, name in enumerate(("old", "pinned", "young"))}
    with opened(lab, quota_bytes=120_000) as store:
        for name, agent in agents.items():
            for turn in range(3):
                publish(store, name, agent.turn(60), turn)
                lab.clock.pass_s(1)
        store.agents.update(NS, "pinned", is_pinned=True)
        heads = {name: store.snapshots.get(NS, name) for name in agents}
        lab.clock.pass_s(REST_S)
        cursor = store.events.after(NS, None).cursor
        fill(store, 100)
        assert store.statistics.of(NS).blob_bytes <= 120_000
        for name, head in heads.items():
            assert store.snapshots.get(NS, name) == head
            assert_readable(store, name)
        assert store.statistics.of(NS).counters["versions_evicted"] == 6
        bodies = [event.body for event in store.events.after(NS, cursor).events]
        updated = [body.agent_id for body in bodies if isinstance(body, AgentUpdated)]
        assert set(updated) == {"old", "pinned", "young"}
        assert updated[-1] == "pinned"
        assert store.care.check().is_clean


def fill(store: Store, seed: int) -> None:
    """Write until the quota refuses."""
    for number in range(100):
        content = SyntheticAgent(SMALL, seed + number).turn(90)
        try:
            publish(store, f"filler-{seed}-{number}", content, 0)
        except ResourceExhausted:
            return
    pytest.fail("the quota refused nothing")


def assert_readable(store: Store, name: str) -> None:
    for digest in snapshot_digests(store, NS, name):
        store.blobs.read(NS, digest)


def test_an_eviction_that_would_not_be_enough_gives_nothing_up(lab: Lab) -> None:
    agent = SyntheticAgent(SMALL, 1)
    with opened(lab) as store:
        for turn in range(3):
            publish(store, "a", agent.turn(10), turn)
        # What is on its way to a commit looks as if it could be freed, until one tries.
        upload(store, SyntheticAgent(SMALL, 2).turn(256))
        lab.clock.pass_s(REST_S)
        stored = store.statistics.of(NS).blob_bytes
    for seed, identity in ((3, SMALL), (4, TINY)):
        with opened(lab, quota_bytes=stored) as store:
            [(digest, _)] = SyntheticAgent(identity, seed).turn(256).new_blobs.items()
            with pytest.raises(ResourceExhausted):
                store.blobs.open_writer(NS, digest, BlobKind.TENSORS)
            assert [each.version for each in store.snapshots.page(NS, "a").snapshots] == [3, 2, 1]
            assert store.care.check().is_clean


def test_heads_go_only_where_configured_long_unused_and_unpinned(lab: Lab) -> None:
    with opened(lab, quota_bytes=130_000, evict_heads=True) as store:
        for seed, name in enumerate(("pinned", "first", "second")):
            publish(store, name, SyntheticAgent(SMALL, seed).turn(400), 0)
            lab.clock.pass_s(1)
        store.agents.update(NS, "pinned", is_pinned=True)
        lab.clock.pass_s(REST_S)
        store.snapshots.get(NS, "first")  # a use
        store.care.collect_garbage()
        cursor = store.events.after(NS, None).cursor
        publish(store, "new", SyntheticAgent(SMALL, 9).turn(500), 0)
        with pytest.raises(NotFound):
            store.agents.get(NS, "second")
        assert AgentDeleted("second") in [event.body for event in store.events.after(NS, cursor).events]
        for name in ("pinned", "first", "new"):
            assert_readable(store, name)
        assert store.care.check().is_clean


@pytest.mark.parametrize("is_used", [False, True])
def test_an_agents_newest_version_goes_after_those_of_its_other_lines(lab: Lab, *, is_used: bool) -> None:
    """Else the agent would go back to an older memory, where another model read that since."""
    with opened(lab, quota_bytes=70_000, evict_heads=True) as store:
        publish(store, "ada", SyntheticAgent(SMALL, 1).turn(400), 0)
        publish(store, "ada", SyntheticAgent(TINY, 2).turn(10), 1)
        lab.clock.pass_s(REST_S)
        store.snapshots.get(NS, "ada", kv_identity_hash=KV)
        lab.clock.pass_s(0 if is_used else REST_S)
        store.care.collect_garbage()
        with pytest.raises(ResourceExhausted) if is_used else nullcontext():
            upload(store, SyntheticAgent(SMALL, 9).turn(400))
        assert [each.version for each in store.agents.get(NS, "ada").lines] == ([2, 1] if is_used else [2])


def test_an_agents_newest_version_goes_last_where_its_line_was_begun_first(lab: Lab) -> None:
    """Both count as used when the other line was."""
    with opened(lab, quota_bytes=80_000, evict_heads=True) as store:
        first = SyntheticAgent(TINY, 2)
        publish(store, "ada", first.turn(10), 0)
        publish(store, "ada", SyntheticAgent(SMALL, 1).turn(400), 1)
        publish(store, "ada", first.turn(10), 2)
        lab.clock.pass_s(REST_S)
        store.snapshots.get(NS, "ada", kv_identity_hash=KV)
        lab.clock.pass_s(REST_S)
        store.care.collect_garbage()
        upload(store, SyntheticAgent(SMALL, 9).turn(400))
        assert [each.version for each in store.agents.get(NS, "ada").lines] == [3]


def test_what_was_promised_does_not_go_by_eviction_either(lab: Lab) -> None:
    with opened(lab, quota_bytes=40_000) as store:
        agent = SyntheticAgent(SMALL, 1)
        old = agent.turn(200)
        publish(store, "a", old, 0)
        agent.trim(0)
        publish(store, "a", agent.turn(100), 1)
        assert store.blobs.find_missing(NS, old.digests) == []
        with pytest.raises(ResourceExhausted):
            upload(store, SyntheticAgent(SMALL, 2).turn(256))
        assert store.blobs.read(NS, old.digests[0])
        lab.clock.pass_s(REST_S)
        upload(store, SyntheticAgent(SMALL, 2).turn(256))
        with pytest.raises(NotFound):
            store.blobs.read(NS, old.digests[0])


@pytest.mark.long(2)
def test_free_and_stored_add_up_after_any_work(lab: Lab) -> None:
    """What the running store counts is what a fresh one counts from its rows."""
    chance = random.Random(4)
    with opened(lab, quota_bytes=300_000) as store:
        heads: dict[str, tuple[SyntheticAgent, int]] = {}
        for step in range(80):
            name = f"agent-{chance.randrange(6)}"
            agent, head = heads.get(name, (SyntheticAgent(SMALL, step), 0))
            try:
                match chance.randrange(4):
                    case 0 | 1:
                        head = publish(store, name, agent.turn(chance.randrange(1, 300)), head).version
                        heads[name] = (agent, head)
                    case 2:
                        store.agents.delete(NS, name)
                        heads.pop(name, None)
                    case _:
                        store.care.collect_garbage()
            except (NotFound, ResourceExhausted, Conflict, FailedPrecondition):
                heads.pop(name, None)
                if store.agents.page(NS, name_prefix=name).agents:
                    store.agents.delete(NS, name)
            lab.clock.pass_s(chance.random() * 60)
        blobs, stats = lab.blobs.of(NS), store.statistics.of(NS)
        lying = sum(blobs.size_bytes(hash_) or 0 for hash_ in blobs.list().blobs)
        assert stats.blob_bytes == lying == store._core.space._stored[NS]
        assert stats.reserved_bytes == 0
        assert not lab.part_hashes
        assert store.care.check().is_clean
