"""A store with sealed namespaces: nothing plain lies in its files, and it does all that a store does."""

import inspect
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from kvasir.errors import FailedPrecondition, NotFound
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.core.stored_blobs import quarantine
from cachestore_svc.facts.records import BlobKind, EventCursor, Origin
from cachestore_svc.index import listing
from cachestore_svc.index.catalog import CatalogChange, CatalogView
from cachestore_svc.index.sqlite.events import _texts_of
from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.recovery import asides
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.medium import blobs_of
from cachestore_svc.recovery.recovering import recover
from cachestore_svc.sealing.keys import MasterKey
from cachestore_svc.sealing.sealed_form import SEGMENT_BYTES
from cachestore_svc.sealing.sealed_names import SealedNames
from cachestore_svc.store.store import Store
from cachestore_svc.upkeep import collecting
from cachestore_svc.upkeep.expiring import ClockReading
from tests.cachestore.core.lab import (
    NS,
    Chance,
    Clock,
    Lab,
    anybody,
    assert_restores,
    prefix_of,
    publish,
    upload,
    write,
)
from tests.cachestore.sealing.canaries import files_with, found_in, secrets_of
from tests.cachestore.sealing.sealed_lab import PLAIN_NS
from tests.made_models.synthetic import LLAMA_8B, MIXED, SMALL, SyntheticAgent

AGENT = "the-name-of-an-agent-is-text-of-people"
LABEL, VALUE = "a label's name, long enough", "a label's value, long enough"


def live(store: Store, namespace: str) -> list[bytes]:
    """A life with everything that leaves text in an index; all that nobody may find of it."""
    agent = SyntheticAgent(MIXED, 5)
    turns = [agent.turn(300, is_prompt=True, request_id=f"the request of turn {turn}") for turn in range(3)]
    for turn, content in enumerate(turns):
        publish(store, AGENT, content, turn, namespace, bind_shared=True)
    store.agents.update(namespace, AGENT, labels={LABEL: VALUE})
    store.agents.fork(namespace, AGENT, AGENT + "-2")
    store.agents.roll_back(namespace, AGENT, 2)
    store.leases.acquire(namespace, AGENT + "-3", kv_identity_hash(SMALL), "engine-1")
    imported = SyntheticAgent(SMALL, 6).turn(40)
    upload(store, imported, namespace)
    detail = "the detail of where it came from"
    store.snapshots.commit(
        namespace, AGENT + "-4", imported.manifest_digest, 0, CommitTerms(origin=Origin.IMPORT, origin_detail=detail)
    )
    store.agents.delete(namespace, AGENT + "-4")
    with pytest.raises(NotFound, match=AGENT):
        store.snapshots.get(namespace, AGENT + "-5")
    left = SyntheticAgent(MIXED, 7).turn(300)
    digest, data = max(left.new_blobs.items(), key=lambda each: len(each[1]))
    with store.blobs.open_writer(namespace, digest, BlobKind.TENSORS) as writer:
        writer.write(0, data[:-100])
    hidden = [text.encode() for text in (AGENT, LABEL, VALUE, detail, *agent.block_hashes(namespace))]
    return [*hidden, *(secret for each in (*turns, imported, left) for secret in secrets_of(each))]


@pytest.mark.long(10)
def test_no_16_bytes_of_a_memory_lie_in_the_files_of_a_sealed_namespace(lab: Lab, tmp_path: Path) -> None:
    plain = Lab(tmp_path / "plain")
    with lab.open() as store, plain.open() as plain_store:
        hidden = live(store, NS)
        assert found_in(lab.root, hidden) == []
        assert (lab.root / "kvasir.sqlite3-wal").stat().st_size > 100_000
        live(plain_store, NS)
        found = found_in(plain.root, hidden)
        assert {"journal", "kvasir.sqlite3-wal"} < set(found)
        assert any(name.endswith(".part") for name in found)
    with lab.open() as store:
        store.care.collect_garbage()
        store.care.scrub()
    assert found_in(lab.root, hidden) == []


def test_a_sealed_namespace_answers_what_a_plain_one_answers(lab: Lab) -> None:
    def told(store: Store, namespace: str) -> list[object]:
        agents = sorted(store.agents.page(namespace).agents, key=lambda each: each.agent_id)
        events = store.events.after(namespace, None).cursor
        found: list[object] = [*agents, events.sequence, store.agents.page(namespace, labels={LABEL: VALUE}).agents]
        found += [
            sorted(store.agents.page(namespace, name_prefix=AGENT + "-").agents, key=lambda each: each.agent_id),
            prefix_of(store, namespace, kv, content.block_hashes(namespace)),
        ]
        with pytest.raises(NotFound) as missing:
            store.snapshots.get(namespace, AGENT, version=99)
        found.append(missing.value.message)
        found += [store.snapshots.page(namespace, agent.agent_id).snapshots for agent in agents]
        return found

    kv = kv_identity_hash(SMALL)
    content = SyntheticAgent(SMALL, 9)
    with lab.open() as store:
        for namespace in (NS, PLAIN_NS):
            live(store, namespace)
            publish(store, "prefix", SyntheticAgent(SMALL, 9).turn(600, is_prompt=True), 0, namespace, bind_shared=True)
        content.turn(600)
        for page_size in (1, 2):
            pages = [list(names(store, namespace, page_size)) for namespace in (NS, PLAIN_NS)]
            assert sorted(pages[0]) == pages[1] == sorted(pages[1]), "sealed names have an order of their own"
        sealed, plain = ([], [])
        for namespace, into in ((NS, sealed), (PLAIN_NS, plain)):
            into += told(store, namespace)
            assert into[-1] != []
        assert len(prefix_of(store, NS, kv, content.block_hashes(NS))) == 2
        assert prefix_of(store, NS, kv, content.block_hashes(PLAIN_NS)) == []
    assert str(sealed) == str(plain)


def test_a_peers_new_name_is_noted_of_sealed_agents_too(lab: Lab) -> None:
    with lab.open() as store:
        for namespace in (NS, PLAIN_NS):
            publish(store, AGENT, SyntheticAgent(SMALL, 1).turn(30), 0, namespace)
            store.moves.offer(namespace, AGENT, "studio", "move", 0, anybody)
        store.owners.rename_peers({"studio": "attic"})
        assert sorted((namespace, name, known.peer) for namespace, name, known in store.owners.known()) == sorted(
            (namespace, AGENT, "attic") for namespace in (NS, PLAIN_NS)
        )


def names(store: Store, namespace: str, page_size: int) -> Iterator[str]:
    token = ""
    while True:
        page = store.agents.page(namespace, page_size, token)
        yield from (agent.agent_id for agent in page.agents)
        if not (token := page.next_page_token):
            return


def test_a_page_of_a_sealed_namespace_opens_only_the_names_that_it_lists(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.open() as store:
        for number in range(60):
            publish(store, f"agent {number}", SyntheticAgent(SMALL, number).turn(20), 0)
        opened = list[str]()
        open_text = SealedNames.open_text
        monkeypatch.setattr(listing, "_AGENTS_AT_ONCE", 7)  # fewer than there are
        monkeypatch.setattr(SealedNames, "open_text", lambda self, text: opened.append(text) or open_text(self, text))
        first = store.agents.page(NS, 5)
        assert len(first.agents) == 5
        assert len({each for each in opened if each.startswith("sealed-agent.")}) == 6, "the sixth: there are more"
        assert sorted(names(store, NS, 5)) == sorted(f"agent {number}" for number in range(60))
        assert sorted(each.agent_id for each in store.agents.page(NS, 60, name_prefix="agent 5").agents) == sorted(
            ["agent 5", *(f"agent 5{digit}" for digit in range(10))]
        )


# --- every verb ---

# Verbs that see no namespace, or whose callers have texts as the tables do: at a start, and in a recovery.
OF_THE_HOUSE = {
    *("namespaces", "stored_bytes", "all_hashes", "after_commit", "set_lease_floor", "unreleased_leases"),
    *(
        "fact",
        "longest_lease_ms",
        "fence_all_leases",
        "leave_objects",
        "set_fact",
        "written",
        "remove_unused_schemas",
        "journal_position",
        "set_journal_position",
        "state",
    ),
    *("state_anyway", "namespaces_anyway", "has_tables", "counted_bytes"),
    *("is_too_new", "wrong_indexes", "problems"),
    *("apply_changes", "fence_changes", "hold_version", "hashes_of"),
}


class Watch:
    """Notes which verbs run in a sealed namespace, and which statements have a needle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
        self.called: set[str] = set()
        self.needles: set[str] = set()
        self.leaks: set[str] = set()
        self._verb = ""
        own = {**vars(CatalogView), **vars(CatalogChange)}.items()
        self.verbs = {name for name, verb in own if inspect.isfunction(verb) and not name.startswith("_")}
        for name in self.verbs:
            monkeypatch.setattr(CatalogChange, name, self._watched(name, getattr(CatalogChange, name)))
        catalog = store._core.catalog
        catalog.read(NS, lambda rows: rows.connection.set_trace_callback(self._trace))  # type: ignore[attr-defined]

    def _watched(self, name: str, verb: Callable[..., object]) -> Callable[..., object]:
        def watched(rows: CatalogChange, *args: object, **kwargs: object) -> object:
            if not rows.texts.names.keep_order:
                self.called.add(name)
            self._verb = name
            return verb(rows, *args, **kwargs)

        return watched

    def _trace(self, statement: str) -> None:
        self.leaks |= {f"{self._verb}: {needle}" for needle in self.needles if needle in statement}


def live_by_every_verb(store: Store, watch: Watch, clock: Clock) -> None:
    agents = [SyntheticAgent(SMALL, seed) for seed in (1, 2)]
    turns = [agent.turn(300, is_prompt=True, request_id=f"request {turn}") for turn, agent in enumerate(agents)]
    hashes = agents[0].block_hashes(NS)
    watch.needles = {AGENT, LABEL, VALUE, "origin detail", "request 0", "request 1", *hashes}
    for turn in turns:
        watch.needles |= {digest.hash for digest in (turn.manifest_digest, *turn.digests)}
    token = store.leases.acquire(NS, AGENT, kv_identity_hash(SMALL), "engine-1").token
    publish(store, AGENT, turns[0], 0, bind_shared=True, lease=token)
    store.leases.renew(NS, AGENT, kv_identity_hash(SMALL), token)
    store.leases.release(NS, AGENT, kv_identity_hash(SMALL), token)
    prefix_of(store, NS, kv_identity_hash(SMALL), hashes)
    upload(store, turns[1])
    store.snapshots.commit(
        NS, AGENT + "-2", turns[1].manifest_digest, 0, CommitTerms(origin=Origin.IMPORT, origin_detail="origin detail")
    )
    clock.pass_s(10)
    for page in (store.agents.get(NS, AGENT), store.agents.page(NS), store.snapshots.page(NS, AGENT)):
        assert page
    store.snapshots.get(NS, AGENT)
    assert store.snapshots.has_had(NS, AGENT, turns[0].manifest_digest.hash)
    assert store.blobs.named_blobs(NS, turns[0].manifest_digest, store.snapshots.get(NS, AGENT).total_bytes)
    with pytest.raises(NotFound):
        store.blobs.named_blobs(NS, turns[0].digests[0], 0)
    store.agents.update(NS, AGENT, labels={LABEL: VALUE, "kvasir.expires_after": "90d"})
    store.agents.fork(NS, AGENT, AGENT + "-3")
    store.agents.roll_back(NS, AGENT, 1)
    store.moves.offer(NS, AGENT + "-3", "peer", "move", 0, anybody)
    (
        store.owners.unfinished(),
        store.owners.known(),
        store.agents.usage(NS, AGENT),
        store.statistics.of(NS),
        store.events.after(NS, None),
    )
    store.events.after(NS, EventCursor(store.events.after(NS, None).cursor.incarnation, 0))
    quarantine(store._core, NS, turns[0].digests[:1])
    store.care.check(repair=True), list(store.care.verify(NS, AGENT)), list(store.care.verify(NS))
    assert store.blobs.leading_stored(NS, turns[0].digests[:1])
    assert store._core.catalog.read(NS, lambda view: view.has_hash(turns[0].digests[0].hash))
    assert store._core.catalog.read(NS, lambda view: view.listed_hashes([turns[0].digests[0].hash]))
    store._core.catalog.write(NS, lambda change: change.hold_again(turns[0].manifest_digest, turns[0].digests))
    store.care.expire_agents(ClockReading(clock(), clock.steady()))
    assert store.care.read_ahead((namespace, manifest) for namespace, manifest, _ in store.care.used_last())
    store.care.scrubbing.load(), store.care.scrubbing.begin(), store.care.scrubbing.next()
    store.agents.delete(NS, AGENT + "-2")
    store.care.collect_garbage(dry_run=True), store.care.collect_garbage()
    clock.pass_s(10_000_000)
    store.care.collect_garbage()
    collecting.make_room(store._core, NS, 1, resuming=turns[0].manifest_digest)


def test_no_statement_of_any_verb_has_a_text_of_a_sealed_namespace(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_bucket, called = Lab(tmp_path / "in a bucket").seal(NS), set[str]()
    bucket = Bucket(MemoryStore(), "s3://memory")
    in_bucket.kept_blobs = blobs_of(replace(in_bucket.config(), blobs=bucket.where), Disk(), bucket)
    for each in (lab, in_bucket):
        with each.open() as store:
            watch = Watch(monkeypatch, store)
            live_by_every_verb(store, watch, each.clock)
            if each is in_bucket:
                asides.sweep_at_start(store._core)
            assert watch.leaks == set()
            assert files_with(each.root, [needle.encode() for needle in watch.needles]) == []
            called |= watch.called
        monkeypatch.undo()
    assert watch.verbs - OF_THE_HOUSE - called == set(), "the life has to come to these, too"


def test_a_statement_takes_no_text_without_a_known_name() -> None:
    rows = Rows(sqlite3.connect(":memory:"))
    assert rows.one("SELECT :name", name="text") == ("text",)
    for texts in ("text", ["text"]):
        with pytest.raises(TypeError, match="has the name 'note'"):
            rows.one("SELECT :note", note=texts)
    with pytest.raises(TypeError, match="has the name 'note'"):
        _texts_of({"note": "text"}, rows.texts.sealed)


# --- interrupted writes ---


@pytest.mark.parametrize("size", [1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES, 3 * SEGMENT_BYTES + 7])
def test_an_interrupted_write_goes_on_where_it_was(lab: Lab, size: int) -> None:
    content = SyntheticAgent(LLAMA_8B, 1).turn(40)
    [(digest, data)] = content.new_blobs.items()
    with lab.open() as store:
        for start, end in pairwise((0, size, size + 1, size + SEGMENT_BYTES)):
            with store.blobs.open_writer(NS, digest, BlobKind.TENSORS) as writer:
                assert writer.received_bytes == start
                writer.write(start, data[start:end])
            assert store.blobs.write_status(NS, digest).received_bytes == end
        write(store, digest, data, BlobKind.TENSORS, frame=100_000)
        assert store.blobs.read(NS, digest) == data


# --- the index is lost ---


@pytest.mark.parametrize(
    "lost", [("kvasir.sqlite3",), pytest.param(("kvasir.sqlite3", "journal"), marks=pytest.mark.long(2))]
)
def test_a_lost_index_of_a_sealed_namespace_is_built_again_with_its_key(lab: Lab, lost: tuple[str, ...]) -> None:
    agent = SyntheticAgent(MIXED, 5)
    with lab.open() as store:
        turns = [agent.turn(300, is_prompt=True) for _ in range(2)]
        for turn, content in enumerate(turns):
            publish(store, AGENT, content, turn, bind_shared=True)
        hidden = [AGENT.encode(), *(secret for each in turns for secret in secrets_of(each))]
        before = [store.agents.get(NS, AGENT), prefix_of(store, NS, kv_identity_hash(MIXED), agent.block_hashes(NS))]
    for name in lost:
        (lab.root / name).unlink()

    def recovered(masters: list[MasterKey]) -> None:
        recover(lab.config(), Means(lab.clock, Chance(500)), [NS], lambda *_: None, masters)

    with pytest.raises(FailedPrecondition, match=f"'{NS}' is sealed"):
        recovered([])
    recovered(list(lab.masters))
    with lab.open() as store:
        assert store.care.check().is_clean
        found = store.agents.page(NS).agents
        for each in found:
            head = each.lines[0]
            assert_restores(store, head, next(one for one in turns if one.manifest_digest == head.manifest))
        if len(lost) == 1:
            after = prefix_of(store, NS, kv_identity_hash(MIXED), agent.block_hashes(NS))
            assert [*found, after] == before
        else:
            assert all(each.agent_id.startswith("recovered-") for each in found)
    assert found_in(lab.root, hidden) == []


def test_a_commit_that_names_a_missing_blob_is_told_its_plain_digest(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        write(store, content.manifest_digest, content.manifest_bytes, BlobKind.MANIFEST)
        with pytest.raises(FailedPrecondition, match="not here") as refused:
            store.snapshots.commit(NS, "ada", content.manifest_digest, 0)
        assert Digest(refused.value.metadata["digest"], content.digests[0].size_bytes) == content.digests[0]
