"""Prefills a prefix that several turns share only once: which turn waits, and which KV a turn begins with. Pure.

Two prompts share what the chain hashes of their blocks share, in whole blocks: equal hashes mean equal KV identity and
equal tokens from position 0. Only rows that were computed on the grid are given away, so that a sibling begins with
what it would have computed itself.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvasir.formats.block_hash import BLOCK_TOKENS


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


class HotPrefix(Protocol):
    """An idle hot memory, as sharing sees it."""

    @property
    def chain(self) -> Sequence[str]: ...

    @property
    def shareable(self) -> int: ...


TurnT = TypeVar("TurnT", bound=Sharing)
HotT = TypeVar("HotT", bound=HotPrefix)
SourceT = TypeVar("SourceT")


@dataclass(frozen=True)
class PrefixSource(Generic[SourceT]):
    """KV that a turn may begin with: its source (a running turn, or a hot memory) and its leading tokens."""

    source: SourceT
    shared_tokens: int


@dataclass(frozen=True)
class PrefixSharing(Generic[TurnT]):
    """Finds shared prefixes. `unit_tokens`, whole blocks, is what they are measured in, and the least worth sharing."""

    unit_tokens: int = BLOCK_TOKENS

    def prefix_source_of(
        self, turn: TurnT, running: Iterable[TurnT], hot: Iterable[HotT] = ()
    ) -> PrefixSource[TurnT | HotT] | None:
        """The computed KV that `turn` should begin with now; None when no source has at least a cell more than its plan
        reuses. `hot`: idle memories of its namespace. Of equals a running turn is preferred.
        """
        sources: list[TurnT | HotT] = [*_siblings(turn, running)]
        sources += hot
        ready = [PrefixSource(one, self._shared(turn, one.chain, one.shareable)) for one in sources]
        best = max(ready, key=lambda prefix: prefix.shared_tokens, default=None)
        is_worth = best is not None and best.shared_tokens >= turn.reusable_tokens + self.unit_tokens
        return best if is_worth else None

    def awaited_by(self, turn: TurnT, running: Collection[TurnT]) -> PrefixSource[TurnT] | None:
        """The running turn that is prefilling a cell or more which `turn` needs and no turn has computed yet, and what
        they share once it is computed.
        """
        now = self.prefix_source_of(turn, running)
        have = max(turn.reusable_tokens, now.shared_tokens if now else 0)
        coming = (
            PrefixSource(other, self._shared(turn, other.chain, other.final_shareable))
            for other in _siblings(turn, running)
        )
        best = max(coming, key=lambda prefix: prefix.shared_tokens, default=None)
        return best if best is not None and best.shared_tokens >= have + self.unit_tokens else None

    def _shared(self, turn: TurnT, chain: Sequence[str], shareable: int) -> int:
        """Leading tokens, in whole blocks, that `turn` could begin with. It always computes its last token itself."""
        if turn.namespace is None:
            return 0
        limit = min(shareable, turn.prompt_tokens - 1) // self.unit_tokens * self.unit_tokens
        return min(limit, common_blocks(turn.chain, chain) * BLOCK_TOKENS // self.unit_tokens * self.unit_tokens)


def _siblings(turn: TurnT, running: Iterable[TurnT]) -> list[TurnT]:
    return [other for other in running if other.namespace == turn.namespace]


def common_blocks(one: Sequence[str], other: Sequence[str]) -> int:
    """Leading hashes that are equal. Each hash covers those before it, so that halving finds the last equal one."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
