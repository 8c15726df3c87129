"""The versions that a full quota gives up, and their order: old versions, then, where configured, lines long unused. An
acknowledged snapshot is a promise: a pinned agent's newest version never goes, an unpinned one's only with
`evict_heads`. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Candidate:
    line_id: int
    version: int
    is_head: bool
    is_pinned: bool
    line_used_unix_ms: int


_RANK = attrgetter("is_head", "is_pinned", "line_used_unix_ms", "version", "line_id")


def order(candidates: Iterable[Candidate], evict_heads: bool, unused_since_unix_ms: int) -> list[Candidate]:
    """The candidates that may go, in the order in which they should. Old versions: of unpinned agents before pinned, of
    lines long unused before others, oldest first. Then heads of lines that were not used since `unused_since_unix_ms`.
    An old version of a line always comes before its head.
    """
    return sorted((each for each in candidates if _may_go(each, evict_heads, unused_since_unix_ms)), key=_RANK)


def _may_go(candidate: Candidate, evict_heads: bool, unused_since_unix_ms: int) -> bool:
    if not candidate.is_head:
        return True
    return evict_heads and not candidate.is_pinned and candidate.line_used_unix_ms < unused_since_unix_ms
