"""Leases over any order of grants, renewals, times and restarts: none is taken back early, and none lives twice."""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvasir.errors import Conflict, FailedPrecondition
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.records import HeldLease, LeaseToken, LineKey
from cachestore_svc.index.live_leases import LiveLeases
from tests.cachestore.core.lab import NS, Clock, Lab, publish
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running import in_memory

KV = kv_identity_hash(SMALL)
OWNERS = ("one", "two")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.sampled_from(OWNERS)),
        st.tuples(st.just("prolong"), st.sampled_from(OWNERS)),
        st.tuples(st.just("release"), st.sampled_from(OWNERS)),
        st.tuples(st.just("take back"), st.just("")),
        st.tuples(st.just("pass"), st.sampled_from(["1", "3", "6"])),
        st.tuples(st.just("restart"), st.just("")),
        st.tuples(st.just("set the clock"), st.sampled_from(["-9000", "9000"])),
        st.tuples(st.just("set the database's clock"), st.sampled_from(["-4", "4", "9000"])),
    ),
    max_size=25,
)


@pytest.mark.long(15)
@given(steps)
@settings(max_examples=sampled(20, of=60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_taken_back_from_an_owner_that_may_count_on_its_lease(
    new_lab: Callable[[Path], Lab], steps: list[tuple[str, str]]
) -> None:
    """Each owner counts from before it asked; what it then counts on, nobody has taken, and no generation goes back."""
    with tempfile.TemporaryDirectory(dir=in_memory.directory()) as directory:
        lab = new_lab(Path(directory))
        store = lab.open()
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
        counts_until: dict[str, tuple[int, float]] = {}
        newest = 0
        for what, whom in steps:
            now = lab.clock.steady()
            try:
                match what:
                    case "acquire":
                        token = store.leases.acquire(NS, "a", KV, whom, 5).token
                        others = [other for other, (_, until) in counts_until.items() if other != whom and until > now]
                        assert others == []
                        assert token.generation >= newest
                        newest = token.generation
                        counts_until[whom] = (token.generation, now + 5)
                    case "prolong" if whom in counts_until:
                        generation = counts_until[whom][0]
                        if not store.leases.renew_all(NS, whom, KV, [HeldLease("a", generation)], 5).lost:
                            assert generation == newest
                            counts_until[whom] = (generation, now + 5)
                    case "release" if whom in counts_until:
                        generation, _ = counts_until.pop(whom)
                        store.leases.release(NS, "a", KV, LeaseToken(whom, generation))
                    case "take back":
                        store.agents.roll_back(NS, "a", 1)
                        assert [owner for owner, (_, until) in counts_until.items() if until > now] == []
                        newest += bool(newest)
                        store.agents.update(NS, "a", retained_versions=1000)
                    case "pass":
                        lab.clock.pass_s(float(whom))
                    case "restart":
                        store.close()
                        store = lab.open()
                    case "set the clock":
                        lab.clock.set_by_s += float(whom)
                    case "set the database's clock":
                        lab.clock.databases_set_by_s += float(whom)
                        lab.clock.pass_s(0)
            except (FailedPrecondition, Conflict):
                pass
        store.close()


def test_a_lease_is_prolonged_or_it_ends_and_never_both() -> None:
    """The heartbeat does not pass through the index thread: whoever sees it ended must not see it prolonged after."""
    clock = Clock()
    live = LiveLeases(clock.steady)
    line, token = LineKey(NS, "a", KV), LeaseToken("one", 1)
    live.grant(line, token, 5)
    seen: list[bool] = []
    is_over = threading.Event()

    def heartbeat() -> None:
        while not is_over.is_set():
            seen.append(not live.prolong_all(NS, "one", KV, [HeldLease("a", 1)], 5).lost)

    thread = threading.Thread(target=heartbeat)
    thread.start()
    while not seen:
        pass
    live.want(line, takes_back=True)
    clock.pass_s(6)
    assert live.left_s(line, token, 5) == 0
    count = len(seen)
    while len(seen) < count + 100:
        pass
    is_over.set()
    thread.join()
    assert not any(seen[count + 1 :])
    assert live.left_s(line, token, 5) == 0
