"""What is no regular file is damaged, and nobody waits for it; and a clock beyond the year 9999 stands at its end."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.errors import DataLoss, Unavailable
from kvasir.server.answers import written

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.edge.messages import write_agent, write_event
from cachestore_svc.facts.records import LAST_UNIX_MS
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, damaged, publish, upload
from tests.made_models.synthetic import SMALL, SyntheticAgent


def a_socket(path: Path) -> None:
    # By its name alone: the whole path may be longer than the name of a socket can be.
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)


def a_directory(path: Path) -> None:
    path.mkdir()


STRANGE = (os.mkfifo, a_socket, a_directory)


def in_time(work: Callable[[], None]) -> None:
    """Do it on a thread that may hang, and do not wait for ever."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "somebody waits for what never comes"
    if failures:
        raise failures[0]


@pytest.mark.parametrize("make", STRANGE)
def test_what_lies_where_a_blob_should_and_is_no_file_is_damaged_and_hangs_nobody(
    lab: Lab, store: Store, make: Callable[[Path], None]
) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    publish(store, "a", content, 0)
    path = lab.blob_files[content.digests[0].hash]
    path.unlink()
    make(path)

    def read() -> None:
        with pytest.raises(DataLoss) as lost:
            store.blobs.read(NS, content.digests[0])
        assert lost.value.metadata == {"digest": content.digests[0].hash}

    in_time(read)
    assert damaged(store) == [content.digests[0]]
    if make is not a_directory:
        upload(store, content)
        assert_restores(store, store.snapshots.get(NS, "a"), content)


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("name", ["ballast", "journal", "closed"])
def test_a_store_starts_beside_what_is_no_file(lab: Lab, make: Callable[[Path], None], name: str) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        publish(store, "a", content, 0)
    (lab.root / name).unlink()
    make(lab.root / name)

    def start() -> None:
        with lab.open() as store:
            assert_restores(store, store.snapshots.get(NS, "a"), content)
            assert store.care.check().is_clean

    in_time(start)


def test_a_lock_that_is_no_file_is_refused_in_words(lab: Lab) -> None:
    lab.open().close()
    (lab.root / "lock").unlink()
    os.mkfifo(lab.root / "lock")

    def start() -> None:
        with pytest.raises(Unavailable, match="the data directory"):
            lab.open()

    in_time(start)


def test_reading_a_device_is_refused() -> None:
    with pytest.raises(OSError, match="no regular file"):
        Disk().read(Path("/dev/zero"), 10)


@pytest.mark.parametrize("now_s", [LAST_UNIX_MS / 1000 + 1, 1e15, -5.0])
def test_a_commit_under_an_absurd_clock_can_be_told(lab: Lab, now_s: float) -> None:
    """What took effect must be answered, and so must every listing after it."""
    lab.clock.now_s = now_s
    with lab.open() as store:
        start = store.events.after(NS, None).cursor
        done = publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
        assert written(pb.SnapshotVersion, done).created_at.ToMilliseconds() >= 0
        for agent in store.agents.page(NS).agents:
            write_agent(agent)
        for event in store.events.after(NS, start).events:
            write_event(event)
        assert store.agents.delete(NS, "a").bytes_gone_by_unix_ms >= 0


def test_a_time_beyond_9999_that_was_stored_before_is_reported_as_its_end(store: Store) -> None:
    publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
    store._core.catalog.write(NS, lambda rows: rows.run("UPDATE lines SET used_unix_ms = :at", at=1 << 60))
    [agent] = store.agents.page(NS).agents
    assert write_agent(agent).used_at.ToMilliseconds() == LAST_UNIX_MS
