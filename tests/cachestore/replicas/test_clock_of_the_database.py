"""Leases of stores over one database whose clock is set, or stands behind: none ends early, none holds for too long."""

from pathlib import Path

import pytest
from kvasir.errors import FailedPrecondition
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.records import HeldLease, LineKey
from cachestore_svc.index.catalog import CatalogChange
from cachestore_svc.index.postgres.clock_steps import ClockSteps
from cachestore_svc.index.postgres.lease_rows import LeaseRows
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.postgres import set_clock_of

KV = kv_identity_hash(SMALL)


def test_a_database_whose_clock_is_set_forward_ends_no_lease_early(stores: tuple[Lab, Store, Store], url: str) -> None:
    lab, a, b = stores
    a.leases.acquire(NS, "ada", KV, "engine-1", 10)
    b.leases.acquire(NS, "bob", KV, "engine-1", 5)
    lab.clock.pass_s(4)
    left_ms = []
    for store in (a, b, a):
        set_clock_of(url, lab.clock.now_s + 3600)
        with pytest.raises(FailedPrecondition) as refused:
            store.leases.acquire(NS, "ada", KV, "engine-2", 10)
        left_ms.append(int(refused.value.metadata["left_ms"]))
    assert left_ms == [6_001, 10_001, 10_001], "as before the step; and each store may find it"
    assert b.leases.renew_all(NS, "engine-1", KV, [HeldLease("ada", 1)], 10).lost == ()
    set_clock_of(url, lab.clock.now_s + 3600 + 11)
    lab.clock.now_s += 11
    assert b.leases.acquire(NS, "bob", KV, "engine-2", 10).token.generation == 2


def test_a_database_whose_clock_is_set_back_lets_no_lease_hold_for_longer_than_its_time(
    stores: tuple[Lab, Store, Store], url: str
) -> None:
    lab, a, b = stores
    a.leases.acquire(NS, "ada", KV, "engine-1", 10)
    b.leases.acquire(NS, "bob", KV, "engine-1", 10)
    for left_ms in (10_001, 9_001):
        set_clock_of(url, lab.clock.now_s - 3600)
        for store in (a, b):
            with pytest.raises(FailedPrecondition) as refused:
                store.leases.acquire(NS, "ada", KV, "engine-2", 10)
            assert refused.value.metadata["left_ms"] == str(left_ms)
        lab.clock.now_s += 1
    set_clock_of(url, lab.clock.now_s - 3600 + 8)
    lab.clock.now_s += 8
    for agent_id, store in (("ada", b), ("bob", a)):
        assert store.leases.acquire(NS, agent_id, KV, "engine-2", 10).token.generation == 2


@pytest.mark.long(2)
def test_a_store_that_starts_behind_a_step_of_its_databases_clock_ends_no_lease_early(
    stores: tuple[Lab, Store, Store], tmp_path: Path
) -> None:
    lab, a, b = stores
    token = a.leases.acquire(NS, "ada", KV, "engine-1", 10).token
    publish(a, "ada", SyntheticAgent(SMALL, 1).turn(30), 0, lease=token)
    b.close()
    lab.clock.databases_set_by_s = 3600
    lab.clock.pass_s(0)
    with Lab(tmp_path / "b", lab.clock, catalog=lab.catalog, kept_blobs=lab.kept_blobs).open() as c:
        for passed_s in (0, 9):
            lab.clock.pass_s(passed_s)
            with pytest.raises(FailedPrecondition, match="held by engine-1"):
                c.leases.acquire(NS, "ada", KV, "engine-2", 10)
            with pytest.raises(FailedPrecondition, match="held by engine-1"):
                publish(c, "ada", SyntheticAgent(SMALL, 2).turn(30), 1)
            with pytest.raises(FailedPrecondition, match="held by engine-1"):
                c.agents.delete(NS, "ada")
        lab.clock.pass_s(1)
        c.agents.delete(NS, "ada")


def test_a_step_amid_a_group_ends_no_lease_of_that_group(stores: tuple[Lab, Store, Store], url: str) -> None:
    lab, a, b = stores
    token = a.leases.acquire(NS, "ada", KV, "engine-1", 10).token
    b.leases.acquire(NS, "bob", KV, "engine-1", 10)
    lab.clock.pass_s(10)
    a.leases.renew(NS, "ada", KV, token, 10)

    def left_s(change: CatalogChange) -> float:
        set_clock_of(url, lab.clock.now_s + 3600)
        return b._core.leases.within(change).left_s(LineKey(NS, "ada", KV), token, 10)

    assert b._core.write(NS, left_s) == pytest.approx(10, abs=0.01)


def test_an_answer_that_comes_late_is_no_step_of_a_clock_and_hides_none() -> None:
    now_s, ahead_s, soon = 0.0, 100.0, (0.005, 0.005)
    steps = ClockSteps(lambda: now_s)

    def asked(until_it_looks_s: float, until_answered_s: float) -> int:
        nonlocal now_s
        now_s += until_it_looks_s
        answer = round(1000 * (now_s + ahead_s))
        now_s += until_answered_s
        return answer

    def group(*looks: tuple[float, float]) -> int | None:
        left = iter(looks)
        steps.begin()
        found = steps.step_ms(asked(*next(left)), lambda: asked(*next(left)))
        steps.keep()
        assert next(left, None) is None
        return found

    assert [group(soon), group((0, 8), soon), group((8, 0), soon)] == [0, None, None], "at first anything may have been"
    assert group((0, 8), (8, 0), soon) is None
    assert steps.unseen_ms == 0
    ahead_s += 3
    assert group(*[(4, 4)] * 4) is None
    assert 3000 <= steps.unseen_ms <= 8100, "what was taken for no step may be one"
    ahead_s -= 3
    assert group(soon) is None
    assert steps.unseen_ms == 0
    for step_s, looks in ((30, [soon]), (3, [(0, 8), soon]), (3, [(8, 0), (9, 9), soon]), (9, [(4, 4)] * 4)):
        ahead_s += step_s
        found = group(*looks)
        assert found is not None
        assert 1000 * step_s <= found <= 1000 * (step_s + sum(looks[-1])) + 20
    ahead_s -= 30
    assert group(soon) == 0
    now_s, ahead_s = now_s + 5000, ahead_s + 4  # two clocks that run at different speeds
    assert group(soon) is None
    assert steps.unseen_ms >= 4000


def test_a_lease_counts_as_ended_once_it_ended_before_all_that_may_be_an_unseen_step(
    stores: tuple[Lab, Store, Store],
) -> None:
    lab, a, _ = stores
    steps = ClockSteps(lab.clock.steady)
    steps.begin()
    steps.step_ms(round(1000 * lab.clock.now_s), lambda: 0)
    steps.keep()
    token = a.leases.acquire(NS, "ada", KV, "engine-1", 5).token
    lab.clock.pass_s(6)

    def left_s(change: CatalogChange) -> float:
        return LeaseRows(change, steps).left_s(LineKey(NS, "ada", KV), token, 5)

    assert a._core.write(NS, left_s) == 0
    steps.unseen_ms = 2000
    assert a._core.write(NS, left_s) == 1


def test_a_step_that_a_group_found_without_effect_is_found_again() -> None:
    steps, found = ClockSteps(lambda: 0.0), []
    for server_s, takes_effect in ((1, True), (9, False), (9, True), (9, True)):
        steps.begin()
        found.append(steps.step_ms(1000 * server_s, lambda: 0))
        if takes_effect:
            steps.keep()
    assert found == [0, 8000, 8000, None]
