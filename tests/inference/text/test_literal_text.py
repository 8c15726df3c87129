"""Guards: letters that spell a special token, told apart from the token."""

import re
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.text.literal_text import GUARD, Specials, from_outside, insert_guards, without_guards
from inference_svc.text.token_ids import TokenChars

SPELLINGS = ["<|a|>", "<|a|b|>", "<s>", "|>x", "aba", "[I N]", "§"]
SPECIALS = Specials(SPELLINGS)
PIECES = ["<", "|", "a", "b", ">", "s", "x", "<|", "|>", "ab", "A", "S", "[I", " N]", " ", "§", GUARD, "é", *SPELLINGS]
words = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def spellings_in(text: str) -> list[tuple[int, int]]:
    """Every spelling that a tokenizer could find in a piece of a text."""
    found = []
    for begin, piece in zip([0, *(match.end() for match in re.finditer(GUARD, text))], text.split(GUARD), strict=True):
        for spelling in SPELLINGS:
            starts = [start for start in range(len(piece)) if piece.startswith(spelling, start)]
            found += [(begin + start, begin + start + len(spelling)) for start in starts]
    return sorted(found)


@given(words)
def test_a_strangers_string_spells_nothing_and_loses_nothing(text: str) -> None:
    guarded = SPECIALS.guarded(text)
    assert not spellings_in(guarded)
    assert without_guards(guarded) == from_outside(text).replace("§", "\ufffd")


@given(st.lists(st.tuples(words, st.booleans()), max_size=6))
def test_a_text_spells_what_its_template_spells_and_nothing_more(parts: list[tuple[str, bool]]) -> None:
    """Strangers' strings stand between the template's own, which may begin what a stranger ends."""
    rendered = "".join(SPECIALS.guarded(text) if is_strange else from_outside(text) for text, is_strange in parts)
    plain = without_guards(rendered)
    ends = list(accumulate((len(text) for text, _ in parts), initial=0))
    own = [False] * len(plain)
    for (_, is_strange), begin, end in zip(parts, ends, ends[1:], strict=False):
        own[begin:end] = [not is_strange] * (end - begin)
    expected = {span for span in spellings_in(plain) if all(own[slice(*span)])}
    settled = SPECIALS.settled(rendered)
    offsets = [len(without_guards(settled[:place])) for place in range(len(settled) + 1)]
    found = {(offsets[start], offsets[end]) for start, end in spellings_in(settled)}
    assert without_guards(settled) == plain
    assert found <= expected
    # Of spellings that overlap, a guard in one may lie in another: the longest at each place decide.
    assert {span for span in expected if not any(a < span[1] and span[0] < b for a, b in _others(plain, own))} <= found


def _others(plain: str, own: list[bool]) -> list[tuple[int, int]]:
    return [span for span in spellings_in(plain) if not all(own[slice(*span)])]


@given(st.lists(words, max_size=6))
def test_a_text_without_spellings_has_no_guards(parts: list[str]) -> None:
    rendered = "".join(SPECIALS.guarded(text) for text in parts)
    if not spellings_in(without_guards(rendered)):
        assert GUARD not in SPECIALS.settled(rendered)


@given(words)
def test_to_settle_twice_is_to_settle_once(text: str) -> None:
    once = SPECIALS.settled(text)
    assert SPECIALS.settled(once) == once


@pytest.mark.parametrize(("before", "after"), [("<", ">"), ("<", "s>"), ("", ">"), ("x <|a", "|>"), ("<|", "")])
def test_no_spelling_is_completed_across_a_border(before: str, after: str) -> None:
    for word in ("s", "<s", "|b", "a|>", "  s  "):
        for shown in (SPECIALS.guarded(word), SPECIALS.guarded(word).strip(), SPECIALS.guarded(word.upper()).lower()):
            assert not spellings_in(SPECIALS.settled(before + shown + after))


def test_a_template_may_trim_a_guarded_string() -> None:
    assert without_guards(SPECIALS.guarded("  s \n").strip()) == "s"


def test_keys_and_values_are_guarded_however_deep() -> None:
    value = SPECIALS.guarded_value({"y<s>y": [{"yabay": "y<|a|>y"}, 1, None, True, 1.5, "é"]})
    assert value == {f"y<{GUARD}s>y": [{f"ya{GUARD}bay": f"y<{GUARD}|a|>y"}, 1, None, True, 1.5, "é"]}


def test_what_was_said_letter_by_letter_is_told_from_the_token() -> None:
    text = "x<s><s>y<|a|>"
    assert SPECIALS.echoed(text, [(1, 4)]) == [5, 9]
    assert SPECIALS.echoed(text, [(1, 4), (4, 7), (8, 13)]) == []
    # A guard never stands inside a token: "|>x" begins with the last characters of one.
    assert SPECIALS.echoed("<|a|>x", [(0, 5)]) == [5]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_a_guard_counts_to_the_token_before_it(chars: list[int], data: st.DataObject) -> None:
    text = "abcdefghijklmnopqrstuvwxyz0123456789"[: sum(chars)]
    places = sorted(data.draw(st.sets(st.integers(1, len(text))))) if text else []
    guarded, counted = insert_guards(text, TokenChars(chars), places)
    assert without_guards(guarded) == text
    assert sum(counted) == len(guarded)
    for end, begin in zip(accumulate(counted), accumulate(chars), strict=True):
        assert without_guards(guarded[:end]) == text[:begin]
        assert not guarded[end:].startswith(GUARD) or not begin


def test_spellings_are_found_across_the_pieces_of_a_long_text() -> None:
    for lead in ("y" * 65533, "<" * 65535, "y" * 65536):
        assert not spellings_in(SPECIALS.guarded(f"{lead}<s>y"))
        assert SPECIALS.spelled(f"{lead}<s>y<|a|b|>") == ["<s>", "<|a|b|>"]
        assert SPECIALS.settled(f"{lead}<s>y<{GUARD}s>") == f"{lead}<s>y<{GUARD}s>"


def test_many_special_tokens_cost_a_text_little() -> None:
    """A thousand spellings are no thousand steps for each character."""
    many = Specials([f"<|reserved_{number}|>" for number in range(1000)])
    assert many.guarded("<" * (4 << 20)).count(GUARD) <= 1
