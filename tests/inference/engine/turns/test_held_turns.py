"""Turns that one engine begins and another ends: tokens, text and memory are those of a turn that stayed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kvasir.errors import Cancelled, InvalidArgument, KvasirError, Unavailable
from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.engine.api import (
    AgentKey,
    Cold,
    Ended,
    Event,
    FinishReason,
    Held,
    HeldTurn,
    Hot,
    Keeps,
    Prefilled,
    Resumed,
    SamplingParams,
    Started,
    Tokens,
    TurnPlan,
    Wanted,
)
from inference_svc.engine.engine import Engine
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.engine.driving import THOUGHTS, Driver, Listener, tokens_of
from tests.inference.engine.families import ALL, write_family

PROMPT = tokens_of(700, 1)
IS_ON_CPU = mx.default_device().type == mx.DeviceType.cpu
MAX_TOKENS = 40 if IS_ON_CPU else 160  # a GPU decodes many before threads have copied a block from it
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7, "logprobs": 3, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    "penalized": {"repetition_penalty": 1.5, "temperature": 0.7, "seed": 3, "top_p": 0.9},
    "constrained": {"constraint": Constraint(ConstraintKind.REGEX, "([a-z]{3} ){30}"), "temperature": 0.8, "seed": 1},
    "limited": {"reasoning_limit": THOUGHTS, "temperature": 0.9, "seed": 2},
}


@dataclass(frozen=True)
class Turn:
    """A turn by its events, wherever they happened, and the memory that it left."""

    events: list[Event]
    ended: Ended
    files: tuple[bytes, ...]

    @property
    def told(self) -> list[object]:
        tokens = [event for event in self.events if isinstance(event, Tokens)]
        ids = [token_id for event in tokens for token_id in event.ids]
        return [ids, "".join(event.text for event in tokens), [event.logprobs for event in tokens if event.ids]]

    @property
    def cells(self) -> list[int]:
        """Where the cells of its prompt ended."""
        return [event.tokens_done for event in self.events if isinstance(event, Prefilled)]


class Two:
    """Two engines with one model."""

    def __init__(self, source: Driver, destination: Driver) -> None:
        self.source, self.destination = source, destination

    def plan(self, key: AgentKey, tokens: Sequence[int] = PROMPT, **settings: Any) -> TurnPlan:
        sampling = replace(SamplingParams(max_tokens=MAX_TOKENS), **settings)
        return TurnPlan(
            TokenIds(tokens), TokenChars((1,) * len(tokens)), sampling, key=key, namespace=key.agent_id
        )  # none shares KV

    def stayed(self, plan: TurnPlan) -> Turn:
        listener = Listener()
        self.source.engine.submit(plan, listener)
        ended = listener.end()
        assert plan.key is not None
        files = self.source.files(plan.key)
        assert self.source.engine.memories.drop(plan.key).result(60)
        return Turn(listener.events, ended, files)

    def held(
        self, plan: TurnPlan, kind: type[Event], count: int, *, is_at_once: bool = False
    ) -> tuple[Listener, HeldTurn, tuple[bytes, ...]]:
        """A turn that was held after that event of it, and its blocks that went ahead: none if it is held at once. Else
        it goes on while threads copy them from a GPU.
        """
        listener, ahead, found = Listener(), [], []

        def hold() -> None:
            handle = listener.handle.result(60)
            if is_at_once:
                found.append(handle.hold())
                return
            sent = handle.full_blocks(0, 1)
            sent.add_done_callback(lambda done: ahead.extend(done.result()))
            sent.add_done_callback(lambda done: found.append(handle.hold(len(done.result()))))

        listener.at(kind, count, hold)
        listener.handle.set_result(self.source.engine.submit(plan, listener))
        listener.wait_for(kind, count)
        while not found:
            self.source.engine.memories.snapshot(self.source.key(), 0).result(60)
        held = found[0].result(60)
        assert held is not None
        assert isinstance(listener.events[-1], Held), "who takes events later than this answer has them in order"
        return listener, held, tuple(ahead)

    def taken_up(self, plan: TurnPlan, held: HeldTurn, files: Sequence[bytes]) -> Listener:
        """The other engine's part of the turn, up to where it waits for a word."""
        listener = Listener()
        listener.at(Wanted, 1, lambda: listener.handle.result(60).resume(files))
        plan = replace(plan, reuse=Cold(), carried=held.carried)
        listener.handle.set_result(self.destination.engine.submit(plan, listener))
        listener.wait_for(Resumed)
        return listener

    def moved(self, plan: TurnPlan, kind: type[Event], count: int, *, is_at_once: bool = False) -> Turn:
        before, held, ahead = self.held(plan, kind, count, is_at_once=is_at_once)
        after = self.taken_up(plan, held, (*ahead, *held.files))
        before.handle.result(60).give_away()
        with pytest.raises(Unavailable) as gone:
            before.end()
        assert gone.value.reason == "TURN_MOVED"
        after.handle.result(60).release()
        ended = after.end()
        assert plan.key is not None
        return Turn([*before.events[:-1], *after.events], ended, self.destination.files(plan.key))


@pytest.fixture(scope="module")
def two(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    drivers = [
        Driver(Engine.open(model_dir, cache_dir=tmp_path_factory.mktemp("digests"), memory_budget_bytes=64 << 20))
        for _ in range(2)
    ]
    yield Two(*drivers)
    for each in drivers:
        each.engine.close()


@pytest.fixture(scope="module")
def stayed(two: Two) -> Callable[[str], Turn]:
    """A turn with the settings of a name that no engine gives away, run once for all tests."""
    return cache(lambda name: two.stayed(two.plan(two.source.key(), **SETTINGS[name])))


def assert_same(moved: Turn, expected: Turn) -> None:
    assert moved.told == expected.told
    assert (moved.ended.text, moved.ended.generated_text) == (expected.ended.text, expected.ended.generated_text)
    assert moved.ended.state == expected.ended.state
    assert (moved.ended.cached_tokens, moved.ended.completion_tokens) == (
        expected.ended.cached_tokens,
        expected.ended.completion_tokens,
    )
    assert moved.files == expected.files


ONE_CELL = pytest.mark.cpu_only("a GPU computes this prompt in one cell")


@pytest.mark.long(12)
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param((Tokens, 1), id="first"),
        pytest.param((Tokens, 23), id="later"),
        pytest.param((Prefilled, 2), id="prompt", marks=ONE_CELL),
    ],
)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_other_engine_goes_on_with_the_very_next_token(
    two: Two, stayed: Callable[[str], Turn], name: str, cut: tuple[type[Event], int]
) -> None:
    moved = two.moved(two.plan(two.source.key(), **SETTINGS[name]), *cut)
    assert_same(moved, stayed(name))
    [resumed] = [event for event in moved.events if isinstance(event, Resumed)]
    assert resumed.lost_tokens == 0
    assert sum(isinstance(event, Started) for event in moved.events) == 1


@pytest.mark.long(2)
def test_text_that_a_stop_string_holds_back_goes_along(two: Two, stayed: Callable[[str], Turn]) -> None:
    start = len(stayed("greedy").ended.text) // 2
    stop = stayed("greedy").ended.text[start : start + 30]
    expected = two.stayed(two.plan(two.source.key(), stop=(stop,)))
    assert expected.ended.matched_stop == stop
    texts = [event.text for event in expected.events if isinstance(event, Tokens)]
    held_back = [count for count in range(1, len(texts)) if not any(texts[count - 1 :])]
    assert len(held_back) >= 6, "a GPU has enqueued another step when it is held"
    for count in held_back[:3]:
        moved = two.moved(two.plan(two.source.key(), stop=(stop,)), Tokens, count, is_at_once=True)
        kinds = [type(event) for event in moved.events if isinstance(event, Tokens | Held)]
        assert kinds.index(Held) in held_back
        assert moved.ended.matched_stop == stop
        assert_same(moved, expected)


@pytest.mark.long(3)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_files_that_do_not_arrive_are_computed_again_and_no_token_is_another(
    two: Two, stayed: Callable[[str], Turn], kept: int
) -> None:
    plan = two.plan(two.source.key(), **SETTINGS["sampled"])
    before, held, ahead = two.held(plan, Tokens, 9)
    after = two.taken_up(plan, held, (*ahead, *held.files)[:kept])
    before.handle.result(60).give_away()
    after.handle.result(60).release()
    after.end()
    assert after.count(Started) == 0
    expected = stayed("sampled")
    events = [event for event in (*before.events, *after.events) if isinstance(event, Tokens)]
    assert [token_id for event in events for token_id in event.ids] == expected.told[0]


def test_a_turn_that_computes_lost_rows_again_may_move_on(two: Two) -> None:
    """It began with more tokens of its agent's memory than it has KV."""
    key, state = two.source.remember(300)
    plan = replace(two.plan(key, (*state.token_ids, *tokens_of(40, 5))), reuse=Hot(300))
    before, held, _ = two.held(plan, Tokens, 9)
    after = two.taken_up(plan, held, ())
    before.handle.result(60).give_away()
    handle = after.handle.result(60)
    handle.release()
    again = handle.hold().result(60)
    assert again is not None
    assert again.carried.computed < again.carried.cached == 299
    back = Two(two.destination, two.source).taken_up(plan, again, again.files)
    handle.give_away()
    back.handle.result(60).release()
    ended = back.end()
    assert (ended.cached_tokens, ended.completion_tokens) == (299, MAX_TOKENS)
    assert ended.state.token_ids[: len(again.carried.token_ids)] == again.carried.token_ids


@pytest.mark.long(2)
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_a_held_turn_that_is_released_goes_on_as_if_nothing_had_been(
    two: Two, stayed: Callable[[str], Turn], name: str
) -> None:
    plan = two.plan(two.source.key(), **SETTINGS[name])
    listener, held, _ = two.held(plan, Tokens, 9)
    told = listener.count(Tokens)
    beside = two.source.turn(tokens_of(300, 5), max_tokens=4)
    assert beside.completion_tokens == 4, "others go on meanwhile"
    assert listener.count(Tokens) == told, "a held turn computes nothing"
    assert len(held.carried.token_ids) - len(PROMPT) == told
    listener.handle.result(60).release()
    assert plan.key is not None
    assert_same(Turn(listener.events, listener.end(), two.source.files(plan.key)), stayed(name))


def test_a_held_turn_can_be_cancelled_and_its_taker_too(two: Two) -> None:
    plan = two.plan(two.source.key())
    listener, held, ahead = two.held(plan, Tokens, 3)
    taker = two.taken_up(plan, held, (*ahead, *held.files))
    for each in (listener, taker):
        each.handle.result(60).cancel()
        with pytest.raises(Cancelled):
            each.end()


@pytest.mark.long(2)
@pytest.mark.parametrize("delay_s", [0, 0.01])
def test_a_cancel_keeps_the_part_of_a_turn_whose_rows_were_lost(
    two: Two, stayed: Callable[[str], Turn], delay_s: float
) -> None:
    """Inside a cell it lost the part; between two cells, the whole prompt was computed in one pass."""
    plan = replace(two.plan(two.source.key()), keeps=Keeps.PARTIAL)
    before, held, _ = two.held(plan, Tokens, 9)
    after = two.taken_up(plan, held, ())
    before.handle.result(60).give_away()
    after.handle.result(60).release()
    time.sleep(delay_s)
    after.handle.result(60).cancel()
    ended = after.end()
    assert ended.finish_reason is FinishReason.CANCELLED
    assert ended.state.token_ids == held.carried.token_ids
    assert plan.key is not None
    blocks = len(ended.state.token_ids) // BLOCK_TOKENS
    assert two.destination.files(plan.key)[:blocks] == stayed("greedy").files[:blocks]


def test_a_turn_that_is_over_is_not_held(two: Two) -> None:
    listener = Listener()
    handle = two.source.engine.submit(two.plan(two.source.key(), max_tokens=2), listener)
    listener.end()
    assert handle.hold().result(60) is None


@pytest.mark.long(3)
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"computed": 10_000}, "computed"),
        ({"cached": 701}, "cached"),
        ({"sampler_key": (1,)}, "sampler_key"),
        ({"first_blocks": {}}, "first_blocks"),
        ({"first_blocks": {0: 99}}, "first_blocks"),
        ({"shareable": 701}, "shareable"),
        ({"rewind_points": (5, 4)}, "rewind_points"),
        ({"rewind_points": (10_000,)}, "rewind_points"),
        ({"token_ids": TokenIds([*PROMPT, 1 << 30])}, "token_ids"),
        ({"token_ids": TokenIds(PROMPT[1:])}, "token_ids"),
        ({"token_ids": TokenIds([*PROMPT[1:], *PROMPT[:5]])}, "token_ids"),
        ({"token_ids": TokenIds([*PROMPT, *PROMPT[:MAX_TOKENS]])}, "token_ids"),
    ],
)
def test_a_state_that_cannot_be_is_refused_by_field(two: Two, wrong: dict[str, Any], field: str) -> None:
    plan = two.plan(two.source.key())
    listener, held, _ = two.held(plan, Tokens, 3)
    listener.handle.result(60).cancel()
    with pytest.raises(InvalidArgument) as refused:
        two.destination.engine.submit(replace(plan, carried=replace(held.carried, **wrong)), Listener())
    assert refused.value.field == f"carried.{field}"


def test_a_reply_outside_of_its_format_is_refused(two: Two) -> None:
    plan = two.plan(two.source.key())
    listener, held, _ = two.held(plan, Tokens, 3)
    listener.handle.result(60).cancel()
    formatted = two.plan(two.source.key(), constraint=Constraint(ConstraintKind.REGEX, "[0-9]{40}"))
    taker = Listener()
    two.destination.engine.submit(replace(formatted, carried=held.carried), taker)
    with pytest.raises(KvasirError):
        taker.end()


@pytest.mark.long(2)
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "granite_hybrid"])
def test_windows_and_recurrent_states_go_along(name: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path / name, ALL[name])
    drivers = [
        Driver(Engine.open(directory, cache_dir=tmp_path / "digests", memory_budget_bytes=64 << 20)) for _ in range(2)
    ]
    two = Two(*drivers)
    most = 12 if IS_ON_CPU else MAX_TOKENS
    expected = two.stayed(two.plan(two.source.key(), max_tokens=most))
    for cut in ((Tokens, 5), (Prefilled, 2)):
        moved = two.moved(two.plan(two.source.key(), max_tokens=most), *cut)
        assert moved.cells == expected.cells
        assert moved.told == expected.told
        assert moved.ended.state.token_ids == expected.ended.state.token_ids
    for driver in drivers:
        driver.engine.close()


@pytest.mark.long(12)
@pytest.mark.parametrize("name", ["gemma3", "granite_hybrid"])
def test_where_a_turn_stopped_is_no_rewind_point_for_which_it_has_room(
    name: str, tmp_path: Path, cell_tokens: int
) -> None:
    """Each would hold pages of windows, or a copy of the states, beyond the turn's reservation."""
    directory = write_family(tmp_path / name, ALL[name])
    drivers = [
        Driver(Engine.open(directory, cache_dir=tmp_path / "digests", memory_budget_bytes=64 << 20)) for _ in range(2)
    ]
    two, points, over = Two(*drivers), list[tuple[int, ...]](), list[int]()
    key, state = two.source.remember(300)
    prompt, settings = (*state.token_ids, *tokens_of(700, 5)), {"max_tokens": 600, "logit_bias": ((0, -1000.0),)}
    plan = replace(two.plan(key, prompt, **settings), reuse=Hot(300))

    def look() -> None:
        [turn] = two.destination.engine._worker._scheduler.turns
        assert turn.kv is not None
        assert turn.reservation is not None
        points.append(turn.kv.rewind_points)
        over.append(turn.reservation.kept_pages() - turn.reservation.most_pages)

    before, held, ahead = two.held(plan, Tokens, 50)
    after = two.taken_up(plan, held, (*ahead, *held.files))
    before.handle.result(60).give_away()
    after.at(Tokens, 536, look).handle.result(60).release()
    after.end()
    assert over[0] <= 0
    # A longer cell writes only what its end sees, and a window's files have no gap: no point before it goes along.
    windows = (300, 768) if cell_tokens <= BLOCK_TOKENS else (768,)
    assert points == [(300, 999) if name == "granite_hybrid" else windows]
    for driver in drivers:
        driver.engine.close()
