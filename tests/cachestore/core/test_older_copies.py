"""An older copy of a data directory that is put back is refused, whole as it is; and no crash makes one look old."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from kvasir.errors import Conflict, FailedPrecondition
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import LeaseToken
from cachestore_svc.journal import journal, last_run
from tests.cachestore.core.lab import NS, Lab, publish, run_sql
from tests.cachestore.service.running import StoreHome, store_home
from tests.cachestore.service.running import publish as publish_over
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import SMALL, SyntheticAgent

KV = kv_identity_hash(SMALL)
KILLS = sampled(4, of=60)


class Life:
    """A lab's directory in which one agent lives, and what lies in it at different times."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.memory = SyntheticAgent(SMALL, 1)
        self.turns = 0

    def turn(self, **settings: object) -> None:
        with self.lab.open(**settings) as store:  # type: ignore[arg-type]
            publish(store, "ada", self.memory.turn(20), self.turns)
        self.turns += 1

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.lab.root, self.lab.root.with_name(name)))

    def put_back(self, copy: Path) -> None:
        shutil.rmtree(self.lab.root)
        shutil.copytree(copy, self.lab.root)

    @property
    def newest(self) -> int:
        with self.lab.open() as store:
            return store.snapshots.get(NS, "ada").version

    def refusal(self) -> FailedPrecondition:
        with pytest.raises(FailedPrecondition) as refused:
            self.lab.open()
        assert refused.value.reason == "INDEX_BEHIND"
        return refused.value

    @property
    def note(self) -> Path:
        found = journal.read(self.lab.root / journal.NAME, Disk())
        assert found is not None
        return last_run.place(Path(os.environ["KVASIR_STORE_LAST_RUNS_DIR"]), self.lab.root, found.store)


@pytest.fixture
def life(lab: Lab) -> Life:
    life = Life(lab)
    life.turn()
    return life


def test_an_older_directory_put_back_whole_is_refused_until_its_owner_accepts_it(life: Life) -> None:
    older = life.copy("older")
    life.lab.clock.pass_s(3600)
    life.turn()
    newer = life.copy("newer")
    life.put_back(older)
    words = life.refusal().message
    assert "2027-01-15 08:00:00+00:00" in words, "when the copy last ran"
    assert "2027-01-15 09:00:00+00:00" in words, "and when the directory did"
    assert "--accept-older" in words
    assert (life.lab.root / "journal").read_bytes() == (older / "journal").read_bytes(), "a refusal changes nothing"
    with life.lab.open(accept_older=True) as store:
        assert store.snapshots.get(NS, "ada").version == 1
    assert life.newest == 1, "it was accepted once and for all"
    life.put_back(newer)
    assert life.newest == 2, "what was given up goes on from the accepted one"


def test_an_accepted_copy_ends_the_leases_of_its_earlier_life_and_no_other_start_does(life: Life) -> None:
    def take(owner: str, *, accept_older: bool = False) -> int:
        with life.lab.open(accept_older=accept_older) as store:
            return store.leases.acquire(NS, "ada", KV, owner).token.generation

    first = take("earlier")
    older = life.copy("older")
    run_sql(life.lab, "UPDATE facts SET value = '' WHERE name = 'inode'")  # as after a crash
    with pytest.raises(FailedPrecondition, match="held by earlier"):
        take("later", accept_older=True)  # no copy: its engines may live
    with life.lab.open() as store:
        publish(store, "eve", SyntheticAgent(SMALL, 2).turn(20), 0)
    life.lab.root.rename(life.lab.root.with_name("gone"))
    shutil.copytree(older, life.lab.root)
    life.refusal()
    assert take("later", accept_older=True) > first
    with life.lab.open() as store:
        with pytest.raises(Conflict, match="fenced"):
            store.leases.renew(NS, "ada", KV, LeaseToken("earlier", first))
    with pytest.raises(FailedPrecondition, match="held by later"):
        take("third", accept_older=True)  # which copy it is was noted
    life.lab.root = life.copy("moved")
    with pytest.raises(FailedPrecondition, match="held by later"):
        take("third")  # a copy that nobody accepted: a store that was moved while its engines live


def test_a_longer_directory_of_another_history_is_refused(life: Life) -> None:
    older = life.copy("older")
    life.turn()
    life.turn()
    longer = life.copy("longer")
    life.put_back(older)
    other = SyntheticAgent(SMALL, 2)
    with life.lab.open(accept_older=True) as store:
        publish(store, "eve", other.turn(20), 0)
    life.put_back(longer)
    life.refusal()


def test_directories_that_were_moved_copied_or_damaged_are_taken_as_they_are(life: Life) -> None:
    older = life.copy("older")
    life.turn()
    assert Life(Lab(older)).newest == 1, "a copy goes on at a place of its own"
    moved = life.lab.root.rename(life.lab.root.with_name("moved"))
    life.lab.root = moved
    assert life.newest == 2
    moved.rename(life.lab.root.with_name("data"))
    life.lab.root = moved.with_name("data")
    life.turn()
    # Ahead of its note: a loss of power, or a time without.
    behind = life.note.read_bytes()
    life.turn()
    life.note.write_bytes(behind)
    assert life.newest == 4


def test_a_note_that_is_torn_copied_or_cannot_be_kept_stops_no_store(life: Life) -> None:
    older = life.copy("older")
    life.turn()
    life.turn()
    note = life.note
    whole = note.read_bytes()
    note.write_bytes(whole[:40] + b"?" + whole[41:])
    life.put_back(older)
    life.refusal()  # one of two is enough
    copy = note.with_name("copy")
    copy.write_bytes(whole)
    copy.rename(note)  # as a copy of all that the user has brings it to another machine
    assert life.newest == 1
    note.write_bytes(b"?" * 9000)
    assert life.newest == 1
    nowhere = life.lab.root.with_name("file")
    nowhere.write_text("no directory")
    with life.lab.open(last_runs_dir=nowhere) as store:
        assert store.snapshots.get(NS, "ada").version == 1


def test_who_only_looks_may_look_at_an_older_copy(life: Life) -> None:
    older = life.copy("older")
    life.turn()
    life.put_back(older)
    home = StoreHome(life.lab.root.parent)
    assert home.check()["findings"] == []
    life.refusal()


def test_of_killed_stores_the_newest_directory_starts_and_no_older_one(tmp_path: Path) -> None:
    chance = random.Random(9)
    with store_home(tmp_path) as home:
        memory, turns, older = SyntheticAgent(SMALL, 1), 0, tmp_path / "older"
        for kill in range(KILLS):
            running = home.start()
            with running.client() as client:
                for _ in range(chance.randint(1, 3)):
                    publish_over(client, "ada", memory.turn(20), turns)
                    turns += 1
            time.sleep(chance.random() / 50)
            running.kill()
            newest = home.data_dir.rename(tmp_path / f"newest-{kill}")
            if older.exists():
                shutil.copytree(older, home.data_dir)
                assert "is older" in home.refusal()
                shutil.rmtree(home.data_dir)
                shutil.rmtree(older)
            shutil.copytree(newest, older)
            newest.rename(home.data_dir)
        shutil.rmtree(home.data_dir)
        shutil.copytree(older, home.data_dir)
        assert home.start().client().get_agent("ada").lines[0].version == turns, "a copy of the newest is the newest"
