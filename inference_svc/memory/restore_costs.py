"""Whether KV is restored from a store or computed: whichever earlier turns took less time for, those before a restart
too (`costs_file.py`). Until both are known, for a small memory, and where a source was long not read (it may be faster
now), KV is restored. Files that the page cache has, and those that come from a disk, are two sources. Pure.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir.formats.blob_place import namespace_place

from inference_svc.memory.outcomes import Miss, MissReason

LEAST_BYTES = 4 << 20  # of a smaller restore most of the time is the same for any size, and is no rate
LEAST_TOKENS = 256  # fewer tokens take as long as one pass over the weights, and show nothing about more
MARGIN = 0.8
"""Computing must take at most this part of a restore's time: estimates are rough, and it keeps others waiting."""
FORGOTTEN_S = 600.0
_OLDER_WEIGHT = 0.7  # of older findings, when there is news


@dataclass
class LearnedCost:
    """Seconds as two numbers, not negative, times known sizes: least squares, where newer measurements count more."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @classmethod
    def of(cls, sums: Sequence[Any]) -> "LearnedCost":
        """The cost with these sums. Raises ValueError for values that no sum has."""
        if len(sums) != len(cls().sums) or not all(map(_is_sum, sums)):
            raise ValueError(f"expected five sums, got {sums!r:.100}")
        return cls([float(each) for each in sums])

    def learn(self, first: float, second: float, seconds: float) -> None:
        news = (first * first, first * second, second * second, first * seconds, second * seconds)
        self.sums = [_OLDER_WEIGHT * old + new for old, new in zip(self.sums, news, strict=True)]

    def estimate(self, first: float, second: float) -> float | None:
        """Seconds for these sizes; None while nothing was learned."""
        per_first, per_second = self._parts()
        return first * per_first + second * per_second if per_first or per_second else None

    def _parts(self) -> tuple[float, float]:
        """Of the fits without a negative part the best one. The first size alone, where only one is known."""
        aa, ab, bb, at, bt = self.sums
        determinant = aa * bb - ab * ab
        fits = [(at / aa if aa else 0.0, 0.0), (0.0, bt / bb if bb else 0.0)]
        if determinant > 1e-6 * aa * bb:
            both = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
            if min(both) >= 0:
                return both
        return min(fits, key=lambda fit: fit[0] * fit[0] * aa + fit[1] * fit[1] * bb - 2 * (fit[0] * at + fit[1] * bt))


class RestoreCosts:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.learned = 0  # measurements, since the start
        self._computing = LearnedCost()
        # By the source's place, because a file shows no name of a namespace, and when it was learned.
        self._restoring: dict[str, tuple[LearnedCost, float]] = {}

    def kept(self) -> dict[str, Any]:
        """What is not forgotten, for `begin_with` after a restart: sums, and the seconds since each source was read."""
        known, now_s = list(self._restoring.items()), self._clock()  # in this order: another thread may learn
        ages = {place: (cost.sums, now_s - at_s) for place, (cost, at_s) in known}
        restoring = {place: [sums, age_s] for place, (sums, age_s) in ages.items() if age_s < FORGOTTEN_S}
        return {"computing": self._computing.sums, "restoring": restoring}

    def begin_with(self, kept: Mapping[str, Any], since_s: float) -> None:
        """Begin with the costs that an engine kept so many seconds ago. Raises ValueError for anything else; then
        nothing has changed.
        """
        try:
            computing, now_s = LearnedCost.of(kept["computing"]), self._clock()
            restoring = {
                str(place): (LearnedCost.of(sums), now_s - _seconds(age_s) - since_s)
                for place, (sums, age_s) in kept["restoring"].items()
            }
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        self._computing, self._restoring = computing, restoring

    def computed(self, start: int, stop: int, seconds: float) -> None:
        """Tokens [start, stop) of a prompt were computed in so many seconds."""
        if stop - start >= LEAST_TOKENS:
            self._computing.learn(stop - start, _depth(start, stop), seconds)
            self.learned += 1  # last: a file that has so many measurements has this one

    def restored(self, source: str, size_bytes: int, seconds: float, *, from_disk: bool = False) -> None:
        if size_bytes >= LEAST_BYTES:
            cost = self._known(source, from_disk=from_disk) or LearnedCost()
            cost.learn(size_bytes, 1.0, seconds)
            self._restoring[_place(source, from_disk=from_disk)] = cost, self._clock()
            self.learned += 1

    def reason_to_compute(self, source: str, tokens: int, size_bytes: int, *, from_disk: bool = False) -> Miss | None:
        """Why a prompt's first tokens should be computed, though the source has them; None: restore them."""
        cost = self._known(source, from_disk=from_disk)
        if cost is None or size_bytes < LEAST_BYTES:
            return None
        restore_s, compute_s = cost.estimate(size_bytes, 1.0), self._computing.estimate(tokens, _depth(0, tokens))
        if restore_s is None or compute_s is None or compute_s > MARGIN * restore_s:
            return None
        expected = f"restoring {tokens} tokens was expected to take {1e3 * restore_s:.0f} ms"
        return Miss(MissReason.COMPUTED, f"{expected}, computing them {1e3 * compute_s:.0f} ms")

    def _known(self, source: str, *, from_disk: bool) -> LearnedCost | None:
        cost, learned_s = self._restoring.get(_place(source, from_disk=from_disk), (None, 0.0))
        return cost if self._clock() - learned_s < FORGOTTEN_S else None


def _place(source: str, *, from_disk: bool) -> str:
    return namespace_place(source) + (" from disk" if from_disk else "")


def _is_sum(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _seconds(value: Any) -> float:
    if not _is_sum(value):
        raise ValueError(f"expected seconds, got {value!r:.100}")
    return float(value)


def _depth(start: int, stop: int) -> float:
    """The sum of the tokens' positions: how many rows all of them attend to."""
    return (stop * stop - start * start) / 2
