"""Whatever a loss of power leaves of what was not synced: acknowledged snapshots are there, and no row lacks bytes."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kvasir.errors import NotFound
from kvasir.formats.blob_place import HANDED

from cachestore_svc.facts.records import SnapshotVersion
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, damaged, hand_all, publish, upload
from tests.cachestore.core.survival.power_loss import RecordingDisk, losses
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import MIXED, SMALL, SyntheticAgent, SyntheticSnapshot

MOMENTS = sampled(60, of=200)


@dataclass
class Acknowledged:
    """A version, and from which effect to which it must be there."""

    snapshot: SnapshotVersion
    content: SyntheticSnapshot
    since: int
    until: int = 1 << 60


@dataclass
class Life:
    """Some work on a recording disk, with what was acknowledged when."""

    lab: Lab
    store: Store
    disk: RecordingDisk
    acknowledged: list[Acknowledged] = field(default_factory=list)

    def turn(self, name: str, agent: SyntheticAgent, tokens: int, parent: int) -> None:
        content = agent.turn(tokens)
        if parent % 2:  # as files, and the manifest with them
            hand_all(self.lab, self.store, content)
        done = publish(self.store, name, content, parent)
        self.acknowledged.append(Acknowledged(done, content, len(self.disk.log)))

    def delete(self, name: str) -> None:
        # From the moment of asking nothing is promised.
        for each in self.acknowledged:
            if each.snapshot.agent_id == name:
                each.until = min(each.until, len(self.disk.log))
        self.store.agents.delete(NS, name)


@pytest.fixture(scope="module")
def life(memory_directory: Path) -> Life:
    root, copies = memory_directory / "recorded", memory_directory / "copies"
    root.mkdir()
    copies.mkdir()
    lab = Lab(root)
    disk = RecordingDisk(root, copies)
    with lab.open(disk, grace_period_s=10.0) as store:
        life = Life(lab, store, disk)
        huginn, muninn = SyntheticAgent(MIXED, 1), SyntheticAgent(SMALL, 2)
        for turn in range(3):
            life.turn("huginn", huginn, 300, turn)
            life.turn("muninn", muninn, 90, turn)
        # What was uploaded, never committed, is garbage; and so is what a deleted agent leaves.
        upload(store, SyntheticAgent(SMALL, 3).turn(280))
        life.delete("muninn")
        store.care.collect_garbage()
        lab.clock.pass_s(60)
        assert store.care.collect_garbage().blobs_swept
        # A blob that was swept is written again.
        life.turn("muninn", SyntheticAgent(SMALL, 2), 90, 0)
    assert any(effect.path.parent.name == HANDED for effect in disk.log if effect.what == "rename")
    return life


@pytest.mark.long(8)
def test_every_acknowledged_snapshot_outlives_any_loss_of_power(life: Life) -> None:
    log = life.disk.log
    # Around every fsync, rename, removal and commit; and a sample of the rest.
    edges = {i + d for i, e in enumerate(log) if e.what in ("fsync", "rename", "remove", "commit") for d in (0, 1)}
    moments = sorted(random.Random(5).sample(sorted(edges), min(MOMENTS, len(edges))))
    problems = []
    for moment, fate, root in losses(life.disk, moments, seed=6):
        with Lab(root).open() as store:
            if gone := damaged(store, NS):
                problems.append(f"{moment} {fate}: rows without bytes: {gone}")
            if findings := store.care.check().findings:
                problems.append(f"{moment} {fate}: {findings}")
            for each in life.acknowledged:
                if each.since <= moment <= each.until:
                    try:
                        assert_restores(store, each.snapshot, each.content)
                    except (NotFound, AssertionError) as error:
                        problems.append(f"{moment} {fate}: version {each.snapshot.version} is lost: {error!r}")
    assert problems == []


def test_the_recording_has_every_kind_of_effect(life: Life) -> None:
    kinds = {effect.what for effect in life.disk.log}
    assert kinds >= {"directory", "name", "write", "fsync", "rename", "remove", "commit"}
