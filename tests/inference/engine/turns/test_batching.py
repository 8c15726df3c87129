"""Turns decode together: each says, and remembers to the bit, what it does alone; shared rows are computed once."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from kvasir.errors import Cancelled, Internal

from inference_svc.engine.api import Ended, FinishReason, Hot, Prefilled, Started, Tokens
from inference_svc.engine.engine import Engine
from inference_svc.engine.sampling import Draws
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.batch.decoded_layer import DecodedLayer
from tests.inference.engine.driving import Driver, Listener, tokens_of

LENGTHS = (3, 255, 256, 257, 40, 511, 513, 120)
BEHIND_CELLS = "a GPU decodes behind each cell, whatever the gap"


@pytest.mark.batch_as_alone
def test_eight_agents_say_and_remember_together_what_each_does_alone(driver: Driver) -> None:
    prompts = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]
    limits = [5 + 9 * place for place in range(len(prompts))]
    alone_keys, keys = [driver.key() for _ in prompts], [driver.key() for _ in prompts]
    alone = [
        driver.reply(driver.turn(prompt, key=key, max_tokens=limit))
        for prompt, key, limit in zip(prompts, alone_keys, limits, strict=True)
    ]
    together = [
        driver.submit(prompt, key=key, max_tokens=limit)
        for prompt, key, limit in zip(prompts, keys, limits, strict=True)
    ]
    assert [driver.reply(listener.end()) for listener in together] == alone
    assert [driver.files(key) for key in keys] == [driver.files(key) for key in alone_keys]


@pytest.mark.long(4)
@pytest.mark.batch_as_alone
def test_who_joins_while_others_decode_changes_nobody(driver: Driver) -> None:
    prompts = [tokens_of(250 + place, 50 + place) for place in range(6)]
    alone = [driver.reply(driver.turn(prompt, max_tokens=30, key=driver.key())) for prompt in prompts]
    listeners = [Listener() for _ in prompts]
    for place, (listener, later) in enumerate(pairwise(listeners)):
        listener.at(
            Tokens,
            4,
            lambda later=later, place=place: driver.submit(  # type: ignore[misc]
                prompts[place + 1], key=driver.key(), listener=later, max_tokens=30
            ),
        )
    driver.submit(prompts[0], key=driver.key(), listener=listeners[0], max_tokens=30)
    assert [driver.reply(listener.end()) for listener in listeners] == alone


@pytest.mark.long(5)
@pytest.mark.cpu_only("a GPU reads pages where they lie")
def test_a_turn_that_ends_beside_a_prompt_makes_no_other_decode_its_rows_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last token's KV is computed before the prompt's next cell."""
    filled: list[int] = []
    fill = DecodedLayer._fill

    def counting(layer: DecodedLayer, slot: int, *types: Any) -> None:
        filled.append(slot)
        fill(layer, slot, *types)

    monkeypatch.setattr(DecodedLayer, "_fill", counting)
    prompts, limits = [tokens_of(200 + place, 90 + place) for place in range(3)], (16, 40, 40)
    given = list(zip(prompts, limits, strict=True))
    alone = [driver.reply(driver.turn(each, key=driver.key(), max_tokens=limit)) for each, limit in given]
    turns, late, seen = [Listener() for _ in prompts], Listener(), list[int]()
    turns[0].at(Tokens, 8, lambda: driver.submit(tokens_of(4_000, 3), listener=late, max_tokens=0))
    turns[0].at(Tokens, 15, filled.clear).at(Ended, 1, lambda: seen.append(late.count(Prefilled)))
    turns[1].at(Tokens, 30, lambda: seen.append(len(filled)))
    for listener, (each, limit) in zip(turns, given, strict=True):
        driver.submit(each, key=driver.key(), listener=listener, max_tokens=limit)
    assert [driver.reply(each.end()) for each in turns] == alone
    late.end()
    cells_before, filled_since = seen
    assert 0 < cells_before < late.count(Prefilled)
    assert filled_since == 0


@pytest.mark.long(2)
@pytest.mark.batch_as_alone
def test_a_cancelled_turn_leaves_the_batch_and_changes_nobody(driver: Driver) -> None:
    prompts = [tokens_of(100 + place, 70 + place) for place in range(3)]
    alone = [driver.reply(driver.turn(prompt, key=driver.key(), max_tokens=40)) for prompt in prompts]
    decoding = [driver.submit(prompt, key=driver.key(), max_tokens=40) for prompt in prompts]
    leaving = Listener().cancel_at(Tokens, 7)
    driver.submit(tokens_of(300, 99), listener=leaving, max_tokens=200)
    with pytest.raises(Cancelled):
        leaving.end()
    assert leaving.count(Tokens) == 7
    assert [driver.reply(listener.end()) for listener in decoding] == alone


def test_a_forward_pass_that_fails_ends_its_turns_and_nothing_after(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(LESSONS 10)"""
    prompt = tokens_of(64, 5)
    expected = driver.reply(driver.turn(prompt, key=driver.key(), max_tokens=10))
    key, state = driver.remember(50, seed=6)
    memory, files = engine.memories.get(key), driver.files(key)
    batch = engine._worker._decoder.batch
    step = batch.step

    def failing(*_arguments: object) -> object:
        monkeypatch.setattr(batch, "step", step)
        raise RuntimeError("the device is gone")

    first = Listener().at(Tokens, 3, lambda: monkeypatch.setattr(batch, "step", failing))
    broken = [driver.submit((*state.token_ids, 9), Hot(50), key, max_tokens=60), driver.submit(prompt, listener=first)]
    for listener in broken:
        with pytest.raises(Internal):
            listener.end()
    assert engine.memories.get(key) == memory, "the turn worked on a fork of it"
    assert driver.files(key) == files
    assert driver.reply(driver.turn(prompt, key=driver.key(), max_tokens=10)) == expected


@pytest.mark.long(3)
@pytest.mark.batch_as_alone
@pytest.mark.cells_of_a_block
def test_siblings_compute_what_they_share_once(driver: Driver) -> None:
    shared = tokens_of(512, 11)
    prompts = [(*shared, *tokens_of(30 + place, 20 + place)) for place in range(4)]
    alone = [driver.reply(driver.turn(prompt, key=driver.key(), max_tokens=20)) for prompt in prompts]
    siblings = [driver.submit(prompt, key=driver.key(), namespace="one", max_tokens=20) for prompt in prompts]
    assert [driver.reply(listener.end()) for listener in siblings] == alone
    assert [started(listener) for listener in siblings] == [Started(0), *[Started(512, is_shared=True)] * 3]
    cells = [event for listener in siblings for event in listener.events if isinstance(event, Prefilled)]
    assert len(cells) == 2 + len(prompts)


@pytest.mark.batch_as_alone
@pytest.mark.cells_of_a_block
def test_who_comes_later_begins_with_what_a_memory_of_the_namespace_holds(driver: Driver) -> None:
    shared = tokens_of(300, 12)
    first = driver.key()
    driver.submit((*shared, 7, 8), key=first, namespace=first.namespace, max_tokens=3).end()
    before = driver.files(first)
    later = driver.submit((*shared, 9), key=driver.key(), namespace=first.namespace, max_tokens=20)
    assert driver.reply(later.end()) == driver.reply(driver.turn((*shared, 9), max_tokens=20, key=driver.key()))
    assert started(later) == Started(256, is_shared=True)
    assert driver.files(first) == before, "a fork is not written through"


@pytest.mark.parametrize("namespace", ["another", None])
def test_nobody_begins_with_what_another_namespace_holds(driver: Driver, namespace: str | None) -> None:
    """(LESSONS 14)"""
    shared = tokens_of(300, 13)
    key = driver.key()
    driver.submit(shared, key=key, namespace=key.namespace, max_tokens=3).end()
    other = driver.submit(shared, key=driver.key(), namespace=namespace, max_tokens=3)
    other.end()
    assert started(other) == Started(0)


def started(listener: Listener) -> Started:
    return next(event for event in listener.events if isinstance(event, Started))


def sit_out(engine: Engine, monkeypatch: pytest.MonkeyPatch, decodes: int, then: Callable[[], None]) -> None:
    """In the sixth step of two rows only the one with so many prompt tokens decodes; `then` happens just before."""
    scheduler = engine._worker._scheduler
    begin_step = scheduler.begin_step
    steps: list[int] = []

    def without_the_other(now: float) -> object:
        rows = begin_step(now)
        steps.append(len(rows))
        if steps.count(2) != 6:
            return rows
        monkeypatch.setattr(scheduler, "begin_step", begin_step)
        then()
        return tuple(row for row in rows if row.cells.prompt_tokens == decodes)

    monkeypatch.setattr(scheduler, "begin_step", without_the_other)


def test_a_row_that_sits_out_while_a_step_fails_does_not_go_on_with_a_token_too_many(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token of the step before was enqueued and never read, so its length counts a token that it does not have."""
    batch = engine._worker._decoder.batch
    step = batch.step

    def failing(*_arguments: object) -> object:
        monkeypatch.setattr(batch, "step", step)
        raise RuntimeError("the device is gone")

    sit_out(engine, monkeypatch, 70, lambda: monkeypatch.setattr(batch, "step", failing))
    both = [driver.submit(each, key=driver.key(), max_tokens=60) for each in (tokens_of(64, 5), tokens_of(70, 6))]
    for listener in both:
        with pytest.raises(Internal):
            listener.end()


@pytest.mark.long(2)
@pytest.mark.parametrize("fails", ["read", "accept"])
def test_a_token_that_cannot_be_read_or_taken_in_makes_no_other_turn_go_on_wrongly(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """While another row of its step sits out. A read fails for all rows, a token for its own turn alone."""
    first, second = tokens_of(64, 5), tokens_of(70, 6)
    alone = driver.reply(driver.turn(second, max_tokens=60))
    broken = {"read": (Draws, "read_drafted"), "accept": (Sequence, "accept")}[fails]
    works = getattr(*broken)

    def failing(self: object, *arguments: object) -> object:
        monkeypatch.setattr(*broken, works)
        raise RuntimeError("no such token")

    sit_out(engine, monkeypatch, len(first), lambda: monkeypatch.setattr(*broken, failing))
    both = [driver.submit(each, key=driver.key(), max_tokens=60) for each in (first, second)]
    with pytest.raises(Internal):
        both[0].end()
    if fails == "accept":
        assert driver.reply(both[1].end()) == alone
    else:
        with pytest.raises(Internal):
            both[1].end()


@pytest.mark.long(3)
def test_looking_ahead_changes_no_token_and_no_byte_of_what_is_remembered(driver: Driver, engine: Engine) -> None:
    """Greedy, drawn, ended by length, a stop token and a stop string: what was computed too much is not remembered."""
    decoder = engine._worker._decoder

    def all_turns() -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for number, sampling in enumerate(
            ({}, {"temperature": 0.9, "seed": 5}, {"max_tokens": 7}, {"stop_token_ids": stops}, {"stop": (words,)})
        ):
            key = driver.key()
            ended = driver.turn(tokens_of(250 + number, seed=number), key=key, **sampling)
            tokens, memory = ended.state.token_ids, engine._worker.memories.get(key)
            assert memory is not None
            assert memory.kv.length == len(tokens) - 1, "a row too many is remembered"
            files = driver.files(key)
            after = driver.turn((*tokens, 9), Hot(len(tokens)), key, max_tokens=8)
            found.append((ended.finish_reason, ended.text, tokens, files, after.text, driver.files(key)))
        return found

    stops = tuple(driver.reply(driver.turn(tokens_of(253, seed=3), max_tokens=12))[8:9])
    words = driver.turn(tokens_of(254, seed=4), max_tokens=20).text[6:9]
    ahead = all_turns()
    assert ahead[-1][0] is FinishReason.STOP_SEQUENCE
    decoder.looks_ahead = False
    try:
        assert all_turns() == ahead
    finally:
        decoder.looks_ahead = True


@pytest.mark.cells_of_a_block
@pytest.mark.parametrize(
    ("gap_s", "least", "most"), [(None, 3, 4), pytest.param(1e6, 0, 1, marks=pytest.mark.cpu_only(BEHIND_CELLS))]
)
def test_a_streams_own_gap_decides_how_many_cells_are_computed_between_its_tokens(
    gap_s: float | None, least: int, most: int, driver: Driver
) -> None:
    """The engine's own is none: a cell of another prompt each."""
    stream, other, counts = Listener(), Listener(), list[int]()
    for cell in (1, 4):
        other.at(Prefilled, cell, lambda: counts.append(stream.count(Tokens)))
    stream.at(Tokens, 2, lambda: driver.submit(tokens_of(1_024, 3), listener=other, max_tokens=1))
    driver.submit(tokens_of(8, 1), listener=stream, longest_gap_s=gap_s, max_tokens=40)
    other.end()
    stream.end()
    assert least <= counts[1] - counts[0] <= most
