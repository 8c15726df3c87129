"""Whose turn it is at the index: namespaces alternate, and no operation or commit is long."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.tensor_layouts import TensorSpec, expected_state_tensors

from cachestore_svc.blobs import manifests
from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import HeldLease
from cachestore_svc.index.catalog import CatalogChange, CatalogView
from cachestore_svc.index.sqlite.operations import MAX_TURN_MS, MAX_WRITES_PER_COMMIT
from cachestore_svc.index.sqlite.rows import Rows, Value
from cachestore_svc.index.sqlite.sqlite_catalog import SqliteCatalog
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, prefix_of, publish, upload
from tests.made_models.synthetic import MIXED, SMALL, SyntheticAgent


class Held:
    """An index whose thread stands still until `go`, and a record of what it then ran."""

    def __init__(self, root: Path) -> None:
        self.now_ms = 0
        disk = Disk()
        self.commits: list[list[str]] = [[]]
        disk.reached = self._reached  # type: ignore[method-assign]
        self.index = SqliteCatalog(root / "i.sqlite3", disk, Ballast(root / "b", 0, disk), lambda: self.now_ms)
        self.ran: list[str] = []
        self._go = threading.Event()
        self._is_held = threading.Event()
        self.threads: list[threading.Thread] = []
        self.ask("holder", self._hold, self.index.read)
        self._is_held.wait(60)

    def _reached(self, point: str) -> None:
        if point == "index: after commit":
            self.commits.append([])

    def _hold(self, view: CatalogView) -> None:
        self._is_held.set()
        self._go.wait(60)

    def ask(self, namespace: str, work: Callable[[CatalogView], None], how: Callable[..., object]) -> None:
        thread = threading.Thread(target=how, args=(namespace, work))
        thread.start()
        self.threads.append(thread)

    def queue(self, names: Sequence[str], how: Callable[..., object], took_ms: int = 0) -> None:
        """Ask in this order, a caller each; "a1" is of namespace "a"."""
        for name in names:
            before = self._waiting()
            self.ask(name[0], lambda rows, name=name: self._note(name, took_ms), how)  # type: ignore[misc]
            while self._waiting() == before:
                pass

    def go(self) -> None:
        self._go.set()
        for thread in self.threads:
            thread.join(60)

    def _waiting(self) -> int:
        return len(self.index._reads) + len(self.index._writes)

    def _note(self, name: str, took_ms: int) -> None:
        self.ran.append(name)
        self.commits[-1].append(name)
        self.now_ms += took_ms


@contextmanager
def held(root: Path) -> Iterator[Held]:
    made = Held(root)
    try:
        yield made
    finally:
        made.go()
        made.index.close()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_operation_waits_for_one_of_each_other_namespace_not_for_all_that_came_before(
    tmp_path: Path, kind: str
) -> None:
    with held(tmp_path) as made:
        made.queue([*(f"a{number}" for number in range(20)), "b0", "c0", "b1"], getattr(made.index, kind))
        made.go()
        assert made.ran[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]
        assert made.ran[6:] == [f"a{number}" for number in range(3, 20)]


def test_a_read_is_not_behind_the_writes_of_others_and_a_write_not_behind_their_reads(tmp_path: Path) -> None:
    with held(tmp_path) as made:
        made.queue([f"a{number}" for number in range(10)], made.index.write, took_ms=MAX_TURN_MS)
        made.queue([f"c{number}" for number in range(10)], made.index.read, took_ms=MAX_TURN_MS)
        made.queue(["b0"], made.index.read)
        made.queue(["d0"], made.index.write)
        made.go()
        # A turn of reads, a turn of writes: each of one operation here, for each takes the turn's whole time.
        assert made.ran.index("b0") <= 2
        assert made.ran.index("d0") <= 5


def test_a_commit_ends_when_its_time_is_over(tmp_path: Path) -> None:
    with held(tmp_path) as made:
        made.queue([f"a{number}" for number in range(6)], made.index.write, took_ms=MAX_TURN_MS // 2)
        made.queue(["b0"], made.index.write)
        made.go()
        assert made.commits[:2] == [["a0", "b0", "a1"], ["a2", "a3"]]


def test_a_commit_holds_what_waits_when_that_is_quick(tmp_path: Path) -> None:
    with held(tmp_path) as made:
        made.queue([f"a{number}" for number in range(12)], made.index.write)
        made.go()
        assert made.commits[:1] == [[f"a{number}" for number in range(12)]]
        assert MAX_WRITES_PER_COMMIT >= 12


class CountingStore:
    """How many operations of the index a call took."""

    def __init__(self, store: Store) -> None:
        self._index = store._core.catalog
        self.count = 0
        submit = self._index._submit

        def counted(*args: object) -> object:
            self.count += 1
            return submit(*args)  # type: ignore[arg-type]

        self._index._submit = counted  # type: ignore[method-assign, assignment]


def test_a_question_for_ten_thousand_digests_is_asked_in_slices(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(2 * 256)
    with lab.open() as store:
        publish(store, "a", content, 0)
        wanted = [Digest(f"{number:064x}", 1) for number in range(9_998)]
        digests = [wanted[0], content.digests[0], *wanted[1:], content.digests[1]]
        counting = CountingStore(store)
        assert store.blobs.find_missing(NS, digests) == wanted
        assert counting.count >= 10


def test_a_page_takes_as_many_statements_for_many_agents_as_for_two(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    statements = [0]
    find = Rows.all

    def counted(rows: Rows, sql: str, **values: Value) -> list[tuple[Any, ...]]:
        statements[0] += 1
        return find(rows, sql, **values)

    def taken(size: int) -> int:
        statements[0] = 0
        assert len(store.agents.page(NS, size, name_prefix="b").agents) == size
        return statements[0]

    with lab.open() as store:
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
        for number in range(50):
            store.agents.fork(NS, "a", f"b{number}")
        monkeypatch.setattr(Rows, "all", counted)
        assert taken(49) == taken(2)


@pytest.mark.long(3)
def test_a_prefix_of_more_than_a_slice_is_found_whole_and_ends_at_its_gap(lab: Lab) -> None:
    agent = SyntheticAgent(SMALL, 1)
    content = agent.turn(600 * 256, is_prompt=True)
    hashes = agent.block_hashes(NS)
    with lab.open() as store:
        publish(store, "a", content, 0, bind_shared=True)
        kv_hash = store.snapshots.get(NS, "a").kv_identity_hash
        assert prefix_of(store, NS, kv_hash, hashes) == content.digests
        gap = ["0" * 64]
        assert prefix_of(store, NS, kv_hash, [*hashes[:550], *gap, *hashes[551:]]) == content.digests[:550]
        assert prefix_of(store, NS, kv_hash, [*hashes[:500], *gap, *hashes[501:]]) == content.digests[:500]
        assert prefix_of(store, NS, kv_hash, [*hashes[:499], *gap, *hashes[500:]]) == content.digests[:499]


def test_the_schema_of_states_is_built_once_and_not_by_the_index(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand states of 4,096 tensors each held the index, and so every namespace, for twenty seconds."""
    built: list[str] = []

    def expected(identity: identity_pb2.KvIdentity) -> tuple[TensorSpec, ...]:
        built.append(threading.current_thread().name)
        return expected_state_tensors(identity)

    agent = SyntheticAgent(MIXED, 1)
    turns = [agent.turn(50) for _ in range(12)]
    with lab.open() as store:
        for version, turn in enumerate(turns[:-1]):
            publish(store, "a", turn, version)
        upload(store, turns[-1])
        monkeypatch.setattr(manifests, "expected_state_tensors", expected)
        store.snapshots.commit(NS, "a", turns[-1].manifest_digest, len(turns) - 1)
        assert len(turns[-1].manifest.states) == 12
        assert len(built) == 1
        assert "kvasir-index" not in built


def test_statistics_of_many_agents_are_asked_in_slices_and_lose_none(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        made = publish(store, "a", content, 0)
        for number in range(520):
            store.agents.fork(NS, "a", f"b{number}")
        wanted = [(f"{number:064x}", number) for number in range(1, 600)]
        unheld = ",".join(f"(1, '{hash_}', {size}, 'manifest', 0)" for hash_, size in wanted)
        columns = "namespace_id, hash, size_bytes, kind, created_unix_ms"
        store._core.catalog.write(NS, lambda rows: rows.run(f"INSERT INTO blobs ({columns}) VALUES {unheld}"))
        counting = CountingStore(store)
        stats = store.statistics.of(NS)
        assert counting.count >= 4
        assert (stats.agent_count, stats.snapshot_count) == (521, 521)
        assert stats.logical_bytes == 521 * made.total_bytes
        assert stats.blob_count == len(content.digests) + 1 + 599
        assert stats.unreferenced_bytes == sum(range(1, 600))
        assert stats.blob_bytes == made.total_bytes + sum(range(1, 600))


def test_prolonging_many_leases_writes_nothing(lab: Lab) -> None:
    kv_hash, held = kv_identity_hash(SMALL), [HeldLease(name, 1) for name in ("a", "b", "c")]
    with lab.open() as store:
        for each in held:
            store.leases.acquire(NS, each.agent_id, kv_hash, "engine-1", 10)
        log = lab.root / "kvasir.sqlite3-wal"
        before = log.stat()
        for _ in range(5):
            lab.clock.pass_s(8)
            assert store.leases.renew_all(NS, "engine-1", kv_hash, held, 10).lost == ()
        assert (log.stat().st_size, log.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_labels_are_undone_with_the_operation_that_wrote_them(lab: Lab) -> None:
    def fail_after(change: CatalogChange) -> None:
        change.update_agent("a", {"name": "value"}, None, None)
        raise RuntimeError("the operation fails")

    with lab.open() as store:
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
        with pytest.raises(RuntimeError):
            store._core.catalog.write(NS, fail_after)
        assert store.agents.get(NS, "a").labels == {}
        assert store.agents.update(NS, "a", labels={"name": "value"}).labels == {"name": "value"}


def test_no_caller_hears_of_success_before_the_commit(lab: Lab) -> None:
    disk, heard, early = Disk(), threading.Event(), list[bool]()

    def reached(point: str) -> None:
        if point == "index: before commit":
            early.append(heard.wait(0.1))

    with lab.open(disk) as store:
        disk.reached = reached  # type: ignore[method-assign]

        def ask() -> None:
            store.leases.acquire(NS, "a", kv_identity_hash(SMALL), "engine-1", 10)
            heard.set()

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(60)
    assert early[0] is False
