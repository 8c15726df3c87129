"""Compiles reply formats where it may go wrong: a process of its own, which can be killed and whose memory is bounded.

Most schemas compile in a millisecond, but some small ones take minutes, or more memory than there is, whatever limits
the library is given. Started by `grammar_trial.py` as a script: a line of JSON in (kind, text), a line out (error).
"""

import contextlib
import json
import resource
import sys
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MEMORY_BYTES = 64 << 20
_MAX_TOLD_CHARS = 2000  # of a long message the end: it says what is wrong with the quoted text before it
# A space, or a line's end and what indents the next: a model that may always say one more would until max_tokens.
_JSON_OPTIONS = {"whitespace_pattern": r"\x20|\n\x20{0,16}"}


def grammar_of(kind: str, text: str) -> str:
    """llguidance's form of a JSON schema or regex. Raises ValueError."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(text)


def limits() -> LLParserLimits:
    """Defaults where nothing is said: a step then takes some tens of milliseconds at worst."""
    # States take 1 to 2 KB each, of a grammar that many requests may share.
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def problem_of(kind: str, text: str, tokenizer: LLTokenizer) -> str:
    """Why a format cannot be used; empty when it can. Its first step is taken, too."""
    try:
        matcher = LLMatcher(tokenizer, grammar_of(kind, text), log_level=0, limits=limits())
    except ValueError as error:
        return str(error)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


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
        problem = problem_of(asked["kind"], asked["text"], tokenizer)
        print(json.dumps({"error": problem[-_MAX_TOLD_CHARS:]}), flush=True)


if __name__ == "__main__":
    main()
