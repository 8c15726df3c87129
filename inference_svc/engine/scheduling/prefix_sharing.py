"""Prefills a prefix that several turns share only once: which turn waits, and which KV a turn begins with. Pure.

Two prompts share what the chain hashes of their blocks share, in whole blocks: equal hashes mean equal KV identity and
equal tokens from position 0. Only rows that were computed on the grid are given away, so that a sibling begins with
what it would have computed itself.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvasir.formats.block_hash import BLOCK_TOKENS


class Sharing(Protocol):
    """What sharing must know about a turn."""

    @property
    def namespace(self) -> str | None:
        """Turns of one namespace may share; a turn without a namespace shares with none."""
        ...

    @property
    def chain(self) -> Sequence[str]:
        """Chain hashes of the prompt's full blocks."""
        ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def reusable_tokens(self) -> int:
        """Leading tokens that the turn's plan reuses by itself."""
        ...

    @property
    def shareable(self) -> int:
        """Leading tokens whose KV exists and was computed on the grid."""
        ...

    @property
    def final_shareable(self) -> int:
        """The value of `shareable` once the prompt is computed."""
        ...


class HotPrefix(Protocol):
    """An idle hot memory, as sharing sees it."""

    @property
    def chain(self) -> Sequence[str]: ...

    @property
    def shareable_tokens(self) -> int: ...


TurnT = TypeVar("TurnT", bound=Sharing)
SourceT = TypeVar("SourceT")


@dataclass(frozen=True)
class PrefixSource(Generic[SourceT]):
    """KV that a turn may begin with: its source (a running turn, or the key of a hot memory) and its leading tokens."""

    source: SourceT
    shared_tokens: int


@dataclass(frozen=True)
class PrefixSharing(Generic[TurnT]):
    """Finds shared prefixes. `unit_tokens`, whole blocks, is what they are measured in, and the least worth sharing."""

    unit_tokens: int = BLOCK_TOKENS

    def prefix_source_of(
        self,
        turn: TurnT,
        running: Iterable[TurnT],
        hot: Iterable[tuple[Hashable, str, HotPrefix]] = (),
    ) -> PrefixSource[TurnT | Hashable] | None:
        """The computed KV that `turn` should begin with now; None when no source has at least a cell more than its plan
        reuses. `hot`: idle memories as (key, namespace, memory). Of equals a running turn is preferred.
        """
        ready: list[PrefixSource[TurnT | Hashable]] = [
            PrefixSource(other, self._shared(turn, other.namespace, other.chain, other.shareable)) for other in running
        ]
        ready += [
            PrefixSource(key, self._shared(turn, namespace, memory.chain, memory.shareable_tokens))
            for key, namespace, memory in hot
        ]
        best = max(ready, key=lambda prefix: prefix.shared_tokens, default=None)
        return best if best is not None and self._is_worth(turn, best.shared_tokens) else None

    def awaited_by(self, turn: TurnT, running: Collection[TurnT]) -> PrefixSource[TurnT] | None:
        """The running turn that is prefilling a cell or more which `turn` needs and no turn has computed yet, and what
        they share once it is computed.
        """
        now = self.prefix_source_of(turn, running)
        have = max(turn.reusable_tokens, now.shared_tokens if now else 0)
        coming = (
            PrefixSource(other, self._shared(turn, other.namespace, other.chain, other.final_shareable))
            for other in running
        )
        best = max(coming, key=lambda prefix: prefix.shared_tokens, default=None)
        return best if best is not None and best.shared_tokens >= have + self.unit_tokens else None

    def _is_worth(self, turn: TurnT, tokens: int) -> bool:
        return tokens >= turn.reusable_tokens + self.unit_tokens

    def _shared(self, turn: TurnT, namespace: str | None, chain: Sequence[str], shareable: int) -> int:
        """Leading tokens, in whole blocks, that `turn` could begin with. It always computes its last token itself."""
        if turn.namespace is None or namespace != turn.namespace:
            return 0
        limit = min(shareable, turn.prompt_tokens - 1) // self.unit_tokens * self.unit_tokens
        return min(limit, common_blocks(turn.chain, chain) * BLOCK_TOKENS // self.unit_tokens * self.unit_tokens)


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
