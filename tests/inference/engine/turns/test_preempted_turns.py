"""Background turns that give up their room to people's: they go on where they were, to the bit, and nothing is lost."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import Cancelled, Unavailable

from inference_svc.engine import engine
from inference_svc.engine.api import (
    Ended,
    Event,
    Hot,
    Preempted,
    Prefilled,
    Priority,
    Resumed,
    Reuse,
    Started,
    Tokens,
    Wanted,
)
from inference_svc.engine.drafting.draft_lengths import DraftCosts, Proposal
from inference_svc.engine.engine import Engine
from inference_svc.engine.files.incoming import Incoming
from inference_svc.engine.scheduling.schedulable import DraftRules
from inference_svc.formats.constraint import Constraint, ConstraintKind
from tests.inference.engine.cells import cells_of
from tests.inference.engine.drafts.planted_drafts import Told, wrong_at
from tests.inference.engine.driving import THOUGHTS, Driver, Listener, tokens_of
from tests.made_models.sampling import pairs

PROMPT = tokens_of(700, 1)
PERSON = tokens_of(900, 2)
# Each of the two fits, both together do not; half of it, which files in memory may take, holds what the first computes.
BUDGET_TOKENS = 1_700


class Keeper(Listener):
    """Keeps the files of a turn that was preempted, and brings `brought` of them back when it is wanted."""

    def __init__(
        self,
        brought: Callable[[Sequence[bytes]], Sequence[bytes] | Incoming | None] = lambda files: files,
        *,
        keeps: bool = False,
    ) -> None:
        """`keeps`: it does not say that the files are stored."""
        super().__init__()
        self._keeps = keeps
        self.files: tuple[bytes, ...] = ()
        self.tokens_at: list[int] = []  # generated before each time that it was preempted
        self._brought = brought

    def __call__(self, events: list[Event]) -> None:
        super().__call__(events)
        for event in events:
            if isinstance(event, Preempted):
                self.files = tuple(map(bytes, event.files))
                self.tokens_at.append(self.count(Tokens))
                if not self._keeps:
                    self.handle.result(60).files_stored()
            if isinstance(event, Wanted) and (brought := self._brought(self.files)) is not None:
                self.handle.result(60).resume(brought)

    def one(self, kind: type[Event]) -> Any:
        [event] = [event for event in self.events if isinstance(event, kind)]
        return event


def open_engine(model_dir: Path, cache_dir: Path) -> Engine:
    unit = Engine.open(model_dir, cache_dir=cache_dir, memory_budget_bytes=1 << 20, longest_gap_s=0)
    budget_bytes = BUDGET_TOKENS * unit.model.kv_bytes_per_token
    unit.close()
    with pytest.MonkeyPatch.context() as patch, cells_of(1):
        # Room for decoded copies, as on a machine with memory: only then does the batch hold rows back from their own
        # buffers, to write them in one go.
        patch.setattr(engine, "_DECODED_PART", Fraction(1, 16))
        # A turn that was preempted is compared with one that had no company.
        return Engine.open(
            model_dir,
            cache_dir=cache_dir,
            memory_budget_bytes=budget_bytes,
            longest_gap_s=0,
            batch_invariant=True,
            drafts=DraftRules(most=16),
        )


@pytest.fixture(scope="module")
def small(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    opened = open_engine(model_dir, tmp_path_factory.mktemp("digests"))
    yield Driver(opened)
    opened.close()


def background(driver: Driver, listener: Listener, reuse: Reuse | None = None, **settings: Any) -> Listener:
    plain: dict[str, Any] = {"key": driver.key(), "max_tokens": 48}
    plain |= {"priority": Priority.BACKGROUND, "can_be_preempted": True}
    return driver.submit(settings.pop("tokens", PROMPT), reuse, listener=listener, **(plain | settings))


def person(driver: Driver, **settings: Any) -> Listener:
    return driver.submit(PERSON, max_tokens=settings.pop("max_tokens", 2), **settings)


def disturbed(driver: Driver, keeper: Keeper, kind: type[Event], count: int, **settings: Any) -> Ended:
    """The end of a background turn whose room a person takes at an event of it."""
    people: list[Listener] = []
    keeper.at(kind, count, lambda: people.append(person(driver)))
    ended = background(driver, keeper, **settings).end()
    assert [one.end().finish_reason.value for one in people] == ["length"]
    return ended


def logprobs(listener: Listener) -> list[object]:
    return [event.logprobs for event in listener.events if isinstance(event, Tokens)]


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7, "logprobs": 3, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    "penalized": {"repetition_penalty": 1.5, "temperature": 0.7, "seed": 3, "top_p": 0.9},
    "constrained": {"constraint": Constraint(ConstraintKind.REGEX, "([a-z]{3} ){30}"), "temperature": 0.8, "seed": 1},
    "limited": {"reasoning_limit": THOUGHTS, "temperature": 0.9, "seed": 2},
}
CUTS: dict[str, tuple[type[Event], int]] = {"decoding": (Tokens, 10), "prefilling": (Prefilled, 2)}


@dataclass(frozen=True)
class Undisturbed:
    """A background turn that nobody preempts, with its events and the files of its memory."""

    listener: Keeper
    ended: Ended
    files: tuple[bytes, ...]


@pytest.fixture(scope="module")
def undisturbed(small: Driver) -> Callable[[str], Undisturbed]:
    """Of the settings of a name, run once for all tests."""

    @cache
    def run(settings: str) -> Undisturbed:
        listener, key = Keeper(), small.key()
        ended = background(small, listener, key=key, **SETTINGS[settings]).end()
        files = small.files(key)
        assert small.engine.memories.drop(key).result(60)
        return Undisturbed(listener, ended, files)

    return run


@pytest.mark.long(8)
@pytest.mark.parametrize(("cut", "settings"), pairs(list(CUTS), SETTINGS))
def test_a_turn_that_was_preempted_says_and_remembers_what_it_does_undisturbed(
    small: Driver, cut: str, settings: str, undisturbed: Callable[[str], Undisturbed]
) -> None:
    expected = undisturbed(settings)
    keeper, key = Keeper(), small.key()
    ended = disturbed(small, keeper, *CUTS[cut], key=key, **SETTINGS[settings])
    assert keeper.one(Resumed).lost_tokens == 0
    assert (ended.text, ended.state) == (expected.ended.text, expected.ended.state)
    assert logprobs(keeper) == logprobs(expected.listener)
    assert small.files(key) == expected.files


@pytest.mark.long(2)
def test_a_turn_that_computes_its_reply_again_tries_nothing_meanwhile(
    small: Driver, undisturbed: Callable[[str], Undisturbed], told: type[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV was lost. Drafts are for tokens behind all that it has, not behind the one that is computed again."""
    expected, key = undisturbed("greedy"), small.key()
    told.replies, told.tries = {PROMPT: small.reply(expected.ended)}, staticmethod(wrong_at(3))
    behind: set[int] = set()

    def lengths(_self: object, _rows: int, proposals: dict[Any, Proposal], _most_rows: int) -> dict[Any, int]:
        behind.update(len(turn.token_ids) - turn.cells.computed for turn in proposals)
        return {turn: each.most for turn, each in proposals.items()}

    monkeypatch.setattr(DraftCosts, "lengths", lengths)
    keeper = Keeper(lambda _files: ())
    ended = disturbed(small, keeper, Tokens, 10, key=key)
    assert keeper.one(Resumed).lost_tokens > len(PROMPT)
    assert behind == {1}
    assert ended.accepted_draft_tokens
    assert (ended.text, ended.state) == (expected.ended.text, expected.ended.state)
    assert small.files(key) == expected.files


@pytest.mark.long(3)
def test_a_stop_string_is_found_across_the_cut_and_not_told(small: Driver) -> None:
    alone = background(small, Keeper()).end()
    start = len(alone.text) // 2
    stop = alone.text[start : start + 6]
    expected = background(small, Keeper(), stop=(stop,)).end()
    before = len(expected.state.token_ids) - len(PROMPT)
    for count in range(max(1, before - 1), before + 2):
        keeper = Keeper()
        ended = disturbed(small, keeper, Tokens, count, stop=(stop,))
        assert (ended.text, ended.matched_stop, ended.state) == (expected.text, stop, expected.state)


@pytest.mark.long(2)
@pytest.mark.parametrize(("cut", "most"), [((Tokens, 10), 11), ((Prefilled, 2), 2)], ids=["decoding", "prefilling"])
def test_a_person_gets_the_room_within_a_step_and_a_cell(
    small: Driver, cut: tuple[type[Event], int], most: int
) -> None:
    keeper = Keeper()
    disturbed(small, keeper, *cut)
    events = keeper.events[: keeper.events.index(keeper.one(Preempted))]
    assert cut[1] <= sum(isinstance(event, cut[0]) for event in events) <= most


BROUGHT: dict[str, Callable[[Sequence[bytes]], Sequence[bytes]]] = {
    "nothing": lambda _: (),
    "one block": lambda files: files[:1],
    "all but the tail": lambda files: files[:-1],
    "one that is short": lambda files: (files[0], files[1][:-64], *files[2:]),
    "another's place": lambda files: (files[1], *files[1:]),
    "one too many": lambda files: (*files, files[-1]),
    "not numbers": lambda files: (files[0], files[1][:-2] + b"\xff\xff", *files[2:]),
}


@pytest.mark.long(5)
@pytest.mark.parametrize(("cut", "brought"), pairs(list(CUTS), BROUGHT))
def test_what_of_a_turn_does_not_come_back_is_computed_again_and_nothing_is_said_twice(
    small: Driver, cut: str, brought: str, undisturbed: Callable[[str], Undisturbed]
) -> None:
    expected = undisturbed("sampled")
    keeper, key = Keeper(BROUGHT[brought]), small.key()
    ended = disturbed(small, keeper, *CUTS[cut], key=key, **SETTINGS["sampled"])
    preempted, resumed = keeper.one(Preempted), keeper.one(Resumed)
    assert resumed.tokens + resumed.lost_tokens == preempted.tokens
    assert (ended.text, ended.state) == (expected.ended.text, expected.ended.state)
    assert logprobs(keeper) == logprobs(expected.listener)
    assert [event for event in keeper.events if isinstance(event, Prefilled)] == [
        event for event in expected.listener.events if isinstance(event, Prefilled)
    ]
    assert small.files(key) == expected.files


def arriving(files: Sequence[bytes], expected: int) -> Incoming:
    """Files that come one after the other, and then no more, of as many as were expected."""
    incoming = Incoming(expected, is_kept=True)

    def come() -> None:
        for data in files:
            time.sleep(0.02)
            incoming.add(data)
        incoming.end()

    threading.Thread(target=come).start()
    return incoming


@pytest.mark.long(10)
@pytest.mark.parametrize("brought", ["all", "one block", "not numbers"])
def test_files_that_come_while_others_become_kv_bring_back_as_much(
    small: Driver, brought: str, undisturbed: Callable[[str], Undisturbed]
) -> None:
    expected, found = undisturbed("greedy"), BROUGHT.get(brought, tuple)
    at_once, one_by_one, key = Keeper(found), Keeper(lambda files: arriving(found(files), len(files))), small.key()
    disturbed(small, at_once, *CUTS["decoding"], is_remembered=False)
    ended = disturbed(small, one_by_one, *CUTS["decoding"], key=key)
    assert one_by_one.one(Resumed) == at_once.one(Resumed)
    assert (ended.text, ended.state) == (expected.ended.text, expected.ended.state)
    assert small.files(key) == expected.files


@pytest.mark.long(4)
def test_a_turn_is_preempted_twice_and_no_more(small: Driver) -> None:
    key, alone_key = small.key(), small.key()
    expected = background(small, Keeper(), key=alone_key).end()
    small.engine.memories.drop(alone_key).result(60)
    keeper, people = Keeper(), []
    for count in (5, 20, 35):
        keeper.at(Tokens, count, lambda: people.append(person(small)))
    ended = background(small, keeper, key=key).end()
    assert len(keeper.tokens_at) == 2
    assert ended.state == expected.state
    for one in people:
        one.end()


@pytest.mark.long(3)
def test_the_hot_memory_that_it_extends_goes_with_it_and_the_turn_is_what_it_would_have_been(small: Driver) -> None:
    key, state = small.remember(500)
    tokens = (*state.token_ids, *tokens_of(200, 3))
    alone = small.fork(key)
    expected = background(small, Keeper(), Hot(500), key=alone, tokens=tokens, max_tokens=24).end()
    expected_files = small.files(alone)
    small.engine.memories.drop(alone).result(60)
    keeper, seen = Keeper(), []
    keeper.at(Preempted, 1, lambda: seen.append(small.engine.memories.get(key)))
    ended = disturbed(small, keeper, Tokens, 5, reuse=Hot(500), key=key, tokens=tokens, max_tokens=24)
    assert seen == [None]
    assert (ended.state, ended.cached_tokens) == (expected.state, 499)
    assert small.files(key) == expected_files


@pytest.mark.long(2)
@pytest.mark.parametrize("when", [Preempted, Wanted])
def test_a_cancel_while_it_is_preempted_or_wanted_frees_everything_at_once(small: Driver, when: type[Event]) -> None:
    key, state = small.remember(300)
    tokens = (*state.token_ids, *PROMPT[:300])
    keeper = Keeper(lambda _: None)
    keeper.cancel_at(when, 1)
    with pytest.raises(Cancelled):
        disturbed(small, keeper, Tokens, 5, reuse=Hot(300), key=key, tokens=tokens)
    assert keeper.events[-2] == keeper.one(when)
    person(small).end()
    assert all_is_free(small)
    assert small.engine.memories.get(key) is None  # its memory is where the plan says that it is whole


def test_nobody_begins_with_blocks_of_a_turn_that_is_preempted_nor_takes_its_memory_for_it(small: Driver) -> None:
    """A key's older memory is not the turn's: blocks that are asked for meanwhile would be another text's."""
    key, _ = small.remember(300)
    asked: list[Any] = []
    keeper = Keeper()
    keeper.at(Preempted, 1, lambda: asked.append(small.engine.memories.snapshot(key, 0, blocks_only=True)))
    keeper.at(Preempted, 1, lambda: asked.append(small.engine.memories.snapshot(key, 0)))
    ended = disturbed(small, keeper, Tokens, 5, key=key)
    assert asked[0].result(60) is None
    assert asked[1].result(60).state == ended.state.computed


@pytest.mark.long(5)
def test_who_may_not_be_preempted_is_not(small: Driver) -> None:
    for settings in ({"can_be_preempted": False}, {"keep_partial": True}, {"priority": Priority.INTERACTIVE}):
        keeper = Keeper()
        disturbed(small, keeper, Tokens, 5, **settings)
        assert keeper.count(Preempted) == 0


@pytest.mark.long(3)
def test_files_in_memory_are_bounded_until_they_are_stored(small: Driver) -> None:
    """By half of the budget: who has computed more does not give way, nor does anybody while others' are too many."""
    keeper = Keeper()
    disturbed(small, keeper, Tokens, 5, tokens=tokens_of(1000, 5))
    assert keeper.count(Preempted) == 0

    old, young, people = Keeper(), Keeper(keeps=True), [Listener(), Listener()]
    # Its gap has room for the background row, which would stand aside for most of the time else.
    old.at(Tokens, 5, lambda: small.submit(PERSON, listener=people[0], max_tokens=60, longest_gap_s=1e6))
    young.at(Preempted, 1, lambda: small.submit(tokens_of(400, 8), listener=people[1], max_tokens=60))
    old.at(Tokens, 20, lambda: young.handle.result(60).files_stored())

    def begin_both() -> None:
        for listener, seed in ((old, 6), (young, 7)):
            background(small, listener, tokens=tokens_of(450, seed), max_tokens=60)

    # Within a step: on a busy machine the first would otherwise speak before the second is there.
    small.submit(tokens_of(5), listener=Listener().at(Started, 1, begin_both), max_tokens=1).end()
    for one in (old, young, *people):
        one.end()
    assert young.tokens_at[0] < 20 <= old.tokens_at[0] <= 21


@pytest.mark.long(4)
def test_many_people_and_many_background_turns_all_come_to_their_end(small: Driver) -> None:
    keepers, people = [Keeper() for _ in range(3)], list[Listener]()

    def another() -> None:
        people.append(Listener())
        if len(people) < 6:
            people[-1].at(Started, 1, another)
        small.submit(PERSON, listener=people[-1], max_tokens=8)

    keepers[0].at(Tokens, 1, another)
    for seed, keeper in enumerate(keepers):
        background(small, keeper, tokens=tokens_of(400, seed), max_tokens=30)
    replies = [keeper.end() for keeper in keepers]
    for number in range(6):
        people[number].end()
    for seed, reply in enumerate(replies):
        alone = background(small, Keeper(), tokens=tokens_of(400, seed), max_tokens=30).end()
        assert reply.state == alone.state
    assert small.engine.preemptions > 0
    assert all_is_free(small)


@pytest.mark.long(2)
def test_an_engine_that_closes_ends_who_is_preempted_and_who_is_wanted(model_dir: Path, tmp_path: Path) -> None:
    driver = Driver(open_engine(model_dir, tmp_path))
    preempted, wanted, first = Keeper(), Keeper(lambda _: None), Listener()
    background(driver, preempted.at(Tokens, 5, lambda: driver.submit(PERSON, listener=first, max_tokens=400)))
    preempted.wait_for(Preempted)
    driver.engine.close()
    for one in (preempted, first):
        with pytest.raises(Unavailable):
            one.end()
    driver = Driver(open_engine(model_dir, tmp_path))
    background(driver, wanted.at(Tokens, 5, lambda: person(driver)))
    wanted.wait_for(Wanted)
    driver.engine.close()
    with pytest.raises(Unavailable):
        wanted.end()


def all_is_free(driver: Driver) -> bool:
    """No turn holds bytes any more."""
    worker = driver.engine._worker
    driver.engine.memories.drop(driver.key()).result(60)  # the worker has done what came before
    return worker.memories.ledger.promised_bytes == 0 and not worker._scheduler.turns
