"""The last hour of each namespace's counters, a minute each, in a ring: memory never grows."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp
from kvasir.errors import KvasirError
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.waits import ANSWER_S

from kvasir_gateway.engine import EngineLink

MINUTES = 60
_SAMPLED_EVERY_S = 20.0
_MOST_NAMESPACES = 256
_MOST_PARTED = 20  # turns of a namespace
Counts = Mapping[str, int]


@dataclass(slots=True)
class Minute:
    """Turns of a minute: by where their memory came from, and by why they reused less than they could have."""

    number: int  # since 1970
    sources: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Parted:
    """A turn whose prompt parted from its agent's memory. It quotes both, so only who may read the memory sees it."""

    at: Timestamp
    agent_id: str
    started: pb.Started


@dataclass(slots=True)
class _Watched:
    """A namespace: the engine's counters as they were last, and the minutes in which they grew."""

    sources: Counts
    misses: Counts
    minutes: deque[Minute] = field(default_factory=lambda: deque(maxlen=MINUTES))


class History:
    """Counters of the last hour, by namespace."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: Unix seconds."""
        self._now = now
        self._watched: OrderedDict[str, _Watched] = OrderedDict()
        self._parted: OrderedDict[str, deque[Parted]] = OrderedDict()

    async def follow(self, engine: EngineLink) -> None:
        """Look for ever at every namespace that the gateway's own credential may see."""
        has_seen_all = False
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    stats = await engine.of(None).client.get_stats()
                for each in stats.namespaces:
                    self.note(each, was_nothing=has_seen_all)
                has_seen_all = stats.HasField("engine")
            except (KvasirError, TimeoutError):
                pass  # an engine that is away has no turns
            await asyncio.sleep(_SAMPLED_EVERY_S)

    def note(self, stats: pb.NamespaceStats, *, was_nothing: bool = False) -> None:
        """Count what a namespace did since the last look. `was_nothing`: an earlier look saw every namespace, so that
        one without counters had done nothing."""
        sources, misses = dict(stats.sources), dict(stats.misses)
        if (watched := self._watched.get(stats.namespace)) is None:
            watched = _Watched({}, {}) if was_nothing else _Watched(sources, misses)
            self._watched[stats.namespace] = watched
        self._watched.move_to_end(stats.namespace)
        while len(self._watched) > _MOST_NAMESPACES:
            self._watched.popitem(last=False)
        number = int(self._now() // 60)
        if not watched.minutes or watched.minutes[-1].number != number:
            watched.minutes.append(Minute(number))
        watched.minutes[-1].sources.update(_since(watched.sources, sources))
        watched.minutes[-1].misses.update(_since(watched.misses, misses))
        watched.sources, watched.misses = sources, misses

    def part(self, namespace: str, agent_id: str, started: pb.Started) -> None:
        """Note a turn, if its prompt parted from its memory."""
        if started.HasField("difference"):
            newest = self._parted.setdefault(namespace, deque(maxlen=_MOST_PARTED))
            newest.appendleft(Parted(Timestamp(seconds=int(self._now())), agent_id, started))
            self._parted.move_to_end(namespace)
            while len(self._parted) > _MOST_NAMESPACES:
                self._parted.popitem(last=False)

    def parted(self, namespace: str) -> Sequence[Parted]:
        """The newest turns whose prompts parted from their memories, the newest first."""
        return tuple(self._parted.get(namespace, ()))

    def last_hour(self, namespace: str) -> Sequence[Minute]:
        """The last MINUTES minutes, the oldest first; one in which nobody looked is empty."""
        watched = self._watched.get(namespace)
        minutes = {minute.number: minute for minute in watched.minutes} if watched is not None else {}
        newest = int(self._now() // 60)
        return [minutes.get(number, Minute(number)) for number in range(newest - MINUTES + 1, newest + 1)]


def _since(before: Counts, after: Counts) -> Counts:
    """What was counted between two looks. Counters that fell are those of an engine that restarted."""
    if any(after.get(name, 0) < count for name, count in before.items()):
        before = {}
    return {name: new for name, count in after.items() if (new := count - before.get(name, 0))}
