"""Numbers of tokens in one buffer do what tuples of the same numbers do."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.text.token_ids import NO_CHARS, NO_TOKENS, TokenChars, TokenIds

numbers = st.lists(st.integers(0, (1 << 32) - 1), max_size=20)
places = st.none() | st.integers(-25, 25)


@given(numbers, numbers, places, places)
def test_they_are_cut_joined_and_compared_as_tuples_are(
    one: list[int], other: list[int], start: int | None, stop: int | None
) -> None:
    ids, others, cut = TokenIds(one), TokenIds(other), slice(start, stop)
    assert (len(ids), tuple(ids), [ids[place] for place in range(-len(one), len(one))]) == (
        len(one),
        tuple(one),
        [*one, *one],
    )
    assert tuple(ids[cut]) == tuple(one[cut])
    assert tuple(ids + others) == (*one, *other)
    assert (ids == others, ids[cut] == others[cut]) == (one == other, one[cut] == other[cut])
    assert ids[cut] == TokenIds(one[cut])
    assert hash(ids[cut]) == hash(TokenIds(one[cut]))
    assert ids.largest == max(one, default=0)
    assert bytes(ids[cut]) == b"".join(number.to_bytes(4, "little") for number in one[cut])


@given(numbers, numbers)
def test_what_grows_is_a_copy(one: list[int], more: list[int]) -> None:
    ids = TokenIds(one)
    growing = ids[1:].growing()
    growing.extend(more)
    assert (ids, TokenIds(growing)) == (TokenIds(one), TokenIds([*one[1:], *more]))
    taken = TokenIds(growing)
    growing.append(7)
    assert list(taken) == [*one[1:], *more]


@pytest.mark.parametrize("number", [-1, 1 << 32])
def test_a_number_that_no_token_can_have_is_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds([5, number])


def test_nobody_changes_them() -> None:
    ids: Any = TokenIds([1, 2])
    with pytest.raises(TypeError):
        ids[0] = 5
    assert ids != (1, 2)
    assert not NO_TOKENS


@given(st.lists(st.integers(0, 200), max_size=20), places)
def test_characters_of_tokens_are_summed_and_packed(counts: list[int], stop: int | None) -> None:
    chars, some = TokenChars(counts)[:stop], counts[:stop]
    assert chars.total == sum(some)
    assert chars.packed() == (bytes(some) if max(some, default=0) < 128 else chars)
    assert chars + TokenChars((1,)) == TokenChars([*some, 1])


def test_a_sum_may_be_more_than_a_number_has_room_for() -> None:
    assert TokenChars([(1 << 32) - 1] * 3).total == 3 * ((1 << 32) - 1)


def test_characters_are_no_ids() -> None:
    chars: Any = TokenChars([1, 2])
    assert chars != TokenIds([1, 2])
    assert TokenIds([1, 2]) != chars
    assert not NO_CHARS
