"""A reply that is computed again: its tokens are known, and come one after the other, without a draw. Pure."""

from collections import deque
from collections.abc import Iterable


class ReplayedReply:
    """Stands where a `ReasoningWatch` stands, and forces every token."""

    banned: int | None = None

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._rest = deque(token_ids)

    @property
    def forced(self) -> int | None:
        """The token that comes next."""
        return self._rest[0] if self._rest else None

    @property
    def waits(self) -> bool:
        """Whether the next draw must wait for the last one: each takes one token of the reply."""
        return bool(self._rest)

    def accept(self, token_id: int) -> None:  # noqa: ARG002 - as of the reasoning's watch
        if self._rest:
            self._rest.popleft()
