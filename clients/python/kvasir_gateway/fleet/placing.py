"""Which engine computes an agent's turn: consistent hashing with bounded loads. Pure: it knows no engine.

Each engine stands at many points of a ring; an agent belongs to the engine of the next point. An engine that comes or
goes moves only the agents between its points and their neighbours'. An engine that has more than its share of open
turns is passed by (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018).
"""

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil

from blake3 import blake3

_POINTS = 100  # of an engine: shares then differ by a tenth or so
_SLACK = 1.25  # an engine takes at most so many times the mean of open turns
_HOT_SLACK = 1.5  # the same of the engine that has the agent hot: elsewhere it would be restored
_HOT_LEAST = 4  # open turns that the hot engine takes at any load: so few are decoded together at little cost


def agent_point(namespace: str, agent_id: str) -> int:
    """Where an agent stands on the ring. Lengths stand before the texts: no two agents share one by their spelling."""
    texts = (namespace.encode(), agent_id.encode("utf-8", "surrogatepass"))
    return _point(b"".join(len(text).to_bytes(4, "big") + text for text in texts))


def _point(data: bytes) -> int:
    return int.from_bytes(blake3(data).digest(8), "big")


class Ring:
    """Engines by name. The order of the names changes no placement."""

    def __init__(self, names: Sequence[str]) -> None:
        points = ((_point(f"{name}\n{number}".encode()), name) for name in names for number in range(_POINTS))
        index = {name: number for number, name in enumerate(names)}
        self._points = [(point, index[name]) for point, name in sorted(points)]
        self._count = len(index)

    def order(self, point: int) -> Iterator[int]:
        """All engines, by their indexes, from the one to which the point belongs on. Most callers need the first."""
        start, seen = bisect(self._points, (point, -1)), set[int]()
        for place in chain(range(start, len(self._points)), range(start)):
            engine = self._points[place][1]
            if engine not in seen:
                seen.add(engine)
                yield engine
                if len(seen) == self._count:
                    return


@dataclass(frozen=True, slots=True)
class EngineState:
    """What is known of an engine now."""

    is_up: bool = True
    open_turns: int = 0


def choose(order: Iterable[int], states: Sequence[EngineState], hot: int | None = None) -> int | None:
    """The engine for a turn of the agent with this order; `hot` has the agent in RAM. None if none is up."""
    up = [state.open_turns for state in states if state.is_up]
    if not up:
        return None
    mean = (sum(up) + 1) / len(up)
    most_of_hot = max(_HOT_LEAST, ceil(_HOT_SLACK * mean))
    if hot is not None and states[hot].is_up and states[hot].open_turns < most_of_hot:
        return hot
    most = ceil(_SLACK * mean)
    return next(engine for engine in order if states[engine].is_up and states[engine].open_turns < most)
