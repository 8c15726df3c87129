"""The small parts of a turn: the outbox, the hand-off, and retries. No model, no wire."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2, manifest_pb2
from kvasir.formats.digest import Digest

from inference_svc.engine.api import (
    AgentKey,
    BlocksFull,
    Event,
    Preempted,
    Prefilled,
    SamplingParams,
    Started,
    TokenLogprobs,
    Tokens,
)
from inference_svc.memory.agent_memory import AgentMemory, Publication, StoredFiles, from_manifest
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.recall import Recall, Recollection
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_plan import Once, Prepared
from inference_svc.memory.store.answers import NO_HEAD, Head, StoreMiss, head_of
from inference_svc.memory.store.patience import Budget
from inference_svc.model.prompting import Tokenized
from inference_svc.text.prefix_matching import Outcome, RememberedText
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from inference_svc.turns import turn_reporter
from inference_svc.turns.phases import Planned, Prompted, Ran, Recalled
from inference_svc.turns.progress import Outbox, ReaderLimits
from inference_svc.turns.prompts.continuing import (
    as_its_agent_has_it,
    continuation,
    what_is_left_out,
    whole_conversation,
)
from inference_svc.turns.turn_data import (
    Continuation,
    MemoryUse,
    MessagesInput,
    PromptInput,
    TurnDelta,
    TurnEvent,
    TurnRequest,
)
from inference_svc.turns.turn_ending import Retry, TurnEnding, check_parent, is_retry, retried
from inference_svc.turns.turn_reporter import HandOff, TurnReporter
from tests.inference.turns.parts import line_parts, parts_of

HEAD = Head(5, Digest.of(b"manifest"), 4, "kv")
HELLO = manifest_pb2.Message(role="user", content="hello")
HI = manifest_pb2.Message(role="assistant", content="hi")


def request(**fields: Any) -> TurnRequest:
    plain = TurnRequest("r", "default", "a", PromptInput("x"), "digest", SamplingParams(1), True)
    use = {name: fields.pop(name) for name in list(fields) if name in MemoryUse.__slots__}
    return replace(plain, memory=MemoryUse(**use), **fields)


def memory(
    *, is_head: bool = True, finish_reason: str = "stop", messages: tuple[manifest_pb2.Message, ...] = ()
) -> AgentMemory:
    turn = manifest_pb2.Turn(request_id="r", input_digest="digest", finish_reason=finish_reason)
    return AgentMemory(
        RememberedText("", TokenIds(), TokenChars()),
        messages,
        turn,
        0,
        "",
        Publication(Standing(HEAD, Stage.STORED if is_head else Stage.MADE)),
    )


# --- retries ---


@pytest.mark.parametrize(
    ("asked", "is_head", "expected"),
    [
        (request(), True, True),
        (request(expected_version=4), True, True),
        (request(expected_version=5), True, False),  # extends this very memory with the same words
        (request(expected_version=5), False, True),  # a turn behind version 5 that was not stored
        (request(expected_version=4), False, False),
        (request(request_id="other"), True, False),
        (request(input_digest="other"), True, False),
    ],
)
def test_a_retry_has_the_id_the_input_and_the_parent_of_the_last_turn(
    asked: TurnRequest, is_head: bool, expected: bool
) -> None:
    assert is_retry(asked, memory(is_head=is_head)) is expected


def test_a_turn_that_was_cut_is_not_told_again() -> None:
    whole, cut = (Recollection(memory(finish_reason=reason), Source.HOT, HEAD) for reason in ("stop", "cancelled"))
    assert retried(request(), whole) is Retry.REPLAYED
    assert retried(request(), cut) is Retry.REPEATED


def test_a_parent_that_is_not_the_head_is_a_conflict_unless_the_head_is_unknown() -> None:
    with pytest.raises(errors.Conflict):
        check_parent(request(expected_version=4), Recollection(None, Source.COLD, HEAD))
    check_parent(request(expected_version=5), Recollection(None, Source.COLD, HEAD))
    check_parent(request(expected_version=4), Recollection(None, Source.COLD, None))


def test_only_a_turn_that_became_shorter_lets_its_caller_name_the_version_before() -> None:
    """A rollback or a fork brings the shorter memory back under a head that the caller has not seen."""
    shorter = replace(memory(), shortened=manifest_pb2.Shortened(is_after_turn=True))
    check_parent(request(expected_version=4), Recollection(shorter, Source.WARM, HEAD))
    with pytest.raises(errors.Conflict):
        check_parent(request(expected_version=4), Recollection(shorter, Source.WARM, replace(HEAD, is_of_turn=False)))
    digest = Digest.of(b"manifest").to_proto()
    forked = head_of(cachestore_pb2.SnapshotVersion(version=1, manifest=digest, origin=cachestore_pb2.ORIGIN_FORK))
    with pytest.raises(errors.Conflict):
        check_parent(request(expected_version=0), Recollection(shorter, Source.WARM, forked))


def test_a_memory_that_became_shorter_and_fell_asleep_has_two_versions_behind_the_one_of_its_turn() -> None:
    """Its caller was told version 3, which extends 2. It became shorter as 4, and fell asleep as 5."""
    shorter = replace(memory(), shortened=manifest_pb2.Shortened(is_after_turn=True))
    asleep = replace(shorter, files=StoredFiles(runs=(), asleep=manifest_pb2.Asleep()))
    assert is_retry(request(expected_version=2), asleep)
    assert not is_retry(request(expected_version=3), asleep), "the same words again are a new turn"
    for version in (3, 4, 5):
        check_parent(request(expected_version=version), Recollection(asleep, Source.WARM, HEAD))
    for version in (2, 6):
        with pytest.raises(errors.Conflict):
            check_parent(request(expected_version=version), Recollection(asleep, Source.WARM, HEAD))


def said(*texts: str) -> tuple[manifest_pb2.Message, ...]:
    roles = ("user", "assistant")
    return tuple(manifest_pb2.Message(role=roles[place % 2], content=text) for place, text in enumerate(texts))


@pytest.mark.parametrize(
    ("sent", "cut"),
    [
        (said("go on", "1", "go on", "2", "go on", "3", "go on"), True),
        (said("go on", "1", "go on", "2", "go on", "3", "stop"), True),
        (said("go on", "1", "go on", "2", "stop"), True),  # an edited question
        (said("go on", "2", "go on", "3", "go on"), False),  # just what the agent remembers
        (said("go on", "2", "go on", "3", "go on", "4", "go on"), False),
    ],
)
def test_a_conversation_whose_questions_are_alike_goes_on_as_its_agent_has_it(
    sent: tuple[manifest_pb2.Message, ...], cut: bool
) -> None:
    known = replace(
        memory(messages=said("go on", "2", "go on", "3")), shortened=manifest_pb2.Shortened(dropped_messages=2)
    )
    asked = as_its_agent_has_it(request(input=MessagesInput(sent)), Recollection(known, Source.HOT, HEAD))
    assert asked.input == MessagesInput(sent[2:] if cut else sent, is_cut=cut)


def steps(first: int, last: int, call: str) -> tuple[manifest_pb2.Message, ...]:
    roles = (("assistant", call), ("tool", "{}"))
    return tuple(
        manifest_pb2.Message(role=role, content=text and f"{text}{number}")
        for number in range(first, last + 1)
        for role, text in roles
    )


@pytest.mark.parametrize("call", ["I look ", ""])
@pytest.mark.parametrize(("last", "cut"), [(1, False), (5, False), (6, True)])
def test_a_caller_who_goes_back_into_what_was_left_out_loses_no_message(call: str, last: int, cut: bool) -> None:
    question = said("what is it")
    left_out = manifest_pb2.Shortened(dropped_messages=10, dropped_behind_question=10)
    known = replace(memory(messages=(*question, *steps(6, 6, call), HI)), shortened=left_out)
    known = replace(known, transcript=RememberedText("x", TokenIds((1,)), TokenChars((1,))))
    sent, recollection = (*question, *steps(1, last, call)), Recollection(known, Source.HOT, HEAD)
    asked = as_its_agent_has_it(request(input=MessagesInput(sent)), recollection)
    assert asked.input == MessagesInput((*question, *steps(6, 6, call)) if cut else sent, is_cut=cut)
    how = continuation(asked, recollection)
    assert how is Continuation.REWOUND
    assert what_is_left_out(asked, recollection, how) == (left_out if cut else None)


# --- memories that cannot be read now ---


@pytest.mark.parametrize(
    ("reason", "sent", "hot", "expected"),
    [
        (MissReason.STORE_TIMEOUT, (HELLO,), None, Continuation.UNDECIDED),
        (MissReason.STORE_TIMEOUT, (HELLO, HI, HELLO), (HELLO, HI), Continuation.UNDECIDED),
        (MissReason.STORE_TIMEOUT, said("a title"), (HELLO, HI), Continuation.BRANCHED),
        (MissReason.BLOB_DAMAGED, (HELLO,), None, Continuation.BRANCHED),
        (MissReason.NEW_AGENT, (HELLO,), None, Continuation.NEW),
    ],
)
def test_a_memory_that_cannot_be_read_is_not_replaced_without_the_callers_word(
    reason: MissReason, sent: tuple[manifest_pb2.Message, ...], hot: Any, expected: Continuation
) -> None:
    known = hot and replace(memory(messages=hot), transcript=RememberedText("x", TokenIds((1,)), TokenChars((1,))))
    unread = Recollection(None, Source.COLD, None, Miss(reason, "why"), unproven=known)
    asked = request(input=MessagesInput(sent))
    assert continuation(asked, unread) is expected
    if expected is not Continuation.NEW:
        assert continuation(replace(asked, memory=MemoryUse(replaces=True)), unread) is Continuation.REPLACED


@pytest.mark.parametrize(("is_head", "expected"), [(False, 3), (True, 9)])
def test_what_extends_an_unstored_memory_counts_under_that_ones_lease(is_head: bool, expected: int) -> None:
    """The present lease may be one that was given after a rollback: it proves nothing of what was before it."""
    tagged: list[AgentMemory] = []
    engine: Any = SimpleNamespace(model=SimpleNamespace(tokenizer_digest="t", mask_window=None))
    line: Any = SimpleNamespace(lease=SimpleNamespace(generation=9), publications=SimpleNamespace(tag=tagged.append))
    lines: Any = {"default": SimpleNamespace(line=lambda _agent: line)}
    ending = TurnEnding(parts_of(engine=engine, recall=Recall(engine, lines)))
    hot = replace(memory(is_head=is_head), is_brought=True)
    hot.publication.standing = hot.publication.standing.under(3)
    recollection = Recollection(hot, Source.HOT, HEAD)
    prepared = Prepared(
        "x", Tokenized(TokenIds((1,)), TokenChars((1,))), Once(None), Source.HOT, Outcome.EXTEND, None, ()
    )
    nothing: Any = None
    state = SequenceState(TokenIds((1,)), TokenChars((1,)), 0, decoded_to=1)
    ended: Any = SimpleNamespace(state=state, cached_tokens=0, prompt_tokens=1)
    planned = Planned(Prompted(Recalled(request(), recollection), "x"), recollection, prepared, nothing)
    text = RememberedText("x", TokenIds((1,)), TokenChars((1,)))
    made = ending._attach(Ran(planned, prepared, ended), text, (), manifest_pb2.Turn())
    assert made.publication.standing.generation == expected
    # And what was computed on brought rows is brought, though the store may have lost its marked copy.
    assert made.is_brought
    assert tagged == [made]


@pytest.mark.parametrize(("is_sealed", "kv_from"), [(False, Source.HOT), (True, Source.COLD)])
def test_a_lease_proves_no_memory_whose_key_is_gone(is_sealed: bool, kv_from: Source) -> None:
    """It counts for seconds, in which an agent could still have been read whose key was destroyed."""

    async def heads(*_asked: object) -> None:
        raise StoreMiss(Miss(MissReason.STORE_REFUSED, "no key", is_sealed=is_sealed))

    hot = memory()
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(kv_identity_hash="kv"),
        memories=SimpleNamespace(get=lambda _key: SimpleNamespace(tag=hot)),
    )
    store: Any = SimpleNamespace(
        agents=SimpleNamespace(heads=heads),
        connection=SimpleNamespace(is_reachable=True),
        events=SimpleNamespace(cursor=None),
    )

    async def newest() -> Recollection:
        lines = Lines("default", store, line_parts(engine=engine))
        setattr(lines.line("a"), "proves", lambda _standing: True)  # noqa: B010
        recall = Recall(engine, {"default": lines})
        return await recall.newest(AgentKey("default", "a"), Budget(1.0, 1.0, lambda: 0.0))

    found = asyncio.run(newest())
    assert (found.memory, found.kv_from) == (None if is_sealed else hot, kv_from)


# --- what is appended to ---


def test_messages_are_appended_to_those_remembered_and_replace_a_reply_that_was_cut() -> None:
    appended = request(input=MessagesInput((HELLO,), is_append=True))
    recollection = Recollection(memory(messages=(HELLO, HI)), Source.HOT, HEAD)
    assert whole_conversation(appended, recollection, is_retry=False) == (HELLO, HI, HELLO)
    assert whole_conversation(appended, recollection, is_retry=True) == (HELLO,)
    # The newest version's last turn was cut, and was to go on from an older one: so does its retry.
    older = Recollection(memory(messages=(HELLO, HI)), Source.WARM, HEAD)
    assert whole_conversation(appended, replace(recollection, base=older), is_retry=True) == (HELLO, HI, HELLO)


def test_an_older_version_is_not_a_hot_memory_that_extends_it_and_is_not_stored() -> None:
    async def version(*_asked: object) -> Head:
        raise StoreMiss(Miss(MissReason.STORE_TIMEOUT, "asked"))

    engine: Any = SimpleNamespace(model=SimpleNamespace(kv_identity_hash="kv"))
    store: Any = SimpleNamespace(agents=SimpleNamespace(version=version))
    recall = Recall(engine, {"default": Lines("default", store, line_parts(engine=engine))})
    key, budget = AgentKey("default", "a"), Budget(1.0, 1.0, lambda: 0.0)
    stored, unstored = (Recollection(memory(is_head=is_head), Source.HOT, HEAD) for is_head in (True, False))
    assert asyncio.run(recall.with_base(key, stored, 5, budget)) is stored
    with pytest.raises(errors.Unavailable, match="asked"):
        asyncio.run(recall.with_base(key, unstored, 5, budget))


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (MissReason.MANIFEST_INVALID, errors.FailedPrecondition),
        (MissReason.STORE_TIMEOUT, errors.Unavailable),
        (MissReason.STORE_UNREACHABLE, errors.Unavailable),
    ],
)
def test_appending_to_what_cannot_be_read_is_refused(reason: MissReason, kind: type[errors.KvasirError]) -> None:
    appended = request(input=MessagesInput((HELLO,), is_append=True))
    with pytest.raises(kind):
        whole_conversation(appended, Recollection(None, Source.COLD, None, Miss(reason, "")), is_retry=False)


@pytest.mark.parametrize(
    ("reason", "expected"), [(MissReason.NEW_AGENT, 0), (MissReason.NEW_AGENT, None), (MissReason.STORE_TIMEOUT, 0)]
)
def test_appending_to_an_agent_that_is_new_or_said_to_be_begins_it(reason: MissReason, expected: int | None) -> None:
    begun = request(input=MessagesInput((HELLO,), is_append=True), expected_version=expected)
    nobody = Recollection(None, Source.COLD, Head(0, None, 0), Miss(reason, ""))
    assert whole_conversation(begun, nobody, is_retry=False) == (HELLO,)


# --- what a stored memory lets others share ---


@pytest.mark.parametrize(("is_brought", "expected"), [(False, 512), (True, 0)])
def test_what_was_brought_from_elsewhere_is_not_passed_on_to_other_agents(is_brought: bool, expected: int) -> None:
    snapshot = cachestore_pb2.SnapshotVersion(
        version=1, manifest=Digest.of(b"manifest").to_proto(), origin=cachestore_pb2.ORIGIN_FORK, is_brought=is_brought
    )
    manifest = manifest_pb2.Manifest(token_ids=range(600), token_chars=[0] * 600, shareable_tokens=512)
    memory = from_manifest(manifest, head_of(snapshot), "")
    assert (memory.shareable_tokens, memory.is_brought) == (expected, is_brought)


# --- whether a hot memory is the newest ---

OTHER = Head(6, Digest.of(b"another"), 5, "kv")


@pytest.mark.parametrize(
    ("standing", "newest", "expected"),
    [
        (Standing(HEAD, Stage.STORED), HEAD, True),
        (Standing(HEAD), HEAD, True),  # extends it, not stored yet
        (Standing(HEAD, Stage.STORED), OTHER, False),
        (Standing(HEAD, Stage.STORED), Head(5, OTHER.manifest, 4, "kv"), False),  # deleted and begun anew
        (Standing(HEAD, Stage.STORED), NO_HEAD, False),
        (
            Standing(HEAD, Stage.SENT, sent=OTHER.identity),
            OTHER,
            True,
        ),  # a commit whose answer was lost
        # Rolled back to it since: the number is another, and so is what the agent remembers.
        (Standing(HEAD, Stage.SENT, sent=OTHER.identity), Head(8, OTHER.manifest, 7, "kv"), False),
        (Standing(HEAD, sent_before=frozenset({OTHER.identity})), OTHER, True),
        (
            Standing(HEAD, sent_before=frozenset({OTHER.identity})),
            Head(8, OTHER.manifest, 7),
            False,
        ),
        (Standing(HEAD).lost("6"), HEAD, False),
        (
            Standing(None),
            OTHER,
            False,
        ),  # made while the store was away: what it follows was never told
        (Standing(None), NO_HEAD, False),
    ],
)
def test_a_hot_memory_is_used_only_if_it_is_or_extends_the_newest_version(
    standing: Standing, newest: Head, expected: bool
) -> None:
    assert standing.is_current(newest.identity) is expected
    if expected:
        assert standing.found(newest).head == newest


# --- outbox and hand-off ---


async def read(outbox: Outbox) -> list[TurnEvent]:
    return [event async for _, event in outbox.events()]


async def test_what_a_slow_reader_did_not_take_becomes_few_messages_that_say_the_same() -> None:
    outbox = Outbox(ReaderLimits(max_unread_bytes=1 << 20, stall_s=60), lambda: 0.0)
    for done in range(100):
        outbox.put(Prefilled(done, 100))
    for token in range(1000):
        outbox.put(TurnDelta(chr(97 + token % 26), (token,)))
    outbox.close()
    progress, delta = await read(outbox)
    assert progress == Prefilled(99, 100)
    assert isinstance(delta, TurnDelta)
    assert (len(delta.text), delta.token_ids) == (1000, tuple(range(1000)))


def test_a_reader_gets_what_was_put_before_the_error() -> None:
    async def failing() -> list[TurnEvent]:
        outbox, heard = Outbox(ReaderLimits(max_unread_bytes=1 << 20, stall_s=60), lambda: 0.0), []
        outbox.put(TurnDelta("a", (1,)))
        outbox.close(errors.ResourceExhausted("full"))
        try:
            async for _, event in outbox.events():
                heard.append(event)
        except errors.ResourceExhausted:
            return heard
        raise AssertionError("the error did not arrive")

    assert asyncio.run(failing()) == [TurnDelta("a", (1,))]


async def test_a_step_of_many_turns_wakes_the_loop_once_and_keeps_each_turns_order() -> None:
    loop, wakes = asyncio.get_running_loop(), 0
    real = loop.call_soon_threadsafe

    def counted(*given: object) -> object:
        nonlocal wakes
        wakes += 1
        return real(*given)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
    handoff, heard = HandOff(loop), {number: list[Prefilled]() for number in range(32)}

    def step() -> None:
        for done in range(3):
            for number in range(32):
                handoff.send(heard[number].extend, [Prefilled(done, 3)])

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()  # blocks the loop, as a busy one is
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wakes == 1
    assert all(events == [Prefilled(done, 3) for done in range(3)] for events in heard.values())


def readers(count: int, heard: list[int]) -> list[Callable[[list[int]], None]]:
    return [lambda numbers, reader=reader: heard.extend(numbers) for reader in range(count)]  # type: ignore[misc]


def counted_steps(*steps: tuple[int, bool]) -> tuple[list[int], list[int]]:
    """Events of so many turns each, which can wait or not: how many had come after each step, and of which steps."""

    async def handing_over() -> tuple[list[int], list[int]]:
        handoff, heard, counts = HandOff(asyncio.get_running_loop()), list[int](), list[int]()
        deliveries = readers(max(turns for turns, _ in steps), heard)
        for number, (turns, can_wait) in enumerate(steps):
            for deliver in deliveries[:turns]:
                handoff.send(deliver, [number], can_wait=can_wait)
            await asyncio.sleep(0)
            counts.append(len(heard))
        return counts, heard

    return asyncio.run(handing_over())


def test_tokens_of_few_readers_come_at_once() -> None:
    assert counted_steps(*[(4, True)] * 3) == ([4, 8, 12], [0] * 4 + [1] * 4 + [2] * 4)


async def test_many_tokens_of_one_reader_that_the_loop_takes_at_once_begin_no_pause() -> None:
    handoff, heard = HandOff(asyncio.get_running_loop()), list[int]()
    for number in (*range(10), None, 10):
        if number is None:
            await asyncio.sleep(0)
        else:
            handoff.send(heard.extend, [number], can_wait=True)
    await asyncio.sleep(0)
    assert heard == [*range(11)]


def test_tokens_of_many_readers_wait_for_a_pause_but_not_behind_what_cannot_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turn_reporter, "LOOK_S", 60)
    counts, heard = counted_steps((5, True), (5, True), (1, False), (5, True), (1, False))
    assert counts == [5, 5, 11, 11, 17]
    assert heard == [0] * 5 + [1] * 5 + [2] + [3] * 5 + [4]


def test_no_reader_waits_for_a_pause_that_others_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have waited for a pass already. Prompts of a pass that say how far they are begin no pause."""
    monkeypatch.setattr(turn_reporter, "LOOK_S", 60)
    counts, _ = counted_steps((5, True), (6, True), (6, True), (1, False), (9, False), (9, True))
    assert counts == [5, 11, 11, 18, 27, 36]


async def test_tokens_that_wait_come_when_the_pause_ends() -> None:
    handoff, heard, last = HandOff(asyncio.get_running_loop()), list[int](), asyncio.Event()
    deliveries = readers(5, heard)
    for number in range(3):
        for deliver in deliveries:
            handoff.send(deliver, [number], can_wait=True)
        await asyncio.sleep(0)
    handoff.send(lambda _: last.set(), [3], can_wait=True)
    await asyncio.wait_for(last.wait(), 60)
    assert heard == [0] * 5 + [1, 2] * 5


async def test_a_reader_hears_its_tokens_in_lists_and_never_before_what_came_before_them() -> None:
    handoff, heard = HandOff(asyncio.get_running_loop()), list[tuple[str, list[int], tuple[object, ...]]]()
    ways = {name: lambda events, *about, name=name: heard.append((name, events, about)) for name in "ab"}
    for name, number, about in [*[("a", 1, ()), ("b", 2, ())] * 2, ("a", 3, ("end",)), ("a", 4, ()), ("a", 5, ())]:
        handoff.send(ways[name], [number], *about, can_wait=not about)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert heard == [("a", [1, 1], ()), ("b", [2, 2], ()), ("a", [3], ("end",)), ("a", [4, 5], ())]


def test_tokens_that_follow_one_another_are_one_event_with_their_log_probabilities() -> None:
    odds = [TokenLogprobs(-1.0 * token) for token in range(5)]
    one, two, three, four = (Tokens((token,), f"{token} ", (odds[token],)) for token in range(1, 5))
    given: list[Event] = [
        Started(2, queue_s=0.0, restore_s=0.0),
        one,
        two,
        BlocksFull(1),
        three,
        four,
        Preempted((), 3),
    ]
    joined = [Tokens((1, 2), "1 2 ", (*odds[1:3],)), Tokens((3, 4), "3 4 ", (*odds[3:],))]
    assert turn_reporter._joined(given) == [given[0], joined[0], given[3], joined[1], given[-1]]
    assert turn_reporter._joined([one]) == [one]


# --- the price of a store ---


@pytest.mark.parametrize("from_disk", [True, False])
def test_a_restore_teaches_the_price_of_where_its_files_came_from(from_disk: bool) -> None:
    size_bytes, costs = 8 << 20, RestoreCosts(lambda: 0.0)
    costs.computed(0, 1_024, 0.5)
    came: dict[str, Any] = {"size_bytes": size_bytes, "came_bytes": size_bytes // 2, "took_s": 0.5, "waited_s": 0.0}
    about: Any = SimpleNamespace(
        _prepared=SimpleNamespace(reading=SimpleNamespace(**came, first_s=0.1, is_from_disk=from_disk)),
        _turn=SimpleNamespace(request=SimpleNamespace(namespace="ns"), times=SimpleNamespace(arrived=0, restore_s=0.2)),
        _parts=SimpleNamespace(clock=lambda: 0.0, planner=SimpleNamespace(costs=costs)),
    )
    TurnReporter._learn_restore(about, Started(512, queue_s=0.0, restore_s=0.4))
    known = costs.reason_to_compute("ns", 1_024, size_bytes, from_disk=from_disk)
    assert known is not None
    assert known.detail == "restoring 1024 tokens was expected to take 1000 ms, computing them 500 ms"
    assert costs.reason_to_compute("ns", 1_024, size_bytes, from_disk=not from_disk) is None
