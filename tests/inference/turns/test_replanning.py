"""Hot memory that goes away between planning and running: the turn goes on, and never over another engine's turn."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest

from inference_svc.config import EngineSettings
from inference_svc.engine.api import (
    BlocksFull,
    CarriedTurn,
    Ended,
    Event,
    Failed,
    FinishReason,
    HotMemoryGone,
    Resumed,
    SamplingParams,
    Started,
    Timings,
)
from inference_svc.kv.damage import DamagedFile
from inference_svc.memory.agent_memory import AgentMemory, Publication
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.recall import Recall, Recollection
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_plan import Once, Prepared
from inference_svc.memory.reuse_planning import ComparedPrompt
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.answers import EventCursor, Head
from inference_svc.memory.stored_windows import StoredWindow
from inference_svc.model.prompting import Tokenized
from inference_svc.text.given_json import GivenJson
from inference_svc.text.literal_text import Specials
from inference_svc.text.prefix_matching import Outcome, RememberedText
from inference_svc.text.replies.reply_parts import ReplyReader
from inference_svc.text.templates.template_clock import TemplateClock
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from inference_svc.text.token_text import TokenText
from inference_svc.turns.admission import Admission
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import BegunPrompt, BegunTurn, Ran, Remembered
from inference_svc.turns.progress import Progress, TakenTurn, TokenCounts, TurnPhase, TurnTiming
from inference_svc.turns.shortening import MemoryShortener
from inference_svc.turns.turn_data import MemoryUse, MessagesInput, TurnFinished, TurnRequest
from inference_svc.turns.turn_reporter import TurnReporter
from inference_svc.turns.turn_service import TurnService
from tests.inference.turns.parts import line_parts

OURS, THEIRS = Head(5, Digest.of(b"5"), 4), Head(6, Digest.of(b"6"), 5)
SETTINGS = EngineSettings(listen="unix:/nowhere")
ENDED = Ended(FinishReason.STOP, "", 2, 0, 1, Timings(), "", "", SequenceState(TokenIds((1, 2)), TokenChars((1, 1)), 0))


def remembered(head: Head, content: str, source: Source = Source.WARM) -> Recollection:
    messages = (manifest_pb2.Message(role="user", content=content),)
    publication = Publication(Standing(head, Stage.STORED))
    return Recollection(
        AgentMemory(RememberedText("", TokenIds(), TokenChars()), messages, manifest_pb2.Turn(), 0, "", publication),
        source,
        head,
    )


class Surroundings:
    """What a turn meets: the recollections in turn, an engine whose hot memory goes away so often, and its end."""

    model = SimpleNamespace(
        context_tokens=100, kv_identity_hash="x", stop_token_ids=(), has_states=False, has_rewind_points=False
    )
    specials = Specials()
    memory_budget_bytes = 100
    copies = None  # no turn here sends blocks ahead
    cursor = None

    def __init__(self, found: list[Recollection], losses: int) -> None:
        self.found, self.losses = found, losses
        self.connection = self.events = self  # of its store
        self.costs = RestoreCosts(lambda: 0.0)
        self.expected: list[int] = []  # versions whose files are begun before their turn is planned
        self.planned: list[str] = []
        self.finished: list[tuple[int | None, str]] = []

    async def of_turn(self, key: object, budget: object, **how: bool) -> Recollection:
        return await self.newest(key, budget)

    async def newest(self, key: object, budget: object) -> Recollection:
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    def expect(self, _namespace: str, recollection: Recollection, _room: object) -> None:
        assert not self.planned or self.expected
        self.expected.append(recollection.version)

    async def plan(self, recollection: Recollection, prompt: ComparedPrompt, *how: Any) -> Prepared:
        self.planned.append(prompt.text)
        return Prepared(
            prompt.text,
            Tokenized(TokenIds((1, 2)), TokenChars((1, 1))),
            Once(None),
            Source.COLD,
            Outcome.NONE,
            None,
            (),
        )

    def submit(self, plan: object, on_events: Callable[[list[Event]], None]) -> object:
        self.losses -= 1
        gone = Failed(HotMemoryGone())
        on_events([gone if self.losses >= 0 else ENDED])
        return SimpleNamespace(cancel=lambda: None)

    def reader(self, *_how: object, **_more: object) -> ReplyReader:
        return ReplyReader()

    def needed_bytes(self, tokens: object) -> int:
        return 1

    async def remember(self, ran: Ran) -> Remembered:
        return Remembered(ran)

    async def finish(self, remembered: Remembered, turn: Progress) -> None:
        head = remembered.ran.planned.recollection.head
        self.finished.append((head.version if head is not None else None, remembered.ran.prepared.text))

    def template(self, messages: list[dict[str, Any]], tools: object, add_generation_prompt: bool) -> str:
        return " ".join(message["content"] for message in messages)

    def clock(self, remembered_ms: int = 0) -> TemplateClock:
        return TemplateClock(remembered_ms)

    def template_at(self, clock: object, settings: object) -> Callable[..., str]:
        return self.template

    async def run(self, namespace: str, work: Callable[[], Any], *, is_large_render: bool = False) -> Any:
        return work()

    def fewest_tokens(self, text: str) -> int:
        return 1

    async def read(self, namespace: str, objects: GivenJson) -> None:
        objects.read()


PLAIN = SamplingParams(4)


def serve(
    around: Surroundings,
    expected_version: int | None,
    sampling: SamplingParams = PLAIN,
    stores: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    async def to_the_end() -> None:
        events: AsyncIterator[object] = service(around, stores).begin(request(expected_version, sampling)).events()
        async for _ in events:
            pass

    asyncio.run(to_the_end())


def service(around: Surroundings, stores: Mapping[str, Any] = MappingProxyType({})) -> TurnService:
    parts: Any = around
    stats = ServiceStats(0.0)
    admission = Admission(SETTINGS.admission, time.monotonic)
    lines = {namespace: Lines(namespace, store, line_parts(engine=parts)) for namespace, store in stores.items()}
    parts.line = Recall(parts, lines).line
    engine_parts = EngineParts(
        parts, parts, parts, parts, parts.copies, stores, SETTINGS.turn_limits, admission, stats, time.monotonic
    )
    return TurnService(engine_parts, parts)


def request(expected_version: int | None, sampling: SamplingParams = PLAIN) -> TurnRequest:
    given = MessagesInput((manifest_pb2.Message(role="user", content="new"),), True)
    return TurnRequest("r", "default", "a", given, "", sampling, False, MemoryUse(expected_version))


async def test_a_turn_that_is_stopped_before_its_task_runs_tells_its_reader_the_end() -> None:
    around = Surroundings([remembered(OURS, "ours")], losses=0)
    turns = service(around)
    events = turns.begin(request(None)).events()
    async with asyncio.timeout(60):
        ends = await turns.stop("default", "r")
        assert [end.finish_reason for end in ends.values()] == ["cancelled"]
        [end] = [event async for _, event in events]
    assert isinstance(end, TurnFinished)
    assert (around.planned, around.finished) == ([], [])


async def test_a_stop_of_a_turn_that_ends_by_itself_does_not_wait_until_its_memory_is_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending, may_end, shortens = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Shortening(Surroundings):
        async def finish(self, remembered: Remembered, turn: Progress) -> None:
            turn.phase = TurnPhase.ENDING
            ending.set()
            await may_end.wait()

    async def is_later(_shortener: object, remembered: Remembered) -> Remembered:
        later: Any = object()
        return replace(remembered, later=later)

    async def shorten(_shortener: object, _remembered: Remembered) -> None:
        shortens.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(MemoryShortener, "after_reply", is_later)
    monkeypatch.setattr(MemoryShortener, "shorten", shorten)
    turns = service(Shortening([remembered(OURS, "ours")], losses=0))
    turns.begin(request(None))
    async with asyncio.timeout(20):
        await ending.wait()
        stopping = asyncio.create_task(turns.stop("default", "r"))
        await asyncio.sleep(0)
        may_end.set()
        await shortens.wait()
        assert await stopping == {}


def test_a_turn_is_not_put_over_another_engines() -> None:
    around = Surroundings([remembered(OURS, "ours", Source.HOT), remembered(THEIRS, "theirs")], losses=1)
    with pytest.raises(errors.Conflict):
        serve(around, expected_version=5)
    assert around.finished == []


def test_a_turn_that_names_no_parent_extends_what_is_newest_by_then() -> None:
    around = Surroundings([remembered(OURS, "ours", Source.HOT), remembered(THEIRS, "theirs")], losses=1)
    serve(around, expected_version=None)
    assert around.planned == ["ours new", "theirs new"]
    assert around.expected == [5, 6]
    assert around.finished == [(6, "theirs new")]


def test_the_same_version_is_planned_on_again() -> None:
    around = Surroundings([remembered(OURS, "ours", Source.HOT), remembered(OURS, "ours")], losses=1)
    serve(around, expected_version=5)
    assert around.finished == [(5, "ours new")]


def test_a_store_that_cannot_be_asked_any_more_leaves_the_turn_on_the_version_it_was_planned_on() -> None:
    unasked = Recollection(None, Source.COLD, None, Miss(MissReason.STORE_UNREACHABLE, "gone"))
    around = Surroundings([remembered(OURS, "ours", Source.HOT), unasked], losses=1)
    serve(around, expected_version=5)
    assert around.finished == [(5, "ours new")]


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        ({"task": SimpleNamespace(done=lambda: False)}, None),  # asked for when the turn is stored, which is in order
        ({"standing": Standing(THEIRS, Stage.STORED)}, 6),
        ({"task": SimpleNamespace(done=lambda: True)}, 5),
    ],
    ids=["on its way", "stored meanwhile", "failed"],
)
def test_a_turn_on_a_memory_that_left_ram_unstored_follows_what_that_became(
    changes: dict[str, Any], follows: int | None
) -> None:
    """Not the version before: that memory's commit comes first, and the turn would lose against it."""
    ours = remembered(OURS, "ours", Source.HOT)
    assert ours.memory is not None
    publication = Publication(**{"standing": Standing(OURS), **changes})
    unstored = replace(ours, memory=replace(ours.memory, publication=publication))
    waiting = Recollection(None, Source.COLD, None, Miss(MissReason.STORE_TIMEOUT, "the turn before is being stored"))
    around = Surroundings([unstored, waiting], losses=1)
    serve(around, expected_version=None)
    assert around.finished == [(follows, "ours new")]


def test_a_memory_that_keeps_moving_ends_the_turn() -> None:
    moving = [remembered(Head(number, Digest.of(b"x"), number - 1), "x") for number in range(5, 40)]
    around = Surroundings(moving, losses=1000)
    with pytest.raises(errors.Unavailable):
        serve(around, expected_version=None)
    assert 1 < len(around.planned) < 10


class Damaged(Surroundings):
    """An engine that refuses the state of 300 tokens, then the tensor file 1."""

    refusals = (DamagedFile("damaged", state=300), DamagedFile("damaged", blob=1))

    def __init__(self) -> None:
        super().__init__([remembered(OURS, "ours")], losses=0)
        self.usable: list[tuple[int | None, int | None]] = []

    async def plan(self, recollection: Recollection, prompt: ComparedPrompt, *how: Any) -> Prepared:
        self.usable.append((how[-1].files, how[-1].last_rewind_point))
        return await super().plan(recollection, prompt, *how)

    def submit(self, plan: object, on_events: Callable[[list[Event]], None]) -> object:
        refused = self.refusals[len(self.usable) - 1 :][:1]
        on_events([Failed(refused[0]) if refused else ENDED])
        return SimpleNamespace(cancel=lambda: None)


def test_what_the_engine_refused_is_not_planned_with_again() -> None:
    """A refused state is gone back before, a refused file not used: damage costs time (LESSONS 10)."""
    around = Damaged()
    serve(around, expected_version=5)
    assert around.usable == [(None, None), (None, 299), (1, 299)]
    assert around.finished == [(5, "ours new")]


class Storing(Surroundings):
    """An engine that tells these events of a turn, and a store that has all blocks of its plan."""

    is_reachable = True
    piece_blocks = 1
    held = None

    def __init__(self, *told: Event) -> None:
        super().__init__([remembered(OURS, "ours")], losses=0)
        self.copies = self
        self.told = told
        self.asked: list[tuple[int, Mapping[int, StoredWindow]]] = []
        self.committed: Prepared | None = None

    async def plan(self, recollection: Recollection, prompt: ComparedPrompt, *how: Any) -> Prepared:
        blocks = {index: Digest.of(b"block %d" % index) for index in range(4)}
        found = await super().plan(recollection, prompt, *how)
        return replace(found, stored_blocks=tuple(blocks.values()), stored_windows={300: StoredWindow(blocks)})

    def submit(self, plan: object, on_events: Callable[[list[Event]], None]) -> object:
        for event in self.told:
            on_events([event])
        return SimpleNamespace(cancel=lambda: None)

    def pin(self, key: object, first_block: int, stored: Mapping[int, StoredWindow]) -> object:
        self.asked.append((first_block, stored))
        return None

    async def finish(self, remembered: Remembered, turn: Progress) -> None:
        self.committed = remembered.ran.prepared


@pytest.mark.parametrize(
    "told", [(Started(700), ENDED), (Started(1000), Resumed(700, 324), ENDED)], ids=["begun", "resumed"]
)
def test_blocks_that_the_engine_computes_again_are_copied_again_and_the_manifest_names_those(
    told: tuple[Event, ...],
) -> None:
    """The store's blocks behind the place where the turn truly began, or went on, are of other rows: a reply's, say.
    Other agents would be lent them: what is computed anew is on the grid.
    """
    around = Storing(*told)
    serve(around, expected_version=5, stores={"default": around})
    [(first_block, windows)] = around.asked
    assert (first_block, windows[300].full) == (2, {0, 1})
    assert around.committed is not None
    assert len(around.committed.stored_blocks) == 2
    assert around.committed.stored_windows == windows


class OnItsThread(Storing):
    """An engine that emits all events of a turn from a thread of its own, before the event loop hears of any."""

    def submit(self, plan: object, on_events: Callable[[list[Event]], None]) -> object:
        thread = threading.Thread(target=lambda: [on_events([event]) for event in self.told])
        thread.start()
        thread.join()
        return SimpleNamespace(cancel=lambda: None)


@pytest.mark.parametrize(
    "told",
    [(Started(700), ENDED), (Started(1000), BlocksFull(4), Resumed(700, 324), ENDED)],
    ids=["begun", "resumed"],
)
def test_the_engines_thread_changes_nothing_of_a_turn_and_requests_its_rows_as_they_are(
    told: tuple[Event, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: set[threading.Thread] = set()

    def written(object_: object, name: str, value: object) -> None:
        writers.add(threading.current_thread())
        object.__setattr__(object_, name, value)

    for kind in (Progress, TokenCounts, TurnTiming, TurnReporter, BlockStream):
        monkeypatch.setattr(kind, "__setattr__", written)
    around = OnItsThread(*told)
    serve(around, expected_version=5, stores={"default": around})
    assert writers == {threading.main_thread()}
    [(first_block, windows)] = around.asked
    assert (first_block, windows[300].full) == (2, {0, 1})


class Taking(Surroundings):
    """An engine to which another engine's turn comes, and what it is told of it."""

    copies = SimpleNamespace(pin=lambda *_asked: None)
    token_text = TokenText.of_bytes(lambda _: b"")

    def __init__(self) -> None:
        super().__init__([remembered(OURS, "ours")], losses=0)
        self.carried: list[CarriedTurn | None] = []
        self.waited: list[tuple[float, float | None]] = []  # in the queue, and until the first token
        self.cursors: list[EventCursor | None] = []

    def submit(self, plan: Any, on_events: Callable[[list[Event]], None]) -> object:
        self.carried.append(plan.carried)
        on_events([Resumed(2, 0)])
        on_events([ENDED])
        return SimpleNamespace(cancel=lambda: None)

    async def finish(self, remembered: Remembered, turn: Progress) -> None:
        self.cursors.append(remembered.ran.planned.recalled.event_cursor)
        self.waited.append((turn.times.queue_s, turn.times.first_token_s and round(turn.times.first_token_s, 3)))


def take(
    around: Taking,
    *,
    is_brought: bool = False,
    first_token_s: float | None = None,
    stores: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    begun = BegunTurn(
        seed=0,
        max_tokens=4,
        prompt=BegunPrompt(
            Tokenized(TokenIds((1, 2)), TokenChars((1, 2))),
            messages=(manifest_pb2.Message(role="user", content="new"),),
        ),
        parent_manifest=OURS.manifest,
        is_brought=is_brought,
        continuation=None,
        shortened=None,
        shortening=None,
        age_s=30.0,
        first_token_s=first_token_s,
    )
    spent = Timings(queue_s=0.25, first_token_s=2.5)
    carried = CarriedTurn(TokenIds((1, 2, 3)), 2, 0, 2, (0, 1), (), {0: 0}, spent)

    async def to_the_end() -> None:
        taken = TakenTurn(begun, carried, 0, ())
        async for _ in service(around, stores).take_over(request(None), {0: taken}).events():
            pass

    asyncio.run(to_the_end())


@pytest.mark.parametrize(("is_brought", "shareable"), [(False, 2), (True, 0)])
def test_kv_that_a_peer_brought_serves_its_own_turn_and_no_sibling(is_brought: bool, shareable: int) -> None:
    """Its rows are another credential's word. A sibling in RAM would begin with them, as it would in the store."""
    around = Taking()
    take(around, is_brought=is_brought)
    [carried] = around.carried
    assert carried is not None
    assert carried.shareable == shareable


@pytest.mark.parametrize(("heard_s", "expected_s"), [(1.5, 1.5), (None, 2.5)], ids=["before", "while files went ahead"])
def test_a_turn_that_moved_did_not_wait_for_as_long_as_it_ran_elsewhere(
    heard_s: float | None, expected_s: float
) -> None:
    """What it waited there is in what the other engine tells with its tokens."""
    around = Taking()
    take(around, first_token_s=heard_s)
    assert around.waited == [(0.0, expected_s)]


def test_a_turn_that_moved_knows_from_when_on_a_change_of_its_agent_counts() -> None:
    """Else its memory, made while the store was away, is taken for one that somebody changed, and is lost."""
    around, now = Taking(), EventCursor("store", 7)
    take(
        around,
        stores={
            "default": SimpleNamespace(
                events=SimpleNamespace(cursor=now), connection=SimpleNamespace(is_reachable=True)
            )
        },
    )
    assert around.cursors == [now]
