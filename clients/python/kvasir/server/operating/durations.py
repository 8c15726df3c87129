"""How often something took how long, in buckets, and which calls ended how: plain data."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

# From a decoded token to a long prompt on a slow machine.
USUAL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# From a queue inside of one process to the longest that is still called short.
SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Durations:
    """A histogram. One thread adds; a reader on another one may see a duration's count before its seconds."""

    def __init__(self, bounds_s: Sequence[float] = USUAL_S) -> None:
        """`bounds_s`: the largest duration of each bucket, rising. What is longer has a bucket of its own."""
        self.bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(self.bounds_s) + 1)
        self.sum_s = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add(self, seconds: float, count: int = 1) -> None:
        """So many of this length each."""
        self._counts[bisect_left(self.bounds_s, seconds)] += count
        self.sum_s += seconds * count

    def add_all(self, others: Iterable["Durations"]) -> "Durations":
        """Those of others of the same buckets too. Returns itself."""
        for other in others:
            self._counts = [mine + more for mine, more in zip(self._counts, other._counts, strict=True)]
            self.sum_s += other.sum_s
        return self

    def up_to(self) -> list[tuple[float, int]]:
        """For each bucket its bound, the last one's infinite, and how many durations are at most so long."""
        return list(zip((*self.bounds_s, float("inf")), accumulate(self._counts), strict=True))

    def at_most_s(self, share: float) -> float:
        """The bound below which this share of all durations lies; 0 without any."""
        wanted = share * self.count
        return next((bound for bound, count in self.up_to() if count >= wanted), 0.0) if self.count else 0.0


class RpcCounts:
    """Calls of a gRPC service, counted since the start. Only the event loop adds, and only RPCs of the service."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # by RPC and status
        self.seconds: dict[str, Durations] = {}  # by RPC
        self.open: Counter[str] = Counter()  # by RPC
        self.refused_credentials: Counter[str] = Counter()  # by reason

    def began(self, rpc: str) -> None:
        """`rpc`: without its package, as CacheStoreService/GetStats."""
        self.open[rpc] += 1

    def ended(self, rpc: str, status: str, seconds: float) -> None:
        self.open[rpc] -= 1
        self.calls[rpc, status] += 1
        if rpc not in self.seconds:
            self.seconds[rpc] = Durations()
        self.seconds[rpc].add(seconds)
