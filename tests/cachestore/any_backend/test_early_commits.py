"""Commits that come before their last blobs: each is that of one which came after them, or there is no version."""

import asyncio
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import Conflict, FailedPrecondition, InvalidArgument, KvasirError, NotFound
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.known_manifests import KnownManifest
from cachestore_svc.blobs.manifests import read_manifest, shareable_hashes, shared_blocks
from cachestore_svc.edge.messages import read_digests
from cachestore_svc.edge.service import CacheStoreService
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.index.catalog import SLICE, CatalogChange
from cachestore_svc.index.values import CommitTerms, Done
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.snapshots import EarlyCommit
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, assert_restores, prefix_of, publish, upload, write, write_all
from tests.made_models.synthetic import SMALL, WINDOWED, SyntheticAgent, SyntheticSnapshot

AGENT = "a"


def known(snapshot: SyntheticSnapshot) -> KnownManifest:
    facts = read_manifest(snapshot.manifest_bytes)
    return KnownManifest(facts, shared_blocks(facts, shareable_hashes(facts, NS)))


def begin(
    store: Store,
    snapshot: SyntheticSnapshot,
    parent: int = 0,
    terms: CommitTerms | None = None,
    awaited: list[Digest] | None = None,
) -> "Future[Done]":
    """Commit what is not written yet."""
    answer: Future[Done] = Future()
    coming = [snapshot.manifest_digest, *snapshot.new_blobs] if awaited is None else awaited
    early = EarlyCommit(known(snapshot), coming, answer)
    terms = terms or CommitTerms(bind_shared=True)
    store.snapshots.commit_early(NS, early, AGENT, snapshot.manifest_digest, parent, terms)
    return answer


def write_manifest(store: Store, snapshot: SyntheticSnapshot) -> None:
    write(store, snapshot.manifest_digest, snapshot.manifest_bytes, BlobKind.MANIFEST)


@pytest.mark.long(3)
@pytest.mark.parametrize("last", ["manifest", "tensors"])
@pytest.mark.parametrize("identity", [SMALL, WINDOWED], ids=["full", "windows"])
def test_an_early_commit_is_that_of_one_which_came_after_its_blobs(identity: object, last: str, store: Store) -> None:
    late, early = SyntheticAgent(identity, 1), SyntheticAgent(identity, 1)  # type: ignore[arg-type]
    for turn, tokens in enumerate((700, 50, 300)):
        expected = publish(store, "late", late.turn(tokens, is_prompt=True), turn, bind_shared=True)
        snapshot = early.turn(tokens, is_prompt=True)
        done = begin(store, snapshot, turn).result(10)  # the same bytes are there already: it waits for nothing
        assert (done.snapshot.version, done.snapshot.manifest) == (expected.version, expected.manifest)
    other = SyntheticAgent(identity, 2)  # type: ignore[arg-type]
    for turn, tokens in enumerate((600, 30)):
        snapshot = other.turn(tokens, is_prompt=True)
        answer = begin(store, snapshot, 3 + turn)
        if last == "manifest":
            write_all(store, snapshot.new_blobs)
        else:
            write_manifest(store, snapshot)
        assert not answer.done(), "it was committed without all of its blobs"
        upload(store, snapshot)
        done = answer.result(10)
        assert (done.is_new, done.snapshot.version) == (True, 4 + turn)
        assert_restores(store, done.snapshot, snapshot)
    if identity is SMALL:
        assert len(prefix_of(store, NS, done.snapshot.kv_identity_hash, other.block_hashes(NS))) == 2
    assert not store._core.early_commits._waiting


def test_a_commit_that_was_taken_away_makes_no_version(store: Store) -> None:
    snapshot = SyntheticAgent(SMALL).turn(300)
    answer = begin(store, snapshot)
    assert answer.cancel()
    upload(store, snapshot)
    with pytest.raises(CancelledError):
        answer.result(0)
    with pytest.raises(NotFound):
        store.snapshots.get(NS, AGENT)
    assert not store._core.early_commits._waiting
    assert publish(store, AGENT, snapshot, 0).version == 1


def test_a_commit_that_is_taken_away_before_it_is_known_makes_no_version(store: Store) -> None:
    snapshot = SyntheticAgent(SMALL).turn(300)
    answer: Future[Done] = Future()
    answer.cancel()
    early = EarlyCommit(known(snapshot), [snapshot.manifest_digest], answer)
    store.snapshots.commit_early(NS, early, AGENT, snapshot.manifest_digest, 0, CommitTerms())
    upload(store, snapshot)
    with pytest.raises(NotFound):
        store.snapshots.get(NS, AGENT)
    assert not store._core.early_commits._waiting


async def test_a_commit_whose_caller_leaves_while_it_is_taken_in_makes_no_version(store: Store) -> None:
    snapshot, may_go_on = SyntheticAgent(SMALL).turn(300), threading.Event()
    threads = StoreThreads(4)
    behind = AioStore(store, threads)
    service: Any = SimpleNamespace(_store=behind, _run=partial(behind.run, NS))
    store._core.catalog.write_later(NS, lambda _: may_go_on.wait(5))  # as a disk that takes its time
    asked = known(snapshot), list(snapshot.new_blobs), AGENT, snapshot.manifest_digest, 0, CommitTerms()
    calling = asyncio.create_task(CacheStoreService._early(service, *asked))
    await asyncio.sleep(0.1)
    calling.cancel()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    threads.close()
    upload(store, snapshot)
    with pytest.raises(NotFound):
        store.snapshots.get(NS, AGENT)
    assert not store._core.early_commits._waiting


def test_a_blob_that_is_neither_here_nor_awaited_refuses_the_commit(store: Store) -> None:
    snapshot = SyntheticAgent(SMALL).turn(600)
    first, *others = snapshot.new_blobs
    answer = begin(store, snapshot, awaited=[snapshot.manifest_digest, *others])
    write_all(store, {digest: snapshot.new_blobs[digest] for digest in others})
    write_manifest(store, snapshot)
    with pytest.raises(FailedPrecondition) as refused:
        answer.result(10)
    assert (refused.value.reason, refused.value.metadata["digest"]) == ("BLOB_MISSING", first.hash)
    upload(store, snapshot)
    assert publish(store, AGENT, snapshot, 0).version == 1


@pytest.mark.parametrize("takes", ["deleted", "rolled back"])
def test_a_memory_that_is_taken_back_meanwhile_does_not_come_back(takes: str, store: Store) -> None:
    agent = SyntheticAgent(SMALL)
    kv_hash = publish(store, AGENT, agent.turn(300), 0).kv_identity_hash
    publish(store, AGENT, agent.turn(30), 1)
    lease = store.leases.acquire(NS, AGENT, kv_hash, "engine", 5.0).token
    snapshot = agent.turn(50)
    answer = begin(store, snapshot, 2, CommitTerms(lease))
    store.leases.release(NS, AGENT, kv_hash, lease)
    if takes == "deleted":
        store.agents.delete(NS, AGENT)
    else:
        store.agents.roll_back(NS, AGENT, 1)
    upload(store, snapshot)
    with pytest.raises(KvasirError) as refused:
        answer.result(10)
    assert isinstance(refused.value, Conflict | FailedPrecondition)
    if takes == "deleted":
        with pytest.raises(NotFound):
            store.snapshots.get(NS, AGENT)
    else:
        newest = store.snapshots.get(NS, AGENT)
        assert (newest.version, newest.token_count) == (3, 300)


def test_of_two_early_commits_on_one_parent_one_is_refused(store: Store) -> None:
    one, other = SyntheticAgent(SMALL, 1).turn(300), SyntheticAgent(SMALL, 2).turn(300)
    answers = [begin(store, one), begin(store, other)]
    upload(store, one)
    upload(store, other)
    assert answers[0].result(10).snapshot.version == 1
    with pytest.raises(Conflict):
        answers[1].result(10)
    assert store.snapshots.get(NS, AGENT).manifest == one.manifest_digest


def test_an_early_commit_serves_no_other_namespace_with_its_blobs(store: Store) -> None:
    snapshot = SyntheticAgent(SMALL).turn(300)
    answer = begin(store, snapshot)
    upload(store, snapshot, "other")
    assert not answer.done()
    with pytest.raises(NotFound):
        store.snapshots.get("other", AGENT)
    upload(store, snapshot)
    assert answer.result(10).snapshot.version == 1


def test_a_commit_that_comes_while_its_last_blob_waits_to_be_listed_is_made(lab: Lab, store: Store) -> None:
    snapshot, catalog = SyntheticAgent(SMALL).turn(300), store._core.catalog
    write_all(store, snapshot.new_blobs)
    data, digest = snapshot.manifest_bytes, snapshot.manifest_digest
    held = threading.Event()
    with (
        ThreadPoolExecutor(2) as threads,
        store.blobs.open_writer(NS, digest, BlobKind.MANIFEST) as writer,
    ):
        writer.write(0, data)
        catalog.write_later(NS, lambda _: held.wait(5) and lab.clock.pass_s(1))  # as a disk that takes its time
        finishing = threads.submit(writer.finish)
        time.sleep(0.1)
        beginning = threads.submit(begin, store, snapshot, 0, None, [digest])
        time.sleep(0.1)  # it looks for the blob, behind or before its listing
        held.set()
        finishing.result(10)
        assert beginning.result(10).result(5).snapshot.version == 1


def test_many_awaited_blobs_are_looked_up_in_slices(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other namespaces' operations come in between: 10,000 at once took half a second of the index's thread."""
    snapshot, counts = SyntheticAgent(SMALL).turn(300), list[int]()
    upload(store, snapshot)
    find = CatalogChange.find_blobs

    def noting(change: CatalogChange, digests: list[Digest]) -> Any:
        counts.append(len(digests))
        return find(change, digests)

    monkeypatch.setattr(CatalogChange, "find_blobs", noting)
    others = [Digest.of(str(number).encode()) for number in range(2 * SLICE)]
    answer = begin(store, snapshot, awaited=[*others, snapshot.manifest_digest])
    assert (sum(counts), max(counts)) == (2 * SLICE + 1, SLICE)
    [early] = store._core.early_commits._waiting[NS]
    assert early.lacking == {*others}, "what is in the last slice is found, too"
    assert answer.cancel()
    many = [Digest.of(b"a").to_proto()] * 10_001
    for wrong, named in ((many, "awaited"), ([manifest_pb2.Digest(hash="x")], "awaited[0]")):
        with pytest.raises(InvalidArgument) as refused:
            read_digests(wrong, "awaited")
        assert refused.value.field == named
