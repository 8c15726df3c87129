"""Which namespaces have turns, or had some lately, and which of them comes next. Pure: callers pass in the time.

Namespaces begin turns one by one: first a new namespace, then the one that began its last turn longest ago. A namespace
is remembered for a while after its last turn. So a caller that comes once a second neither counts as new each time, nor
leaves the others alone in between.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

Namespace = str | None


@dataclass
class Place:
    turns: int = 0  # turns that wait or run
    left_s: float = 0.0  # when its last turn ended
    began: int = 0  # number of the turn that it began last, counted over all namespaces
    served: int = 0  # number of the cell that it got last, counted over all namespaces
    taken_s: float = 0.0  # seconds of its cells and files; of others' too while it had none
    owed_s: float = 0.0  # prefill beside others' decoding that it has not made up for yet


class Company:
    """The namespaces that count as present."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._places: dict[Namespace, Place] = {}
        self._begun = 0

    @property
    def is_shared(self) -> bool:
        """More than one namespace is here, or was a moment ago."""
        return len(self._places) > 1

    def alone_s(self, now: float) -> float:
        """For how long no two namespaces have had turns; infinite if no other is remembered."""
        absent = [place.left_s for place in self._places.values() if not place.turns]
        if len(self._places) - len(absent) > 1:
            return 0.0
        return now - max(absent) if self.is_shared else math.inf

    def of(self, namespace: Namespace) -> Place:
        return self._places[namespace]

    @property
    def places(self) -> Collection[Place]:
        return self._places.values()

    def came(self, namespace: Namespace) -> None:
        self._places.setdefault(namespace, Place()).turns += 1

    def went(self, namespace: Namespace, now: float) -> None:
        place = self._places[namespace]
        place.turns -= 1
        place.left_s = now

    def began(self, namespace: Namespace) -> None:
        self._begun += 1
        self._places[namespace].began = self._begun

    def forget_absent(self, now: float) -> None:
        """Forget the namespaces that have had no turn for long; at once nobody's (None): an engine that is new has only
        had turns of its own.
        """
        self._places = {
            namespace: place
            for namespace, place in self._places.items()
            if place.turns or (namespace is not None and now - place.left_s < self._lasts_s)
        }
