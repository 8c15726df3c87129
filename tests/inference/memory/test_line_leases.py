"""Leases of the lines whose memory is hot: asked for once, prolonged together, given back, and gone when wanted."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2, manifest_pb2
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory, Publication
from inference_svc.memory.lines import line_lease, lines
from inference_svc.memory.lines.line_states import LEASE_MARGIN_S, Stage, Standing, Use
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.store.answers import (
    LEASE_TTL_S,
    NO_HEAD,
    AgentGone,
    EventsLost,
    Head,
    HeadMoved,
    LeaseRenewal,
    LeaseWanted,
    StoreEvent,
)
from inference_svc.memory.store.leases import StoredLeases
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.memory.lease_lab import HEAD, HELD, KV, Lab, settle

SEALED = errors.FailedPrecondition("no master key was given", reason="NAMESPACE_SEALED")
ERASED = errors.FailedPrecondition("destroyed", reason="NAMESPACE_SEALED", metadata={"erased_unix_ms": "1"})


def run(scenario: Callable[[Lab], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(Lab()), 10)

    asyncio.run(bounded())


def test_a_lease_is_requested_once_and_counts_from_before_it_was_requested() -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        lab.store.answering.clear()
        lab.line("a").lease.request()
        lab.line("a").lease.request()
        await settle()
        lab.now += 3
        lab.store.answering.set()
        await settle()
        assert lab.store.asked == [("a", True)]
        assert lab.counts("a")
        lab.now = 100 + LEASE_TTL_S - LEASE_MARGIN_S
        assert not lab.counts("a")
        lab.line("a").lease.request()
        await settle()
        assert lab.store.asked[1:] == [("a", False)]  # its own earlier lease is not fenced: a commit may be on its way

    run(scenario)


@pytest.mark.parametrize(("owner", "generation"), [("", 0), ("engine-1", 0), ("engine-1", -5), ("engine-2", 7)])
def test_an_answer_without_a_lease_of_this_engine_is_none_and_holds_up_nobody(owner: str, generation: int) -> None:
    """Generation 0 stands for a memory without a lease, which asks for one again and again."""

    async def scenario(lab: Lab) -> None:
        async def acquire_lease(*_asked: object, **_how: object) -> cachestore_pb2.AcquireLeaseResponse:
            return cachestore_pb2.AcquireLeaseResponse(lease={"owner": owner, "generation": generation})

        store: Any = lab.store
        store.leases = StoredLeases(SimpleNamespace(client=SimpleNamespace(acquire_lease=acquire_lease)))  # type: ignore[arg-type]
        with pytest.raises(errors.Unavailable, match="not understood"):
            await lab.line("a").lease.obtain(1.0)
        assert lab.line("a").lease.generation == 0

    run(scenario)


def test_a_busy_stores_answer_about_leases_is_waited_for_as_long_as_it_is_of_use() -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        lab.store.takes_s = LEASE_TTL_S - LEASE_MARGIN_S - 0.1
        await lab.held("a")
        lab.store.takes_s = 3.0
        lab.now += 3
        await lab.lines.beat()
        lab.now += 3
        assert lab.counts("a")

    run(scenario)


def test_a_turn_waits_a_moment_for_a_lease_of_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_lease, "SOON_S", 0.02)

    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        lab.store.answering.clear()
        with pytest.raises(errors.DeadlineExceeded):
            await lab.line("a").lease.obtain(0.01)
        lab.store.answering.set()
        await settle()
        assert lab.counts("a")  # the answer is there for the next
        assert len(lab.store.asked) == 1

    run(scenario)


def test_a_store_that_answers_every_heartbeat_late_keeps_all_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        await lab.held("a")
        due = asyncio.Queue[None]()

        async def passes(_seconds: float) -> None:
            await due.get()

        monkeypatch.setattr(lines, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": passes}))
        lab.lines.start()
        lab.store.answering.clear()
        for _ in range(2):
            lab.now += LEASE_TTL_S / 3
            due.put_nowait(None)
            await settle()
        assert len(lab.store.renewed) == 2
        lab.now += 1
        lab.store.answering.set()
        await settle()
        lab.now = 100 + 2 * LEASE_TTL_S / 3 + LEASE_TTL_S - LEASE_MARGIN_S - 0.1
        assert lab.counts("a")
        lab.now += 0.2
        assert not lab.counts("a")
        await lab.lines.close()

    run(scenario)


def test_one_heartbeat_prolongs_what_is_hot_or_used_and_gives_back_the_rest() -> None:
    async def scenario(lab: Lab) -> None:
        for agent in ("hot", "used", "dropped"):
            await lab.held(agent)
        lab.remember("hot")
        with lab.line("used").in_use():
            lab.now += 3
            lab.store.answering.clear()
            beating = asyncio.create_task(lab.lines.beat())
            await settle()
            lab.now += 1  # the answer is late: time counts from before the request
            lab.store.answering.set()
            await beating
        await settle()
        assert lab.store.renewed == [{"hot": 1, "used": 2}]
        assert lab.store.released == [("dropped", 3)]
        lab.now = 103 + LEASE_TTL_S - LEASE_MARGIN_S - 0.01
        assert lab.counts("hot")
        lab.now += 0.02
        assert not lab.counts("hot")

    run(scenario)


@pytest.mark.parametrize("is_unverified", [False, True])
@pytest.mark.parametrize("has_ended", [False, True])
def test_what_a_heartbeat_finds_lost_counts_no_more_and_is_given_back_unless_it_had_ended(
    has_ended: bool, is_unverified: bool
) -> None:
    """Whoever takes the memory back waits for the release; the event that asks for it may come after the beat, or be
    one of those that are lost."""

    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        await lab.held("a")
        if is_unverified:
            lab.lines._happened(EventsLost())
        lab.store.lost = frozenset({"a"})
        lab.now += LEASE_TTL_S if has_ended else 0
        await lab.lines.beat()
        assert not lab.counts("a")
        lab.lines._happened(LeaseWanted("a", KV, takes_back=True))
        await settle()
        # One that ended may be of a publication on its way: the next lease must not fence that.
        assert lab.store.released == ([] if has_ended else [("a", 1)])
        assert lab.engine.hot == {}

    run(scenario)


def test_a_heartbeat_that_is_answered_late_says_nothing_of_a_lease_that_was_granted_since() -> None:
    """The same generation, where the first had ended and nobody took it: given back, the next would fence a commit."""

    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        await lab.held("a")
        lab.store.generation = 1
        lab.now += LEASE_TTL_S

        async def late(*_asked: object) -> LeaseRenewal:
            await lab.held("a")
            return LeaseRenewal(frozenset({"a"}), frozenset())

        lab.store.renew = late  # type: ignore[method-assign, assignment]
        await lab.lines.beat()
        await settle()
        assert lab.counts("a")
        assert lab.store.released == []

    run(scenario)


@pytest.mark.parametrize("is_used", [False, True])
def test_what_is_taken_back_is_given_back_at_once_and_answered_from_no_more(is_used: bool) -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        await lab.held("a")
        with lab.line("a").in_use() if is_used else contextlib.nullcontext():
            lab.lines._happened(LeaseWanted("a", KV, takes_back=True))
            assert not lab.counts("a")
            await settle()
            assert lab.store.released == [("a", 1)]
            assert ("a" in lab.engine.hot) is is_used

    run(scenario)


def test_a_busy_store_is_given_the_lease_back_for_as_long_as_it_holds() -> None:
    """Whoever takes the memory back waits for the release; given up, it would wait for the end of the lease."""

    async def scenario(lab: Lab) -> None:
        await lab.held("a")
        lab.store.release_takes_s = LEASE_TTL_S - 0.5
        lab.lines._happened(LeaseWanted("a", KV, takes_back=True))
        await settle()
        assert lab.store.released == [("a", 1)]

    run(scenario)


def test_another_engine_gets_the_line_when_its_turn_has_ended_and_is_stored() -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        await lab.held("a")
        with lab.line("a").in_use():
            lab.lines._happened(LeaseWanted("a", KV, takes_back=False))
            await settle()
            assert lab.store.released == []
            assert lab.counts("a")
        await settle()
        assert lab.store.released == [("a", 1)]
        assert lab.engine.hot == {}
        assert not lab.counts("a")

    run(scenario)


@pytest.mark.parametrize("takes_back", [False, True])
def test_after_a_lease_was_given_back_the_next_one_is_of_another_generation(takes_back: bool) -> None:
    """The release may arrive after the next request: with the same generation it would end the new lease unheard."""

    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        await lab.held("a")
        lab.lines._happened(LeaseWanted("a", KV, takes_back=takes_back))
        await lab.held("a")
        assert lab.store.released == [("a", 1)]
        assert lab.store.asked == [("a", True), ("a", True)]

    run(scenario)


def test_a_lease_that_was_requested_before_it_was_taken_back_is_given_back_unused() -> None:
    async def scenario(lab: Lab) -> None:
        lab.store.answering.clear()
        lab.line("a").lease.request()
        await settle()
        lab.lines._happened(LeaseWanted("a", KV, takes_back=True))
        lab.store.answering.set()
        await settle()
        assert lab.line("a").lease.held is None
        assert lab.store.released == [("a", 1)]
        assert (await lab.line("a").lease.obtain(1)).generation == 2
        assert lab.store.asked == [("a", True), ("a", True)]

    run(scenario)


@pytest.mark.parametrize("is_granted_since", [False, True])
def test_a_wish_for_a_lease_gives_back_none_that_was_granted_since(is_granted_since: bool) -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        await lab.held("a")

        async def late(*_asked: object) -> LeaseRenewal:
            if is_granted_since:
                lab.line("a").lease.give_back()
                await lab.held("a")
            return LeaseRenewal(frozenset(), frozenset({"a"}))

        lab.store.renew = late  # type: ignore[method-assign, assignment]
        await lab.lines.beat()
        await settle()
        assert lab.store.released == [("a", 1)]
        assert lab.counts("a") == ("a" in lab.engine.hot) == is_granted_since

    run(scenario)


def test_a_memory_that_is_nowhere_else_is_not_dropped_for_another_engine() -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a", is_safe=False)
        await lab.held("a")
        lab.store.wanted = frozenset({"a"})
        await lab.lines.beat()
        await settle()
        assert lab.store.released == []
        assert "a" in lab.engine.hot

    run(scenario)


def test_a_line_that_is_held_elsewhere_is_waited_for_a_little_and_then_refused() -> None:
    async def scenario(lab: Lab) -> None:
        lab.store.refusals = [HELD, HELD]
        lab.line("a").lease.request()
        await settle()
        assert lab.line("a").lease.is_elsewhere
        assert (await lab.line("a").lease.obtain(5)).newest == HEAD.identity
        assert not lab.line("a").lease.is_elsewhere
        lab.store.refusals = [HELD] * 100
        lab.now += 100
        with pytest.raises(errors.Unavailable) as refused:
            await lab.line("a").lease.obtain(0.0)
        assert refused.value.reason == "AGENT_HELD_ELSEWHERE"
        assert refused.value.metadata == {"agent_id": "a", "owner": "engine-2"}
        assert refused.value.retry_after_s

    run(scenario)


def test_a_wait_for_anothers_lease_begins_with_many_requests_and_goes_on_with_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(lab: Lab) -> None:
        asked_at = list[float]()

        async def passes(seconds: float) -> None:
            asked_at.append(lab.now - 100)
            lab.now += seconds
            await settle()

        monkeypatch.setattr(line_lease, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": passes}))
        lab.store.refusals = [HELD] * 1000
        with pytest.raises(errors.Unavailable):
            await lab.line("a").lease.obtain(30.0)
        assert len([at for at in asked_at if at < 1]) > 6
        assert len(asked_at) < 50
        assert 28 < asked_at[-1] < 30

    run(scenario)


@pytest.mark.parametrize("patience_s", [1.0, 2.0, 5.0, LEASE_TTL_S + 1, 30.0])
def test_a_lease_that_is_given_back_at_the_end_of_the_patience_is_had(
    monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    async def scenario(lab: Lab) -> None:
        async def passes(seconds: float) -> None:
            lab.now += seconds
            if lab.now > 100 + 0.99 * patience_s:
                lab.store.refusals.clear()
            await settle()

        monkeypatch.setattr(line_lease, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": passes}))
        lab.store.refusals = [HELD] * 1000
        assert (await lab.line("a").lease.obtain(patience_s)).newest == HEAD.identity
        assert lab.now <= 100 + patience_s + 1e-6

    run(scenario)


def test_after_lost_events_no_lease_counts_until_it_is_prolonged() -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        await lab.held("a")
        lab.lines._happened(EventsLost())
        assert not lab.counts("a")
        await lab.lines.beat()
        assert lab.counts("a")

    run(scenario)


@pytest.mark.parametrize("is_held", [False, True])
def test_an_answer_to_a_question_before_events_were_lost_makes_no_lease_count(*, is_held: bool) -> None:
    """The event that took the lease back may be among them, and came behind that answer."""

    async def scenario(lab: Lab) -> None:
        lab.remember("a")
        if is_held:
            await lab.held("a")
        lab.store.answering.clear()
        if is_held:
            asking = asyncio.create_task(lab.lines.beat())
        else:
            lab.line("a").lease.request()
        await settle()
        lab.now += 1
        lab.lines._happened(EventsLost())
        lab.store.answering.set()
        await settle()
        assert not is_held or asking.done()
        assert lab.line("a").lease.held is not None
        assert not lab.counts("a")
        await lab.lines.beat()
        assert lab.counts("a")

    run(scenario)


@pytest.mark.parametrize(
    ("event", "is_safe", "expected"),
    [
        (HeadMoved("a", HEAD), True, True),
        (HeadMoved("a", Head(2, Digest.of(b"two"), 1, KV)), True, True),  # old news
        (HeadMoved("a", Head(4, Digest.of(b"others"), 3, KV)), True, False),
        (HeadMoved("a", Head(4, Digest.of(b"others"), 3, "another")), True, False),  # of another KV identity
        (HeadMoved("a", Head(4, Digest.of(b"others"), 3, KV)), False, True),  # the next turn decides
        (AgentGone("a"), True, False),
        (AgentGone("b"), True, True),
    ],
)
def test_what_others_did_drops_what_no_turn_can_use(event: StoreEvent, is_safe: bool, expected: bool) -> None:
    async def scenario(lab: Lab) -> None:
        lab.remember("a", is_safe=is_safe)
        lab.lines._happened(event)
        assert ("a" in lab.engine.hot) is expected

    run(scenario)


def test_each_deletion_is_reported() -> None:
    async def scenario(lab: Lab) -> None:
        lab.lines._happened(AgentGone("cold"))
        assert lab.deleted == lab.engine.forgotten == [AgentKey("default", "cold")]

    run(scenario)


def test_a_namespace_that_is_shut_or_lost_its_events_keeps_no_begun_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key may have been destroyed, or any of its agents deleted. A store that is away says neither."""
    refusals = [errors.Unavailable("away"), errors.PermissionDenied("no"), SEALED, SEALED]

    async def scenario(lab: Lab) -> None:
        for name in ("PAUSE_S", "LEASE_TTL_S"):
            monkeypatch.setattr(lines, name, 0.0)
        for count, refusal in enumerate(refusals, 1):
            lab.store.watched = [refusal]
            lab.lines.start()
            await settle()
            await lab.lines.close()
            assert lab.engine.forgotten == ["default"] * max(0, count - 2)
        lab.lines._happened(EventsLost())
        assert len(lab.engine.forgotten) == 3

    run(scenario)


@pytest.mark.parametrize(
    ("watched", "hot"), [([errors.PermissionDenied("no"), SEALED], ["used", "owed"]), ([ERASED], [])]
)
def test_a_shut_namespace_keeps_hot_what_nothing_else_has_and_one_whose_key_was_destroyed_nothing(
    watched: list[Any], hot: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LEASE_TTL_S", 0.0)

    async def scenario(lab: Lab) -> None:
        for agent in ("stored", "used", "owed"):
            lab.remember(agent, is_safe=agent != "owed")
        lab.store.watched = watched
        with lab.line("used").in_use():  # the engine drops its memory once no turn of it runs
            lab.lines.start()
            await settle()
            assert [*lab.engine.hot] == hot
            await lab.lines.close()

    run(scenario)


@pytest.mark.parametrize(
    ("standing", "is_used", "expected"),
    [
        (Standing(NO_HEAD), False, False),
        (Standing(NO_HEAD, Stage.SENT, sent=HEAD.identity), False, False),
        (Standing(HEAD, sent_before=frozenset({HEAD.identity})), False, False),
        (Standing(HEAD, Stage.SENT, sent=HEAD.identity), True, True),  # its turn or its commit decides
        (Standing(None), False, True),
    ],
)
def test_of_an_agent_that_is_gone_nothing_stays_that_may_have_been_stored(
    standing: Standing, is_used: bool, expected: bool
) -> None:
    async def scenario(lab: Lab) -> None:
        lab.engine.hot["a"] = AgentMemory(
            RememberedText("", TokenIds(), TokenChars()), (), manifest_pb2.Turn(), 0, "", Publication(standing)
        )
        with lab.line("a").in_use() if is_used else contextlib.nullcontext():
            lab.lines._happened(AgentGone("a"))
        assert ("a" in lab.engine.hot) is expected

    run(scenario)


@pytest.mark.parametrize(
    ("version", "generation", "expected"), [(4, 1, True), (3, 1, False), (2, 1, False), (4, 0, False), (4, 2, False)]
)
def test_a_commit_moves_on_what_its_own_lease_calls_newest_and_never_back(
    version: int, generation: int, expected: bool
) -> None:
    """A repeated commit answers the version that it made before a rollback: hot, it would bring that back."""

    async def scenario(lab: Lab) -> None:
        await lab.held("a")
        committed = Head(version, Digest.of(b"committed"), version - 1, KV)
        lease = lab.line("a").lease.held
        assert lease is not None
        lease.committed(committed, generation)
        assert lease.newest == (committed if expected else HEAD).identity
        assert (Standing(committed, Stage.STORED).use(None, lease, lab.now) is Use.YES) is expected

    run(scenario)


def test_manifests_of_a_forgotten_line_stay_this_engines_own() -> None:
    """Else a turn that could not ask for the newest version, behind a cut watch, takes its engine for another."""

    async def scenario(lab: Lab) -> None:
        line = lab.line("a")
        stored = asyncio.create_task(asyncio.sleep(0, SnapshotOutcome(SnapshotState.COMMITTED, 3, "", HEAD.manifest)))
        line.publications.running.append(stored)
        stored.add_done_callback(partial(line.publications._ended, line.known.now))
        await settle()
        await lab.lines.beat()
        assert lab.line("a") is not line, "it is forgotten"
        assert lab.line("a").known.own == {HEAD.manifest}
        assert lab.line("a").known.now.newest == HEAD.identity
        assert not lab.line("b").known.own

    run(scenario)


def test_sleep_ends_leases_and_no_patience() -> None:
    """A memory that was on its way to the store when the lid closed must not be dropped once it opens."""

    async def scenario(lab: Lab) -> None:
        lab.remember("a", is_safe=False)
        await lab.held("a")
        owed = lab.engine.hot["a"].publication
        lab.line("a").publications._owe(owed)
        lab.now, lab.slept_s = lab.now + 3_600, 3_600
        assert not lab.counts("a")
        assert owed.is_awaited
        lab.now += 60
        assert not owed.is_awaited

    run(scenario)


def test_at_the_end_all_leases_are_given_back() -> None:
    async def scenario(lab: Lab) -> None:
        for agent in ("a", "b"):
            await lab.held(agent)
        await lab.lines.close()
        assert sorted(lab.store.released) == [("a", 1), ("b", 2)]

    run(scenario)
