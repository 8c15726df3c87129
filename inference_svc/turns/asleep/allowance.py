"""The bounds of waking ahead: a share of an engine's time, and half of its KV memory. Pure."""

from inference_svc.turns.asleep.returns import SECONDS_OF_DAY

_PART_OF_MEMORY = 0.5


class Allowance:
    """Time that nothing was spent of is saved, for at most a day: agents come back in the morning, all at once."""

    def __init__(self, share: float, memory_bytes: int, now_s: float) -> None:
        """`share`: of all time, from 0 to 1. `memory_bytes`: the KV that the engine may hold."""
        self._share = share
        self._most_bytes = _PART_OF_MEMORY * memory_bytes
        self._saved_s, self._counted_s = share * SECONDS_OF_DAY / 24, now_s

    @property
    def is_empty(self) -> bool:
        """Whether no agent may ever be woken."""
        return self._share == 0

    def has_room(self, held_bytes: int, needed_bytes: int) -> bool:
        """Whether an agent of so many bytes may be woken beside those that were woken and wait for their turns."""
        return held_bytes + needed_bytes <= self._most_bytes

    def has_time(self, now_s: float) -> bool:
        """Whether an agent may be woken now."""
        elapsed_s = max(0.0, now_s - self._counted_s)  # a clock may go back
        self._saved_s = min(self._saved_s + self._share * elapsed_s, self._share * SECONDS_OF_DAY)
        self._counted_s = now_s
        return self._saved_s > 0

    def spend(self, seconds: float) -> None:
        """It may be more than was saved: how long a wake takes is known afterwards."""
        self._saved_s -= seconds
