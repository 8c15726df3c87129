"""Which hot memory may be used: the property over any history of a line, and recall's use of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory, PublicationState
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.recall import Recall, Recollection
from inference_svc.memory.store.answers import NO_HEAD, AgentHeads, Head, StoreMiss
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.trust import (
    LEASE_MARGIN_S,
    LEASE_TTL_S,
    Claim,
    Lease,
    Version,
    is_current,
    known_newest,
    may_use_hot,
)
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import TokenIds

KEY = AgentKey("default", "a")
NOTHING = Version(0, None)
FIRST = Head(1, Digest.of(b"first"), 0, "kv")
ROLLED_BACK = Head(2, FIRST.manifest, 1, "kv")
SECOND = Version(2, Digest.of(b"second"))

contents = st.sampled_from("abcd").map(lambda text: Digest.of(text.encode()))
versions = st.builds(Version, st.integers(1, 5), contents)


@given(versions, st.frozensets(versions, max_size=3), versions | st.just(NOTHING))
def test_a_memory_is_current_only_beside_the_very_version_that_it_follows_or_tried_to_become(
    follows: Version, attempts: frozenset[Version], newest: Version
) -> None:
    claim = Claim(follows, attempts, is_lost=False)
    assert is_current(claim, newest) is (newest in {follows, *attempts})
    assert not is_current(Claim(follows, attempts, is_lost=True), newest)
    assert is_current(Claim(None, attempts, is_lost=False), newest) is (newest in attempts)
    first = Claim(NOTHING, attempts, is_lost=False)
    # Where a first commit may have taken effect, an agent that is not there may have been deleted since.
    assert is_current(first, newest) is (newest in attempts or (newest == NOTHING and not attempts))


delays = st.floats(0, 8)


@given(st.lists(st.tuples(delays, delays, st.booleans()), min_size=1, max_size=6), delays, st.floats(-0.02, 0.02))
def test_a_lease_counts_for_its_owner_only_while_it_is_live_at_the_store(
    requests: list[tuple[float, float, bool]], asked_after: float, drift: float
) -> None:
    """However long requests and answers travel, whichever are lost, and though the two clocks run apart a little."""
    now, lease, live_until = 0.0, None, 0.0
    for there, back, is_heard in requests:
        asked_at = now
        arrived = asked_at + there
        if lease is None or arrived < live_until:
            live_until = arrived + LEASE_TTL_S * (1 + drift)
            now = arrived + back
            if is_heard and lease is None:
                lease = Lease.granted(1, NOTHING, asked_at)
            elif is_heard and lease is not None:
                lease.prolonged(asked_at)
        last = lease.counts_until - 1e-6 if lease is not None else now
        for moment in (now, now + asked_after, max(now, last)):
            if lease is not None and lease.counts(moment):
                assert moment < live_until
    if lease is not None:
        lease.unverified()
        assert not lease.counts(now)
    assert LEASE_MARGIN_S > LEASE_TTL_S * 0.02


@given(
    versions,
    st.frozensets(versions, max_size=2),
    versions | st.none(),
    versions,
    versions | st.none(),
    st.integers(0, 2),
    st.floats(0, 10),
)
def test_without_an_answer_only_a_lease_that_counts_says_what_is_newest(
    follows: Version,
    attempts: frozenset[Version],
    answer: Version | None,
    leased: Version,
    itself: Version | None,
    generation: int,
    now: float,
) -> None:
    claim = Claim(follows, attempts, is_lost=False, itself=itself, generation=generation)
    lease = Lease(1, leased, counts_until=5, ends_at=5)
    assert may_use_hot(claim, None, None, now) is False
    assert known_newest(answer, None, now) == answer
    newest = answer if answer is not None else leased if now < 5 else None
    assert known_newest(answer, lease, now) == newest
    # What it has beyond the newest version may have been taken back under any other lease.
    is_told = answer is not None or newest == itself or generation == 1
    assert may_use_hot(claim, answer, lease, now) is (newest is not None and is_current(claim, newest) and is_told)


class Engine:
    """One hot memory, or none."""

    def __init__(self, memory: AgentMemory | None) -> None:
        self.hot: Any = SimpleNamespace(tag=memory) if memory is not None else None
        self.model = SimpleNamespace(kv_identity_hash="kv")

    def hot_memory(self, _key: AgentKey) -> Any:
        return self.hot

    def drop_hot(self, _key: AgentKey) -> None:
        self.hot = None


class Store:
    """Answers what it calls newest."""

    is_reachable = True

    def __init__(self, head: Head, *, taken_back: bool | None = False) -> None:
        """`taken_back`: None when it does not say."""
        self.head = head
        self.taken_back = taken_back

    async def heads(self, *_asked: object) -> AgentHeads:
        return AgentHeads(self.head, None)

    async def was_taken_back_within(self, *_asked: object) -> bool:
        if self.taken_back is None:
            raise StoreMiss(Miss(MissReason.STORE_TIMEOUT, "no answer"))
        return self.taken_back

    async def manifest(self, *_asked: object) -> bytes:
        return b"not a manifest: it is found, and the memory is not hot"


def recalled(head: Head, publication: PublicationState, *, is_being_published: bool) -> tuple[Recollection, Engine]:
    async def scenario() -> tuple[Recollection, Engine]:
        if is_being_published:
            publication.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        memory = AgentMemory(RememberedText("one", TokenIds((1,)), (3,)), (), manifest_pb2.Turn(), 0, "", publication)
        engine: Any = Engine(memory)
        store: Any = Store(head)
        recall = Recall(engine, {"default": store})
        found = await recall.newest(KEY, Budget(0.02, 1.0, asyncio.get_running_loop().time))
        if publication.task is not None:
            publication.task.cancel()
        return found, engine

    return asyncio.run(scenario())


@pytest.mark.parametrize("is_being_published", [True, False])
@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (FIRST, True),
        (Head(2, SECOND.manifest, 1), True),  # its own commit took effect, and the answer is on its way
        (ROLLED_BACK, False),  # the number that it expected, taken by a rollback
        (Head(2, Digest.of(b"another writer's"), 1), False),
        (Head(3, SECOND.manifest, 2), False),  # rolled back to it, from a version that it did not make
        (NO_HEAD, False),
    ],
)
def test_a_memory_that_is_being_stored_is_used_only_beside_what_it_follows(
    newest: Head, expected: bool, is_being_published: bool
) -> None:
    publication = PublicationState(FIRST, is_head=False, attempted=SECOND)
    found, engine = recalled(newest, publication, is_being_published=is_being_published)
    assert (found.kv_from is Source.HOT) is expected
    assert (engine.hot is not None) is expected
    assert found.head == newest


@pytest.mark.parametrize("is_being_published", [True, False])
def test_a_first_memory_that_may_have_been_stored_is_not_used_beside_no_agent(is_being_published: bool) -> None:
    """The agent may have been deleted since. While its commit is under way the memory is not forgotten either."""
    publication = PublicationState(NO_HEAD, is_head=False, attempted=Version(1, FIRST.manifest))
    found, engine = recalled(NO_HEAD, publication, is_being_published=is_being_published)
    assert (found.kv_from, found.memory) == (Source.COLD, None)
    assert found.head == (None if is_being_published else NO_HEAD)
    assert (engine.hot is not None) is is_being_published


def test_a_memory_that_is_being_stored_after_nobody_knows_what_is_neither_used_nor_dropped() -> None:
    found, engine = recalled(FIRST, PublicationState(None, is_head=False), is_being_published=True)
    assert (found.kv_from, found.memory, found.head) == (Source.COLD, None, None)
    assert engine.hot is not None


@pytest.mark.parametrize("ends", [True, False])
def test_a_turn_after_one_that_left_ram_before_it_was_stored_does_not_go_on_without_it(ends: bool) -> None:
    """From the store's newest version it would answer as if the last turn had not been, and lose to its commit."""

    newest = Head(SECOND.number, SECOND.manifest, 1)

    async def scenario() -> Recollection:
        engine: Any = Engine(None)
        store: Any = Store(FIRST)

        async def publish() -> None:
            await asyncio.sleep(0.01 if ends else 60)
            store.head = newest

        running: Any = asyncio.create_task(publish())
        recall = Recall(engine, {"default": store}, publication_of=lambda key: running if key == KEY else None)
        found = await recall.newest(KEY, Budget(5.0 if ends else 0.05, 1.0, asyncio.get_running_loop().time))
        running.cancel()
        return found

    found = asyncio.run(scenario())
    assert found.head == (newest if ends else None)
    if not ends:
        assert found.miss is not None
        assert found.miss.reason is MissReason.STORE_TIMEOUT


@pytest.mark.parametrize(
    ("publication", "generation", "counts_until", "taken_back", "is_used"),
    [
        (
            PublicationState(FIRST, is_head=False, generation=1),
            1,
            5.0,
            True,
            True,
        ),  # the line was this engine's all the while
        (
            PublicationState(FIRST, is_head=False, generation=1),
            2,
            5.0,
            True,
            False,
        ),  # deleted, and forked back to the same
        (PublicationState(FIRST, is_head=False, generation=1), 2, 5.0, False, True),
        (PublicationState(FIRST, is_head=False, generation=1), 2, 5.0, None, False),
        (PublicationState(FIRST, is_head=False, generation=1), 1, 0.0, True, False),  # the lease may have ended unheard
        (PublicationState(FIRST, is_head=False, generation=1), None, 0.0, True, False),
        (
            PublicationState(FIRST, is_head=True),
            None,
            0.0,
            True,
            True,
        ),  # it is what the store calls newest, and nothing beyond
    ],
)
def test_what_extends_the_newest_version_is_used_only_if_nothing_can_have_been_taken_back(
    publication: PublicationState, generation: int | None, counts_until: float, taken_back: bool | None, is_used: bool
) -> None:
    """A version that is made again has the number and the manifest of the one that was deleted with what followed."""

    async def scenario() -> Recollection:
        memory = AgentMemory(RememberedText("one", TokenIds((1,)), (3,)), (), manifest_pb2.Turn(), 0, "", publication)
        engine: Any = Engine(memory)
        store: Any = Store(FIRST, taken_back=taken_back)
        lease = Lease(generation, FIRST.identity, counts_until, counts_until) if generation is not None else None

        async def answered(*_asked: object) -> None:
            pass

        leases: Any = SimpleNamespace(lease=lambda _agent: lease, clock=lambda: 1.0, answered=answered)
        recall = Recall(engine, {"default": store}, leases={"default": leases})
        return await recall.newest(KEY, Budget(0.02, 1.0, asyncio.get_running_loop().time))

    found = asyncio.run(scenario())
    assert (found.kv_from is Source.HOT) is is_used


def test_a_memory_whose_conversation_is_not_decided_follows_no_version_that_proves_it() -> None:
    """A turn that could not read its agent's memory may be another conversation: nothing goes on from it unchecked."""
    head, lease = Head(3, Digest.of(b"three"), 2, "kv"), Lease.granted(1, Version(3, Digest.of(b"three")), 0.0)
    known = PublicationState(head, is_head=False, generation=1)
    undecided = PublicationState(head, is_head=False, generation=1, may_follow=lambda _: True)
    assert may_use_hot(known.claim, head.identity, lease, 0.0)
    assert not may_use_hot(undecided.claim, head.identity, lease, 0.0)
    assert not may_use_hot(undecided.claim, None, lease, 0.0)
