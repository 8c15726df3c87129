"""A memory's last token was drawn and has no KV yet: the next turn computes it, wherever the memory was since."""

from collections.abc import Callable

import pytest

from inference_svc.engine.api import AgentKey, FinishReason, Hot, Tokens
from inference_svc.memory.replaying import Runs, replay_steps, runs_of_turn
from inference_svc.text.token_ids import SequenceState, TokenIds
from tests.inference.engine.drafts.planted_drafts import Told
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.made_models.sampling import first_and_in_turn

# The last one is the first of a block, the last of a block, the first but one, and inside.
LENGTHS = first_and_in_turn([257, 256, 258, 512, 513, 300], seconds=4, first=3)
GENERATED = 6
Left = tuple[AgentKey, SequenceState, Runs]


def left(driver: Driver, length: int, **more: object) -> Left:
    """An agent whose turn has just ended, with so many tokens, and how its rows were computed."""
    for attempt in range(20):  # a random model may end inside a character, which is not remembered
        key = driver.key()
        prompt = tokens_of(length - GENERATED, 1000 * attempt + length)
        ended = driver.turn(prompt, key=key, max_tokens=GENERATED, **more)
        if len(ended.state.token_ids) == length:
            runs = runs_of_turn((), ended.cached_tokens, ended.prompt_tokens, ended.state.decoded_to)
            assert runs is not None
            return key, ended.state, runs
    raise AssertionError("no memory of that length in 20 attempts")


def kv_tokens(driver: Driver, key: AgentKey) -> int:
    return driver.engine._thread.post(lambda worker: worker.memories.get(key).kv.length).result(60)


def replayed(driver: Driver, tokens: TokenIds, runs: Runs) -> AgentKey:
    key = driver.key()
    for step in replay_steps(tokens, runs):
        reuse = Hot(step.keep) if step.keep else None
        driver.turn(tokens[: step.prompt], reuse, key=key, max_tokens=len(step.reply), replayed=step.reply)
    return key


def goes_on_alike(driver: Driver, memory: Left, suffix: int = 17) -> tuple[int, ...]:
    """The agent's next turn after it stayed hot, was restored, forked and replayed; also the files that each leaves."""
    key, state, runs = memory
    rows = len(state.token_ids) - state.pending
    prompt = (*state.token_ids, *tokens_of(suffix, seed=4))
    keys = {"restored": driver.key(), "forked": driver.fork(key), "hot": key}
    again = replayed(driver, state.token_ids[:rows], runs) if driver.engine.model.cell_tokens <= 256 else None
    if again is not None:  # a GPU's cells are cut by the clock
        assert driver.files(again) == driver.files(key)
        keys = {"replayed": again, **keys}
    files, found = driver.restored(key), {}
    for how, each in keys.items():
        ended = driver.turn(prompt, files if how == "restored" else Hot(rows), each)
        assert ended.cached_tokens == min(rows, len(prompt) - 1), how
        found[how] = driver.reply(ended), driver.files(each), ended.state.shareable_tokens
    assert len(set(found.values())) == 1, {how: reply for how, (reply, *_) in found.items()}
    return found["hot"][0]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_memory_goes_on_alike_hot_restored_forked_and_replayed(driver: Driver, length: int) -> None:
    memory = key, state, runs = left(driver, length)
    assert (state.pending, kv_tokens(driver, key)) == (1, length - 1)
    assert runs == (length - GENERATED, length - 1)
    goes_on_alike(driver, memory)


def test_nothing_but_the_last_token_is_computed_when_nothing_follows_it(driver: Driver) -> None:
    goes_on_alike(driver, left(driver, 301), suffix=0)


@pytest.mark.long(3)
@pytest.mark.cpu_only("a GPU's cells are cut by the clock, so their rows have other bits each time")
@pytest.mark.parametrize("length", LENGTHS)
def test_a_memory_beside_other_streams_is_the_one_that_was_alone(driver: Driver, length: int) -> None:
    alone = goes_on_alike(driver, left(driver, length))
    beside = [driver.submit(tokens_of(40 + each, seed=each), max_tokens=150) for each in range(3)]
    assert goes_on_alike(driver, left(driver, length)) == alone
    for each in beside:
        each.end()


@pytest.mark.parametrize("length", LENGTHS)
def test_an_end_token_that_a_step_ahead_has_computed_has_no_kv(driver: Driver, length: int) -> None:
    """The reply ends while the next step is enqueued, or not: the memory is the same."""
    _, state, _ = left(driver, length)
    prompt, end = state.token_ids[: length - GENERATED], state.token_ids[-1]
    assert end not in tuple(state.token_ids[length - GENERATED : -1]), "choose another length"
    key = driver.key()
    ended = driver.turn(prompt, key=key, max_tokens=50, stop_token_ids=(end,))
    assert (ended.finish_reason, ended.state.token_ids) == (FinishReason.STOP, state.token_ids)
    assert (ended.state.pending, kv_tokens(driver, key)) == (1, length - 1)
    runs = runs_of_turn((), 0, ended.prompt_tokens, ended.state.decoded_to)
    assert runs is not None
    assert goes_on_alike(driver, (key, ended.state, runs)) == goes_on_alike(driver, left(driver, length))


def test_a_reply_that_a_stop_string_has_cut_is_one_that_ended_there(driver: Driver) -> None:
    key, state, _ = left(driver, 300)
    spelled = driver.engine.token_text.spell(state.token_ids[-GENERATED:])[0]
    stop = spelled[-3:]
    other = driver.key()
    ended = driver.turn(state.token_ids[:-GENERATED], key=other, max_tokens=50, stop=(stop,))
    assert ended.finish_reason is FinishReason.STOP_SEQUENCE
    assert len(ended.state.token_ids) < ended.prompt_tokens + ended.completion_tokens
    assert (ended.state.pending, kv_tokens(driver, other)) == (1, len(ended.state.token_ids) - 1)
    runs = runs_of_turn((), 0, ended.prompt_tokens, ended.state.decoded_to)
    assert runs is not None
    goes_on_alike(driver, (other, ended.state, runs))
    assert driver.engine.memories.get(key) is not None


@pytest.mark.parametrize("generated", [1, 2, 5])
def test_a_turn_that_is_cancelled_leaves_what_one_that_ended_there_leaves(driver: Driver, generated: int) -> None:
    """Whatever was computed ahead of the cancel."""
    prompt, cut, ended = tokens_of(251, seed=generated), driver.key(), driver.key()
    listener = Listener().cancel_at(Tokens, generated)
    cancelled = driver.submit(prompt, key=cut, keep_partial=True, max_tokens=50, listener=listener).end()
    assert cancelled.finish_reason is FinishReason.CANCELLED
    said = len(driver.reply(cancelled))  # without a token that ends inside a character
    whole = driver.turn(prompt, key=ended, max_tokens=said)
    assert (cancelled.state, cancelled.state.decoded_to) == (whole.state, whole.state.decoded_to)
    assert kv_tokens(driver, cut) == kv_tokens(driver, ended) == 251 + said - 1
    assert driver.files(cut) == driver.files(ended)


@pytest.mark.cpu_only("a GPU's sums depend on how many rows a step has")
@pytest.mark.parametrize("most_drafts", [1, 3, 16])
def test_drafts_that_were_right_leave_the_same_memory(driver: Driver, told: type[Told], most_drafts: int) -> None:
    key, state, _ = left(driver, 262, most_drafts=0)
    prompt, reply = state.token_ids[:-GENERATED], tuple(state.token_ids[-GENERATED:])
    told.replies = {tuple(prompt): (*reply, *tokens_of(20))}
    drafted = driver.key()
    ended = driver.turn(prompt, key=drafted, max_tokens=GENERATED, most_drafts=most_drafts)
    assert ended.accepted_draft_tokens
    assert (ended.state, ended.state.decoded_to) == (state, state.decoded_to)
    assert driver.files(drafted) == driver.files(key)
    told.replies = {}
    runs = runs_of_turn((), 0, ended.prompt_tokens, ended.state.decoded_to)
    assert runs is not None
    goes_on_alike(driver, (drafted, ended.state, runs))


def test_a_prompt_alone_leaves_no_token_without_kv(driver: Driver) -> None:
    key, prompt = driver.key(), tokens_of(300)
    state = driver.turn(prompt, key=key, max_tokens=0).state
    assert (state.pending, kv_tokens(driver, key)) == (0, 300)
    goes_on_alike(driver, (key, state, ()))


@pytest.mark.parametrize("length", [256, 257, 300])
def test_a_memory_of_an_earlier_release_whose_last_token_has_kv_goes_on(driver: Driver, length: int) -> None:
    """Its row was computed by a step: here by that of a reply that is one token longer, and cut again."""
    _, longer, _ = left(driver, length + 1)
    old, prompt = driver.key(), longer.token_ids[: length + 1 - GENERATED]
    driver.turn(prompt, key=old, max_tokens=GENERATED, replayed=tuple(longer.token_ids[-GENERATED:]))
    runs = (len(prompt), length)
    hot = driver.engine.memories.get(old)
    assert hot is not None
    whole = hot.state.computed
    assert len(whole.token_ids) == kv_tokens(driver, old) == length
    goes_on_alike(driver, (old, whole, runs))


@pytest.mark.long(6)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "granite_hybrid"])
def test_windows_and_states_keep_the_last_tokens_kv_also_after_a_cancel(
    family: Callable[[str], Driver], name: str
) -> None:
    driver = family(name)
    key, state = driver.remember(300)
    assert (state.pending, kv_tokens(driver, key)) == (0, 300)
    listener, prompt, cut = Listener().cancel_at(Tokens, 3), tokens_of(100), driver.key()
    ended = driver.submit(prompt, key=cut, keep_partial=True, max_tokens=50, listener=listener).end()
    assert (ended.state.pending, kv_tokens(driver, cut)) == (0, len(ended.state.token_ids))
    known, whole = ended.state.token_ids, driver.key()
    driver.turn(prompt, key=whole, max_tokens=len(driver.reply(ended)))
    said = [driver.turn((*known, *tokens_of(9, 8)), Hot(len(known)), each) for each in (cut, whole)]
    assert said[0].cached_tokens == len(known)
    assert driver.reply(said[0]) == driver.reply(said[1])
