"""A lost index is built anew: every version whose manifest is there comes back as it was, and what does not is told."""

import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import Conflict, DataLoss, FailedPrecondition, NotFound, Unavailable
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import LeaseToken, Origin, RecoverReport, SnapshotVersion
from cachestore_svc.recovery.recovering import recover
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Chance, Lab, damaged, publish, upload
from tests.made_models.synthetic import MIXED, SMALL, WINDOWED, SyntheticAgent, SyntheticSnapshot
from tests.running.programs import run

DATABASE = "kvasir.sqlite3"
OTHER_NS = "other"


def recovered(lab: Lab, *namespaces: str, disk: Disk | None = None) -> RecoverReport:
    return recover(
        lab.config(), lab.clock, Chance(lab.chance.drawn + 1000), disk or Disk(), namespaces, lambda *_: None
    )  # type: ignore[attr-defined]


class Life:
    """A store with turns, forks, rollbacks, labels, an import and garbage, and everything that it answered."""

    def __init__(self, lab: Lab) -> None:
        ada, bob = SyntheticAgent(MIXED, 1), SyntheticAgent(SMALL, 2)
        with lab.open() as store:
            for turn in range(4):
                self._publish(store, NS, "ada", ada.turn(300, is_prompt=True), turn)
            self._publish(store, NS, "ada", SyntheticAgent(SMALL, 7).turn(40), 4)
            self._publish(store, OTHER_NS, "bob", bob.turn(300), 0, Origin.IMPORT)
            self._publish(store, OTHER_NS, "bob", bob.turn(300), 1)
            store.agents.update(NS, "ada", labels={"x": "y"}, is_pinned=True, retained_versions=4)
            store.agents.fork(NS, "ada", "fork")
            store.agents.roll_back(NS, "ada", 2, MIXED_HASH)
            store.agents.fork(NS, "ada", "gone")
            store.agents.delete(NS, "gone")
            upload(store, SyntheticAgent(SMALL, 9).turn(300))
            self.lease = store.leases.acquire(NS, "ada", MIXED_HASH, "engine-1").token
            self.cursor = store.events.after(NS, None).cursor
            self.told = told(store)
            self.versions = [each for each in self.told if isinstance(each, SnapshotVersion)]
            self.bound = bound(store)
            self.root = lab.root.with_name("killed")
            shutil.copytree(lab.root, self.root)

    def _publish(
        self,
        store: Store,
        namespace: str,
        name: str,
        content: SyntheticSnapshot,
        parent: int,
        origin: Origin = Origin.TURN,
    ) -> None:
        publish(store, name, content, parent, namespace, bind_shared=True, origin=origin)


MIXED_HASH = kv_identity_hash(MIXED)


def told(store: Store) -> list[object]:
    """Everything that the store says of agents and versions but times of use, which may be lost."""
    found: list[object] = []
    for namespace in (NS, OTHER_NS):
        for agent in store.agents.page(namespace).agents:
            found.append((namespace, agent.agent_id, agent.labels, agent.is_pinned, agent.retained_versions))
            found += store.snapshots.page(namespace, agent.agent_id).snapshots
    return found


def bound(store: Store) -> list[object]:
    sql = "SELECT block_hash, blobs.hash FROM prefixes JOIN blobs ON blobs.id = blob_id ORDER BY block_hash"
    return store._core.catalog.read(NS, lambda rows: rows.all(sql))


@pytest.fixture
def life(lab: Lab) -> Life:
    return Life(lab)


@pytest.fixture
def killed(life: Life) -> Lab:
    """The directory as kill -9 left it, everything in the log."""
    return Lab(life.root, chance=Chance(50))


def remove_database(root: Path) -> None:
    (root / DATABASE).unlink()


def remove_log(root: Path) -> None:
    (root / f"{DATABASE}-wal").unlink()


def remove_both(root: Path) -> None:
    remove_database(root)
    remove_log(root)


def cut_log(root: Path) -> None:
    path = root / f"{DATABASE}-wal"
    os.truncate(path, path.stat().st_size // 2)


def nothing(root: Path) -> None:
    pass


@pytest.mark.parametrize("harm", [remove_database, remove_log, remove_both, cut_log, nothing])
def test_everything_comes_back_as_it_was(life: Life, killed: Lab, harm: Callable[[Path], None]) -> None:
    harm(killed.root)
    old = {path.name for path in killed.root.glob(f"{DATABASE}*")}
    report = recovered(killed)
    assert report.is_complete
    assert {(each.namespace, each.versions) for each in report.namespaces} == {(NS, 8), (OTHER_NS, 2)}
    assert len(report.kept) == len(old) + 1
    assert all((killed.root / name).exists() for name in report.kept)
    for _ in range(2):
        with killed.open() as store:
            assert told(store) == life.told
            assert bound(store) == life.bound
            assert store.care.check().is_clean
            for namespace in (NS, OTHER_NS):
                assert damaged(store, namespace) == []
                *_, last = store.care.verify(namespace)
                assert last.damaged == ()
    with killed.open(grace_period_s=0.0) as store:
        publish(store, "ada", SyntheticAgent(SMALL, 7).turn(40), 6)
        for _ in range(3):
            store.care.collect_garbage()
        assert store.care.check().is_clean
        assert store.care.check().set_aside == 0


def test_watchers_lost_events_and_no_lease_generation_comes_again(life: Life, killed: Lab) -> None:
    recovered(killed)
    with killed.open() as store:
        assert store.events.after(NS, life.cursor).is_lost
        taken = store.leases.acquire(NS, "ada", MIXED_HASH, "engine-1").token
        assert taken.generation > life.lease.generation
        head = store.snapshots.get(NS, "ada", MIXED_HASH)
        upload(store, SyntheticAgent(MIXED, 77).turn(30))
        with pytest.raises(Conflict) as fenced:
            store.snapshots.commit(
                NS, "ada", SyntheticAgent(MIXED, 77).turn(30).manifest_digest, head.version, life.lease
            )
        assert fenced.value.reason == "LEASE_FENCED"
        assert isinstance(taken, LeaseToken)


def test_a_version_whose_manifest_is_gone_is_told_by_agent_and_version(life: Life, killed: Lab) -> None:
    with Lab(killed.root, chance=Chance(7)).open() as store:
        head = store.snapshots.get(OTHER_NS, "bob")
        content = store.blobs.read(OTHER_NS, head.manifest)
    killed.blob_files[head.manifest.hash].write_bytes(bytes(content)[:-1])
    remove_database(killed.root)
    report = recovered(killed)
    [other] = [each for each in report.namespaces if each.namespace == OTHER_NS]
    assert [(lost.agent_id, lost.version) for lost in other.lost] == [("bob", 2)]
    assert head.manifest.hash in other.lost[0].why
    with killed.open() as store:
        assert store.snapshots.get(OTHER_NS, "bob").version == 1
        assert store.care.check().is_clean


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize(("identity", "place"), [(SMALL, 1), (WINDOWED, 3), (WINDOWED, 4), (MIXED, -1)])
def test_a_version_comes_back_without_a_blob_that_is_lost(
    life: Life, killed: Lab, is_gone: bool, identity: identity_pb2.KvIdentity, place: int
) -> None:
    agent = SyntheticAgent(identity, 1)
    content = agent.turn(600)
    with killed.open() as store:
        publish(store, "torn", content, 0)
    lost = content.digests[place]
    path = killed.blob_files[lost.hash]
    whole = path.read_bytes()
    path.unlink()
    if not is_gone:
        path.write_bytes(whole[:-1] + b"?")
    remove_database(killed.root)
    report = recovered(killed)
    [space] = [each for each in report.namespaces if each.namespace == NS]
    assert (space.lost, space.damaged_blobs) == ((), (lost.hash,))
    assert space.with_damaged_blobs == (("torn", 1),)
    with killed.open() as store:
        assert damaged(store) == [lost]
        assert bytes(store.blobs.read(NS, store.snapshots.get(NS, "torn").manifest)) == content.manifest_bytes
        with pytest.raises(DataLoss):
            store.blobs.read(NS, lost)
        # An engine computes it again, and goes on.
        upload(store, content)
        assert damaged(store) == []
        publish(store, "torn", agent.turn(30), 1)


def test_files_that_were_set_aside_come_back_too(life: Life, killed: Lab) -> None:
    for path in killed.blob_files.values():
        path.rename(path.with_name(f"{path.name}.aside-1"))
    remove_both(killed.root)
    assert recovered(killed).is_complete
    with killed.open() as store:
        assert told(store) == life.told


def test_where_the_journal_is_gone_too_manifests_come_back_under_other_names_and_as_brought(
    life: Life, killed: Lab
) -> None:
    remove_both(killed.root)
    (killed.root / "journal").unlink()
    with pytest.raises(FailedPrecondition, match="--namespace") as refused:
        recovered(killed)
    assert refused.value.reason == "NAMESPACE_UNKNOWN"
    report = recovered(killed, OTHER_NS)
    assert not report.is_complete
    with killed.open() as store:
        for space in report.namespaces:
            agents = store.agents.page(space.namespace).agents
            assert sorted(agent.agent_id for agent in agents) == sorted(space.named_anew)
            assert all(agent.agent_id.startswith("recovered-") for agent in agents)
            assert all(line.is_brought for agent in agents for line in agent.lines)
        assert bound(store) == []
        assert store.care.check().is_clean
        manifests = {line.manifest for a in store.agents.page(NS).agents for line in a.lines}
    assert {
        version.manifest for version in life.told if hasattr(version, "manifest") and version.agent_id == "ada"
    } <= (manifests)


def test_a_damaged_journal_and_an_old_index_tell_together_what_each_still_can(life: Life, killed: Lab) -> None:
    path = killed.root / "journal"
    lines = path.read_bytes().split(b"\n")
    lines[5] = lines[5][:-3] + b"???"
    path.write_bytes(b"\n".join(lines))
    report = recovered(killed)
    assert "damaged" in report.source
    with killed.open() as store:
        assert {agent.agent_id for agent in store.agents.page(NS).agents} >= {"ada", "fork"}
        for each in life.versions:
            namespace = OTHER_NS if each.agent_id == "bob" else NS
            found = store.snapshots.get(namespace, each.agent_id, each.kv_identity_hash, each.version)
            assert found.manifest == each.manifest
        assert store.care.check().is_clean


def test_nothing_comes_back_bound_behind_a_block_of_other_bytes(lab: Lab) -> None:
    prompt = tuple(SyntheticAgent(SMALL, 1).turn(600).manifest.token_ids)
    with lab.open() as store:
        for name, engine, tokens in (("ada", 1, prompt[:300]), ("bob", 2, prompt)):
            content = SyntheticAgent(SMALL, engine_seed=engine).turn(tokens, is_prompt=True)
            publish(store, name, content, 0, bind_shared=True)
        before = bound(store)
    assert len(before) == 1
    remove_database(lab.root)
    assert recovered(lab).is_complete
    with lab.open() as store:
        assert bound(store) == before


def cut_in_a_line(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def cut_after_a_line(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\n", 0, len(data) - 1) + 1])


@pytest.mark.parametrize(
    ("cut", "has_index"),
    # Cut after a line, and without an index, nothing is left that could tell.
    [(cut_in_a_line, True), (cut_in_a_line, False), (cut_after_a_line, True)],
)
def test_a_journal_that_was_cut_is_not_the_whole_story(lab: Lab, cut: Callable[[Path], None], has_index: bool) -> None:
    agent = SyntheticAgent(SMALL, 1)
    with lab.open() as store:
        for parent in range(2):
            publish(store, "a", agent.turn(30), parent)
        head = store.snapshots.get(NS, "a")
    cut(lab.root / "journal")
    if not has_index:
        remove_database(lab.root)
    report = recovered(lab)
    assert not report.is_complete
    with lab.open() as store:
        heads = [line.manifest for each in store.agents.page(NS).agents for line in each.lines]
        assert head.manifest in heads
        assert not has_index or store.snapshots.get(NS, "a").version == 2


class DyingDisk(Disk):
    """Dies at its nth rename or removal."""

    def __init__(self, left: int) -> None:
        self.left = left

    def _effect(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def rename(self, source: Path, target: Path) -> None:
        self._effect()
        super().rename(source, target)
        self._effect()

    def remove(self, path: Path) -> None:
        self._effect()
        super().remove(path)
        self._effect()


@pytest.mark.long(4)
def test_a_recovery_that_dies_anywhere_can_be_done_again(life: Life, killed: Lab, tmp_path: Path) -> None:
    remove_log(killed.root)
    death = 0
    while True:
        death += 1
        again = Lab(tmp_path / f"again-{death}", chance=Chance(50))
        shutil.copytree(killed.root, again.root)
        try:
            recovered(again, disk=DyingDisk(death))
        except KeyboardInterrupt:
            pass
        else:
            break
        try:
            with again.open() as store:
                assert told(store) == life.told
        except (FailedPrecondition, DataLoss) as refused:
            assert "kvasir store recover" in refused.message  # noqa: PT017
            recovered(again)
            with again.open() as store:
                assert told(store) == life.told
                assert store.care.check().is_clean
        shutil.rmtree(again.root)
    assert death > 10


def remove_journal(root: Path) -> None:
    (root / "journal").unlink()


def damage_journal(root: Path) -> None:
    """From here on only the index in its log knows what there is."""
    path = root / "journal"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], *(line[:-3] + b"???" for line in lines[2:-1]), b""]))


@pytest.mark.long(16)
@pytest.mark.parametrize("harm", [damage_journal, remove_journal, remove_both])
def test_a_recovery_after_one_that_died_anywhere_has_all_that_the_first_had(
    killed: Lab, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """Also where the old index is needed, because the journal is not whole, and where the journal is all there is."""
    harm(killed.root)
    expected: list[object] = []
    for death in count():  # at 0 it does not die
        again = Lab(tmp_path / f"again-{death}", chance=Chance(50))
        shutil.copytree(killed.root, again.root)
        has_died = False
        try:
            recovered(again, disk=DyingDisk(death))
        except KeyboardInterrupt:
            has_died = True
            for early in range(1, 5):  # while it puts back what the first moved away
                with suppress(KeyboardInterrupt):
                    recovered(again, disk=DyingDisk(early))
            recovered(again)
        with again.open() as store:
            # Those that a recovery named anew are known agents to the next, and wait for a claim as those do.
            found = [*told(store), *(each for each in store.owners.known() if not each[1].startswith("recovered-"))]
            assert store.care.check().is_clean
        expected = expected or found
        assert found == expected, death
        assert not list(again.root.glob("*.recovering*"))
        shutil.rmtree(again.root)
        if death and not has_died:
            break
    assert death > 10


def test_an_index_that_was_put_back_by_hand_is_the_evidence_after_a_recovery_that_died(
    killed: Lab, tmp_path: Path
) -> None:
    """The files of the recovery that died neither replace it nor speak for the journal that is lost."""
    remove_journal(killed.root)
    for death in count(1):
        again = Lab(tmp_path / f"again-{death}", chance=Chance(50))
        shutil.copytree(killed.root, again.root)
        with pytest.raises(KeyboardInterrupt):
            recovered(again, disk=DyingDisk(death))
        if not (again.root / DATABASE).exists():
            break
    [kept] = again.root.glob(f"{DATABASE}.before-*")
    for path in killed.root.glob(f"{DATABASE}*"):
        shutil.copy(path, again.root)
    report = recovered(again)
    assert (report.source, report.is_complete) == ("the old index and manifests", False)
    assert kept.exists()
    assert kept.name not in report.kept


def test_a_running_store_is_not_recovered(lab: Lab) -> None:
    with lab.open(), pytest.raises(Unavailable) as refused:
        recovered(lab)
    assert refused.value.reason == "LOCKED"


def test_an_empty_directory_has_nothing_to_recover(lab: Lab) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        recovered(lab)
    assert refused.value.reason == "NOTHING_TO_RECOVER"


def test_the_program_recovers_a_namespace_that_was_kept_out(lab: Lab) -> None:
    with lab.open() as store:
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(300), 0)
    with sqlite3.connect(lab.root / DATABASE) as connection:
        connection.execute("UPDATE agents SET name = 'b'")
    connection.close()

    def store(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run("cachestore_svc", *arguments, "--data-dir", str(lab.root))

    found = store("check", "--json")
    assert found.returncode == 1
    assert "'a' is missing" in json.loads(found.stdout)["findings"][0]["detail"]
    done = store("recover", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["is_complete"]
    assert report["namespaces"][0]["versions"] == 1
    assert json.loads(store("check", "--json").stdout)["is_clean"]
    assert "1 versions of 1 agents came back" in store("recover").stdout
    with lab.open() as store:
        assert store.snapshots.get(NS, "a").version == 1
        with pytest.raises(NotFound):
            store.snapshots.get(NS, "b")
