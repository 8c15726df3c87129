"""The engine's debt to the store: whether a memory's room must wait until the store has the memory."""

from collections.abc import Callable

# A turn that wants the room waits so long for a publication that does not move, and for one more try: longer than a
# store takes to come back from a stall or a restart.
_KEPT_S = 30.0


class Owing:
    """One memory on its way, as the engine is asked about it (`hot_memories.Owed`). The event loop changes it, the MLX
    thread reads.
    """

    def __init__(
        self,
        is_unstored: Callable[[], bool],
        moves: Callable[[float], bool],
        clock: Callable[[], float],
        hurry: Callable[[], object],
    ) -> None:
        """`is_unstored`: the store lacks the memory, and may get it. `moves`: whether the store has taken data within
        so many seconds. `hurry`: begin the next try now. All are called on the MLX thread.
        """
        self.is_copied = False  # the publication has copies of all that the store lacks
        self.is_refused = False  # the store does not take such a memory: no try can succeed
        self._is_unstored = is_unstored
        self._moves = moves
        self._clock = clock
        self._hurry = hurry
        self._kept_until_s = clock() + _KEPT_S
        self._failed_s: float | None = None  # the last try, while none runs

    # --- on the event loop ---

    def progressed(self) -> None:
        """A try has begun, or a part of the memory is stored."""
        self._kept_until_s, self._failed_s = self._clock() + _KEPT_S, None

    def failed(self) -> None:
        """A try has failed: the memory may go now, and after a while not before one more try."""
        self._failed_s, self.is_copied = self._clock(), False

    @property
    def has_failed(self) -> bool:
        """Whether the last try has failed, and none runs."""
        return self._failed_s is not None

    # --- on the MLX thread ---

    @property
    def is_owed(self) -> bool:
        return self._is_unstored()

    @property
    def is_awaited(self) -> bool:
        if not self.is_owed or self.is_refused or self.is_copied:
            return False
        if (failed_s := self._failed_s) is not None:
            return self._clock() - failed_s >= _KEPT_S
        return self._clock() < self._kept_until_s or self._moves(_KEPT_S)

    def want(self) -> None:
        if self._failed_s is not None:
            self.progressed()
            self._hurry()
