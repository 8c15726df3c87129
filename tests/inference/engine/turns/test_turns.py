"""What a turn does besides answering: it waits its turn, stops where it was told, and leaves nothing when it is cut
off.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest
from kvasir.errors import Cancelled, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from kvasir.formats import block_hash

from inference_svc.engine.api import (
    AgentKey,
    Ended,
    Failed,
    FinishReason,
    Hot,
    Prefilled,
    SamplingParams,
    Started,
    Tokens,
    TurnPlan,
)
from inference_svc.engine.engine import Engine
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.engine.driving import Driver, Listener, tokens_of


@pytest.mark.cells_of_a_block
def test_a_turn_tells_its_life_in_order(driver: Driver) -> None:
    listener = driver.submit(tokens_of(600), key=driver.key(), max_tokens=5)
    ended = listener.end()
    kinds = [type(event).__name__ for event in listener.events]
    assert kinds[:6] == ["Started", "BlocksFull", "Prefilled", "BlocksFull", "Prefilled", "Prefilled"]
    assert kinds[6:] == ["Tokens"] * 5 + ["Ended"]
    assert [e.tokens_done for e in listener.events if isinstance(e, Prefilled)] == [256, 512, 600]
    assert ended.finish_reason is FinishReason.LENGTH
    assert (ended.prompt_tokens, ended.cached_tokens, ended.completion_tokens) == (600, 0, 5)
    assert ended.text == "".join(event.text for event in listener.events if isinstance(event, Tokens))
    assert ended.timings.first_token_s >= ended.timings.prefill_s > 0


@pytest.mark.cells_of_a_block
def test_a_cell_and_a_token_tell_all_their_events_at_once_and_the_last_token_before_the_end(driver: Driver) -> None:
    listener = driver.submit(tokens_of(300), max_tokens=3)
    listener.end()
    assert [[type(e).__name__ for e in step] for step in listener.steps] == [
        ["Started", "BlocksFull", "Prefilled"],
        ["Prefilled", "Tokens"],
        ["Tokens"],
        ["Tokens"],
        ["Ended"],
    ]


@pytest.mark.long(2)
@pytest.mark.batch_as_alone
def test_two_agents_interleaved_say_what_each_says_alone(driver: Driver) -> None:
    prompts = [tokens_of(700, seed=1), tokens_of(300, seed=2), tokens_of(530, seed=3)]
    alone = [driver.reply(driver.turn(prompt, key=driver.key())) for prompt in prompts]
    together = [driver.submit(prompt, key=driver.key()) for prompt in prompts]
    assert [driver.reply(listener.end()) for listener in together] == alone


@pytest.mark.long(4)
@pytest.mark.cells_of_a_block
def test_a_long_prompt_does_not_hold_up_another_agents_reply(driver: Driver) -> None:
    """A token of the one between any two cells of the other, on a GPU too, which decodes it behind the first one."""
    decoding, reading = Listener(), Listener()
    log: list[str] = []
    for place in range(1, 13):
        reading.at(Prefilled, place, lambda: log.append("cell"))
    for place in range(1, 101):
        decoding.at(Tokens, place, lambda: log.append("token"))
    decoding.at(Tokens, 3, lambda: driver.submit(tokens_of(3000), listener=reading, max_tokens=1))
    driver.submit(tokens_of(20), listener=decoding, max_tokens=100).end()
    reading.end()
    assert log.count("cell") == 12
    while_reading = log[log.index("cell") :][:20]
    assert while_reading == ["cell", "token"] * 10


@pytest.mark.cells_of_a_block
def test_of_equal_prompts_the_first_is_computed_to_its_end_before_the_next(driver: Driver) -> None:
    order: list[str] = []
    readers = {name: Listener() for name in "ab"}

    def submit_both() -> None:
        for name, reader in readers.items():
            for cell in range(1, 5):
                reader.at(Prefilled, cell, functools.partial(order.append, name))
            driver.submit(tokens_of(1024, seed=ord(name)), listener=reader, max_tokens=1)

    driver.submit(tokens_of(10), listener=Listener().at(Tokens, 1, submit_both), max_tokens=2).end()
    for reader in readers.values():
        reader.end()
    assert order == [*"aaaabbbb"]


def test_turns_of_one_agent_run_in_order(driver: Driver) -> None:
    key = driver.key()
    first = driver.submit(tokens_of(300), key=key, max_tokens=5)
    second = driver.submit(tokens_of(200, seed=5), key=key, max_tokens=5)
    assert first.end().prompt_tokens == 300
    assert second.end().prompt_tokens == 200
    hot = driver.engine.memories.get(key)
    assert hot is not None
    assert hot.state == second.end().state


def test_a_tag_belongs_to_one_memory(driver: Driver) -> None:
    key = driver.key()
    driver.engine.memories.tag(key, "of nobody")
    for _ in range(2):
        driver.turn(tokens_of(20), key=key)
        assert driver.engine.memories.tag_of(key) is None
        driver.engine.memories.tag(key, "version 1")
    assert driver.engine.memories.tag_of(key) == "version 1"


@pytest.mark.cells_of_a_block
@pytest.mark.parametrize("keep", [603, 400, 256, 601])
@pytest.mark.parametrize("moment", ["in mid-prefill", "in mid-decode"])
def test_a_cancelled_turn_leaves_the_memory_of_the_turn_before(driver: Driver, keep: int, moment: str) -> None:
    key, state = driver.remember(603)
    driver.engine.memories.tag(key, "version 1")
    files = driver.files(key)
    prompt = (*state.token_ids[:keep], *tokens_of(1500, seed=3))
    listener = Listener().cancel_at(Prefilled if moment == "in mid-prefill" else Tokens, 2)
    with pytest.raises(Cancelled):
        driver.turn(prompt, Hot(keep), key, listener=listener, max_tokens=500)
    assert listener.count(Tokens) == (0 if moment == "in mid-prefill" else 2)
    hot = driver.engine.memories.get(key)
    assert hot is not None
    assert (hot.state, hot.tag) == (state, "version 1")
    assert driver.files(key) == files


def test_a_cancel_frees_the_turn_on_the_next_step(driver: Driver) -> None:
    listener = Listener().cancel_at(Prefilled, 1)
    with pytest.raises(Cancelled):
        driver.turn(tokens_of(3900), listener=listener, max_tokens=100)
    assert listener.count(Prefilled) == 1


def test_a_cancel_in_the_queue_is_a_cancel(driver: Driver) -> None:
    key, waiting = driver.key(), Listener()

    def submit_and_cancel() -> None:
        driver.submit(tokens_of(10), key=key, listener=waiting).handle.result().cancel()

    driver.turn(tokens_of(20), key=key, listener=Listener().at(Tokens, 1, submit_and_cancel), max_tokens=5)
    with pytest.raises(Cancelled):
        waiting.end()
    assert waiting.count(Started) == 0
    waiting.handle.result().cancel()  # again, after the end: nothing happens


def test_a_cancel_between_two_looks_of_one_step_ends_that_turn_alone(driver: Driver) -> None:
    cancelled, key, other = Listener(), driver.key(), Listener()

    def submit_what_fails_to_begin() -> None:
        cancels = Listener().at(Failed, 1, lambda: cancelled.handle.result(60).cancel())  # the step has looked already
        driver.submit(tokens_of(50), Hot(10), driver.key(), listener=cancels)

    cancelled.at(Tokens, 5, submit_what_fails_to_begin)
    alone = driver.turn(tokens_of(40, seed=1), max_tokens=30)
    driver.submit(tokens_of(40, seed=1), key=key, listener=other, max_tokens=30)
    driver.submit(tokens_of(40, seed=2), listener=cancelled, max_tokens=200, logit_bias=((0, -1000.0),))
    with pytest.raises(Cancelled):
        cancelled.end()
    assert cancelled.count(Tokens) == 5
    assert other.end().state.token_ids == alone.state.token_ids


@pytest.mark.long(5)
@pytest.mark.parametrize("penalty", [1.0, 1.1], ids=["a step is ahead", "each step is read first"])
def test_a_cancelled_turn_that_keeps_its_part_is_remembered_and_goes_on(driver: Driver, penalty: float) -> None:
    how = {"max_tokens": 200, "repetition_penalty": penalty}
    key, state = driver.remember(300)
    prompt = (*state.token_ids, *tokens_of(100, seed=4))
    undisturbed = driver.fork(key)
    whole = driver.turn(prompt, Hot(300), undisturbed, **how)
    listener = Listener().cancel_at(Tokens, 20)
    ended = driver.turn(prompt, Hot(300), key, listener=listener, keep_partial=True, **how)
    assert (ended.finish_reason, ended.completion_tokens) == (FinishReason.CANCELLED, 20)
    length = len(ended.state.token_ids)
    assert 400 < length <= 420, "half a character is not kept"
    assert ended.state.token_ids == whole.state.token_ids[:length]
    follow_up = (*ended.state.token_ids, *tokens_of(9))
    restored = driver.turn(follow_up, driver.restored(key), driver.key())
    assert driver.turn(follow_up, Hot(length), key).state == restored.state
    assert driver.turn(follow_up, Hot(length), undisturbed).state == restored.state, "a row is missing"


def test_keep_partial_before_the_first_token_keeps_the_memory_before(driver: Driver) -> None:
    key, state = driver.remember(300)
    prompt = (*state.token_ids, *tokens_of(3000))
    with pytest.raises(Cancelled):
        driver.turn(prompt, Hot(300), key, listener=Listener().cancel_at(Prefilled, 1), keep_partial=True)
    hot = driver.engine.memories.get(key)
    assert hot is not None
    assert hot.state == state


def test_generation_ends_before_a_stop_string_wherever_tokens_cut_it(driver: Driver) -> None:
    prompt = tokens_of(100, seed=11)
    whole = driver.turn(prompt).text
    for start, length in ((5, 1), (10, 3), (20, 7), (33, 12)):
        stop = whole[start : start + length]
        listener = driver.submit(prompt, stop=(stop, "never said"))
        ended = listener.end()
        assert (ended.finish_reason, ended.matched_stop) == (FinishReason.STOP_SEQUENCE, stop)
        assert ended.text == whole[: whole.index(stop)]
        assert ended.text == "".join(event.text for event in listener.events if isinstance(event, Tokens))


def test_what_spells_a_stop_string_is_not_remembered(driver: Driver) -> None:
    prompt, key = tokens_of(100, seed=11), driver.key()
    whole = driver.turn(prompt).text
    ended = driver.turn(prompt, key=key, stop=(whole[30:36],))
    assert whole.startswith(ended.generated_text)
    assert len(ended.generated_text) <= 30
    assert sum(ended.state.token_chars) == 100 + len(ended.generated_text)
    assert len(driver.files(key)) == 1


def test_a_stop_token_ends_the_reply_and_is_remembered(driver: Driver) -> None:
    prompt, key = tokens_of(100, seed=12), driver.key()
    whole = driver.reply(driver.turn(prompt))
    place = next(place for place in range(5, 60) if whole[place] not in whole[:place])
    ended = driver.turn(prompt, key=key, stop_token_ids=(whole[place],))
    assert ended.finish_reason is FinishReason.STOP
    assert driver.reply(ended) == whole[: place + 1]
    assert ended.generated_text.startswith(ended.text)
    assert ended.completion_tokens == place + 1


def test_a_seed_gives_the_same_reply_whoever_else_is_served(driver: Driver) -> None:
    prompt = tokens_of(50, seed=13)
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "min_p": 0.01}
    alone = driver.reply(driver.turn(prompt, seed=7, **sampling))
    others = [driver.submit(tokens_of(60, seed=n), seed=n, **sampling) for n in range(3)]
    beside = driver.reply(driver.turn(prompt, seed=7, **sampling))
    for listener in others:
        listener.end()
    assert beside == alone
    assert driver.reply(driver.turn(prompt, seed=8, **sampling)) != alone
    assert driver.reply(driver.turn(prompt)) != alone


@pytest.mark.long(2)
@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_filter_is_greedy(driver: Driver, narrow: dict[str, Any]) -> None:
    prompt = tokens_of(50, seed=14)
    greedy = driver.reply(driver.turn(prompt, max_tokens=20))
    assert driver.reply(driver.turn(prompt, max_tokens=20, temperature=2.0, seed=3, **narrow)) == greedy


def test_a_turn_that_only_reads_a_memory_begins_with_all_of_it_and_leaves_it_as_it_was(driver: Driver) -> None:
    key, state = driver.remember(300)
    prompt = (*state.token_ids, *tokens_of(20, seed=3))
    files = driver.files(key)
    listener = Listener()
    seen: list[object] = []
    # While it runs, what is published of the agent is the agent's.
    listener.at(Tokens, 1, lambda: seen.append(driver.engine.memories.snapshot(key, 0, blocks_only=True)))
    driver.submit(prompt, Hot(len(state.token_ids)), key, listener, is_remembered=False)
    ended = listener.end()
    assert ended.cached_tokens == len(state.token_ids) - 1
    assert seen[0].result(60).state == state.computed  # type: ignore[attr-defined]
    hot = driver.engine.memories.get(key)
    assert hot is not None
    assert hot.state == state
    assert driver.files(key) == files
    kept = driver.turn(prompt, Hot(len(state.token_ids)), key)
    assert driver.reply(kept) == driver.reply(ended)


def test_a_turn_whose_hot_memory_is_gone_fails_without_effect(driver: Driver) -> None:
    key, state = driver.remember(300)
    other = (5, *state.token_ids[1:], 7)
    with pytest.raises(FailedPrecondition) as refused:
        driver.turn(other, Hot(300), key)
    assert refused.value.reason == "HOT_MEMORY_GONE"
    assert driver.engine.memories.drop(key).result(60)
    assert not driver.engine.memories.drop(key).result(60)
    with pytest.raises(FailedPrecondition):
        driver.turn((*state.token_ids, 7), Hot(300), key)
    assert driver.engine.memories.snapshot(key, 0).result(60) is None


@pytest.mark.long(4)
def test_a_hot_turn_looks_at_its_new_tokens_and_at_none_that_it_remembers(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.remember(1_300)  # another agent's, longer in whole blocks: only hashes say that it is of other tokens
    key, state = driver.remember(1_010)
    prompt = state.token_ids + TokenIds(tokens_of(20, seed=3))
    penalty = SamplingParams(max_tokens=20, repetition_penalty=1.1, repetition_tokens=8, most_drafts=0)
    plan = TurnPlan(prompt, TokenChars((1,) * len(prompt)), penalty, Hot(1_010), key, namespace=key.namespace)
    looked_at: list[int] = []
    hashed: list[int] = []
    look, name = TokenIds.__iter__, block_hash._token_bytes
    monkeypatch.setattr(TokenIds, "__iter__", lambda ids: (looked_at.append(len(ids)), look(ids))[1])
    monkeypatch.setattr(block_hash, "_token_bytes", lambda ids: (hashed.append(len(ids)), name(ids))[1])
    listener = Listener()
    driver.engine.submit(plan, listener)
    ended = listener.end()
    assert ended.cached_tokens == 1_009
    assert (looked_at, hashed) == ([8], [256])  # for the penalty; the block that became full


def test_a_prompt_beyond_the_context_is_refused_with_numbers(driver: Driver) -> None:
    with pytest.raises(ResourceExhausted) as refused:
        driver.submit(tokens_of(4090), max_tokens=7)
    assert refused.value.reason == "CONTEXT_EXCEEDED"
    assert refused.value.metadata == {"prompt_tokens": "4090", "context_tokens": "4096"}


@pytest.mark.parametrize("tokens", [(), (5, 1024)])
def test_a_prompt_that_is_none_is_refused(driver: Driver, tokens: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        driver.submit(tokens)


@pytest.mark.long(6)
def test_memory_is_bounded_and_the_longest_unused_goes_first(model_dir: Path, tmp_path: Path) -> None:
    budget_tokens = 2048
    probe = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=1 << 20)
    token_bytes = probe.model.kv_bytes_per_token
    probe.close()
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=budget_tokens * token_bytes)
    try:
        driver = Driver(engine)
        keys = [driver.key() for _ in range(4)]
        for key in keys[:3]:
            driver.turn(tokens_of(500), key=key, max_tokens=5)
        assert engine.memories.get(keys[0]) is not None, "counts as a use"
        driver.turn(tokens_of(680), key=keys[3], max_tokens=20)
        assert [engine.memories.get(key) is not None for key in keys] == [True, False, True, True]
        assert engine.memory_used_bytes <= engine.memory_budget_bytes
        with pytest.raises(ResourceExhausted) as refused:
            driver.submit(tokens_of(2000), max_tokens=49)
        assert refused.value.reason == "MEMORY_EXCEEDED"
        assert int(refused.value.metadata["needed_bytes"]) > budget_tokens * token_bytes
        together = [driver.submit(tokens_of(980, seed=n), key=driver.key(), max_tokens=20) for n in range(4)]
        for listener in together:
            listener.end()
        assert engine.memory_used_bytes <= engine.memory_budget_bytes
    finally:
        engine.close()


@pytest.mark.long(4)
def test_close_fails_what_is_open(model_dir: Path, tmp_path: Path) -> None:
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=64 << 20)
    driver = Driver(engine)
    listeners = [driver.submit(tokens_of(3000), key=AgentKey("n", "one"), max_tokens=500) for _ in range(3)]
    engine.close()
    engine.close()
    for listener in listeners:
        assert isinstance(listener.events[-1], Failed)
        with pytest.raises(Unavailable):
            listener.end()
    with pytest.raises(Unavailable):
        driver.submit(tokens_of(5))


@pytest.mark.long(4)
def test_live_and_stored_kv_is_under_three_tenths_of_fp16(driver: Driver) -> None:
    key, state = driver.remember(4000, generated=3)
    model = driver.engine.model
    fp16 = model.kv_bytes_per_token_fp16 * len(state.token_ids)
    assert model.policy_applied_layers == model.layer_count == 3
    assert model.kv_bytes_per_token / model.kv_bytes_per_token_fp16 < 0.2813
    assert sum(map(len, driver.files(key))) / fp16 <= 0.30
    before = driver.engine.memory_used_bytes
    driver.engine.memories.drop(key).result(60)
    driver.turn(tokens_of(2), max_tokens=1)
    assert 0 < (before - driver.engine.memory_used_bytes) / fp16 <= 0.30


def test_a_turn_ends_once(driver: Driver) -> None:
    listener = driver.submit(tokens_of(10), max_tokens=2)
    listener.end()
    listener.handle.result().cancel()
    driver.turn(tokens_of(3), max_tokens=1)
    assert len([event for event in listener.events if isinstance(event, Ended | Failed)]) == 1


def test_a_cancel_in_the_midst_of_a_cell_ends_it_there_and_changes_no_memory(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(LESSONS 21)"""
    key, state = driver.remember(300, seed=41)
    before, expected = driver.files(key), driver.reply(driver.turn((*state.token_ids, 9), Hot(300), driver.fork(key)))
    listener, looks = Listener(), 0
    compute = engine._worker._runner._compute

    def cancelling(
        kv: SequenceKV, token_ids: Sequence[int], is_cancelled: Callable[[], bool], *others: Any, **options: Any
    ) -> object:
        def look() -> bool:
            nonlocal looks
            looks += 1
            listener.handle.result(60).cancel()
            return is_cancelled()

        return compute(kv, token_ids, look, *others, **options)

    monkeypatch.setattr(engine._worker._runner, "_compute", cancelling)
    with pytest.raises(Cancelled) as cancelled:
        driver.turn((*state.token_ids, *tokens_of(400, 42)), Hot(300), key, listener=listener)
    monkeypatch.undo()
    held = {name for frame, _ in walk_tb(cancelled.value.__traceback__) for name in frame.f_locals}
    assert "layers" not in held, "they read the pool's arrays, which each write would copy as long as the error lives"
    assert looks == 1, "the first of three layers"
    assert driver.files(key) == before
    assert driver.reply(driver.turn((*state.token_ids, 9), Hot(300), key)) == expected


def test_a_cancelled_turn_gives_back_the_room_that_it_had_made_a_memory_take(driver: Driver, engine: Engine) -> None:
    key, state = driver.remember(250, seed=43)
    before = engine.memories.sizes()[key]
    listener = Listener().cancel_at(Tokens, 40)
    with pytest.raises(Cancelled):
        driver.turn((*state.token_ids, 9), Hot(250), key, listener=listener, max_tokens=200)
    assert listener.count(Tokens) == 40
    assert engine.memories.sizes()[key] == before
