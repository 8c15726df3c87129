"""The next tokens from logits: what each row asked for, and nothing that depends on its batch mates."""

import math
import random
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import Internal, ResourceExhausted
from numpy.typing import NDArray

from inference_svc.engine.api import SamplingParams
from inference_svc.engine.sampling import Drawn, Draws, Sampler
from inference_svc.kv.batch.draw_pairs import in_pairs

VOCABULARY = 97
STEPS = 6


class OnlyThese:
    """A constraint that allows the same tokens always, and remembers what it was told."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.accepted: list[int] = []
        self._words = np.zeros(-(-VOCABULARY // 32), np.uint32)
        for token in tokens:
            self._words[token // 32] |= np.uint32(1 << token % 32)

    def allowed(self) -> NDArray[np.uint32]:
        return self._words

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


class FollowsNothing(OnlyThese):
    """It cannot go on behind any draft."""

    def follow(self, _token_id: int) -> bool:
        return False

    def go_back(self, tokens: int) -> None:
        assert not tokens


class TooMuch:
    """A constraint that gives up."""

    def allowed(self) -> NDArray[np.uint32]:
        raise ResourceExhausted("too complex")

    def accept(self, token_id: int) -> None:
        raise AssertionError(token_id)


def sample(samplers: Sequence[Sampler], logits: mx.array) -> list[Any]:
    """The next token of each row, or its error."""
    return [*Draws(samplers, logits).read()]


def logits_of(rows: int, seed: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(scale=3, size=(rows, VOCABULARY)).astype(np.float32))


def sampler_of(number: int) -> Sampler:
    """Every kind of request, the number-th of them."""
    kinds: Sequence[dict[str, Any]] = (
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.3, "repetition_tokens": 8, "frequency_penalty": 0.3},
        {"logprobs": 4, "temperature": 1.2},
        {"logit_bias": ((3, 2.5), (90, -100.0)), "temperature": 0.5, "presence_penalty": 1.5},
        {"logprobs": 0},
        {"temperature": 1.5, "constraint": OnlyThese(range(10, 20))},
    )
    chosen = dict(kinds[number % len(kinds)])
    constraint = chosen.pop("constraint", None)
    return Sampler(SamplingParams(99, seed=number, **chosen), range(number % 30), constraint)


def drawn(sampler: Sampler, row: Sequence[float]) -> Drawn:
    (one,) = sample([sampler], mx.array([row], dtype=mx.float32))
    assert isinstance(one, Drawn)
    return one


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-40, 1e-30, 1e-5, 1e-4])
def test_next_to_no_heat_is_greedy(temperature: float) -> None:
    sampler = Sampler(SamplingParams(5, temperature=temperature, seed=1))
    assert [drawn(sampler, [-3.0, 1.0, 4.0, 3.5]).token_id for _ in range(5)] == [2] * 5


def test_heat_draws_other_tokens_too() -> None:
    sampler = Sampler(SamplingParams(5, temperature=1.0, seed=1))
    assert {drawn(sampler, [0.0, 0.0, 0.0]).token_id for _ in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 16, 32])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_batch_mates_change_no_draw_and_no_probability(rows: int, dtype: mx.Dtype) -> None:
    """Bit for bit, over steps, joined at random places, beside other neighbours and an idle row (LESSONS 2, 15)."""
    alone, batched = [sampler_of(n) for n in range(rows)], [sampler_of(n) for n in range(rows)]
    order = list(range(rows))
    for step in range(STEPS):
        random.Random(step).shuffle(order)
        logits = logits_of(rows, step).astype(dtype)
        mixed = mx.concatenate([logits[mx.array(order)], mx.full((1, VOCABULARY), math.nan, dtype=dtype)])
        together = dict(zip(order, sample([batched[n] for n in order], mixed), strict=True))
        for n in range(rows):
            assert sample([alone[n]], logits[n : n + 1]) == [together[n]], (step, n)


def test_a_sampler_with_several_rows_draws_them_one_after_another_beside_others_of_its_settings() -> None:
    params = SamplingParams(9, temperature=1.0, top_p=0.9, seed=3)
    logits, one, other = logits_of(4, 5), Sampler(params), Sampler(params)
    expected = [sample([other], logits[row : row + 1])[0] for row in range(3)]
    assert sample([one, one, one, Sampler(params)], logits)[:3] == expected
    assert one.key_words == other.key_words


def test_equal_logits_are_the_first_token_alone_and_in_a_batch() -> None:
    tied = [0.0, 5.0, 5.0, 1.0]
    greedy, asking = Sampler(SamplingParams(9)), Sampler(SamplingParams(9, logprobs=2))
    both = sample([greedy, asking], mx.array([tied, tied]))
    assert [one.token_id for one in both if isinstance(one, Drawn)] == [1, 1]


def test_the_seed_decides_what_is_drawn() -> None:
    def draws(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(9, temperature=1.0, seed=seed))
        return [drawn(sampler, [0.0] * VOCABULARY).token_id for _ in range(20)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert draws(2**64 - 1) == draws(2**64 - 1)


def test_a_repeated_token_is_less_likely_whatever_the_sign_of_its_logit() -> None:
    """Positive logits are divided and negative ones multiplied, once however often the token came."""
    params = SamplingParams(9, repetition_penalty=2.0, repetition_tokens=3)
    assert drawn(Sampler(params, [0, 0]), [4.0, 2.1, 0.0]).token_id == 1
    assert drawn(Sampler(params, [0, 0]), [4.0, 1.9, 0.0]).token_id == 0  # 4 / 2, not 4 / 4
    assert drawn(Sampler(params, [0]), [-1.0, -1.9, -9.0]).token_id == 1
    assert drawn(Sampler(params, [0]), [-1.0, -2.1, -9.0]).token_id == 0


def test_openais_penalties_count_what_the_reply_has_and_nothing_of_the_prompt() -> None:
    row = [4.0, 3.5, 3.0, 0.0]
    often = Sampler(SamplingParams(9, frequency_penalty=0.4), [0, 0, 0])
    # After 0: 3.6, 3.5; again: 3.2, 3.5; then 1 is 3.1, and so on: each time 0.4 less.
    assert [drawn(often, row).token_id for _ in range(6)] == [0, 0, 1, 0, 1, 2]
    once = Sampler(SamplingParams(9, presence_penalty=0.75), [0, 0, 0])
    # 0 is 3.25 from then on, 1 then 2.75, 2 then 2.25: no more is subtracted.
    assert [drawn(once, row).token_id for _ in range(6)] == [0, 1, 0, 0, 0, 0]
    liked = Sampler(SamplingParams(9, presence_penalty=-2.0), [3])
    assert [drawn(liked, row).token_id for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_sampler_that_goes_on_elsewhere_draws_what_the_first_one_would_have(cut: int) -> None:
    params = SamplingParams(99, temperature=1.0, seed=4, frequency_penalty=0.1, presence_penalty=0.3)
    rows = [logits_of(1, step) for step in range(20)]
    whole = Sampler(params)
    expected = [sample([whole], row)[0].token_id for row in rows]
    first = Sampler(params)
    assert [sample([first], row)[0].token_id for row in rows[:cut]] == expected[:cut]
    second = Sampler(params, key=first.key_words, reply_ids=expected[:cut])
    assert [sample([second], row)[0].token_id for row in rows[cut:]] == expected[cut:]


def test_only_the_last_tokens_of_prompt_and_reply_count_as_repeated() -> None:
    params = SamplingParams(9, repetition_penalty=2.0, repetition_tokens=2)
    sampler = Sampler(params, [0, 5, 5])
    row = [4.0, 3.0, 2.5, 2.2]
    # 0 is three tokens ago; then 0, then 1 count as said, and 0 no more once 2 was said too.
    assert [drawn(sampler, row).token_id for _ in range(4)] == [0, 1, 2, 0]


def test_a_bias_bans_and_forces() -> None:
    row = [1.0, 9.0, 2.0, -9.0]
    assert drawn(Sampler(SamplingParams(9, logit_bias=((1, -100.0),))), row).token_id == 2
    hot = Sampler(SamplingParams(9, temperature=2.0, seed=3, logit_bias=((3, 100.0),)))
    assert {drawn(hot, row).token_id for _ in range(50)} == {3}


def test_log_probabilities_are_the_models_own_whatever_else_was_asked() -> None:
    row = np.random.default_rng(1).normal(size=VOCABULARY)
    expected = row - np.log(np.exp(row).sum())
    settings = {"temperature": 1.7, "top_k": 3, "repetition_penalty": 1.8, "logit_bias": ((40, 30.0),)}
    one = drawn(Sampler(SamplingParams(9, seed=1, logprobs=20, **settings), range(50)), row.tolist())  # type: ignore[arg-type]
    assert one.logprobs is not None
    assert one.logprobs.logprob == pytest.approx(expected[one.token_id], abs=1e-5)
    assert [token for token, _ in one.logprobs.top] == np.argsort(-expected)[:20].tolist()
    assert [value for _, value in one.logprobs.top] == pytest.approx(sorted(expected)[::-1][:20], abs=1e-5)


def test_log_probabilities_are_told_only_to_who_asked() -> None:
    row = [1.0, 2.0, 3.0]
    assert drawn(Sampler(SamplingParams(9, temperature=1.0)), row).logprobs is None
    alone = drawn(Sampler(SamplingParams(9, logprobs=0)), row).logprobs
    assert alone is not None
    assert alone.top == ()
    every = drawn(Sampler(SamplingParams(9, logprobs=20)), row).logprobs
    assert every is not None
    assert [token for token, _ in every.top] == [2, 1, 0]  # a vocabulary smaller than what was asked for


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_allows_what_it_allows_and_hears_what_was_drawn(temperature: float) -> None:
    constraint = OnlyThese([5, 64, 96])
    sampler = Sampler(SamplingParams(9, temperature=temperature, logit_bias=((7, 100.0),)), (), constraint)
    said = [drawn(sampler, [0.0] * VOCABULARY).token_id for _ in range(30)]
    assert set(said) <= {5, 64, 96}
    assert constraint.accepted == said


def test_what_no_word_of_a_constraint_tells_of_is_not_allowed() -> None:
    """Vocabularies are padded beyond their tokenizer's."""
    sampler = Sampler(SamplingParams(9), (), OnlyThese([2]))
    assert drawn(sampler, [0.0] * 200).token_id == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 50, VOCABULARY - 1])
def test_logits_that_are_no_numbers_fail_their_row_alone(bad: float, place: int) -> None:
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)
    for sampler in (Sampler(SamplingParams(9)), Sampler(SamplingParams(9, temperature=1.0))):
        broken = logits.copy()
        broken[1, place] = bad
        mates = [Sampler(SamplingParams(9)), sampler, Sampler(SamplingParams(9, temperature=1.0, seed=4))]
        first, second, third = sample(mates, mx.array(broken))
        assert isinstance(second, Internal)
        assert isinstance(first, Drawn)
        assert first.token_id == logits[0].argmax()
        assert isinstance(third, Drawn)
        assert third == drawn(Sampler(SamplingParams(9, temperature=1.0, seed=4)), logits[2].tolist())


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_draws_that_are_read_beside_other_work_are_the_same_in_arrays_of_two_rows(rows: int) -> None:
    logits = logits_of(rows, 4)
    logits[rows - 1] = math.nan

    def draws(**how: Any) -> Draws:
        return Draws([sampler_of(number) for number in range(rows)], logits, **how)

    def words(read: Sequence[Any]) -> list[Any]:
        return [each.reason if isinstance(each, Internal) else each for each in read]

    def with_a_spare_word(tokens: mx.array, greatest: mx.array) -> list[mx.array]:
        *pairs, last = in_pairs(tokens, greatest, None)
        return [*pairs, mx.concatenate([last, last])[:2]]

    for pairs in (partial(in_pairs, dialect=None), with_a_spare_word):
        beside = draws(in_pairs=pairs)
        assert {array.nbytes for array in beside._read_apart} <= {4, 8}
        assert words(beside.read()) == words(draws().read())


def test_a_row_of_nothing_but_minus_infinity_fails() -> None:
    assert isinstance(sample([Sampler(SamplingParams(9))], mx.full((1, 8), -math.inf))[0], Internal)


def test_a_constraint_that_gives_up_fails_its_row_alone() -> None:
    stuck, free = Sampler(SamplingParams(9), (), TooMuch()), Sampler(SamplingParams(9))
    first, second = sample([stuck, free], mx.array([[1.0, 2.0], [1.0, 2.0]]))
    assert isinstance(first, ResourceExhausted)
    assert second == Drawn(1)


@pytest.mark.parametrize("drafts", [[(5,), ()], [(), (5,), ()], [(5,), (6,), ()]])
def test_rows_behind_drafts_that_no_constraint_follows_are_those_of_their_own_turns(drafts: list[Any]) -> None:
    """None of the drafts is left then, and their rows stand between those of the turns."""
    logits = logits_of(sum(1 + len(tried) for tried in drafts), 7)
    samplers = [Sampler(SamplingParams(9), (), FollowsNothing(range(90)) if tried else None) for tried in drafts]
    firsts = [place + sum(map(len, drafts[:place])) for place in range(len(drafts))]
    found = [drawn for [drawn] in Draws(samplers, logits, drafts).read_drafted()]
    assert found == [
        Drawn(int(logits[first, :90].argmax().item())) if drafts[place] else Drawn(int(logits[first].argmax().item()))
        for place, first in enumerate(firsts)
    ]
