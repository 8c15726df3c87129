"""Callers' texts beside a model's special tokens: a guard, the noncharacter U+FDD0, stands inside every spelling of one
that is text. Tokenizers get the text in pieces, cut at guards; the guard stays in the text that is remembered and
matched. Pure.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from inference_svc.text.token_ids import TokenChars

GUARD = "\ufdd0"
_REPLACEMENT = "\ufffd"
_SEARCHED_CHARS = 1 << 16  # A search holds the interpreter until it finds a match, so it goes through a text in pieces


def utf8_bytes(text: str) -> int:
    """Length of a text in UTF-8. An ASCII text, which Python marks as such, is not copied for that."""
    return len(text) if text.isascii() else len(text.encode())


def without_guards(text: str) -> str:
    return text.replace(GUARD, "")


def from_outside(text: str) -> str:
    """A caller's text with other characters in place of guards. It keeps its length."""
    return text.replace(GUARD, _REPLACEMENT)


class Specials:
    """How one model's special tokens are spelled, and where a text spells them."""

    def __init__(self, spellings: Iterable[str] = ()) -> None:
        known = sorted({spelling for spelling in spellings if spelling.strip()})
        several = [spelling for spelling in known if len(spelling) > 1]
        # No guard stands inside of a single character.
        self._single = {ord(spelling): _REPLACEMENT for spelling in known if len(spelling) == 1}
        self._longest = max(map(len, several), default=0)
        pattern = _pattern(several)
        self._longest_at = re.compile(pattern, re.DOTALL)
        self._alike = re.compile(pattern, re.DOTALL | re.IGNORECASE)  # whatever their case: a template may change it
        self._exactly = re.compile("|".join([pattern, *(re.escape(chr(char)) for char in self._single)]), re.DOTALL)
        lowered = [spelling.lower() for spelling in several]
        self._beginnings = {spelling[:cut] for spelling in lowered for cut in range(1, len(spelling))}
        self._ends = {spelling[cut:] for spelling in lowered for cut in range(1, len(spelling))}
        self._joined = "\0".join(lowered)
        self._hold_spaces = any(char.isspace() for spelling in several for char in spelling)

    def guarded(self, text: str) -> str:
        """A caller's string, for a template: guards stand inside each spelling, and at ends that could become one."""
        text = from_outside(text).translate(self._single) if self._single else from_outside(text)
        if not text or not self._longest:
            return text
        places = {start + 1 for start, _ in self._spans(text, self._alike)}
        return with_guards(text, sorted(places | self._open_ends(text)))

    def guarded_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.guarded(value)
        if isinstance(value, list):
            return [self.guarded_value(each) for each in value]
        if isinstance(value, dict):
            return {self.guarded(name): self.guarded_value(each) for name, each in value.items()}
        return value

    def settled(self, text: str) -> str:
        """A text with one guard in each spelling that had one or more, and none anywhere else."""
        if GUARD not in text:
            return text
        parts = text.split(GUARD)
        guards = list(accumulate(map(len, parts[:-1])))
        plain = "".join(parts)
        places = set()
        for start, end in self._spans(plain, self._longest_at):
            first = bisect_right(guards, start)
            if first < len(guards) and guards[first] < end:
                places.add(guards[first])
        return with_guards(plain, sorted(places))

    def spelled(self, text: str) -> list[str]:
        """The special tokens that a tokenizer must find in a text without guards."""
        found, place = [], 0
        while place < len(text):
            end = place + _SEARCHED_CHARS
            match = self._exactly.search(text, place, end + self._longest)
            if match is None or match.start() >= end:
                place = end
            else:
                found.append(match.group())
                place = match.end()
        return found

    def echoed(self, text: str, tokens: Sequence[tuple[int, int]]) -> list[int]:
        """Where guards belong in a generated text: in all spellings but its special `tokens` (from, to)."""
        begins, ends = [start for start, _ in tokens], [end for _, end in tokens]
        places = set()
        for start, end in self._spans(text, self._longest_at):
            place, last = start + 1, bisect_right(begins, start) - 1
            if last >= 0 and ends[last] >= end:
                continue  # it is one, or lies inside one
            if last >= 0 and place < ends[last]:
                place = ends[last]
            places.add(place)
        return sorted(places)

    def _spans(self, text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
        """The longest spelling at each place where there is one; they may overlap."""
        for begin in range(0, len(text) if self._longest else 0, _SEARCHED_CHARS):
            place, end = begin, min(begin + _SEARCHED_CHARS, len(text))
            # A lookahead would find all that overlap by itself, and try every place.
            while place < end and (match := pattern.search(text, place, end + self._longest)):
                if match.start() >= end:
                    break
                yield match.span()
                place = match.start() + 1

    def _open_ends(self, text: str) -> set[int]:
        """Ends of a text at which a spelling could go on: inside the spaces around it, which a template may trim."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        places = self._open_ends_of(text[begin:end], begin)
        # Where no special token holds a space, none goes on behind one.
        return places | self._open_ends_of(text, 0) if self._hold_spaces else places

    def _open_ends_of(self, text: str, offset: int) -> set[int]:
        first, last = text[: self._longest].lower(), text[-self._longest :].lower()
        is_inside = len(text) < self._longest and first in self._joined
        sizes = range(1, len(first) + 1)
        places = set()
        if is_inside or any(first[:size] in self._ends for size in sizes):
            places.add(offset)
        if is_inside or any(last[-size:] in self._beginnings for size in sizes):
            places.add(offset + len(text))
        return places


def insert_guards(text: str, token_chars: TokenChars, places: Sequence[int]) -> tuple[str, TokenChars]:
    """Put guards at these places, ascending. Each counts to the token that completes the character before it."""
    if not places:
        return text, token_chars
    chars, ends = list(token_chars), list(accumulate(token_chars))
    for place in places:
        chars[bisect_left(ends, place)] += 1
    return with_guards(text, places), TokenChars(chars)


def with_guards(text: str, places: Sequence[int]) -> str:
    if not places:
        return text
    return GUARD.join(text[start:end] for start, end in pairwise((0, *places, len(text))))


def _pattern(spellings: Sequence[str]) -> str:
    """A regular expression of a few steps for each character, however many spellings there are; finds the longest."""
    if not spellings:
        return "(?!)"
    rest: dict[str, list[str]] = {}
    for spelling in spellings:
        if spelling:
            rest.setdefault(spelling[0], []).append(spelling[1:])
    options = [re.escape(char) + (_pattern(tails) if any(tails) else "") for char, tails in rest.items()]
    if not options:
        return ""
    whole = options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
    return f"(?:{whole})?" if "" in spellings else whole
