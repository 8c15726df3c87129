"""Which hot memory may be used: the property over any history of a line, and recall's use of it."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory, Publication
from inference_svc.memory.lines.line import Line
from inference_svc.memory.lines.line_states import LEASE_MARGIN_S, Changes, Doubt, Lease, Stage, Standing, Use
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.recall import Recall, Recollection
from inference_svc.memory.store.answers import LEASE_TTL_S, NO_HEAD, AgentHeads, Head, StoreMiss, Version
from inference_svc.memory.store.patience import Budget
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.turns.parts import line_parts

KEY = AgentKey("default", "a")
NOTHING = Version(0, None)
FIRST = Head(1, Digest.of(b"first"), 0, "kv")
ROLLED_BACK = Head(2, FIRST.manifest, 1, "kv")
SECOND = Version(2, Digest.of(b"second"))

contents = st.sampled_from("abcd").map(lambda text: Digest.of(text.encode()))
versions = st.builds(Version, st.integers(1, 5), contents)


def head(version: Version) -> Head:
    return Head(version.number, version.manifest, version.number - 1)


@given(versions, st.frozensets(versions, max_size=3), versions | st.just(NOTHING))
def test_a_memory_is_current_only_beside_the_very_version_that_it_follows_or_tried_to_become(
    follows: Version, sent: frozenset[Version], newest: Version
) -> None:
    standing = Standing(head(follows), sent_before=sent)
    assert standing.is_current(newest) is (newest in {follows, *sent})
    assert not standing.lost("6").is_current(newest)
    assert Standing(None, sent_before=sent).is_current(newest) is (newest in sent)
    assert replace(standing, is_undecided=True).is_current(newest) is (newest in sent)
    # Where a first commit may have taken effect, an agent that is not there may have been deleted since.
    first = Standing(NO_HEAD, sent_before=sent)
    assert first.is_current(newest) is (newest in sent or (newest == NOTHING and not sent))


delays = st.floats(0, 8)


@given(st.lists(st.tuples(delays, delays, st.booleans()), min_size=1, max_size=6), delays, st.floats(-0.02, 0.02))
def test_a_lease_counts_for_its_owner_only_while_it_is_live_at_the_store(
    requests: list[tuple[float, float, bool]], asked_after: float, drift: float
) -> None:
    """However long requests and answers travel, whichever are lost, and though the two clocks run apart a little."""
    now, lease, live_until = 0.0, None, 0.0
    for there, back, is_heard in requests:
        sent_at = now
        arrived = sent_at + there
        if lease is None or arrived < live_until:
            live_until = arrived + LEASE_TTL_S * (1 + drift)
            now = arrived + back
            if is_heard and lease is None:
                lease = Lease.granted(1, NOTHING, sent_at)
            elif is_heard and lease is not None:
                lease.prolonged(sent_at)
        last = lease.counts_until - 1e-6 if lease is not None else now
        for moment in (now, now + asked_after, max(now, last)):
            if lease is not None and lease.counts(moment):
                assert moment < live_until
    if lease is not None:
        lease.unverified(now)
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
def test_without_an_answer_only_a_lease_that_counts_reports_what_is_newest(
    follows: Version,
    before: frozenset[Version],
    answer: Version | None,
    leased: Version,
    sent: Version | None,
    generation: int,
    now: float,
) -> None:
    stage = Stage.MADE if sent is None else Stage.SENT
    standing = Standing(head(follows), stage, generation, sent=sent, sent_before=before)
    lease = Lease(1, leased, counts_until=5, ends_at=5)
    assert standing.use(None, None, now) is Use.NO
    newest = answer if answer is not None else leased if now < 5 else None
    # What it has beyond the newest version may have been taken back under any other lease.
    is_proven = newest == sent or (generation == 1 and now < 5)
    otherwise = Use.NO if answer is None else Use.UNLESS_TAKEN_BACK
    is_current = newest is not None and standing.is_current(newest)
    assert standing.use(answer, lease, now) is ((Use.YES if is_proven else otherwise) if is_current else Use.NO)


@given(versions, versions, st.integers(1, 3), st.integers(1, 3))
def test_a_memory_moves_to_another_lease_only_if_its_parent_is_still_the_newest_version(
    follows: Version, newest: Version, made_under: int, generation: int
) -> None:
    standing = Standing(head(follows), generation=made_under)
    moves = generation != made_under and newest == follows
    assert standing.moves_to(Lease(generation, newest, 5.0, 5.0)) is moves
    assert not standing.moves_to(None)
    assert not Standing(NO_HEAD, generation=made_under).moves_to(Lease(generation, NOTHING, 5.0, 5.0))


@pytest.mark.parametrize("expected_version", [None, 0])
def test_only_of_an_agent_that_nobody_ever_had_no_event_can_forbid_the_first_version(
    expected_version: int | None,
) -> None:
    named = Changes.ANY if expected_version is None else Changes.TAKEN_BACK
    first = Standing(None, generation=1, expected_version=expected_version)
    assert first.forbidden(NO_HEAD) is None
    assert first.forbidden(FIRST) is named
    assert first.under(2).forbidden(NO_HEAD) is named


# --- any life of a line, at the store and in this engine ---


class Life:
    """An agent's line at its store, and one memory that this engine made behind version 1 under a lease.

    Each change of another gives the line a new generation, as the store does; the engine's lease does not count then.
    """

    def __init__(self) -> None:
        self.newest = Head(1, Digest.of(b"1"), 0)
        self.generation = 1
        self.lease: Lease | None = Lease(1, self.newest.identity, 5.0, 5.0)
        self.standing = Standing(self.newest, generation=1)
        self.is_taken_back = False  # since the memory was made
        self.is_there = False  # the memory is a version, or one that was brought back

    def step(self, name: str) -> None:
        getattr(self, name)()
        if name in ("roll_back", "delete_and_fork_back", "others_turn"):
            self.generation += 1
            self.lease = None

    def roll_back(self) -> None:
        self.newest = Head(self.newest.version + 1, Digest.of(b"1"), self.newest.version)
        self.is_taken_back, self.is_there = True, False

    def delete_and_fork_back(self) -> None:
        """The agent has the number and the manifest again that the memory follows."""
        self.newest = Head(1, Digest.of(b"1"), 0)
        self.is_taken_back, self.is_there = True, False

    def others_turn(self) -> None:
        self.newest = Head(self.newest.version + 1, Digest.of(b"others"), self.newest.version)
        self.is_there = False

    def request_lease(self) -> None:
        self.lease = Lease(self.generation, self.newest.identity, 5.0, 5.0)

    def commit(self) -> None:
        if self.commit_without_answer():
            self.standing = self.standing.committed(self.newest)
            if self.lease is not None:
                self.lease.committed(self.newest, self.standing.generation)

    def commit_without_answer(self) -> bool:
        """Whether it took effect: by the store's compare-and-swap, and its fence."""
        if not self.standing.is_owed or self.standing.doubt is not None:
            return False
        if self.standing.moves_to(self.lease) and not self.is_taken_back:
            self.standing = self.standing.under(self.generation)
        self.standing = self.standing.sending(Digest.of(b"ours"))
        if self.standing.parent != self.newest.identity or self.standing.generation != self.generation:
            return False
        self.newest = Head(self.newest.version + 1, Digest.of(b"ours"), self.newest.version)
        self.is_there = True
        return True

    def learn(self) -> None:
        self.standing = self.standing.found(self.newest)


STEPS = [name for name in vars(Life) if name[0] != "_" and name != "step"]


@given(st.lists(st.sampled_from(STEPS), max_size=8), st.booleans())
def test_in_any_life_of_a_line_nothing_that_was_taken_back_is_used_or_written(steps: list[str], is_asked: bool) -> None:
    life = Life()
    for name in steps:
        was_there, was_taken_back, before = life.is_there, life.is_taken_back, life.newest
        life.step(name)
        if life.is_there and not was_there:
            assert not was_taken_back, "the commit brought back what was taken back"
            assert before.identity == life.standing.follows or life.standing.is_stored
        if not is_asked and life.lease is None:
            continue
        use = life.standing.use(life.newest.identity if is_asked else None, life.lease, 0.0)
        if use is Use.YES or (use is Use.UNLESS_TAKEN_BACK and not life.is_taken_back):
            assert life.is_there or not life.is_taken_back
            assert life.is_there or life.standing.head == life.newest
        if is_asked and life.standing.is_stored and life.is_there:
            assert use is Use.YES, "what is surely the newest is used"


changes = st.lists(
    st.one_of(
        st.tuples(st.just("sending"), contents),
        st.tuples(st.sampled_from(["committed", "found", "placed"]), versions.map(head)),
        st.tuples(st.just("under"), st.integers(1, 3)),
        st.tuples(st.just("decided")),
        st.tuples(st.just("lost"), st.just("9")),
    ),
    max_size=6,
)


@given(st.builds(Standing, st.none() | versions.map(head), is_undecided=st.booleans()), changes)
def test_only_what_is_owed_and_without_a_doubt_may_be_written_behind_a_known_parent(
    standing: Standing, steps: list[tuple[Any, ...]]
) -> None:
    for name, *values in steps:
        how = {"is_changed": False} if name == "placed" else {}
        standing = getattr(standing, name)(*values, **how)
        if standing.doubt is None:
            assert standing.generation
            assert standing.head is not None
            assert standing.follows == standing.parent
        assert standing.is_owed is not (standing.is_safe or standing.stage is Stage.LOST)
        following = Standing(standing.head, generation=1)
        if standing.stage is Stage.LOST:
            with pytest.raises(errors.Conflict):
                following.extending(standing)
            continue
        following = following.extending(standing)
        assert following.doubt in (None, Doubt.PARENT, Doubt.CONVERSATION)
        assert (following.head, following.is_undecided) == (standing.head, standing.is_undecided)
        # Whatever may be that memory's version may be this one's parent.
        assert standing.itself is None or following.is_current(standing.itself) or standing.is_undecided


class Engine:
    """One hot memory, or none."""

    def __init__(self, memory: AgentMemory | None) -> None:
        self.memories = self
        self.hot: Any = SimpleNamespace(tag=memory) if memory is not None else None
        self.model = SimpleNamespace(kv_identity_hash="kv")

    def get(self, _key: AgentKey) -> Any:
        return self.hot

    def drop(self, _key: AgentKey) -> None:
        self.hot = None


class Store:
    """Answers what it calls newest."""

    is_reachable = True
    cursor = None

    def __init__(self, head: Head, *, taken_back: bool | None = False) -> None:
        """`taken_back`: None when it does not say."""
        self.head = head
        self.taken_back = taken_back
        self.connection = self.agents = self.blobs = self.events = self

    async def heads(self, *_asked: object) -> AgentHeads:
        return AgentHeads(self.head, None)

    async def was_taken_back_within(self, *_asked: object) -> bool:
        if self.taken_back is None:
            raise StoreMiss(Miss(MissReason.STORE_TIMEOUT, "no answer"))
        return self.taken_back

    async def manifest(self, *_asked: object) -> bytes:
        return b"not a manifest: it is found, and the memory is not hot"


def recall_of(engine: Any, store: Any) -> tuple[Recall, Line]:
    lines = Lines("default", store, line_parts(engine=engine, lease_clock=lambda: 1.0))
    return Recall(engine, {"default": lines}), lines.line(KEY.agent_id)


def recalled(newest: Head, standing: Standing, *, is_being_published: bool) -> tuple[Recollection, Engine]:
    async def scenario() -> tuple[Recollection, Engine]:
        publication = Publication(standing)
        if is_being_published:
            publication.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        memory = AgentMemory(
            RememberedText("one", TokenIds((1,)), TokenChars((3,))), (), manifest_pb2.Turn(), 0, "", publication
        )
        engine = Engine(memory)
        recall, _ = recall_of(engine, Store(newest))
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
    found, engine = recalled(newest, Standing(FIRST, Stage.SENT, sent=SECOND), is_being_published=is_being_published)
    assert (found.kv_from is Source.HOT) is expected
    assert (engine.hot is not None) is expected
    assert found.head == newest


@pytest.mark.parametrize("is_being_published", [True, False])
def test_a_first_memory_that_may_have_been_stored_is_not_used_beside_no_agent(is_being_published: bool) -> None:
    """The agent may have been deleted since. While its commit is under way the memory is not forgotten either."""
    first = Standing(NO_HEAD, Stage.SENT, sent=Version(1, FIRST.manifest))
    found, engine = recalled(NO_HEAD, first, is_being_published=is_being_published)
    assert (found.kv_from, found.memory) == (Source.COLD, None)
    assert found.head == (None if is_being_published else NO_HEAD)
    assert (engine.hot is not None) is is_being_published


def test_a_memory_that_is_being_stored_after_nobody_knows_what_is_neither_used_nor_dropped() -> None:
    found, engine = recalled(FIRST, Standing(None), is_being_published=True)
    assert (found.kv_from, found.memory, found.head) == (Source.COLD, None, None)
    assert engine.hot is not None


@pytest.mark.parametrize("ends", [True, False])
async def test_a_turn_after_one_that_left_ram_before_it_was_stored_does_not_go_on_without_it(ends: bool) -> None:
    """From the store's newest version it would answer as if the last turn had not been, and lose to its commit."""

    newest = Head(SECOND.number, SECOND.manifest, 1)
    store = Store(FIRST)

    async def publish() -> None:
        await asyncio.sleep(0.01 if ends else 60)
        store.head = newest

    running: Any = asyncio.create_task(publish())
    recall, line = recall_of(Engine(None), store)
    line.publications.running.append(running)
    found = await recall.newest(KEY, Budget(5.0 if ends else 0.05, 1.0, asyncio.get_running_loop().time))
    running.cancel()
    assert found.head == (newest if ends else None)
    if not ends:
        assert found.miss is not None
        assert found.miss.reason is MissReason.STORE_TIMEOUT


@pytest.mark.parametrize(
    ("standing", "generation", "counts_until", "taken_back", "is_used"),
    [
        (Standing(FIRST, generation=1), 1, 5.0, True, True),  # the line was this engine's all the while
        (Standing(FIRST, generation=1), 2, 5.0, True, False),  # deleted, and forked back to the same
        (Standing(FIRST, generation=1), 2, 5.0, False, True),
        (Standing(FIRST, generation=1), 2, 5.0, None, False),
        (Standing(FIRST, generation=1), 1, 0.0, True, False),  # the lease may have ended unheard
        (Standing(FIRST, generation=1), None, 0.0, True, False),
        (Standing(FIRST, Stage.STORED), None, 0.0, True, True),  # it is what the store calls newest, and nothing beyond
    ],
)
async def test_what_extends_the_newest_version_is_used_only_if_nothing_can_have_been_taken_back(
    standing: Standing, generation: int | None, counts_until: float, taken_back: bool | None, is_used: bool
) -> None:
    """A version that is made again has the number and the manifest of the one that was deleted with what followed."""
    transcript = RememberedText("one", TokenIds((1,)), TokenChars((3,)))
    memory = AgentMemory(transcript, (), manifest_pb2.Turn(), 0, "", Publication(standing))
    recall, line = recall_of(Engine(memory), Store(FIRST, taken_back=taken_back))
    if generation is not None:
        line.lease.held = Lease(generation, FIRST.identity, counts_until, counts_until)
    found = await recall.newest(KEY, Budget(0.02, 1.0, asyncio.get_running_loop().time))
    assert (found.kv_from is Source.HOT) is is_used


def test_a_memory_whose_conversation_is_not_decided_follows_no_version_that_proves_it() -> None:
    """A turn that could not read its agent's memory may be another conversation: nothing goes on from it unchecked."""
    newest, lease = Head(3, Digest.of(b"three"), 2, "kv"), Lease.granted(1, Version(3, Digest.of(b"three")), 0.0)
    known = Standing(newest, generation=1)
    undecided = replace(known, is_undecided=True)
    assert known.use(newest.identity, lease, 0.0) is Use.YES
    assert undecided.use(newest.identity, lease, 0.0) is Use.NO
    assert undecided.use(None, lease, 0.0) is Use.NO
