"""How soon an agent's KV is at hand: in the engine (hot), in the store (warm), or computed from its tokens (asleep)."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from kvasir.address import accepts
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cli.caller import Caller
from kvasir.cli.engine import engine_client
from kvasir.errors import KvasirError

_PAGE = 1000
_WAKES = re.compile(r"asleep, wakes in (\d+) ms")


@dataclass(frozen=True, slots=True)
class Temperature:
    word: str  # hot, warm or asleep; empty where nothing is remembered
    wake_ms: int | None = None  # of one that is asleep, as its engine measured it

    @property
    def text(self) -> str:
        return self.word if self.wake_ms is None else f"{self.word}, wakes in {self.wake_ms / 1e3:.1f} s"


def temperature(agent: pb.Agent, hot: Collection[str]) -> Temperature:
    """Of the agent's newest version. `hot`: agents that an engine has in RAM."""
    if not agent.lines:
        return Temperature("")
    newest = agent.lines[0]
    is_asleep = newest.total_bytes == newest.manifest.size_bytes  # its manifest names no blob
    if agent.agent_id in hot or not is_asleep:
        return Temperature("hot" if agent.agent_id in hot else "warm")
    measured = _WAKES.search(newest.origin_detail)
    return Temperature("asleep", int(measured[1]) if measured else None)


def hot_agents(caller: Caller, names: list[str]) -> set[str]:
    """Those that the caller's engine has in RAM; none where no engine of this store answers."""
    is_homes = caller.engine_address or caller.store.address == caller.home.endpoint("store").address
    if not is_homes or not accepts(caller.engine.address):
        return set()
    pages = [names[start : start + _PAGE] for start in range(0, len(names), _PAGE)]
    try:
        with engine_client(caller) as client:
            return {each.agent_id for page in pages for each in client.list_hot_memories(page)}
    except KvasirError:
        return set()
