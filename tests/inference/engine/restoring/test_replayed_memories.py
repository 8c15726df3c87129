"""A memory's KV, computed again from its tokens and the runs of its turns, has the bytes that it had."""

import random
from collections.abc import Callable

import pytest

from inference_svc.engine.api import AgentKey, Hot
from inference_svc.memory.replaying import Runs, replay_steps, runs_of_turn
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from tests.inference.engine.driving import Driver, tokens_of
from tests.inference.engine.tiny_models import VOCABULARY
from tests.made_models.sampling import first_and_in_turn

pytestmark = pytest.mark.cpu_only("a GPU's cells are cut by the clock, so their rows have other bits each time")
FAMILIES = ("qwen3", "llama", "gemma3", "gpt_oss", "deepseek_v2")


def lived(driver: Driver, seed: int, turns: int = 5) -> tuple[AgentKey, SequenceState, Runs]:
    """An agent after turns of any length, some of which rewind; its tokens, and how they were computed."""
    chance, key = random.Random(seed), driver.key()
    known, runs = TokenIds(), ()
    state = SequenceState(known, TokenChars(), 0)
    for turn in range(turns):
        kept = len(known) if chance.random() < 0.7 else chance.randrange(len(known) + 1)
        prompt = (*known[:kept], *tokens_of(chance.randrange(1, 330), 100 * seed + turn))
        ended = driver.turn(prompt, Hot(kept) if kept else None, key=key, max_tokens=chance.randrange(1, 90))
        known, state = ended.state.token_ids, ended.state
        found = runs_of_turn(runs, ended.cached_tokens, ended.prompt_tokens, state.decoded_to)
        assert found is not None
        runs = found
    return key, state, runs


def replayed(driver: Driver, tokens: TokenIds, runs: Runs) -> AgentKey:
    key = driver.key()
    for step in replay_steps(tokens, runs):
        reuse = Hot(step.keep) if step.keep else None
        driver.turn(tokens[: step.prompt], reuse, key=key, max_tokens=len(step.reply), replayed=step.reply)
    return key


@pytest.mark.long(35)
@pytest.mark.parametrize(
    ("name", "seed"), first_and_in_turn([(name, seed) for name in FAMILIES for seed in (1, 2)], seconds=16)
)
def test_a_replayed_memory_has_the_bytes_of_the_one_that_never_slept(
    driver: Driver, family: Callable[[str], Driver], name: str, seed: int
) -> None:
    driver = driver if name == "llama" else family(name)
    key, state, runs = lived(driver, seed)
    assert runs
    again, computed = replayed(driver, state.computed.token_ids, runs), len(state.computed.token_ids)
    assert driver.files(again) == driver.files(key)
    more = (*state.token_ids, *tokens_of(7, seed))
    said = [driver.reply(driver.turn(more, Hot(computed), key=each)) for each in (key, again)]
    assert said[0] == said[1]


def test_a_replayed_reply_keeps_tokens_that_end_inside_a_character(driver: Driver) -> None:
    """A turn of its own leaves them out; a run that another turn cut there has their rows."""
    spell = driver.engine.token_text.spell
    part = next(token for token in range(3, VOCABULARY) if spell((token,))[1] == [0])  # a first byte of several
    prompt, key = tokens_of(20), driver.key()
    ended = driver.turn(prompt, key=key, max_tokens=1, replayed=(part,))
    assert ended.state.token_ids == TokenIds((*prompt, part))
    assert len(ended.state.token_chars) == 21
    assert driver.turn((*prompt, part, 9), Hot(21), key=key, max_tokens=1).cached_tokens == 20  # the last has no KV
