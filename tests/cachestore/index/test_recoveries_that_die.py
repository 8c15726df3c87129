"""A recovery that dies at any effect on the disk: the next one has all that the first had."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from kvasir.errors import DataLoss, FailedPrecondition

from cachestore_svc.blobs.disk import Disk
from tests.cachestore.core.lab import Chance, Lab
from tests.cachestore.index.lives import DATABASE, Life, recovered, remove_both, remove_log, told


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
