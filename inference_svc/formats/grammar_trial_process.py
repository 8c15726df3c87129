"""Compiles reply formats in a process that can be killed, with bounded memory, and begins a few replies: some small
formats take minutes or all memory, whatever the library's limits are. A line of JSON in (kind, text), one out (error,
gave_up, step_s). Before the first, when it is ready, an empty one.
"""

import contextlib
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MEMORY_BYTES = 64 << 20
_MAX_SHOWN_CHARS = 2000  # the end of a long message: it explains the fault of the text quoted before it
_AT_PLACE = re.compile(r"at \d+\(\d+\): (.+)")  # of a grammar's text; behind it the library quotes that line, whole
# A space, or a line's end with indentation. Without a bound a model could write white space until max_tokens.
_JSON_OPTIONS = {"whitespace_pattern": r"\x20|\n\x20{0,16}"}
# A few replies of _STEPS tokens each; a token's place in the vocabulary is a multiple of the stride.
_STRIDES, _STEPS, _WALK_S = (33, 31, 101, 7919), 16, 0.2


@dataclass(frozen=True)
class Trial:
    """A trial's error, or the median seconds of a step. `gave_up`: a reply in it could not be followed."""

    error: str = ""
    gave_up: bool = False
    step_s: float = 0.0


def grammar_of(kind: str, text: str) -> str:
    """llguidance's form of a JSON schema, a regex, or its own text for calls of tools. Raises ValueError."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(text)


def limits() -> LLParserLimits:
    """The library's limits, its defaults except for these: a step takes some tens of milliseconds at worst."""
    # A state takes 1 to 2 KB, in a grammar that many requests may share. Items in a row are the possible continuations
    # at one place; the default of 2,000 ended replies of a choice of 200 small objects, or of 800 properties.
    return LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, verbose_errors=False)


def try_format(kind: str, text: str, tokenizer: LLTokenizer, clock: Callable[[], float]) -> Trial:
    """Compile a format and begin replies in it. `clock` gives the working seconds of this thread."""
    try:
        matcher = LLMatcher(tokenizer, grammar_of(kind, text), log_level=0, limits=limits())
    except ValueError as error:
        return Trial(str(error))
    return begin_replies(matcher, clock)


def begin_replies(matcher: LLMatcher, clock: Callable[[], float]) -> Trial:
    """Begin a few replies of arbitrary tokens, the same ones each time. The matcher stays at its beginning."""
    first = matcher.deep_copy()
    if not matcher.is_error():
        first.compute_bitmask()  # the first mask builds tables that all replies share
    if first.is_error():
        return Trial(_without_quotes(first.get_error()))
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
    # Not the mean: on a busy machine some steps are delayed many times over.
    return Trial(step_s=statistics.median(steps_s))


def _without_quotes(error: str) -> str:
    at_place = _AT_PLACE.match(error)
    return at_place[1] if at_place and "error: " not in error else error  # a regex's fault follows its text


def _token(mask: bytes, place: int) -> int | None:
    """The first allowed token from a place on, or else from the start."""
    allowed = int.from_bytes(mask, "little")
    if not allowed:
        return None
    place %= 8 * len(mask)
    later = allowed >> place << place
    return ((later or allowed) & -(later or allowed)).bit_length() - 1


def _bound_memory() -> None:
    """Limit the memory that this process may add. Where the system has no such limit, only time bounds it."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    tokenizer = LLTokenizer("byte")  # bytes as tokens: a grammar's cost hardly depends on the vocabulary
    _bound_memory()
    print(flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        trial = asdict(try_format(asked["kind"], asked["text"], tokenizer, time.thread_time))
        print(json.dumps({**trial, "error": trial["error"][-_MAX_SHOWN_CHARS:]}), flush=True)


if __name__ == "__main__":
    main()
