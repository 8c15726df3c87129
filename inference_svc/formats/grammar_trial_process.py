"""Compiles reply formats where it may go wrong: a process of its own, which can be killed and whose memory is bounded.

Most schemas compile in a millisecond, but some small ones take minutes, or more memory than there is, whatever limits
the library is given. Some compile at once, and each of their steps takes long, or the library gives up following them:
so a few replies are begun, too. Started by `grammar_trial.py` as a script: a line of JSON in (kind, text), a line out
(error, gave_up, step_s).
"""

import contextlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MEMORY_BYTES = 64 << 20
_MAX_TOLD_CHARS = 2000  # of a long message the end: it says what is wrong with the quoted text before it
# A space, or a line's end and what indents the next: a model that may always say one more would until max_tokens.
_JSON_OPTIONS = {"whitespace_pattern": r"\x20|\n\x20{0,16}"}
# A few replies of so many tokens; a token's place in the vocabulary is a multiple of the stride.
_STRIDES, _STEPS, _WALK_S = (33, 31, 101, 7919), 16, 0.2


@dataclass(frozen=True)
class Trial:
    """What became of a format: an error, or the median seconds of a step. `gave_up`: it compiled, and a reply could
    not be followed.
    """

    error: str = ""
    gave_up: bool = False
    step_s: float = 0.0


def grammar_of(kind: str, text: str) -> str:
    """llguidance's form of a JSON schema or regex. Raises ValueError."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(text)


def limits() -> LLParserLimits:
    """Defaults where nothing is said: a step then takes some tens of milliseconds at worst."""
    # States take 1 to 2 KB each, of a grammar that many requests may share. Items in a row: the ways on from one place;
    # 2,000, the default, ended replies of a choice of 200 small objects, or of 800 properties.
    return LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, verbose_errors=False)


def tried(kind: str, text: str, tokenizer: LLTokenizer, clock: Callable[[], float]) -> Trial:
    """Compile a format and begin replies in it. `clock` gives the seconds that this thread worked."""
    try:
        matcher = LLMatcher(tokenizer, grammar_of(kind, text), log_level=0, limits=limits())
    except ValueError as error:
        return Trial(str(error))
    return walked(matcher, clock)


def walked(matcher: LLMatcher, clock: Callable[[], float]) -> Trial:
    """Begin a few replies of tokens chosen blindly; the same ones each time. The matcher stays at its beginning."""
    first = matcher.deep_copy()
    if not matcher.is_error():
        first.compute_bitmask()  # what is built at the first mask is built once for all replies
    if first.is_error():
        return Trial(first.get_error())
    began_s, steps_s = clock(), list[float]()
    for stride in _STRIDES:
        reply = matcher.deep_copy()
        for step in range(_STEPS):
            if steps_s and clock() - began_s > _WALK_S:
                break
            step_s = clock()
            allowed = _token(reply.compute_bitmask(), stride * step)
            if allowed is not None and not reply.is_error():
                reply.consume_token(allowed)
            steps_s.append(clock() - step_s)
            if allowed is None or reply.is_error() or reply.is_stopped():
                break
        if reply.is_error():
            return Trial(reply.get_error(), gave_up=True)
    # Not the mean: on a busy machine some steps take many times what they cost.
    return Trial(step_s=statistics.median(steps_s))


def _token(mask: bytes, place: int) -> int | None:
    """The first token that is allowed from a place on, and around."""
    allowed = int.from_bytes(mask, "little")
    if not allowed:
        return None
    place %= 8 * len(mask)
    later = allowed >> place << place
    return ((later or allowed) & -(later or allowed)).bit_length() - 1


def _bound_memory() -> None:
    """What it may take besides what it has. Where this cannot be said, its time alone bounds it."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    # Bytes as tokens: what a grammar costs hardly depends on the vocabulary.
    tokenizer = LLTokenizer("byte")
    _bound_memory()
    for line in sys.stdin:
        asked = json.loads(line)
        trial = asdict(tried(asked["kind"], asked["text"], tokenizer, time.thread_time))
        print(json.dumps({**trial, "error": trial["error"][-_MAX_TOLD_CHARS:]}), flush=True)


if __name__ == "__main__":
    main()
