"""A lost index is built anew: every version whose manifest is there comes back as it was, and what does not is told."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import Conflict, DataLoss, FailedPrecondition, NotFound, Unavailable

from cachestore_svc.facts.records import LeaseToken, Origin
from cachestore_svc.index.values import CommitTerms
from tests.cachestore.core.lab import NS, Chance, Lab, damaged, publish, upload
from tests.cachestore.index.lives import (
    DATABASE,
    MIXED_HASH,
    OTHER_NS,
    Life,
    bound,
    recovered,
    remove_both,
    remove_database,
    remove_log,
    told,
)
from tests.made_models.sampling import first_and_in_turn
from tests.made_models.synthetic import MIXED, SMALL, WINDOWED, SyntheticAgent
from tests.running.programs import run


def cut_log(root: Path) -> None:
    path = root / f"{DATABASE}-wal"
    os.truncate(path, path.stat().st_size // 2)


def nothing(root: Path) -> None:
    pass


@pytest.mark.parametrize(
    "harm", first_and_in_turn([remove_both, cut_log, remove_database, remove_log, nothing], seconds=2, first=2)
)
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
                NS, "ada", SyntheticAgent(MIXED, 77).turn(30).manifest_digest, head.version, CommitTerms(life.lease)
            )
        assert fenced.value.reason == "LEASE_FENCED"
        assert isinstance(taken, LeaseToken)


def test_a_version_whose_manifest_is_gone_is_reported_by_agent_and_version(life: Life, killed: Lab) -> None:
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


@pytest.mark.long(3)
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


@pytest.mark.parametrize("is_shortened", [False, True])
def test_a_text_that_is_its_agents_own_behind_a_move_comes_back_so(
    lab: Lab, is_shortened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SyntheticAgent(SMALL, 1)
    with lab.open() as store:
        for parent, terms in enumerate((CommitTerms(origin=Origin.MOVE, is_text_own=True), CommitTerms())):
            content = agent.turn(300)
            upload(store, content)
            made = store.snapshots.commit(NS, "ada", content.manifest_digest, parent, terms)
            assert (made.is_brought, made.is_text_own) == (True, True)
        if is_shortened:
            monkeypatch.setattr("cachestore_svc.journal.journal.Journal.is_long", True)
            store.care.collect_garbage()
        before = told(store)
    remove_database(lab.root)
    assert recovered(lab).is_complete
    with lab.open() as store:
        assert told(store) == before


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
    assert "1 version of 1 agent came back" in store("recover").stdout
    with lab.open() as store:
        assert store.snapshots.get(NS, "a").version == 1
        with pytest.raises(NotFound):
            store.snapshots.get(NS, "b")


@pytest.mark.long(2)
def test_letters_that_the_output_lacks_end_no_report_of_a_recovery(lab: Lab) -> None:
    with lab.open() as store:
        publish(store, "Małgorzata", SyntheticAgent(SMALL, 1).turn(300), 0)
    max(lab.root.glob("namespaces/*/blobs/*/*"), key=lambda file: file.stat().st_size).unlink()
    command = [sys.executable, "-m", "cachestore_svc", "recover", "--data-dir", str(lab.root)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert "'Ma\\u0142gorzata' version 1 lacks blobs" in done.stdout, done.stderr
    assert "the old index is kept: kvasir.sqlite3.before-" in done.stdout
