"""Prefills a prefix that several turns share only once: which turn waits, and which KV a turn begins with. Pure.

Two prompts share what the chain hashes of their blocks share, in whole blocks: equal hashes mean equal KV identity and
equal tokens from position 0. Only rows that were computed on the grid are given away, so that a sibling begins with
what it would have computed itself.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.engine.scheduling.hot_memories import ResidentMemory
from inference_svc.text.prefix_matching import common_prefix_length


class Sharing(Protocol):
    """What sharing must know about a turn."""

    @property
    def namespace(self) -> str | None:
        """Turns of one namespace may share; a turn without a namespace shares with none."""

    @property
    def chain(self) -> Sequence[str]:
        """Chain hashes of the prompt's full blocks."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def reusable_tokens(self) -> int:
        """Leading tokens that the turn's plan reuses by itself."""

    @property
    def shareable(self) -> int:
        """Leading tokens whose KV exists and was computed on the grid."""

    @property
    def final_shareable(self) -> int:
        """The value of `shareable` once the prompt is computed."""


TurnT = TypeVar("TurnT", bound=Sharing)
HotT = TypeVar("HotT", bound=ResidentMemory[Any])
SourceT = TypeVar("SourceT")


@dataclass(frozen=True)
class PrefixSource(Generic[SourceT]):
    """KV that a turn may begin with: its source (a running turn, or a hot memory) and its leading tokens."""

    source: SourceT
    shared_tokens: int


def prefix_source_of(
    turn: TurnT, running: Iterable[TurnT], hot: Iterable[HotT] = ()
) -> PrefixSource[TurnT | HotT] | None:
    """The computed KV that `turn` should begin with now; None when no source has at least a block more than its plan
    reuses. `hot`: idle memories of its namespace. Of equals a running turn is preferred.
    """
    sources: list[TurnT | HotT] = [*_siblings(turn, running)]
    sources += hot
    ready = [PrefixSource(one, _shared(turn, one, one.shareable)) for one in sources]
    return _best(ready, turn.reusable_tokens)


def awaited_by(turn: TurnT, running: Collection[TurnT]) -> PrefixSource[TurnT] | None:
    """The running turn that is prefilling a block or more which `turn` needs and no turn has computed yet, and what
    they share once it is computed.
    """
    now = prefix_source_of(turn, running)
    coming = [PrefixSource(one, _shared(turn, one, one.final_shareable)) for one in _siblings(turn, running)]
    return _best(coming, max(turn.reusable_tokens, now.shared_tokens if now else 0))


def _best(prefixes: Iterable[PrefixSource[SourceT]], have: int) -> PrefixSource[SourceT] | None:
    """The longest, if it is at least a block longer than what the turn has."""
    best = max(prefixes, key=lambda prefix: prefix.shared_tokens, default=None)
    return best if best is not None and best.shared_tokens >= have + BLOCK_TOKENS else None


def _shared(turn: Sharing, source: Sharing | ResidentMemory[Any], shareable: int) -> int:
    """Leading tokens, in whole blocks, that `turn` could begin with. It always computes its last token itself. 0
    without hashing a prompt where they cannot be a block more than its plan reuses.
    """
    most = min(shareable, turn.prompt_tokens - 1) // BLOCK_TOKENS
    if turn.namespace is None or most * BLOCK_TOKENS < turn.reusable_tokens + BLOCK_TOKENS:
        return 0
    return min(most, common_prefix_length(turn.chain, source.chain)) * BLOCK_TOKENS


def _siblings(turn: TurnT, running: Iterable[TurnT]) -> list[TurnT]:
    return [other for other in running if other.namespace == turn.namespace]
