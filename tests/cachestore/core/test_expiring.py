"""Agents expire when nobody used them for as long as they may stay: never early, whatever is done to the clocks."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.errors import InvalidArgument, NotFound
from kvasir.expires_after import LABEL
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.records import AgentDeleted, EventCursor
from cachestore_svc.store.store import Store
from cachestore_svc.upkeep.expiring import ClockReading
from tests.cachestore.core.lab import NS, Lab, anybody, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent

HOUR, DAY = 3600.0, 86_400.0
TURN = SyntheticAgent(SMALL, 1).turn(300, is_prompt=True)
KV = kv_identity_hash(SMALL)
_runs = count()


@dataclass
class Machine:
    """A machine on which stores run, one after the other."""

    lab: Lab
    started_s: float = 0.0  # when it was last started, on the clock that nobody sets
    run: str = "first"

    def sweep(self, store: Store, after_s: float = 0.0) -> list[str]:
        """Let time pass and sweep; the agents that are left."""
        self.lab.clock.pass_s(after_s)
        store.care.expire_agents(self.clocks())
        return [agent.agent_id for agent in store.agents.page(NS).agents]

    def clocks(self) -> ClockReading:
        return ClockReading(self.lab.clock(), self.lab.clock.steady() - self.started_s, self.run)

    def restarts(self, *, store_only: bool = False) -> None:
        self.run = f"run {next(_runs)}"
        if not store_only:
            self.started_s = self.lab.clock.steady()


@pytest.fixture
def machine(lab: Lab) -> Machine:
    return Machine(lab)


def test_an_agent_goes_when_its_time_is_over_and_is_reported_before(machine: Machine) -> None:
    with machine.lab.open() as store:
        publish(store, "kept", TURN, 0)
        publish(store, "ada", TURN, 0)
        assert store.agents.get(NS, "ada").expires_unix_ms is None
        store.agents.update(NS, "ada", {LABEL: "2d"})
        assert machine.sweep(store) == ["ada", "kept"]
        assert machine.sweep(store, DAY) == ["ada", "kept"]
        told = store.agents.page(NS).agents[0].expires_unix_ms
        assert told == (machine.lab.clock() + DAY) * 1000
        cursor = store.events.after(NS, None).cursor
        assert machine.sweep(store, DAY) == ["kept"]
        assert [event.body for event in store.events.after(NS, cursor).events] == [AgentDeleted("ada")]


def test_a_namespace_may_have_a_time_and_a_label_says_otherwise(machine: Machine) -> None:
    with machine.lab.open(expires_after_s=DAY, namespace_expires_after_s={"other": None}) as store:
        for name in ("ada", "long", "ever", "pinned"):
            publish(store, name, TURN, 0)
        publish(store, "foreign", TURN, 0, namespace="other")
        store.agents.update(NS, "long", {LABEL: "3d"})
        store.agents.update(NS, "ever", {LABEL: "never"})
        store.agents.update(NS, "pinned", is_pinned=True)
        assert store.agents.get(NS, "pinned").expires_unix_ms is None
        machine.sweep(store)
        assert machine.sweep(store, 2 * DAY) == ["ever", "long", "pinned"]
        assert machine.sweep(store, 2 * DAY) == ["ever", "pinned"]
        assert store.agents.get("other", "foreign")


@pytest.mark.parametrize("set_by_s", [0.0, -10 * DAY, 5 * HOUR])
def test_every_use_begins_the_time_again_also_when_the_clock_was_set(machine: Machine, set_by_s: float) -> None:
    uses: list[Callable[[Store], object]] = [
        lambda store: store.snapshots.get(NS, "ada"),
        lambda store: store.agents.update(NS, "ada", {"project": "x"}),
        lambda store: store.agents.roll_back(NS, "ada", 1),
    ]
    with machine.lab.open(expires_after_s=DAY) as store:
        publish(store, "ada", TURN, 0)
        machine.sweep(store)
        for use in uses:
            machine.lab.clock.pass_s(0.9 * DAY)
            machine.lab.clock.set_by_s += set_by_s
            use(store)
            assert machine.sweep(store) == ["ada"]
        assert machine.sweep(store, 0.9 * DAY) == ["ada"]
        assert machine.sweep(store, 0.2 * DAY) == []


def test_a_live_lease_keeps_an_agent(machine: Machine) -> None:
    with machine.lab.open(expires_after_s=HOUR) as store:
        publish(store, "ada", TURN, 0)
        machine.sweep(store)
        machine.lab.clock.pass_s(2 * HOUR)
        lease = store.leases.acquire(NS, "ada", KV, "engine", 60)
        assert machine.sweep(store) == ["ada"]
        store.leases.release(NS, "ada", KV, lease.token)
        assert machine.sweep(store) == []


def test_an_agent_on_its_way_to_another_store_stays(machine: Machine) -> None:
    with machine.lab.open(expires_after_s=HOUR) as store:
        publish(store, "ada", TURN, 0)
        machine.sweep(store)
        store.moves.offer(NS, "ada", "studio", "m" * 16, 0, anybody)
        assert machine.sweep(store, 2 * HOUR) == ["ada"]
        store.moves.undo(NS, "ada", "studio", "m" * 16)
        assert machine.sweep(store) == []


def test_unused_time_outlives_a_restart_of_the_store(machine: Machine) -> None:
    with machine.lab.open(expires_after_s=DAY) as store:
        publish(store, "ada", TURN, 0)
        machine.sweep(store)
        machine.sweep(store, 0.5 * DAY)
    machine.restarts(store_only=True)
    with machine.lab.open(expires_after_s=DAY) as store:
        assert machine.sweep(store, 0.4 * DAY) == ["ada"]
        assert machine.sweep(store, 0.2 * DAY) == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.floats(0, 0.6 * DAY)),
            st.tuples(st.just("set"), st.floats(-400 * DAY, 400 * DAY)),
            st.tuples(st.just("restart machine"), st.just(0.0)),
            st.tuples(st.just("restart store"), st.just(0.0)),
        ),
        max_size=30,
    )
)
def test_whatever_is_done_to_clocks_no_more_time_counts_than_passed(steps: list[tuple[str, float]]) -> None:
    machine = Machine(Lab(Path()))
    began, counted, last = machine.lab.clock.steady(), 0.0, None
    for what, how in steps:
        if what == "pass":
            machine.lab.clock.pass_s(how)
        elif what == "set":
            machine.lab.clock.set_by_s += how
        else:
            machine.restarts(store_only=what == "restart store")
        now = ClockReading.from_json(machine.clocks().to_json())
        assert now is not None
        counted += now.since(last)
        last = now
    assert counted <= machine.lab.clock.steady() - began + 0.001


@pytest.mark.parametrize(
    ("now", "passed_s"),
    [
        (ClockReading(1000.0, 503.0, "a"), 3.0),
        (
            ClockReading(1003.0 + 10 * DAY, 503.0, "b"),
            3.0,
        ),  # the clock was set, the store restarted
        (ClockReading(1010.0, 9 * DAY, "b"), 10.0),  # the data lie in a machine that runs for longer
        (ClockReading(1010.0, 7.0, "b"), 7.0),  # the machine was restarted
        (ClockReading(900.0, 7.0, "b"), 0.0),
        (ClockReading(900.0, 499.0, "a"), 0.0),
    ],
)
def test_after_a_restart_the_clock_that_says_less_is_believed(now: ClockReading, passed_s: float) -> None:
    assert now.since(ClockReading(1000.0, 500.0, "a")) == passed_s


@pytest.mark.parametrize("value", ["30", "30 d", "-1d", "1s", "0m", "1.5h", "99999w", "soon", "٣d"])
def test_a_label_that_says_no_time_is_refused(store: Store, value: str) -> None:
    publish(store, "ada", TURN, 0)
    with pytest.raises(InvalidArgument) as refused:
        store.agents.update(NS, "ada", {LABEL: value})
    assert refused.value.field == f"labels.{LABEL}"


def test_an_expired_agent_is_no_more_and_its_name_is_free(machine: Machine) -> None:
    with machine.lab.open(expires_after_s=HOUR) as store:
        publish(store, "ada", TURN, 0)
        machine.sweep(store)
        machine.sweep(store, 2 * HOUR)
        with pytest.raises(NotFound):
            store.agents.get(NS, "ada")
        assert (
            store.blobs.find_missing(NS, [TURN.manifest_digest]) == []
        )  # its bytes rest, as those of any deleted agent
        assert publish(store, "ada", TURN, 0).version == 1
        assert store.events.after(NS, EventCursor("", 0)) is not None
