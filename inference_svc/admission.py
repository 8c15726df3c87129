"""Who may begin a turn: counts what open turns hold, and refuses with numbers and a time to come back before anything
is allocated.

Three kinds of room are given out. Turns: so many in all, and fewer for one namespace and one credential, so that no
caller takes every place. Bytes that wait: prompts, KV that turns may come to need, memory read from the store that is
not KV yet. And copies of KV that wait for the store. Whoever takes room gives it back at its end, whatever the end is.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvasir.errors import ResourceExhausted

from inference_svc.held_bytes import HeldBytes
from inference_svc.service_stats import ServiceStats

_USUAL_TURN_S = 1.0  # until a turn has ended
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.1, 30.0
_NEWEST_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What all callers, one namespace and one credential may take at once."""

    max_turns: int = 256
    max_turns_per_namespace: int = 192
    max_turns_per_caller: int = 192
    max_open_prompt_bytes: int = 256 << 20
    """Prompts of all turns that wait or run."""
    kv_backlog: float = 4.0
    """Open turns may come to need this many times the KV memory; the rest is refused rather than kept waiting."""
    max_restoring_bytes: int = 1 << 30
    """Memory read from the store that is not KV yet. Turns wait for their part of it."""
    max_publishing_bytes: int = 512 << 20
    """Copies of KV that wait for the store."""


class Admission:
    """The room of one service. On one event loop."""

    def __init__(self, limits: AdmissionLimits, stats: ServiceStats, clock: Callable[[], float]) -> None:
        """`clock` gives seconds, monotonic."""
        self.limits = limits
        self.restoring = HeldBytes(limits.max_restoring_bytes)
        self.publishing = HeldBytes(limits.max_publishing_bytes)
        self._stats = stats
        self._clock = clock
        self._open_turns = 0
        self._of_namespace: Counter[str] = Counter()
        self._of_caller: Counter[tuple[str, str]] = Counter()
        self._kv_bytes = 0
        self._usual_turn_s = _USUAL_TURN_S

    @contextlib.contextmanager
    def turn(self, namespace: str, caller: str, prompt_bytes: int) -> Iterator[None]:
        """A turn's place, until the end of the block. Raises ResourceExhausted."""
        with self._counting_refusals(namespace):
            self._check_turn(namespace, caller, prompt_bytes)
        began = self._clock()
        self._add(namespace, caller, prompt_bytes, 1)
        try:
            yield
        finally:
            self._add(namespace, caller, prompt_bytes, -1)
            self._usual_turn_s += _NEWEST_WEIGHT * (self._clock() - began - self._usual_turn_s)

    @contextlib.contextmanager
    def kv(self, namespace: str, needed_bytes: int, budget_bytes: int) -> Iterator[None]:
        """KV that a turn may come to need, until the end of the block. Raises ResourceExhausted."""
        most = int(self.limits.kv_backlog * budget_bytes)
        if self._kv_bytes and self._kv_bytes + needed_bytes > most:
            with self._counting_refusals(namespace):
                raise self._refusal(
                    "MEMORY_BUSY",
                    f"memory: the turn's KV may need {needed_bytes} bytes, turns that wait or run {self._kv_bytes}; "
                    f"at most {most} may be asked for at once",
                    needed_bytes=needed_bytes,
                    open_bytes=self._kv_bytes,
                    max_bytes=most,
                )
        self._kv_bytes += needed_bytes
        try:
            yield
        finally:
            self._kv_bytes -= needed_bytes

    @property
    def retry_after_s(self) -> float:
        """When a place is likely to be free: open turns end one after the other, each in its usual time."""
        return min(max(self._usual_turn_s / max(self._open_turns, 1), _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def _check_turn(self, namespace: str, caller: str, prompt_bytes: int) -> None:
        limits = self.limits
        places = (
            ("QUEUE_FULL", "all callers", self._open_turns, limits.max_turns),
            ("NAMESPACE_BUSY", "the namespace", self._of_namespace[namespace], limits.max_turns_per_namespace),
            ("CALLER_BUSY", "the credential", self._of_caller[namespace, caller], limits.max_turns_per_caller),
        )
        for reason, whose, turns, most in places:
            if turns >= most:
                raise self._refusal(
                    reason,
                    f"queue: {turns} turns of {whose} wait or run, at most {most} may",
                    turns=turns,
                    max_turns=most,
                )
        if (held := self._stats.prompt_bytes) and held + prompt_bytes > limits.max_open_prompt_bytes:
            raise self._refusal(
                "PROMPTS_TOO_LARGE",
                f"queue: prompts of turns that wait or run have {held} bytes and this one {prompt_bytes}; at most "
                f"{limits.max_open_prompt_bytes} may be held",
                prompt_bytes=prompt_bytes,
                open_bytes=held,
                max_bytes=limits.max_open_prompt_bytes,
            )

    def _refusal(self, reason: str, message: str, **numbers: int) -> ResourceExhausted:
        return ResourceExhausted(
            message,
            reason=reason,
            retry_after_s=self.retry_after_s,
            metadata={name: str(number) for name, number in numbers.items()},
        )

    @contextlib.contextmanager
    def _counting_refusals(self, namespace: str) -> Iterator[None]:
        try:
            yield
        except ResourceExhausted as refusal:
            self._stats.of(namespace).refusals[refusal.reason] += 1
            raise

    def _add(self, namespace: str, caller: str, prompt_bytes: int, turns: int) -> None:
        self._open_turns += turns
        self._of_namespace[namespace] += turns
        self._of_caller[namespace, caller] += turns
        self._stats.prompt_bytes += turns * prompt_bytes
