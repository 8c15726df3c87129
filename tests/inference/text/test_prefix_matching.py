"""Prefix matching over a toy byte-pair tokenizer whose tokens cross character borders, as real ones do."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inference_svc.text.prefix_matching import Outcome, PrefixMatch, RememberedText, common_prefix_length, match_prefix
from inference_svc.text.token_ids import TokenChars, TokenIds

# Merges that cross character borders: a space with two thirds of a quotation mark, and its last third with an "s".
_VOCABULARY = [
    *(bytes([value]) for value in range(256)),
    " \u201c".encode()[:3],
    "\u201cs".encode()[2:],
    b"ab",
    b"abc",
    b"\xc3\xa9",
    b"e a",
]
_BY_LENGTH = sorted(range(len(_VOCABULARY)), key=lambda token: -len(_VOCABULARY[token]))


def tokenize(text: str) -> list[int]:
    data, tokens = text.encode(), []
    while data:
        token = next(token for token in _BY_LENGTH if data.startswith(_VOCABULARY[token]))
        tokens.append(token)
        data = data[len(_VOCABULARY[token]) :]
    return tokens


def spell(tokens: Sequence[int]) -> bytes:
    return b"".join(_VOCABULARY[token] for token in tokens)


def ends_whole(tokens: Sequence[int]) -> bool:
    return not spell(tokens).decode(errors="replace").endswith("\ufffd")


def remember(*pieces: str) -> RememberedText:
    """A memory tokenized piece by piece, as turns are."""
    tokens = [token for piece in pieces for token in tokenize(piece)]
    ends = [len(spell(tokens[: count + 1]).decode(errors="ignore")) for count in range(len(tokens))]
    return RememberedText(
        "".join(pieces),
        TokenIds(tokens),
        TokenChars(end - before for end, before in zip(ends, [0, *ends], strict=False)),
    )


def match(memory: RememberedText, prompt: str) -> PrefixMatch:
    return match_prefix(memory, prompt, ends_whole=ends_whole)


texts = st.text(alphabet="abc e é“”s🜚漢", max_size=30)


@given(texts, texts, texts)
@example("ab \u201cs", " \u201cs", "ab x")
@example("", "say \u201c", "say hello")
def test_what_is_kept_spells_a_prefix_of_the_prompt_and_never_half_a_character(one: str, two: str, prompt: str) -> None:
    memory = remember(one, two)
    for candidate in (prompt, one + prompt, one + two + prompt, (one + two)[: len(prompt)]):
        kept = match(memory, candidate)
        assert spell(memory.token_ids[: kept.kept_tokens]) == candidate[: kept.kept_chars].encode()


@given(texts, texts, texts)
def test_kept_is_the_most_that_lies_inside_the_match(one: str, two: str, prompt: str) -> None:
    memory = remember(one, two)
    kept = match(memory, one + prompt)
    for more in range(kept.kept_tokens + 1, len(memory.token_ids) + 1):
        spelled = spell(memory.token_ids[:more])
        assert not (one + prompt).encode().startswith(spelled) or not ends_whole(memory.token_ids[:more])


@given(texts.filter(bool), texts)
def test_an_equal_text_is_exact_and_a_longer_one_extends(stored: str, more: str) -> None:
    memory = remember(stored)
    expected = Outcome.EXTEND if more else Outcome.EXACT
    assert match(memory, stored + more) == PrefixMatch(expected, len(memory.token_ids), len(stored), len(stored))


def test_whatever_part_of_a_memory_matches_is_kept() -> None:
    memory = remember("x" * 100)
    assert match(memory, "y").outcome is Outcome.NONE
    for length in (1, 2, 50, 99):
        assert match(memory, "x" * length + "yyy") == PrefixMatch(Outcome.DIVERGE, length, length, length)


def test_a_memory_that_ends_inside_a_character_gives_that_character_back() -> None:
    tokens = tokenize("ab")
    half = RememberedText("ab", TokenIds([*tokens, 0xE2]), TokenChars([2, 0]))
    assert match(half, "abc") == PrefixMatch(Outcome.DIVERGE, 1, 2, 2)


def test_a_token_that_completes_a_space_and_begins_a_quotation_mark_is_given_back() -> None:
    memory = remember("say \u201c")
    assert match(memory, "say hello").kept_chars == 3


@given(texts, texts)
def test_the_common_prefix_is_the_longest(one: str, other: str) -> None:
    length = common_prefix_length(one, other)
    assert one[:length] == other[:length]
    assert one[length : length + 1] != other[length : length + 1] or length == min(len(one), len(other))
    assert length == common_prefix_length(tuple(one), tuple(other))
    assert length == common_prefix_length(TokenIds(map(ord, one)), TokenIds(map(ord, other)))


def test_a_memory_whose_offsets_do_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="sum of 3"):
        RememberedText("abc", TokenIds([1, 2]), TokenChars([1, 1]))
