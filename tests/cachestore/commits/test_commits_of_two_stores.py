"""Stores over one database of PostgreSQL and one bucket commit by difference, while others let go of what they know."""

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from kvasir.errors import KvasirError, NotFound
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.known_manifests import KnownManifests
from cachestore_svc.index.catalog import open_postgres
from cachestore_svc.index.sqlite import versions
from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.recovery import on_server
from cachestore_svc.recovery.medium import blobs_of
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, damaged, publish
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.postgres import PostgresServer, postgres  # noqa: F401

_BLOBS = "s3://bucket/agents"
_SECONDS = sampled(6, of=60)
_EXPECTED = {"BLOB_MISSING", "WRITE_IN_PROGRESS", "BLOB_NOT_FOUND"}  # to one who writes without a grace period


@pytest.fixture
def stores(
    postgres: PostgresServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Store, Store]]:
    monkeypatch.setattr(on_server, "open_postgres", partial(open_postgres, shared_as={"blobs": _BLOBS}))
    bucket, url = Bucket(MemoryStore(), _BLOBS), postgres.url(postgres.new_database())
    a = Lab(tmp_path / "a", catalog=url)
    b = Lab(tmp_path / "b", a.clock, catalog=url)
    first, second = (
        blobs_of(replace(lab.config(), blobs=_BLOBS, catalog=""), Disk(), bucket, only_looks=lab is b) for lab in (a, b)
    )
    second.owner = first.owner  # type: ignore[attr-defined]
    a.kept_blobs, b.kept_blobs = first, second
    how = {"grace_period_s": 0.0, "retained_versions": 2}
    with a.open(**how) as one:
        shutil.copy(a.root / on_server.NAME, b.root)
        with b.open(**how) as other:
            for store in (one, other):
                store.snapshots._manifests = KnownManifests(0)
            yield one, other


def live(stores: tuple[Store, Store], number: int, until_s: float) -> None:
    """An agent grows by turns, through one store or the other. Others have its first turns, too. Sometimes it is
    deleted amid them, and its next turn follows a manifest that perhaps no version is any more.
    """
    dice, name = random.Random(number), f"agent-{number}"
    while time.monotonic() < until_s:
        mind, store, version = SyntheticAgent(SMALL, number % 2), dice.choice(stores), 0
        try:
            for turn in range(4):
                store = store if dice.random() < 0.8 else dice.choice(stores)
                content = mind.turn(300, is_prompt=turn < 2 or dice.random() < 0.5)
                made, reader = publish(store, name, content, version), dice.choice(stores)
                held = reader._core.read(NS, lambda view: view.named_after(content.manifest_digest, -1, -1))  # noqa: B023
                assert [digest for _, digest in held] == content.digests
                assert_restores(reader, made, content)
                version = made.version
                if dice.random() < 0.3:
                    dice.choice(stores).agents.delete(NS, name)
                    version = 0
        except KvasirError as error:
            if error.reason not in _EXPECTED:
                raise
        with suppress(NotFound):
            dice.choice(stores).agents.delete(NS, name)


@pytest.mark.fleet
def test_a_commit_by_difference_holds_all_blobs_whatever_another_store_lets_go(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, known_part, is_over = Counter[bool](), versions.known_part, threading.Event()

    def counted(rows: Rows, *about: object) -> versions.KnownPart:
        found = known_part(rows, *about)  # type: ignore[arg-type]
        known[bool(found.length)] += 1
        return found

    def collect(store: Store) -> None:
        while not is_over.wait(0.02):
            store.care.collect_garbage()

    monkeypatch.setattr(versions, "known_part", counted)
    with ThreadPoolExecutor(6) as threads:
        collecting = [threads.submit(collect, store) for store in stores]
        until_s = time.monotonic() + _SECONDS
        living = [threads.submit(live, stores, number, until_s) for number in range(4)]
        failures = [each.exception() for each in living]
        is_over.set()
        failures += [each.exception() for each in collecting]
    assert failures == [None] * 6
    assert known[True] > 5, known
    assert damaged(stores[0], NS) == []
    assert stores[0].care.check().is_clean
