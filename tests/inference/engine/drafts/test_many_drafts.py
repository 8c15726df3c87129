"""Many turns at once with drafts that are right, wrong or both: each is as without, and so is what all of them draw."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.inference.engine.drafts.planted_drafts import Told, wrong_at
from tests.inference.engine.drafts.test_drafts import KINDS, reported
from tests.inference.engine.driving import Driver, tokens_of
from tests.made_models.sampling import sampled

TOGETHER, TURNS = 12, 10_000
REPLY, TOKENS = 8, 100_000


@pytest.mark.long(3)
@pytest.mark.batch_as_alone
@pytest.mark.parametrize("number", range(sampled(2, of=-(-TURNS // TOGETHER))))
def test_many_turns_at_once_equal_turns_without_drafts(driver: Driver, told: type[Told], number: int) -> None:
    rng = random.Random(number)
    turns = [
        (tokens_of(rng.randint(2, 530), 1000 * number + each), {**rng.choice(KINDS), "max_tokens": rng.randint(1, 24)})
        for each in range(TOGETHER)
    ]
    plain_keys, keys = [driver.key() for _ in turns], [driver.key() for _ in turns]
    plain = [
        driver.submit(prompt, key=key, most_drafts=0, **how)
        for key, (prompt, how) in zip(plain_keys, turns, strict=True)
    ]
    replies = [driver.reply(each.end()) for each in plain]
    told.replies = {prompt: reply for (prompt, _), reply in zip(turns, replies, strict=True)}
    told.tries = staticmethod(wrong_at(rng.choice([2, 3, 5, 99])))
    tried = [
        driver.submit(prompt, key=key, most_drafts=rng.randint(1, 16), **how)
        for key, (prompt, how) in zip(keys, turns, strict=True)
    ]
    assert sum(each.end().drafted_tokens for each in tried)
    for alone, ahead, plain_key, key in zip(plain, tried, plain_keys, keys, strict=True):
        assert reported(ahead) == reported(alone)
        assert driver.files(key) == driver.files(plain_key)
        for each in (plain_key, key):
            driver.engine.memories.drop(each).result(60)


@pytest.mark.long(3)
def test_sampled_replies_are_distributed_as_without_drafts(driver: Driver, told: type[Told]) -> None:
    """Other seeds on either side, so that equal draws cannot hide what drafts would change (chi squared)."""
    prompt, how = tokens_of(20, 4), {"temperature": 0.5, "top_k": 3, "max_tokens": REPLY}
    told.replies = {prompt: driver.reply(driver.turn(prompt, most_drafts=0, **how))}
    count = sampled(60, of=TOKENS // REPLY)
    plain, _ = drawn(driver, prompt, range(1, count + 1), most_drafts=0, **how)
    ahead, right = drawn(driver, prompt, range(count + 1, 2 * count + 1), most_drafts=REPLY, **how)
    assert right > count / 20
    for place in range(REPLY):
        assert surprise(plain[place], ahead[place]) < 4, place


def drawn(driver: Driver, prompt: Sequence[int], seeds: Iterable[int], **how: Any) -> tuple[list[Counter[int]], int]:
    """By place in the reply, how often each token was drawn; and how many drafts were right."""
    counts: list[Counter[int]] = [Counter() for _ in range(REPLY)]
    waiting, right = list(seeds), 0
    while waiting:
        now, waiting = waiting[:TOGETHER], waiting[TOGETHER:]
        for each in [driver.submit(prompt, seed=seed, **how) for seed in now]:
            right += each.end().accepted_draft_tokens
            for place, token in enumerate(driver.reply(each.end())):
                counts[place][token] += 1
    return counts, right


def surprise(one: Counter[int], other: Counter[int]) -> float:
    """Standard deviations above the mean of chi squared, by which two samples differ; rare tokens count as one."""
    common = [token for token in one | other if one[token] + other[token] >= 10]
    columns = [(one[token], other[token]) for token in common]
    columns.append((one.total() - sum(a for a, _ in columns), other.total() - sum(b for _, b in columns)))
    shares = [each.total() / (one.total() + other.total()) for each in (one, other)]
    found = sum(
        (seen - share * (a + b)) ** 2 / (share * (a + b))
        for a, b in columns
        if a + b
        for seen, share in zip((a, b), shares, strict=True)
    )
    free = max(1, sum(a + b > 0 for a, b in columns) - 1)
    # Wilson and Hilferty, 1931: the cube root is nearly normal.
    return float(((found / free) ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5)
