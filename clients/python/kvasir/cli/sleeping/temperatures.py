"""How soon an agent's KV is at hand: in the engine (hot), in the store (warm), in the store's bucket (far), or computed
from its tokens (asleep).
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.address import accepts
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cli.caller import Caller
from kvasir.cli.engine import engine_client
from kvasir.cli.rows import counted
from kvasir.errors import KvasirError

_PAGE = 1000
_WAKES = re.compile(r"asleep, wakes in (\d+) ms$")


@dataclass(frozen=True, slots=True)
class Temperature:
    word: str  # hot, warm, far or asleep; empty where nothing is remembered
    wake_ms: int | None = None  # of one that is asleep, as its engine measured it
    is_woken_ahead: bool = False  # of one that was asleep, for a turn that has not come yet

    @property
    def columns(self) -> dict[str, object]:
        return {"temperature": self.word, "wake_ms": self.wake_ms, "is_woken_ahead": self.is_woken_ahead}

    @property
    def text(self) -> str:
        if self.is_woken_ahead:
            return f"{self.word}, woken ahead"
        return self.word if self.wake_ms is None else f"{self.word}, wakes in {self.wake_ms / 1e3:.1f} s"


def temperature(agent: pb.Agent, hot: Mapping[str, bool], *, is_far: bool) -> Temperature:
    """Of the agent's newest version. `hot`: agents that an engine has in RAM, and whether it woke them ahead; `is_far`:
    the store has its blobs in a bucket."""
    if not agent.lines:
        return Temperature("")
    newest = agent.lines[0]
    is_asleep = newest.total_bytes == newest.manifest.size_bytes  # its manifest names no blob
    if agent.agent_id in hot or not is_asleep:
        word = "hot" if agent.agent_id in hot else "far" if is_far else "warm"
        return Temperature(word, is_woken_ahead=hot.get(agent.agent_id, False))
    measured = _WAKES.search(newest.origin_detail)
    return Temperature("asleep", int(measured[1]) if measured else None)


@dataclass(frozen=True, slots=True)
class EngineSide:
    """The engine's knowledge of agents; empty where no engine of this store answers."""

    hot: Mapping[str, bool] = field(default_factory=dict)  # agents in its RAM, and whether it woke them ahead
    wakes: Mapping[str, int] = field(default_factory=dict)  # since its start, of the caller's namespace


def engine_side(caller: Caller, names: list[str]) -> EngineSide:
    if not caller.is_engine_of_store or not accepts(caller.engine.address):
        return EngineSide()
    pages = [names[start : start + _PAGE] for start in range(0, len(names), _PAGE)]
    try:
        with engine_client(caller) as client:
            found = [each for page in pages for each in client.list_hot_memories(page)]
            counted = Counter[str]()
            for each in client.get_stats().namespaces:
                counted.update(each.wakes)
    except KvasirError:
        return EngineSide()
    return EngineSide({each.agent_id: each.is_woken_ahead for each in found}, counted)


def wakes_text(wakes: Mapping[str, int]) -> str:
    """Empty where no agent that was asleep has had a turn."""
    came = wakes.get("hidden", 0) + wakes.get("waited", 0)
    if not came:
        return ""
    unused = f"; {wakes['unused']} more were woken in vain" if wakes.get("unused") else ""
    return f"{wakes.get('hidden', 0)} of {counted(came, 'turn')} of sleeping agents found them woken ahead{unused}."
