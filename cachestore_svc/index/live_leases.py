"""The ends of leases of a catalog that one process has, on a monotonic clock, in RAM. A lease that is neither released
nor known here counts as held for its whole time from the first look on, because nothing proves that it ended.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kvasir.waits import RETRY_S

from cachestore_svc.facts.records import HeldLease, LeaseToken, LineKey, RenewedLeases


@dataclass(slots=True)
class _Grant:
    token: LeaseToken
    ends: float
    ttl_s: float  # as its row has it: all that it has after a restart
    is_wanted: bool = False  # by another owner, which waits until the holder has no more use for it
    is_taken_back: bool = False  # by a rollback or its like, which goes before: the lease is not prolonged any more


class LiveLeases:
    """Implements `LeaseEnds` and `Ends`."""

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._lock = threading.Lock()
        self._grants: dict[LineKey, _Grant] = {}
        self._barred: dict[LineKey, float] = {}
        self._all_barred = 0.0

    @property
    def in_ram(self) -> Self:
        return self

    def within(self, _: object) -> Self:
        return self

    def grant(self, line: LineKey, token: LeaseToken, ttl_s: float) -> None:
        with self._lock:
            self._put(line, token, ttl_s)

    def left_s(self, line: LineKey, token: LeaseToken, ttl_s: float) -> float:
        with self._lock:
            found = self._grants.get(line)
            if found is None or found.token.generation < token.generation:
                found = self._put(line, token, ttl_s)
            if found.token.generation > token.generation:
                return 0.0  # it had ended already when a later one was granted, whose row never became durable
            return max(found.ends - self._steady(), 0.0)

    def _prolong(self, line: LineKey, token: LeaseToken, ttl_s: float) -> bool:
        """Hold it for longer. False if it ended, is taken back, or would end earlier by a restart than expected."""
        with self._lock:
            found = self._grants.get(line)
            if found is None or found.token != token or found.is_taken_back or found.ends <= self._steady():
                return False
            if ttl_s > found.ttl_s:
                return False
            found.ends = max(found.ends, self._steady() + ttl_s)
            return True

    def prolong_all(
        self, namespace: str, owner: str, kv_identity_hash: str, held: Sequence[HeldLease], ttl_s: float
    ) -> RenewedLeases:
        lost, wanted = list[HeldLease](), list[HeldLease]()
        for each in held:
            line = LineKey(namespace, each.agent_id, kv_identity_hash)
            if not self._prolong(line, LeaseToken(owner, each.generation), ttl_s):
                lost.append(each)
            elif self._is_wanted(line):
                wanted.append(each)
        return RenewedLeases(tuple(lost), tuple(wanted))

    def _is_wanted(self, line: LineKey) -> bool:
        with self._lock:
            found = self._grants.get(line)
            return found is not None and found.is_wanted

    def want(self, line: LineKey, *, takes_back: bool) -> bool:
        with self._lock:
            if takes_back:
                # While the next try of this waiter may still come, the lease goes to no other.
                self._barred[line] = self._steady() + RETRY_S
            found = self._grants.get(line)
            if found is None or found.is_taken_back or (found.is_wanted and not takes_back):
                return False
            found.is_wanted, found.is_taken_back = True, takes_back
            return True

    def bar_all(self, seconds: float) -> None:
        with self._lock:
            self._all_barred = self._steady() + seconds

    def barred_s(self, line: LineKey) -> float:
        with self._lock:
            return max(self._barred.get(line, 0.0) - self._steady(), self._all_barred - self._steady(), 0.0)

    def drop(self, line: LineKey) -> None:
        with self._lock:
            self._grants.pop(line, None)

    def taken_back(self, line: LineKey) -> None:
        with self._lock:
            self._barred.pop(line, None)

    def _put(self, line: LineKey, token: LeaseToken, ttl_s: float) -> _Grant:
        found, ends = self._grants.get(line), self._steady() + ttl_s
        if found is None or found.token != token:
            found = self._grants[line] = _Grant(token, ends, ttl_s)
        found.ends, found.ttl_s = max(found.ends, ends), ttl_s
        self._barred.pop(line, None)
        return found
