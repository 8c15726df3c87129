"""Memories of every layout: hot, restored from tensor files, batched, cut, forked, undone, and damaged."""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvasir.errors import Cancelled, DataLoss
from kvasir.formats.block_file import check_schema, parse_header
from kvasir.formats.layer_groups import first_touched_block
from kvasir.formats.tensor_layouts import expected_state_tensors

from inference_svc.engine.api import (
    AgentKey,
    Ended,
    Hot,
    Prefilled,
    Restored,
    RestoredWindow,
    Resumed,
    SamplingParams,
    Snapshot,
    Started,
    Tokens,
    TurnPlan,
    WindowFiles,
)
from inference_svc.engine.engine import Engine
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.families import ALL, BUDGET, write_family
from tests.inference.engine.turns.test_preempted_turns import PROMPT, Keeper, background, disturbed
from tests.made_models.sampling import one_of, pairs

WINDOWED = ["gemma3", "gpt_oss"]
RECURRENT = ["granite_hybrid", "falcon_h1"]
WITH_STATES = [*WINDOWED, *RECURRENT]


def of_each_kind(turn: int) -> list[str]:
    """One with windows and one that is recurrent; the whole has all of both."""
    return [*one_of(WINDOWED, turn), *one_of(RECURRENT, turn)]


def snapshot(driver: Driver, key: AgentKey) -> Snapshot:
    taken = driver.engine.memories.snapshot(key, 0).result(60)
    assert taken is not None
    return taken


def stored(taken: Snapshot, keep: int) -> Restored:
    """What a store would give back for a prompt that begins with the first `keep` tokens."""
    files = tuple(data for _, data in (*taken.blocks, *([taken.tail] if taken.tail else [])))
    states = {identity.tokens: data for identity, data in taken.states}
    windows = tuple(_seen(each, keep) for each in taken.windows)
    shareable = taken.state.shareable_tokens
    return Restored(files, taken.state.token_ids, keep, shareable, states.get(keep), windows)


def _seen(window: WindowFiles, keep: int) -> RestoredWindow:
    """The files of a window from the block on that the token behind `keep` sees first."""
    first = first_touched_block(window.window, keep)
    files = window.by_block
    return RestoredWindow(window.window, first, tuple(files[block] for block in range(first, max(files) + 1)))


def generated(driver: Driver, length: int, seed: int = 0, **sampling: Any) -> tuple[AgentKey, Ended]:
    """An agent whose last turn had a prompt of `length` tokens and remembers all that it said."""
    for attempt in range(20):
        key = driver.key()
        ended = driver.turn(tokens_of(length, seed + 100 * attempt), key=key, **{"max_tokens": 5, **sampling})
        if len(ended.state.token_ids) == length + 5:  # random models often end inside a character
            return key, ended
    raise AssertionError("no memory of that length in 20 attempts")


def test_with_states_nobody_waits_for_a_sibling_that_has_nothing_to_give(family: Callable[[str], Driver]) -> None:
    driver, sibling = family("granite_hybrid"), Listener()
    prompt = tokens_of(1500)
    first = Listener().at(
        Prefilled, 1, lambda: driver.submit(prompt, listener=sibling, namespace="tests", max_tokens=1)
    )
    begun: list[int] = []
    sibling.at(Started, 1, lambda: begun.append(first.count(Prefilled)))
    driver.turn(prompt, listener=first, namespace="tests", max_tokens=1)
    assert sibling.end().cached_tokens == 0
    assert begun[0] <= 2, "it began while the other was computed"


# Shorter than a window, past it, ending with a block, and past one. Without windows the first two are alike.
LENGTHS = [*pairs(WINDOWED, (60, 97, 251, 330)), *pairs(RECURRENT, (60, 251, 330))]
LENGTHS += [(name, 251 + 20 * number) for number, name in enumerate(sorted(set(ALL) - set(WITH_STATES)))]


@pytest.mark.long(7)
@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_a_restored_sequence_of_every_layout_goes_on_as_if_it_had_never_left(
    name: str, length: int, family: Callable[[str], Driver]
) -> None:
    """From its end and, where its layers allow it, from elsewhere: 32 greedy tokens, through real tensor files."""
    driver = family(name)
    key, ended = generated(driver, length)
    whole = len(ended.state.computed.token_ids)
    taken = snapshot(driver, key)
    points = ended.state.rewind_points if driver.engine.model.has_states else (whole - 20, whole)
    for keep in points:
        prompt = (*ended.state.token_ids[:keep], *tokens_of(20, seed=keep))
        stayed = driver.turn(prompt, Hot(keep), driver.fork(key))
        came_back = driver.turn(prompt, stored(taken, keep), driver.key())
        assert (stayed.cached_tokens, came_back.cached_tokens) == (keep, keep)
        assert came_back.state == stayed.state
        assert len(came_back.state.token_ids) >= len(prompt)


def is_recurrent(driver: Driver) -> bool:
    """Some layer can only go back to rewind points. Windows go back wherever their pages are."""
    return driver.engine.model.state_bytes > 0


@pytest.mark.parametrize("name", RECURRENT)
def test_the_next_turn_of_a_model_with_states_goes_on_from_the_end_or_from_the_prompt(
    name: str, family: Callable[[str], Driver]
) -> None:
    """Hybrids and sliding windows do hit, and what is said to be cached is what was not computed (LESSONS 18)."""
    driver = family(name)
    key, first = generated(driver, 300)
    end = len(first.state.token_ids)
    assert first.state.rewind_points == (299, end)
    assert first.state.shareable_tokens == 0, "states would have to be shared, too"
    second = driver.turn((*first.state.token_ids, *tokens_of(30, seed=1)), Hot(end), key, max_tokens=4)
    assert second.cached_tokens == end
    assert second.state.rewind_points[:2] == (end, end + 29), (
        "where it began, the prompt, and its own end if it is whole"
    )
    rewritten = (*first.state.token_ids[:302], *tokens_of(9, seed=2))
    again = driver.turn(rewritten, Hot(302), driver.fork(key), max_tokens=1)
    assert again.cached_tokens == 0, "the prompt of two turns ago is forgotten"
    key, first = generated(driver, 300)
    again = driver.turn(rewritten, Hot(302), key, max_tokens=1)
    assert again.cached_tokens == 299, "a template that rewrites replies goes on from before the reply"


@pytest.mark.long(2)
@pytest.mark.parametrize("name", of_each_kind(0))
def test_a_turn_from_a_point_says_what_the_same_turns_say_from_nothing(
    name: str, family: Callable[[str], Driver]
) -> None:
    driver = family(name)
    key, first = generated(driver, 270)
    prompt = (*first.state.token_ids[:272], *tokens_of(40, seed=3))
    changed = driver.turn(prompt, Hot(272), driver.fork(key), max_tokens=12)
    assert changed.cached_tokens == (269 if is_recurrent(driver) else 272)
    hot = driver.turn(prompt, Hot(269), key, max_tokens=12)
    assert (hot.cached_tokens, hot.state.token_ids) == (269, changed.state.token_ids)
    same = driver.key()
    driver.turn(first.state.token_ids[:270], key=same, max_tokens=1)
    assert driver.turn(prompt, Hot(269), same, max_tokens=12).state == hot.state


@pytest.mark.parametrize("name", RECURRENT)
def test_the_files_of_a_memory_hold_what_its_layout_says(name: str, family: Callable[[str], Driver]) -> None:
    driver = family(name)
    model = driver.engine.model
    key, ended = generated(driver, 256)
    taken = snapshot(driver, key)
    assert tuple(identity.tokens for identity, _ in taken.states) == ended.state.rewind_points == (255, 261)
    assert model.has_states
    for identity, data in (*taken.blocks, *taken.states, *([taken.tail] if taken.tail else [])):
        header = parse_header(data, len(data))
        check_schema(header, model.kv_identity)
        assert header.identity == identity
        assert identity.kv_identity_hash == model.kv_identity_hash
    largest = sum(tensor.size_bytes for tensor in expected_state_tensors(model.kv_identity))
    assert largest == model.state_bytes


@pytest.mark.long(2)
@pytest.mark.parametrize("name", of_each_kind(1))
def test_a_cancelled_turn_leaves_points_and_states_to_the_bit_as_they_were(
    name: str, family: Callable[[str], Driver]
) -> None:
    driver = family(name)
    key, ended = generated(driver, 280)
    before = snapshot(driver, key)
    for keep in (len(ended.state.token_ids), 282):
        listener = Listener().cancel_at(Tokens, 3)
        prompt = (*ended.state.token_ids[:keep], *tokens_of(300, seed=5))
        with pytest.raises(Cancelled):
            driver.submit(prompt, Hot(keep), key, listener).end()
        assert snapshot(driver, key) == before
    end = len(ended.state.token_ids)
    prompt = (*ended.state.token_ids, *tokens_of(10, seed=6))
    expected = driver.turn(prompt, stored(before, end), driver.key())
    assert driver.turn(prompt, Hot(end), key).state == expected.state


@pytest.mark.parametrize("name", of_each_kind(0))
def test_a_fork_of_states_goes_its_own_way(name: str, family: Callable[[str], Driver]) -> None:
    """Neither side sees what the other makes of the state (LESSONS 6)."""
    driver = family(name)
    key, ended = generated(driver, 200)
    end = len(ended.state.token_ids)
    before, fork = snapshot(driver, key), driver.fork(key)
    prompts = [(*ended.state.token_ids, *tokens_of(15, seed=n)) for n in (1, 2)]
    expected = [driver.turn(prompt, stored(before, end), driver.key()).state for prompt in prompts]
    assert driver.turn(prompts[0], Hot(end), key).state == expected[0]
    assert driver.turn(prompts[1], Hot(end), fork).state == expected[1]


@pytest.mark.long(4)
@pytest.mark.parametrize("name", of_each_kind(1))
def test_agents_with_states_decode_together_as_each_does_alone(name: str, family: Callable[[str], Driver]) -> None:
    driver = family(name)
    prompts = [tokens_of(length, seed=length) for length in (20, 95, 130, 260)]
    alone = [driver.reply(driver.turn(prompt, max_tokens=24)) for prompt in prompts]
    together = [driver.submit(prompt, key=driver.key(), max_tokens=24) for prompt in prompts]
    assert [driver.reply(listener.end()) for listener in together] == alone
    assert len(set(alone)) == len(alone)


@pytest.mark.parametrize("name", ["granite_hybrid"])
def test_a_state_that_saw_more_than_is_remembered_is_not_kept(name: str, family: Callable[[str], Driver]) -> None:
    """A stop string takes tokens back that the state has seen: the memory then goes on from before the reply (LESSONS
    12)."""
    driver = family(name)
    for seed in range(40):
        prompt, key = tokens_of(120, seed=seed), driver.key()
        text = driver.turn(prompt, max_tokens=12).text
        if len(text) > 6 and text.isascii():
            ended = driver.turn(prompt, key=key, max_tokens=12, stop=(text[3:6],))
            if ended.matched_stop and len(ended.state.token_ids) < 120 + ended.completion_tokens - 1:
                break
    else:
        raise AssertionError("no reply whose stop string spans tokens")
    end = len(ended.state.token_ids)
    points = (119,) if is_recurrent(driver) else (119, end)  # rows of a window are taken back with the tokens
    assert ended.state.rewind_points == points
    taken = snapshot(driver, key)
    assert tuple(identity.tokens for identity, _ in taken.states) == points
    prompt = (*ended.state.token_ids, *tokens_of(5, seed=9))
    stayed = driver.turn(prompt, Hot(end), key)
    assert stayed.cached_tokens == points[-1]
    assert driver.turn(prompt, stored(taken, points[-1]), driver.key()).state == stayed.state


def _with_nan(data: bytes) -> bytes:
    """A state whose last number is not finite."""
    header = parse_header(data, len(data))
    width = {"F32": 4, "F16": 2, "BF16": 2}[header.tensors[-1].dtype]
    nan = np.float32("nan").tobytes() if width == 4 else struct.pack("<H", 0x7E00)
    return data[:-width] + nan


@pytest.mark.parametrize("name", ["granite_hybrid"])
def test_a_wrong_or_damaged_state_is_data_loss_and_changes_nothing(name: str, family: Callable[[str], Driver]) -> None:
    """Of another moment (LESSONS 12), other tokens, other weights (LESSONS 13), cut short, or no numbers."""
    driver = family(name)
    key, ended = generated(driver, 200)
    taken, (_, other) = snapshot(driver, key), generated(driver, 200, seed=50)
    early, end = (data for _, data in taken.states)
    tokens = len(ended.state.token_ids)
    other_taken = snapshot(driver, driver.fork(generated(driver, 200, seed=70)[0]))
    assert len(other.state.token_ids) == tokens
    wrong = {
        "another moment": early,
        "other tokens": other_taken.states[1][1],
        "cut short": end[:-8],
        "a byte of the header": bytes((end[0] ^ 1, *end[1:])),
        "a tail": taken.tail[1] if taken.tail else b"",
        "nothing": b"",
        "no numbers": _with_nan(end),
        "other weights": end.replace(driver.engine.model.kv_identity_hash.encode(), b"0" * 64),
    }
    prompt, good = (*ended.state.token_ids, *tokens_of(9)), stored(taken, tokens)
    before = driver.engine.memory_used_bytes
    for what, data in wrong.items():
        restored = Restored(good.blobs, good.token_ids, tokens, 0, data)
        with pytest.raises(DataLoss) as refused:
            driver.turn(prompt, restored, driver.key())
        assert refused.value.metadata == {"state": str(tokens)}, what
    assert driver.turn(prompt, good, driver.key(), max_tokens=2).cached_tokens == tokens
    assert driver.engine.memory_used_bytes >= before


@pytest.mark.parametrize("name", one_of(["gemma3", "granite_hybrid"], 0))
def test_room_is_made_for_states_before_they_are_and_no_more_is_kept(name: str, tmp_path: Path) -> None:
    """What a turn may come to need covers rows, running layers and points; at rest there are rows and points
    (LESSONS 20)."""
    directory = write_family(tmp_path / "m", ALL[name])
    with_room = Engine.open(directory, cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    try:
        driver, model = Driver(with_room), with_room.model
        generated(driver, 40)
        pages = driver.engine._worker.memories.pages
        rows = len(pages) * driver.engine._worker._pool.page_bytes
        assert rows <= driver.engine.memory_used_bytes <= rows + 2 * model.state_bytes
        assert (rows < driver.engine.memory_used_bytes) is (model.state_bytes > 0)
        plan = TurnPlan(TokenIds(PROMPT), TokenChars((1,) * len(PROMPT)), SamplingParams(max_tokens=48))
        before, seen, turn = driver.engine.memory_used_bytes, list[int](), Listener()
        turn.at(Tokens, 9, lambda: seen.append(driver.engine.memory_used_bytes))
        driver.engine.submit(plan, turn)
        turn.end()
        assert before < seen[0] <= before + driver.engine.needed_bytes(plan.most_tokens)
        assert driver.engine.memory_used_bytes == before
    finally:
        with_room.close()


@contextmanager
def crowded(name: str, tmp_path: Path) -> Iterator[Driver]:
    """An engine in which a turn of PROMPT and another do not fit together."""
    directory = write_family(tmp_path / "m", ALL[name], seed=1)
    roomy = Engine.open(directory, cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    try:
        plan = TurnPlan(TokenIds(PROMPT), TokenChars((1,) * len(PROMPT)), SamplingParams(max_tokens=48))
        budget = roomy.needed_bytes(plan.most_tokens) * 9 // 5
    finally:
        roomy.close()
    engine = Engine.open(directory, cache_dir=tmp_path, memory_budget_bytes=budget, longest_gap_s=0)
    try:
        yield Driver(engine)
    finally:
        engine.close()


@pytest.mark.long(3)
@pytest.mark.parametrize("name", ["gemma3"])
def test_a_window_turn_that_gave_up_its_room_goes_back_to_no_point_whose_rows_did_not_come_back(
    name: str, tmp_path: Path
) -> None:
    """Between the rows that its point needs and those at its end is a block that no window sees."""
    again = (*PROMPT[:256], *tokens_of(20, seed=5))
    with crowded(name, tmp_path) as driver:
        expected = driver.turn(again).state
        stayed, went = driver.key(), driver.key()
        background(driver, Keeper(), key=stayed, rewind_point_tokens=300).end()
        from_point = driver.turn(again, Hot(256), stayed)
        assert (from_point.cached_tokens, from_point.state) == (256, expected)
        disturbed(driver, Keeper(), Tokens, 10, key=went, rewind_point_tokens=300)
        assert driver.turn(again, Hot(256), went).state == expected


@pytest.mark.long(4)
@pytest.mark.parametrize("name", one_of(["gemma3", "granite_hybrid"], 1))
def test_a_turn_with_states_that_gave_up_its_room_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    """Its points come back with it; what does not come back whole is computed again, and nothing goes on from no state
    (LESSONS 9)."""
    with crowded(name, tmp_path) as driver:
        expected = background(driver, Keeper()).end()
        for kind, count in ((Tokens, 10), (Prefilled, 2)):
            keeper = Keeper()
            ended = disturbed(driver, keeper, kind, count)
            assert keeper.one(Resumed).lost_tokens == 0
            assert (ended.state, ended.state.rewind_points) == (expected.state, expected.state.rewind_points)
        short = Keeper(lambda files: files[:-1])
        assert disturbed(driver, short, Tokens, 10).state == expected.state
        assert short.one(Resumed).lost_tokens > len(PROMPT)


@pytest.mark.parametrize("name", ["granite_hybrid"])
def test_a_memory_that_is_warmed_keeps_its_points(name: str, family: Callable[[str], Driver]) -> None:
    driver = family(name)
    key, ended = generated(driver, 150)
    before = snapshot(driver, key)
    warmed = driver.turn(ended.state.token_ids, Hot(155), key, max_tokens=0)
    assert (warmed.cached_tokens, warmed.state.rewind_points) == (155, ended.state.rewind_points)
    after = snapshot(driver, key)
    assert (after.blocks, after.tail, after.states) == (before.blocks, before.tail, before.states)
    other = driver.key()
    assert driver.turn(ended.state.token_ids, stored(before, 155), other, max_tokens=0).state.rewind_points == (155,)
    assert snapshot(driver, other).states == before.states[1:]
