"""Leases: who may extend a line, on a clock that nobody sets; what takes a memory back waits for them, and fences."""

from collections.abc import Callable

import pytest
from kvasir.errors import Conflict, FailedPrecondition, InvalidArgument, KvasirError, NotFound
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.records import HeldLease, LeaseToken, LeaseWanted, Origin
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, publish, upload
from tests.made_models.synthetic import SMALL, TINY, SyntheticAgent

KV = kv_identity_hash(SMALL)


def test_a_fenced_late_writer_is_refused(lab: Lab, store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    old = store.leases.acquire(NS, "a", KV, "engine-1", 10)
    publish(store, "a", agent.turn(30), 0, lease=old.token)
    late = agent.fork(seed=5).turn(30)
    lab.clock.pass_s(11)
    new = store.leases.acquire(NS, "a", KV, "engine-2", 10)
    assert new.token.generation == old.token.generation + 1
    assert new.newest is not None
    assert new.newest.version == 1
    with pytest.raises(Conflict) as refused:
        publish(store, "a", late, 1, lease=old.token)
    assert refused.value.reason == "LEASE_FENCED"
    for call in (store.leases.renew, store.leases.release):
        with pytest.raises(Conflict):
            call(NS, "a", KV, old.token)
    publish(store, "a", agent.turn(30), 1, lease=new.token)


def test_a_live_lease_refuses_others_and_turns_without_one(lab: Lab, store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    lease = store.leases.acquire(NS, "a", KV, "engine-1", 10)
    content = agent.turn(30)
    for call in (
        lambda: store.leases.acquire(NS, "a", KV, "engine-2", 10),
        lambda: publish(store, "a", content, 0),
    ):
        with pytest.raises(FailedPrecondition) as refused:
            call()
        assert refused.value.reason == "LEASE_HELD"
        assert refused.value.metadata["owner"] == "engine-1"
    assert store.leases.acquire(NS, "a", KV, "engine-1", 10).token == lease.token
    lab.clock.pass_s(11)
    publish(store, "a", content, 0)


def test_a_lease_that_ended_and_that_nobody_took_may_be_renewed_and_still_commits(lab: Lab, store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    lease = store.leases.acquire(NS, "a", KV, "engine-1", 10)
    lab.clock.pass_s(60)
    publish(store, "a", agent.turn(30), 0, lease=lease.token)
    assert store.leases.renew(NS, "a", KV, lease.token, 10).expires_unix_ms == int(lab.clock() * 1000) + 10_000


def test_generations_only_rise_also_over_release_delete_and_restart(lab: Lab) -> None:
    generations = []
    with lab.open() as store:
        for _ in range(3):
            lease = store.leases.acquire(NS, "a", KV, "engine-1", 10)
            generations.append(lease.token.generation)
            store.leases.release(NS, "a", KV, lease.token)
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
        store.agents.delete(NS, "a")
    with lab.open() as store:
        generations.append(store.leases.acquire(NS, "a", KV, "engine-2", 10).token.generation)
    assert generations == [1, 2, 3, 5]  # what was deleted was fenced


def test_a_lease_of_absurd_length_is_refused(store: Store) -> None:
    for ttl_s in (0.5, 0, -1, 601, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="ttl"):
            store.leases.acquire(NS, "a", KV, "engine-1", ttl_s)


def test_a_lease_that_is_not_there_is_not_found(store: Store) -> None:
    token = store.leases.acquire(NS, "a", KV, "engine-1", 10).token
    with pytest.raises(NotFound):
        store.leases.renew(NS, "b", KV, token)


# --- the clock ---


@pytest.mark.parametrize("step_s", [-7200, 7200, 40 * 365 * 86400])
def test_a_clock_that_is_set_neither_ends_nor_prolongs_a_lease(step_s: float, lab: Lab, store: Store) -> None:
    store.leases.acquire(NS, "a", KV, "engine-1", 10)
    lab.clock.set_by_s = step_s
    lab.clock.pass_s(9)
    with pytest.raises(FailedPrecondition):
        store.leases.acquire(NS, "a", KV, "engine-2", 10)
    lab.clock.pass_s(2)
    assert store.leases.acquire(NS, "a", KV, "engine-2", 10).token == LeaseToken("engine-2", 2)


@pytest.mark.parametrize("step_s", [0, *(pytest.param(step, marks=pytest.mark.fleet) for step in (3600, -3600))])
def test_after_a_restart_a_lease_has_its_whole_time_again(step_s: float, lab: Lab) -> None:
    """Wherever the database's clock was set to meanwhile: those of a fleet have one."""
    with lab.open() as store:
        token = store.leases.acquire(NS, "a", KV, "engine-1", 10).token
        store.leases.acquire(NS, "c", KV, "engine-1", 10)
        store.leases.release(NS, "b", KV, store.leases.acquire(NS, "b", KV, "engine-1", 10).token)
        lab.clock.pass_s(2)
    lab.clock.databases_set_by_s = step_s
    lab.clock.pass_s(0)
    with lab.open() as store:
        store.leases.acquire(NS, "b", KV, "engine-2", 10)
        lab.clock.pass_s(7)
        if not lab.has_lease_ends:  # there it may have ended, and somebody may have committed since
            assert store.leases.renew_all(NS, "engine-1", KV, [HeldLease("a", token.generation)], 10).lost == ()
        store.leases.renew(NS, "a", KV, token, 10)
        lab.clock.pass_s(2)
        for agent_id in ("a", "c"):
            with pytest.raises(FailedPrecondition):
                store.leases.acquire(NS, agent_id, KV, "engine-2", 10)
        lab.clock.pass_s(2)
        store.leases.acquire(NS, "c", KV, "engine-2", 10)
        with pytest.raises(FailedPrecondition):
            store.leases.acquire(NS, "a", KV, "engine-2", 10)
        lab.clock.pass_s(7)
        assert store.leases.acquire(NS, "a", KV, "engine-2", 10).token.generation == token.generation + 1


def test_the_same_owner_has_its_lease_at_once_and_may_fence_the_process_that_it_was(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    before = store.leases.acquire(NS, "a", KV, "engine-1", 10).token
    now = store.leases.acquire(NS, "a", KV, "engine-1", 10, begins_anew=True).token
    assert now.generation == before.generation + 1
    content = agent.turn(30)
    with pytest.raises(Conflict):
        publish(store, "a", content, 0, lease=before)
    publish(store, "a", content, 0, lease=now)


def test_a_lease_that_ended_and_that_nobody_took_is_its_owners_again_under_the_same_generation(
    lab: Lab, store: Store
) -> None:
    """What its owner was about to commit is not fenced by its own return."""
    token = store.leases.acquire(NS, "a", KV, "engine-1", 10).token
    lab.clock.pass_s(60)
    assert store.leases.acquire(NS, "a", KV, "engine-1", 10).token == token


# --- many at once ---


def test_many_leases_are_prolonged_at_once(lab: Lab, store: Store) -> None:
    for name in ("a", "b", "c"):
        store.leases.acquire(NS, name, KV, "engine-1", 10)
    held = [HeldLease(name, 1) for name in ("a", "b", "c")]
    for _ in range(5):
        lab.clock.pass_s(8)
        assert store.leases.renew_all(NS, "engine-1", KV, held, 10).lost == ()
    lost = store.leases.renew_all(NS, "engine-1", KV, [*held, HeldLease("a", 2), HeldLease("d", 1)], 10).lost
    assert lost == (HeldLease("a", 2), HeldLease("d", 1))
    assert store.leases.renew_all(NS, "engine-2", KV, held, 10).lost == tuple(held)
    lab.clock.pass_s(11)
    assert store.leases.renew_all(NS, "engine-1", KV, held, 10).lost == tuple(held)


def test_no_lease_is_prolonged_for_longer_than_it_has_after_a_restart(lab: Lab, store: Store) -> None:
    """Its row has the time for which it was acquired: a store that starts again knows of no other."""
    store.leases.acquire(NS, "a", KV, "engine-1", 10)
    held = [HeldLease("a", 1)]
    assert store.leases.renew_all(NS, "engine-1", KV, held, 60).lost == tuple(held)
    lab.clock.pass_s(9)
    assert store.leases.renew_all(NS, "engine-1", KV, held, 10).lost == ()
    store.leases.renew(NS, "a", KV, LeaseToken("engine-1", 1), 60)
    assert store.leases.renew_all(NS, "engine-1", KV, held, 60).lost == ()


# --- what takes a memory back ---


def taken_back(store: Store, how: str) -> object:
    match how:
        case "rollback":
            return store.agents.roll_back(NS, "a", 1)
        case "delete":
            return store.agents.delete(NS, "a")
        case _:
            return publish(store, "a", SyntheticAgent(SMALL, 9).turn(30), 1, origin=Origin[how.upper()])


def events(store: Store, cursor: object) -> list[object]:
    return [event.body for event in store.events.after(NS, cursor).events]  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["rollback", "delete", "import", "pull"])
@pytest.mark.parametrize("ends_by", ["release", "time"])
def test_what_takes_a_memory_back_waits_for_its_lease_and_fences_the_late(
    how: str, ends_by: str, lab: Lab, store: Store
) -> None:
    agent = SyntheticAgent(SMALL, 1)
    publish(store, "a", agent.turn(30), 0)
    token = store.leases.acquire(NS, "a", KV, "engine-1", 10).token
    late = agent.turn(30)
    cursor = store.events.after(NS, None).cursor
    for _ in range(3):
        with pytest.raises(FailedPrecondition) as refused:
            taken_back(store, how)
        assert refused.value.reason == "LEASE_HELD"
        assert 0 < int(refused.value.metadata["left_ms"]) <= 10_001
    assert events(store, cursor) == [LeaseWanted("a", KV, takes_back=True)]
    assert store.snapshots.get(NS, "a").version == 1
    # From now on it is prolonged for nobody.
    assert store.leases.renew_all(NS, "engine-1", KV, [HeldLease("a", 1)], 10).lost == (HeldLease("a", 1),)
    for call in (
        lambda: store.leases.acquire(NS, "a", KV, "engine-1", 10),
        lambda: store.leases.acquire(NS, "a", KV, "engine-2", 10),
        lambda: store.leases.renew(NS, "a", KV, token, 10),
    ):
        with pytest.raises(FailedPrecondition):
            call()
    if ends_by == "release":
        store.leases.release(NS, "a", KV, token)
    else:
        lab.clock.pass_s(10)
    taken_back(store, how)
    with pytest.raises(Conflict) as fenced:
        publish(store, "a", late, 0 if how == "delete" else 1, lease=token)
    assert fenced.value.reason == "LEASE_FENCED"
    assert store.leases.acquire(NS, "a", KV, "engine-1", 10).token.generation > token.generation


def test_a_lease_that_ended_stays_ended_while_a_lease_of_another_line_is_waited_for(lab: Lab, store: Store) -> None:
    """Of an agent with two models: the engine of the one is gone, that of the other releases as soon as it is asked."""
    for parent, identity in enumerate((SMALL, TINY)):
        publish(store, "a", SyntheticAgent(identity, 1).turn(30), parent)
    gone, live = sorted((KV, kv_identity_hash(TINY)))
    store.leases.acquire(NS, "a", gone, "engine-1", 10)
    lab.clock.pass_s(10)
    token = store.leases.acquire(NS, "a", live, "engine-2", 10).token
    with pytest.raises(FailedPrecondition) as refused:
        store.agents.delete(NS, "a")
    assert refused.value.metadata["owner"] == "engine-2"
    store.leases.release(NS, "a", live, token)
    store.agents.delete(NS, "a")


def test_one_owner_at_a_time_has_leases_of_an_agent_whichever_line_they_are_of(lab: Lab, store: Store) -> None:
    publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
    other = kv_identity_hash(TINY)
    token = store.leases.acquire(NS, "a", KV, "engine-1", 10).token
    cursor = store.events.after(NS, None).cursor
    for _ in range(2):
        with pytest.raises(FailedPrecondition) as refused:
            store.leases.acquire(NS, "a", other, "engine-2", 10, asks=True)
        assert (refused.value.reason, refused.value.metadata["owner"]) == ("LEASE_HELD", "engine-1")
    # The holder is asked, by its own line.
    assert store.leases.renew_all(NS, "engine-1", KV, [HeldLease("a", token.generation)], 10).wanted
    assert [each.body for each in store.events.after(NS, cursor).events] == [LeaseWanted("a", KV, False)]
    with pytest.raises(FailedPrecondition):
        publish(store, "a", SyntheticAgent(TINY, 1).turn(30), 1)
    assert store.leases.acquire(NS, "a", other, "engine-1", 10).newest.version == 1
    store.leases.release(NS, "a", KV, token)
    with pytest.raises(FailedPrecondition):
        store.agents.roll_back(NS, "a", 1)
    lab.clock.pass_s(10)
    assert store.agents.roll_back(NS, "a", 1).version == 2


@pytest.mark.parametrize("is_released", [False, True])
def test_a_lease_of_another_line_fences_the_late_commit_of_whoever_had_the_agent_before(
    is_released: bool, lab: Lab, store: Store
) -> None:
    ada, other = SyntheticAgent(SMALL, 1), SyntheticAgent(TINY, 2)
    old = store.leases.acquire(NS, "a", KV, "engine-1", 10).token
    publish(store, "a", ada.turn(30), 0, lease=old)
    if is_released:
        store.leases.release(NS, "a", KV, old)
    lab.clock.pass_s(11)
    new = store.leases.acquire(NS, "a", kv_identity_hash(TINY), "engine-2", 10).token
    for call in (
        lambda: publish(store, "a", ada.turn(30), 1, lease=old),
        lambda: store.leases.renew(NS, "a", KV, old, 10),
    ):
        with pytest.raises(Conflict) as refused:
            call()
        assert refused.value.reason == "LEASE_FENCED"
    publish(store, "a", other.turn(30), 1, lease=new)
    assert store.leases.acquire(NS, "a", kv_identity_hash(TINY), "engine-2", 10).token == new
    assert store.leases.acquire(NS, "a", KV, "engine-2", 10).token.generation > old.generation


def test_what_an_engines_earlier_model_commits_late_is_fenced_once_its_next_model_has_the_agent(store: Store) -> None:
    """Both models have one owner, and a line each."""
    ada, other = SyntheticAgent(SMALL, 1), SyntheticAgent(TINY, 2)
    old = store.leases.acquire(NS, "a", KV, "engine", 10, begins_anew=True).token
    publish(store, "a", ada.turn(30), 0, lease=old)
    new = store.leases.acquire(NS, "a", kv_identity_hash(TINY), "engine", 10, begins_anew=True).token
    with pytest.raises(Conflict) as refused:
        publish(store, "a", ada.turn(30), 1, lease=old)
    assert refused.value.reason == "LEASE_FENCED"
    publish(store, "a", other.turn(30), 1, lease=new)
    store.leases.release(NS, "a", kv_identity_hash(TINY), new)
    assert store.agents.roll_back(NS, "a", 1).version == 3, "it waits for nobody"


def test_a_fork_over_a_name_waits_for_whoever_runs_its_first_turn(store: Store) -> None:
    publish(store, "source", SyntheticAgent(SMALL, 1).turn(30), 0)
    token = store.leases.acquire(NS, "new", KV, "engine-1", 10).token
    with pytest.raises(FailedPrecondition):
        store.agents.fork(NS, "source", "new")
    store.leases.release(NS, "new", KV, token)
    assert store.agents.fork(NS, "source", "new").lines[0].version == 1
    with pytest.raises(Conflict):
        publish(store, "new", SyntheticAgent(SMALL, 2).turn(30), 0, lease=token)


def test_what_is_refused_for_another_reason_waits_for_nobody(store: Store) -> None:
    publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
    store.leases.acquire(NS, "a", KV, "engine-1", 10)
    store.leases.acquire(NS, "nobody", KV, "engine-1", 10)
    store.agents.update(NS, "a", is_pinned=True)
    refused: list[Callable[[], object]] = [
        lambda: store.agents.roll_back(NS, "a", 7),
        lambda: store.agents.roll_back(NS, "a", 1, expected_head=3),
        lambda: store.agents.delete(NS, "nobody"),
        lambda: store.agents.delete(NS, "a"),
        lambda: store.agents.fork(NS, "a", "a"),
    ]
    for call in refused:
        with pytest.raises(KvasirError) as error:
            call()
        assert error.value.reason != "LEASE_HELD"
    assert store.leases.renew_all(NS, "engine-1", KV, [HeldLease("a", 1), HeldLease("nobody", 1)], 10).lost == ()


def test_another_owner_asks_and_the_holder_hears_it_once_and_keeps_it_while_it_needs_it(store: Store) -> None:
    token = store.leases.acquire(NS, "a", KV, "engine-1", 10).token
    cursor = store.events.after(NS, None).cursor
    for asks in (False, True, True):
        with pytest.raises(FailedPrecondition):
            store.leases.acquire(NS, "a", KV, "engine-2", 10, asks=asks)
    assert events(store, cursor) == [LeaseWanted("a", KV, takes_back=False)]
    renewed = store.leases.renew_all(NS, "engine-1", KV, [HeldLease("a", 1)], 10)
    assert (renewed.lost, renewed.wanted) == ((), (HeldLease("a", 1),))
    store.leases.release(NS, "a", KV, token)
    assert store.leases.acquire(NS, "a", KV, "engine-2", 10).token.generation == 2


def test_a_number_that_another_memory_has_now_is_not_the_parent(store: Store) -> None:
    """Deleted, and begun anew by somebody else: version 1 is there, and it is not what the turn extends."""
    agent = SyntheticAgent(SMALL, 1)
    parent = publish(store, "a", agent.turn(30), 0)
    late = agent.turn(30)
    upload(store, late)
    store.agents.delete(NS, "a")
    others = publish(store, "a", SyntheticAgent(SMALL, 2).turn(30), 0)
    with pytest.raises(Conflict) as moved:
        store.snapshots.commit(NS, "a", late.manifest_digest, 1, CommitTerms(parent_manifest=parent.manifest))
    assert moved.value.metadata["head_version"] == "1"
    assert store.snapshots.get(NS, "a").manifest == others.manifest
