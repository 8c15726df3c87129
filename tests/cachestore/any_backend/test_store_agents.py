"""Agents and their lines: forked, rolled back, listed, pinned, forgotten, and found by their prefixes."""

import pytest
from kvasir.errors import AlreadyExists, Conflict, FailedPrecondition, InvalidArgument, NotFound
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.ownership import HERE
from cachestore_svc.facts.records import Origin
from cachestore_svc.index import listing
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, prefix_of, publish
from tests.made_models.synthetic import (
    MIXED,
    SMALL,
    TINY,
    SyntheticAgent,
)

KV = kv_identity_hash(SMALL)


def test_a_fork_is_a_new_line_that_shares_every_blob(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    publish(store, "a", agent.turn(600), 0)
    content = agent.turn(100)
    source = publish(store, "a", content, 1)
    blobs = store.statistics.of(NS).blob_count
    [line] = store.agents.fork(NS, "a", "b").lines
    assert (line.version, line.parent_version, line.manifest, line.origin) == (1, 0, source.manifest, Origin.FORK)
    assert store.statistics.of(NS).blob_count == blobs
    publish(store, "b", agent.fork(seed=4).turn(40), 1)
    store.agents.delete(NS, "a")
    store.care.collect_garbage(NS)
    assert_restores(store, store.snapshots.get(NS, "b", version=1), content)
    with pytest.raises(AlreadyExists):
        store.agents.fork(NS, "b", "b")
    with pytest.raises(NotFound):
        store.agents.fork(NS, "nobody", "c")
    with pytest.raises(NotFound):
        store.agents.fork(NS, "b", "c", version=9)
    with pytest.raises(NotFound):
        store.agents.get(NS, "c")


def test_an_agent_has_a_line_per_kv_identity_and_forks_them_all(store: Store) -> None:
    publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
    publish(store, "a", SyntheticAgent(MIXED, 1).turn(40), 1)
    assert {line.kv_identity_hash for line in store.agents.fork(NS, "a", "b").lines} == {KV, kv_identity_hash(MIXED)}
    assert [line.kv_identity_hash for line in store.agents.fork(NS, "a", "c", KV, 1).lines] == [KV]
    assert [line.kv_identity_hash for line in store.agents.fork(NS, "a", "d", version=1).lines] == [KV]
    back = store.agents.roll_back(NS, "a", 1)
    assert (back.kv_identity_hash, back.version, back.base_version) == (KV, 3, 1)
    with pytest.raises(NotFound):
        store.snapshots.get(NS, "a", kv_identity_hash(TINY))


def test_an_agents_newest_version_is_the_last_that_was_made_whichever_line_it_is_in(lab: Lab, store: Store) -> None:
    small, mixed = SyntheticAgent(SMALL, 1), SyntheticAgent(MIXED, 1)
    publish(store, "a", small.turn(30), 0)
    publish(store, "a", mixed.turn(40), 1)
    assert store.snapshots.get(NS, "a").kv_identity_hash == kv_identity_hash(MIXED)
    lab.clock.pass_s(5)
    store.snapshots.get(NS, "a", KV)  # to read another line changes nothing
    store.care.collect_garbage()  # waits for what was written without waiting
    assert store.agents.get(NS, "a").lines[0].kv_identity_hash == kv_identity_hash(MIXED)
    third = small.turn(10)
    with pytest.raises(Conflict) as lost:  # its line's newest version is not the agent's
        publish(store, "a", third, 1)
    assert lost.value.metadata["head_version"] == "2"
    made = publish(store, "a", third, 2)
    assert (made.version, store.snapshots.get(NS, "a"), store.snapshots.get(NS, "a", version=2).kv_identity_hash) == (
        3,
        made,
        kv_identity_hash(MIXED),
    )
    with pytest.raises(Conflict):
        store.agents.roll_back(NS, "a", 2, expected_head=2)
    assert store.agents.roll_back(NS, "a", 2, expected_head=3).version == 4


def test_a_rollback_is_a_new_version_and_removes_nothing(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    first = agent.turn(300)
    publish(store, "a", first, 0)
    second = agent.turn(30)
    publish(store, "a", second, 1)
    with pytest.raises(Conflict):
        store.agents.roll_back(NS, "a", 1, expected_head=1)
    back = store.agents.roll_back(NS, "a", 1, expected_head=2)
    assert (back.version, back.parent_version, back.origin, back.origin_detail) == (3, 2, Origin.ROLLBACK, "version 1")
    assert_restores(store, back, first)
    assert_restores(store, store.snapshots.get(NS, "a", version=2), second)
    with pytest.raises(NotFound):
        store.agents.roll_back(NS, "a", 7)


def test_every_version_names_the_one_that_it_goes_on_from(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    for parent in range(3):
        publish(store, "a", agent.turn(30), parent)
    publish(store, "a", agent.turn(30), 3, base_version=1)
    store.agents.roll_back(NS, "a", 2)
    publish(store, "a", agent.turn(30), 5)
    bases = {each.version: each.base_version for each in store.snapshots.page(NS, "a").snapshots}
    assert bases == {6: 5, 5: 2, 4: 1, 3: 2, 2: 1, 1: 0}
    assert [line.base_version for line in store.agents.fork(NS, "a", "version 7").lines] == [0]
    with pytest.raises(InvalidArgument, match="base_version"):
        publish(store, "a", agent.turn(30), 6, base_version=7)


def test_usage_counts_an_agents_blobs_once_and_tells_which_others_name_too(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    first, second = agent.turn(300), agent.turn(300)
    publish(store, "a", first, 0)
    store.agents.fork(NS, "a", "b")
    publish(store, "a", second, 1)
    manifests = [snapshot.manifest_digest for snapshot in (first, second)]
    named = {*first.digests, *second.digests, *manifests}
    shared = {*first.digests, manifests[0]}
    used = store.agents.usage(NS, "a")
    assert (used.snapshot_count, used.blob_count, used.shared_blob_count) == (2, len(named), len(shared))
    assert used.blob_bytes == sum(digest.size_bytes for digest in named)
    assert used.shared_bytes == sum(digest.size_bytes for digest in shared)
    assert store.agents.usage(NS, "b").shared_bytes == store.agents.usage(NS, "b").blob_bytes == used.shared_bytes
    store.agents.delete(NS, "b")
    assert store.agents.usage(NS, "a").shared_bytes == 0
    with pytest.raises(NotFound):
        store.agents.usage(NS, "b")


def test_versions_beyond_retention_go_and_those_of_a_pinned_agent_stay(lab: Lab) -> None:
    with lab.open(retained_versions=3) as store:
        agent = SyntheticAgent(SMALL, 1)
        for turn in range(5):
            publish(store, "a", agent.turn(30), turn)
        assert [each.version for each in store.snapshots.page(NS, "a").snapshots] == [5, 4, 3]
        store.agents.update(NS, "a", is_pinned=True)
        for turn in range(5, 8):
            publish(store, "a", agent.turn(30), turn)
        assert [each.version for each in store.snapshots.page(NS, "a").snapshots] == [8, 7, 6, 5, 4, 3]
        store.agents.update(NS, "a", is_pinned=False, retained_versions=2)
        publish(store, "a", agent.turn(30), 8)
        assert [each.version for each in store.snapshots.page(NS, "a").snapshots] == [9, 8]
        assert store.care.check().is_clean


def test_a_version_is_known_longer_than_it_is_kept(lab: Lab) -> None:
    with lab.open(retained_versions=1) as store:
        agent = SyntheticAgent(SMALL, 1)
        turns = [agent.turn(30) for _ in range(6)]
        for number, turn in enumerate(turns):
            publish(store, "a", turn, number)
        assert all(store.snapshots.has_had(NS, "a", turn.manifest_digest.hash) for turn in turns)
        assert not store.snapshots.has_had(NS, "a", "0" * 64)
        assert not store.snapshots.has_had(NS, "b", turns[-1].manifest_digest.hash)
        store.agents.delete(NS, "a")
        assert not store.snapshots.has_had(NS, "a", turns[-1].manifest_digest.hash)


# --- agents ---


def test_listing_pages_through_names_by_prefix_and_labels(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["Zeta", "alpha", "beta-1", "beta-2", "beta-3", "日本"]
    for number, name in enumerate(names):
        publish(store, name, SyntheticAgent(SMALL, number).turn(3), 0)
    store.agents.update(NS, "beta-1", labels={"role": "critic", "team": "x"})
    store.agents.update(NS, "beta-3", labels={"role": "critic"})

    def listed(**filters: object) -> list[str]:
        found, token = [], ""
        while True:
            page = store.agents.page(NS, page_size=2, page_token=token, **filters)  # type: ignore[arg-type]
            assert page.agents or not token, "a page is told of only if it has somebody"
            found += [agent.agent_id for agent in page.agents]
            token = page.next_page_token
            if not token:
                return found if not store.is_sealed(NS) else sorted(found)  # these have an order of their own

    catalog = store._core.catalog
    reads, read = list[object](), catalog.read
    monkeypatch.setattr(catalog, "read", lambda *given: (reads.append(given), read(*given))[1])
    for at_once in (1, 2, 50):
        monkeypatch.setattr(listing, "_AGENTS_AT_ONCE", at_once)
        assert listed() == names
        assert listed(name_prefix="beta-") == ["beta-1", "beta-2", "beta-3"]
        assert listed(labels={"role": "critic"}) == ["beta-1", "beta-3"]
        assert listed(labels={"role": "critic", "team": "x"}) == ["beta-1"]
        assert listed(name_prefix="%") == []
        reads.clear()
        assert listed(labels={"team": "x"}) == ["beta-1"]
        assert len(reads) <= len(names) // at_once + 1, "a rare label asks for few agents at a time, not for one"
    for bad in ("!", "AAAA=A", "\xff", "Zeta\x00"):
        with pytest.raises(InvalidArgument, match="page_token"):
            store.agents.page(NS, page_token=bad)
    with pytest.raises(InvalidArgument, match="page_size"):
        store.agents.page(NS, page_size=-1)
    with pytest.raises(InvalidArgument, match="name_prefix: expected text without a NUL"):
        store.agents.page(NS, name_prefix="beta\0")
    with pytest.raises(InvalidArgument, match="page_token: expected text without a NUL"):
        store.agents.page(NS, page_token=listing.page_token("beta\0", ("",)))
    assert len(store.agents.page(NS, page_size=1_000_000).agents) == len(names)
    token = store.agents.page(NS, page_size=1, name_prefix="beta-").next_page_token
    for filters in ({}, {"name_prefix": "b"}, {"name_prefix": "beta-", "labels": {"role": "critic"}}):
        with pytest.raises(InvalidArgument, match="another listing"):
            store.agents.page(NS, page_token=token, **filters)  # type: ignore[arg-type]


def test_a_page_lists_each_agent_as_it_is_listed_alone(store: Store) -> None:
    names = ["ada", "bob", "cleo", "dora"]
    for number, name in enumerate(names):
        agents = SyntheticAgent(SMALL, number), SyntheticAgent(MIXED, number)
        for parent in range(number + 1):
            publish(store, name, agents[parent % 2].turn(10), parent)
        store.agents.update(NS, name, labels={"role": name, "b": "1"} if number % 2 else {}, is_pinned=number == 2)
    store.owners.claim(NS, "cleo", 1)
    listed = tuple(sorted(store.agents.page(NS).agents, key=lambda each: each.agent_id))
    assert listed == tuple(store.agents.get(NS, name) for name in names)
    assert [[each.version for each in agent.lines] for agent in listed] == [[1], [2, 1], [3, 2], [4, 3]]
    assert [dict(agent.labels) for agent in listed] == [{}, {"b": "1", "role": "bob"}, {}, {"b": "1", "role": "dora"}]
    assert [agent.agent_id for agent in listed if agent.is_pinned] == ["cleo"]
    assert [agent.ownership == HERE for agent in listed] == [True, True, False, True]


def test_snapshots_are_listed_newest_first_over_pages_of_several_lines(store: Store) -> None:
    agents = SyntheticAgent(SMALL, 1), SyntheticAgent(MIXED, 1)
    for parent in range(6):
        publish(store, "a", agents[parent % 2].turn(10), parent)
    found, token = [], ""
    while True:
        page = store.snapshots.page(NS, "a", page_size=2, page_token=token)
        found += [(each.kv_identity_hash, each.version) for each in page.snapshots]
        token = page.next_page_token
        if not token:
            break
    lines = (kv_identity_hash(MIXED), KV)
    assert found == [(lines[version % 2], version) for version in (6, 5, 4, 3, 2, 1)]
    assert [each.version for each in store.snapshots.page(NS, "a", KV).snapshots] == [5, 3, 1]
    with pytest.raises(InvalidArgument):
        store.snapshots.page(NS, "a", page_token="eA==")
    token = store.snapshots.page(NS, "a", page_size=1).next_page_token
    with pytest.raises(InvalidArgument, match="another listing"):
        store.snapshots.page(NS, "a", KV, page_token=token)
    with pytest.raises(NotFound):
        store.snapshots.page(NS, "b")


def test_labels_pins_and_retention_change_alone_and_are_checked(store: Store) -> None:
    publish(store, "a", SyntheticAgent(SMALL, 1).turn(3), 0)
    store.agents.update(NS, "a", labels={"x": "1", "y": "2"}, retained_versions=5)
    store.agents.update(NS, "a", is_pinned=True)
    agent = store.agents.update(NS, "a", labels={"x": ""})
    assert (dict(agent.labels), agent.is_pinned, agent.retained_versions) == ({"y": "2"}, True, 5)
    for bad in ({"": "1"}, {"x": "\n"}, {"x" * 257: "1"}, {str(n): "1" for n in range(65)}):
        with pytest.raises(InvalidArgument, match="labels"):
            store.agents.update(NS, "a", labels=bad)
    for count in (0, 1001):
        with pytest.raises(InvalidArgument, match="retained_versions"):
            store.agents.update(NS, "a", retained_versions=count)
    assert dict(store.agents.get(NS, "a").labels) == {"y": "2"}


def test_a_pinned_agent_is_deleted_only_by_force(store: Store) -> None:
    publish(store, "a", SyntheticAgent(SMALL, 1).turn(3), 0)
    store.agents.update(NS, "a", is_pinned=True)
    with pytest.raises(FailedPrecondition) as refused:
        store.agents.delete(NS, "a")
    assert refused.value.reason == "AGENT_PINNED"
    store.agents.delete(NS, "a", force=True)
    with pytest.raises(NotFound):
        store.agents.get(NS, "a")


# --- prefixes ---


def test_a_prefix_is_found_only_as_far_as_it_was_prefilled_and_bound(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    publish(store, "a", agent.turn(600, is_prompt=True), 0, bind_shared=True)
    content = agent.turn(300)  # a reply: never shared
    publish(store, "a", content, 1, bind_shared=True)
    hashes = agent.block_hashes(NS)
    assert len(hashes) == 3
    assert prefix_of(store, NS, KV, hashes) == content.digests[:2]
    assert prefix_of(store, NS, KV, hashes[1:]) == [content.digests[1]]
    assert prefix_of(store, NS, KV, ["0" * 64, *hashes]) == []
    assert prefix_of(store, NS, kv_identity_hash(TINY), hashes) == []
    for bad in (["x"], ["A" * 64], ["0" * 63], ["0" * 64 + "\n"]):
        with pytest.raises(InvalidArgument):
            prefix_of(store, NS, KV, bad)


def test_what_is_imported_binds_no_prefix(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    publish(store, "a", agent.turn(600, is_prompt=True), 0, bind_shared=False, origin=Origin.IMPORT)
    assert prefix_of(store, NS, KV, agent.block_hashes(NS)) == []


def test_the_first_binding_wins_until_its_blob_is_damaged(lab: Lab, store: Store) -> None:
    tokens = list(range(256))
    ours, theirs = SyntheticAgent(SMALL, 1, engine_seed=1), SyntheticAgent(SMALL, 1, engine_seed=2)
    first, second = ours.turn(tokens, is_prompt=True), theirs.turn(tokens, is_prompt=True)
    publish(store, "a", first, 0, bind_shared=True)
    publish(store, "b", second, 0, bind_shared=True)
    hashes = ours.block_hashes(NS)
    assert prefix_of(store, NS, KV, hashes) == first.digests != second.digests
    lab.overwrite(first.digests[0], b"")
    list(store.care.verify(NS))
    assert prefix_of(store, NS, KV, hashes) == []
    publish(store, "c", second, 0, bind_shared=True)
    assert prefix_of(store, NS, KV, hashes) == second.digests
