"""The last hour of each namespace's counters, a minute each, in a ring: memory never grows."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.timestamp_pb2 import Timestamp
from kvasir.errors import KvasirError
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.waits import ANSWER_S

from kvasir_gateway.engine import EngineLink

MINUTES = 60
_SAMPLED_EVERY_S = 20.0
_MOST_NAMESPACES = 256
_MOST_PARTED = 20  # turns of a namespace
_MOST_AGENTS = 256  # of a namespace, whose last turns are kept
_MOST_TURNS = 8  # of an agent
_MOST_TIMED = 1000  # turns of a namespace
Counts = Mapping[str, int]
_Kept = TypeVar("_Kept")


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


@dataclass(frozen=True, slots=True)
class Reused:
    """What a turn had of its agent's memory. `parted`: where it parted from it, which quotes both."""

    at: Timestamp
    source: int
    cached_tokens: int
    prompt_tokens: int
    reason: str
    parted: pb.Difference | None

    @classmethod
    def of(cls, at: Timestamp, started: pb.Started) -> "Reused":
        parted = started.difference if started.HasField("difference") else None
        return cls(at, started.source, started.cached_tokens, started.prompt_tokens, started.reason, parted)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast turns of the last hour were, of at most the last 1,000: milliseconds until half of them, and nineteen of
    twenty, had their first token; the tokens a second of the middle one."""

    turns: int
    half_ms: float
    most_ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class _Timed:
    at_s: float
    first_token_ms: float
    tokens_per_s: float


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
        # Later a namespace that is new had done nothing before, whoever looks at it first.
        self._has_seen_all = False
        self._watched: OrderedDict[str, _Watched] = OrderedDict()
        self._parted: OrderedDict[str, deque[Parted]] = OrderedDict()
        self._timed: OrderedDict[str, deque[_Timed]] = OrderedDict()
        self._turns: OrderedDict[str, OrderedDict[str, deque[Reused]]] = OrderedDict()

    async def follow(self, engine: EngineLink) -> None:
        """Look for ever at every namespace that the gateway's own credential may see."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    self.note_all(await engine.of(None).client.get_stats())
            except (KvasirError, TimeoutError):
                pass  # an engine that is away has no turns
            await asyncio.sleep(_SAMPLED_EVERY_S)

    def note_all(self, stats: pb.GetStatsResponse) -> None:
        """Count what each namespace of this look did since the last one."""
        for each in stats.namespaces:
            self.note(each)
        self._has_seen_all = stats.HasField("engine")

    def note(self, stats: pb.NamespaceStats) -> None:
        """Count what a namespace did since the last look."""
        sources, misses = dict(stats.sources), dict(stats.misses)
        if (watched := self._watched.get(stats.namespace)) is None:
            watched = _Watched({}, {}) if self._has_seen_all else _Watched(sources, misses)
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

    def began(self, namespace: str, agent_id: str, started: pb.Started) -> None:
        """Note a turn: what it reused, and where its prompt parted from its memory."""
        at, started = Timestamp(seconds=int(self._now())), _small(started)
        if agent_id:
            agents = _newest_of(self._turns, namespace, OrderedDict, _MOST_NAMESPACES)
            _newest_of(agents, agent_id, lambda: deque(maxlen=_MOST_TURNS), _MOST_AGENTS).appendleft(
                Reused.of(at, started)
            )
        if started.HasField("difference"):
            newest = _newest_of(self._parted, namespace, lambda: deque(maxlen=_MOST_PARTED), _MOST_NAMESPACES)
            newest.appendleft(Parted(at, agent_id, started))

    def ended(self, namespace: str, finished: pb.Finished) -> None:
        """Note how fast a turn was. One that is sent again has no times."""
        first_ms = finished.timings.first_token.ToMicroseconds() / 1000
        if first_ms <= 0:
            return
        decode_s, tokens = finished.timings.decode.ToMicroseconds() / 1e6, finished.usage.completion_tokens
        timed = _newest_of(self._timed, namespace, lambda: deque(maxlen=_MOST_TIMED), _MOST_NAMESPACES)
        timed.append(_Timed(self._now(), first_ms, tokens / decode_s if decode_s > 0 else 0.0))

    def speed(self, namespace: str) -> Speed | None:
        """Of the last hour; None without a turn."""
        timed = [each for each in self._timed.get(namespace, ()) if each.at_s > self._now() - 60 * MINUTES]
        if not timed:
            return None
        first = sorted(each.first_token_ms for each in timed)
        rates = sorted(each.tokens_per_s for each in timed)
        middle = (len(timed) - 1) // 2
        return Speed(len(timed), first[middle], first[-(-95 * len(timed) // 100) - 1], rates[middle])

    def turns_of(self, namespace: str, agent_id: str) -> Sequence[Reused]:
        """An agent's last turns over HTTP, the newest first."""
        agents = self._turns.get(namespace)
        return tuple(agents.get(agent_id, ())) if agents is not None else ()

    def parted(self, namespace: str) -> Sequence[Parted]:
        """The newest turns whose prompts parted from their memories, the newest first."""
        return tuple(self._parted.get(namespace, ()))

    def last_hour(self, namespace: str) -> Sequence[Minute]:
        """The last MINUTES minutes, the oldest first; one in which nobody looked is empty."""
        watched = self._watched.get(namespace)
        minutes = {minute.number: minute for minute in watched.minutes} if watched is not None else {}
        newest = int(self._now() // 60)
        return [minutes.get(number, Minute(number)) for number in range(newest - MINUTES + 1, newest + 1)]


def _small(started: pb.Started) -> pb.Started:
    """What is kept of it. A part of a message holds all of it, and that may have the prompt's 100,000 tokens."""
    fields = {name: getattr(started, name) for name in ("source", "cached_tokens", "prompt_tokens", "reason")}
    kept = pb.Started(**fields)
    if started.HasField("difference"):
        kept.difference.CopyFrom(started.difference)
    return kept


def _newest_of(kept: OrderedDict[str, _Kept], name: str, new: Callable[[], _Kept], most: int) -> _Kept:
    """What is kept under a name, now as the newest; the oldest beyond `most` go."""
    found = kept.setdefault(name, new())
    kept.move_to_end(name)
    while len(kept) > most:
        kept.popitem(last=False)
    return found


def _since(before: Counts, after: Counts) -> Counts:
    """What was counted between two looks. Counters that fell are those of an engine that restarted."""
    if any(after.get(name, 0) < count for name, count in before.items()):
        before = {}
    return {name: new for name, count in after.items() if (new := count - before.get(name, 0))}
