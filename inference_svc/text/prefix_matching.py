"""Character-level prefix matching: how much of an agent's memory a new prompt may reuse. Texts are compared, as pieces
are tokenized otherwise than the whole; the tokens that spell the common text keep their KV. Pure: the caller knows
which tokens spell whole characters.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.formats.manifest import tokens_within_chars

from inference_svc.text.literal_text import GUARD
from inference_svc.text.token_ids import NO_CHARS, NO_TOKENS, TokenChars, TokenIds

# A character is at most four bytes, so at most four tokens: eight are enough to see how the last one ends.
_CHARACTER_WINDOW = 8


class Outcome(enum.Enum):
    NONE = "none"
    EXACT = "exact"
    EXTEND = "extend"
    DIVERGE = "diverge"


@dataclass(frozen=True, slots=True)
class RememberedText:
    """A text and the tokens that spell it; `token_chars[i]` is how many code points of it token i completes."""

    text: str
    token_ids: TokenIds
    token_chars: TokenChars

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.token_chars):
            raise ValueError(f"token_chars: expected {len(self.token_ids)} entries, got {len(self.token_chars)}")
        if (total := self.token_chars.total) != len(self.text):
            raise ValueError(f"token_chars: expected a sum of {len(self.text)}, got {total}")


NO_TEXT = RememberedText("", NO_TOKENS, NO_CHARS)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The leading tokens of a memory that a prompt keeps, and the code points of the prompt that they spell."""

    outcome: Outcome
    kept_tokens: int
    kept_chars: int
    matched_chars: int


NO_MATCH = PrefixMatch(Outcome.NONE, 0, 0, 0)


def match_prefix(memory: RememberedText, prompt: str, *, ends_whole: Callable[[Sequence[int]], bool]) -> PrefixMatch:
    """Compare a prompt with a memory. EXACT: the prompt is the memory's text. EXTEND: the text is a proper prefix of
    the prompt. DIVERGE: they part inside the text, or the memory ends inside a character; kept is up to the last token
    wholly inside the match, whatever part of the memory that is. NONE when no token is. `ends_whole(token_ids)`:
    whether the last of a few consecutive tokens ends at a character's border.
    """
    matched = common_prefix_length(memory.text, prompt)
    # A guard counts to the character before it, with which the texts part then.
    while matched and GUARD in (memory.text[matched : matched + 1], prompt[matched : matched + 1]):
        matched -= 1
    if not matched:
        return PrefixMatch(Outcome.NONE, 0, 0, matched)
    kept, kept_chars = _tokens_inside(memory, matched, ends_whole)
    if not kept:
        return PrefixMatch(Outcome.NONE, 0, 0, matched)
    if kept < len(memory.token_ids):
        return PrefixMatch(Outcome.DIVERGE, kept, kept_chars, matched)
    return PrefixMatch(Outcome.EXACT if matched == len(prompt) else Outcome.EXTEND, kept, kept_chars, matched)


def match_tokens(memory: RememberedText, token_ids: TokenIds) -> PrefixMatch:
    """Compare a prompt that came as tokens with a memory: the leading tokens that are the same are kept."""
    kept = common_prefix_length(memory.token_ids, token_ids)
    chars = memory.token_chars[:kept].total
    if kept < len(memory.token_ids):
        return PrefixMatch(Outcome.DIVERGE if kept else Outcome.NONE, kept, chars, chars)
    return PrefixMatch(Outcome.EXACT if kept == len(token_ids) else Outcome.EXTEND, kept, chars, chars)


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Items that two sequences of a type have in common from their start, by bisection over slices: C compares them."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tokens_inside(
    memory: RememberedText, matched: int, ends_whole: Callable[[Sequence[int]], bool]
) -> tuple[int, int]:
    """Longest run of leading tokens inside the first `matched` code points that ends between two characters."""
    kept, kept_chars = len(memory.token_ids), len(memory.text)
    if matched < kept_chars:
        # Also without the first tokens of a character that is not kept: a letter in NFC may be two.
        kept = tokens_within_chars(memory.token_chars, matched)
        kept_chars = memory.token_chars[:kept].total
    # A token may complete a character and begin the next (GPT-2's " âĢ" is a space and two thirds of a quotation
    # mark), so counting completed characters is not enough: such a token is given back too.
    while kept and not ends_whole(memory.token_ids[max(0, kept - _CHARACTER_WINDOW) : kept]):
        kept -= 1
        kept_chars -= memory.token_chars[kept]
    return kept, kept_chars
