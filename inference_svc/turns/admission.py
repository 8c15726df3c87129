"""Admits turns, before any memory is allocated: counts turns, bytes that wait (prompts, KV to come, restored bytes) and
copies for the store. Namespaces share each kind (`kvasir.server.fair_shares`), so that one which holds none always
finds some. A refusal has the caller's own numbers and the limits, never those of others.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvasir.errors import ResourceExhausted
from kvasir.server.fair_shares import Shares
from kvasir.server.shared_room import SharedRoom
from kvasir.waits import LONGEST_RETRY_S, PAUSE_S, RETRY_S

_NEWEST_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    max_turns: int
    max_turns_per_namespace: int
    """While no other namespace has a turn. Beside others it is less, so that a place is left for new callers."""
    max_turns_per_caller: int
    max_open_prompt_bytes: int  # bytes of the prompts of all turns that wait or run
    kv_memory_bytes: int  # of the model that was loaded last
    kv_backlog: float
    """Open turns may come to need this many times the KV memory; further turns are refused, not kept waiting."""
    max_restoring_bytes: int  # Bytes read from the store that are not KV yet. Turns wait for their part of this room.
    max_publishing_bytes: int  # bytes of KV copies that wait for the store

    @property
    def max_kv_backlog_bytes(self) -> int:
        return int(self.kv_backlog * self.kv_memory_bytes)


class Admission:
    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.restoring = SharedRoom(limits.max_restoring_bytes)
        self.publishing = SharedRoom(limits.max_publishing_bytes)
        self._clock = clock
        self._turns = Shares(limits.max_turns)
        self._of_caller: Counter[tuple[str, str]] = Counter()
        self._prompt_bytes = Shares(limits.max_open_prompt_bytes)
        self._kv_bytes = Shares(limits.max_kv_backlog_bytes)
        self._usual_turn_s: dict[str, float] = {}  # `RETRY_S` until a turn has ended

    def serves_with(self, kv_memory_bytes: int) -> None:
        self.limits = replace(self.limits, kv_memory_bytes=kv_memory_bytes)
        self._kv_bytes.total = self.limits.max_kv_backlog_bytes

    @contextlib.contextmanager
    def turn(self, namespace: str, caller: str, prompt_bytes: int) -> Iterator[None]:
        """A turn's place, until the end of the block. Raises ResourceExhausted."""
        self._check_turn(namespace, caller, prompt_bytes)
        began = self._clock()
        self._hold(namespace, caller, prompt_bytes)
        try:
            yield
        finally:
            self._let_go(namespace, caller, prompt_bytes)
            usual_s = self._usual_turn_s.get(namespace, RETRY_S)
            self._usual_turn_s[namespace] = usual_s + _NEWEST_WEIGHT * (self._clock() - began - usual_s)

    @contextlib.contextmanager
    def kv(self, namespace: str, needed_bytes: int) -> Iterator[None]:
        """KV that a turn may come to need, until the end of the block. Raises ResourceExhausted."""
        if not _has_room(self._kv_bytes, namespace, needed_bytes):
            own_bytes, most = self._kv_bytes.held(namespace), self.limits.max_kv_backlog_bytes
            raise self._refusal(
                namespace,
                "MEMORY_BUSY",
                f"KV memory: the turn's KV may need {needed_bytes} bytes, the namespace's turns that wait or run "
                f"{own_bytes}; the namespace may reserve no more of all {most} now",
                needed_bytes=needed_bytes,
                open_bytes=own_bytes,
                max_bytes=most,
            )
        self._kv_bytes.hold(namespace, needed_bytes)
        try:
            yield
        finally:
            self._kv_bytes.give_back(namespace, needed_bytes)

    @property
    def open_prompt_bytes(self) -> int:
        """Bytes of all callers' prompts, for the service's owner only."""
        return self._prompt_bytes.held_by_all

    def retry_after_s(self, namespace: str) -> float:
        """When a place is likely free: the namespace's turns end one by one. It reveals nothing of other namespaces."""
        usual_s = self._usual_turn_s.get(namespace, RETRY_S)
        return min(max(usual_s / max(self._turns.held(namespace), 1), PAUSE_S), LONGEST_RETRY_S)

    def _check_turn(self, namespace: str, caller: str, prompt_bytes: int) -> None:
        limits, own_turns, callers = self.limits, self._turns.held(namespace), self._of_caller[namespace, caller]
        if callers >= limits.max_turns_per_caller:
            raise self._no_place(namespace, "CALLER_BUSY", "the credential", callers, limits.max_turns_per_caller)
        if own_turns >= limits.max_turns_per_namespace or (own_turns and not self._turns.has_room(namespace, 1)):
            most = limits.max_turns_per_namespace
            raise self._no_place(namespace, "NAMESPACE_BUSY", "the namespace", own_turns, most)
        if not self._turns.has_room(namespace, 1):
            raise self._no_place(namespace, "QUEUE_FULL", "the namespace", own_turns, limits.max_turns)
        if not _has_room(self._prompt_bytes, namespace, prompt_bytes):
            own_bytes = self._prompt_bytes.held(namespace)
            raise self._refusal(
                namespace,
                "PROMPTS_TOO_LARGE",
                f"queue: prompts of the namespace's turns that wait or run have {own_bytes} bytes and this one "
                f"{prompt_bytes}; of the {limits.max_open_prompt_bytes} that may be held, no more are this namespace's "
                "now",
                prompt_bytes=prompt_bytes,
                open_bytes=own_bytes,
                max_bytes=limits.max_open_prompt_bytes,
            )

    def _no_place(self, namespace: str, reason: str, whose: str, turns: int, most: int) -> ResourceExhausted:
        return self._refusal(
            namespace,
            reason,
            f"queue: {turns} turns of {whose} wait or run, and there is no place for one more; at most {most} may, "
            "fewer beside others'",
            turns=turns,
            max_turns=most,
        )

    def _refusal(self, namespace: str, reason: str, message: str, **numbers: int) -> ResourceExhausted:
        return ResourceExhausted(
            message,
            reason=reason,
            retry_after_s=self.retry_after_s(namespace),
            metadata={name: str(number) for name, number in numbers.items()},
        )

    def _hold(self, namespace: str, caller: str, prompt_bytes: int) -> None:
        self._turns.hold(namespace, 1)
        self._of_caller[namespace, caller] += 1
        self._prompt_bytes.hold(namespace, prompt_bytes)

    def _let_go(self, namespace: str, caller: str, prompt_bytes: int) -> None:
        self._turns.give_back(namespace, 1)
        self._of_caller[namespace, caller] -= 1
        if not self._of_caller[namespace, caller]:
            del self._of_caller[namespace, caller]
        self._prompt_bytes.give_back(namespace, prompt_bytes)


def _has_room(shares: Shares, namespace: str, amount: int) -> bool:
    return not shares.held_by_all or shares.has_room(namespace, amount)
