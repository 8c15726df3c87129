"""How much each peer may use of a store, in RAM: words, bytes, tries. Rows are bounded where they are written."""

from collections.abc import Callable
from dataclasses import dataclass

from cachestore_svc.pairing.rights import over_limit

_WORDS, _WORDS_PER_S = 2000.0, 20.0  # words that may change something: so many at once, and so many a second after that
# Tries at an agent that came to nothing and cost no pause: a network may break twice.
_FREE_TRIES, _LONGEST_PAUSE_S = 2, 3600.0
_MAX_TRIES = 10_000

_Agent = tuple[str, str, str]  # namespace, agent, peer


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


@dataclass(slots=True)
class _Tries:
    since: float | None = None  # the move that is under way
    failed: int = 0
    free_at: float = 0.0


class PeerLimits:
    """Of all peers of one store. On one event loop."""

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._tries: dict[_Agent, _Tries] = {}

    def now(self) -> float:
        return self._steady()

    def word(self, peer: str) -> None:
        self._take(peer, "words", 1, _WORDS, _WORDS_PER_S)

    def sent(self, peer: str, size_bytes: int, most_bytes: int) -> None:
        """Count bytes that it sends unasked, which take room until collected. Raises ResourceExhausted (PEER_LIMIT)."""
        self._take(peer, "bytes", size_bytes, most_bytes, most_bytes / 3600)

    def not_sent(self, peer: str, size_bytes: int) -> None:
        if (bucket := self._buckets.get((peer, "bytes"))) is not None:
            bucket.left += max(size_bytes, 0)

    def check_try(self, agent: _Agent) -> None:
        """Raises ResourceExhausted (PEER_LIMIT) while the agent rests from the peer's tries."""
        tries = self._tries.get(agent)
        if tries is not None and (left_s := tries.free_at - self._steady()) > 0:
            raise over_limit(agent[2], "moves of one agent that it did not end", left_s)

    def began(self, agent: _Agent, *, is_new: bool) -> None:
        """A move of the agent is under way, and begins now if it is new, or if nobody knows when it began."""
        if len(self._tries) >= _MAX_TRIES:
            self._tries.pop(next(iter(self._tries)))
        tries = self._tries.setdefault(agent, _Tries())
        tries.since = self._steady() if is_new or tries.since is None else tries.since

    def lasts_s(self, agent: _Agent) -> float:
        tries = self._tries.get(agent)
        return 0.0 if tries is None or tries.since is None else self._steady() - tries.since

    def failed(self, agent: _Agent) -> None:
        """It was undone: each further one costs the peer a pause that doubles, and is never shorter than the move."""
        tries = self._tries.get(agent)
        if tries is None or tries.since is None:
            return
        lasted_s, tries.since, tries.failed = max(self.lasts_s(agent), 1.0), None, tries.failed + 1
        if tries.failed > _FREE_TRIES:
            pause_s = min(lasted_s * 2 ** min(tries.failed - _FREE_TRIES, 20), _LONGEST_PAUSE_S)
            tries.free_at = self._steady() + max(pause_s, lasted_s)

    def ended(self, agent: _Agent) -> None:
        self._tries.pop(agent, None)

    def _take(self, peer: str, what: str, amount: float, most: float, per_s: float) -> None:
        now = self._steady()
        bucket = self._buckets.setdefault((peer, what), _Bucket(most, now))
        bucket.left, bucket.at = min(most, bucket.left + (now - bucket.at) * per_s), now
        if bucket.left <= 0:
            raise over_limit(peer, what, min(-bucket.left / per_s if per_s else 3600.0, 3600.0))
        bucket.left -= amount
