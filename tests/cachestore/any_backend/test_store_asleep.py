"""A version that is asleep names no blob: it takes the place of all before it, and their blobs go as any garbage."""

import pytest
from kvasir.errors import NotFound
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import BlobKind, Origin
from cachestore_svc.index.values import CommitTerms
from tests.cachestore.core.lab import NS, Lab, publish, write
from tests.made_models.synthetic import SMALL, SyntheticAgent, asleep


def test_a_sleeping_agent_frees_its_blobs_but_not_those_of_others(lab: Lab) -> None:
    alone, shared = SyntheticAgent(SMALL, 1), SyntheticAgent(SMALL, 2)
    with lab.open(grace_period_s=0.0) as store:
        publish(store, "ada", alone.turn(300), 0)
        store.agents.update(NS, "ada", retained_versions=5)
        newest = alone.turn(300)
        publish(store, "ada", newest, 1)
        publish(store, "ben", shared.turn(300), 0)
        store.agents.fork(NS, "ada", "cyd", version=1)
        data = asleep(newest.manifest)
        write(store, Digest.of(data), data, BlobKind.MANIFEST)
        made = store.snapshots.commit(NS, "ada", Digest.of(data), 2)
        assert (made.version, made.total_bytes) == (3, len(data))
        assert (made.origin_detail, made.base_version) == ("asleep, wakes in 1200 ms", 2)
        kept = [each.version for each in store.snapshots.page(NS, "ada").snapshots]
        assert kept == [3], "whatever the agent says of its versions"
        for _ in range(2):
            store.care.collect_garbage(NS)
        assert store.agents.usage(NS, "ada").blob_bytes == len(data)
        with pytest.raises(NotFound):
            store.blobs.read(NS, newest.digests[-1])  # nobody else's
        assert store.care.check().is_clean
        assert not list(store.care.verify(NS, "cyd"))[-1].damaged
    with lab.open(grace_period_s=0.0) as store:
        store.agents.fork(NS, "ada", "dan")
        dan = store.agents.get(NS, "dan").lines[0]
        assert (dan.token_count, dan.total_bytes) == (600, len(data))
        assert dan.origin_detail == "ada version 3, asleep, wakes in 1200 ms"
        back = store.agents.roll_back(NS, "ada", 3)
        assert (back.origin_detail, back.base_version) == ("version 3, asleep, wakes in 1200 ms", 3)
        by_import = CommitTerms(origin=Origin.IMPORT, origin_detail="ada")
        came = store.snapshots.commit(NS, "eva", Digest.of(data), 0, by_import)
        assert (came.origin_detail, came.base_version) == ("ada, asleep, wakes in 1200 ms", 0)
