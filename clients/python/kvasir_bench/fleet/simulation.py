"""A day of a fleet: which engine each agent belongs to, who finds its memory hot, what the bucket sees, what it costs.

Placement is the gateway's own ring and choice; sizes are those of the file format. A session's turns, their gaps and
the sizes of memories are drawn from distributions whose means were published. Hot sets follow from how long an engine's
RAM lasts until it is full of newer memories (Che, Tung and Wang, "Hierarchical Web Caching Systems", 2002)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.tensor_layouts import expected_tensors
from kvasir_gateway.fleet.placing import EngineState, Ring, agent_point, choose

_SECONDS_OF_DAY = 86_400.0
_DAYS_OF_MONTH = 30
_OBJECTS_OF_TURN = 2  # a tail and a manifest, beside full blocks
_CHOICES, _ASKED = 50, 300  # choices that are timed; engines that are called for their own agents
_GIB, _GB = 1 << 30, 1e9


@dataclass(frozen=True, slots=True)
class _Day:
    """Turns of one day in the order of agents, and for each how long ago the agent's last one was."""

    agent: Any
    gap_s: Any  # of an agent's first turn of the day: since its last session


def simulate(given: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """The results by name; `limits` has what is demanded of each part over what it gives, the worst first."""
    dice = np.random.default_rng(seed)
    agents, engines = int(given["agents"]), int(given["engines"])
    tokens = _lognormal(dice, given["tokens_of_memory"], agents)
    day = _day(given, dice, agents)
    ring = Ring([f"engine-{number}" for number in range(engines)])
    home = _homes(ring, agents, dice)
    token_bytes = kv_bytes_of_token(given["kv"])
    sizes = tokens * token_bytes
    open_turns, moved, choice_s = _choices(given, ring, len(day.agent), dice)
    hot = _hot_share(given, day, sizes, np.bincount(home, sizes, engines))
    found_hot = hot * (1 - moved)
    turns = len(day.agent)
    blocks = np.ceil(tokens[day.agent] / BLOCK_TOKENS)
    restores = (1 - found_hot) * turns
    moved_bytes = (1 - found_hot) * float(sizes[day.agent].sum())
    puts = turns * (float(_value(given["tokens_of_reply"])) / BLOCK_TOKENS + _OBJECTS_OF_TURN)
    gets = (1 - found_hot) * float(blocks.sum() + turns) * float(_value(given["requests_of_read"]))
    stored = float(sizes.sum())
    counts = np.bincount(home, minlength=engines)
    found = {
        "agents": agents,
        "engines": engines,
        "turns_of_day": turns,
        "token_bytes": token_bytes,
        "memory_mean_bytes": stored / agents,
        "agents_of_engine_mean": float(counts.mean()),
        "agents_of_engine_most": int(counts.max()),
        "open_turns_of_engine": open_turns,
        "turns_moved_by_load": moved,
        "turns_found_hot": found_hot,
        "restores_of_day": restores,
        "restored_bytes_of_day": moved_bytes,
        "stored_bytes": stored,
        "puts_of_day": puts,
        "gets_of_day": gets,
    }
    demand = {"turns": turns, "puts": puts, "gets": gets, "bytes": moved_bytes, "choice_s": choice_s, "agents": agents}
    return {"assumptions": dict(given), "fleet": found, "costs": _costs(given, found), "limits": _limits(given, demand)}


def kv_bytes_of_token(kv: Mapping[str, Any]) -> float:
    """Bytes that a full block of these layers has for each token, by the file format."""
    layer = identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_FULL, kv_heads=kv["kv_heads"], key_dim=kv["head_dim"], value_dim=kv["head_dim"]
    )
    policy = identity_pb2.KvPolicy(
        key_bits=kv["bits"],
        value_bits=kv["bits"],
        group_size=kv["group_size"],
        scale_type=identity_pb2.SCALE_TYPE_FLOAT16,
        key_rotation=identity_pb2.KEY_ROTATION_NONE,
    )
    identity = identity_pb2.KvIdentity(layers=[layer] * int(kv["layers"]), policy=policy)
    return sum(tensor.size_bytes for tensor in expected_tensors(identity, BLOCK_TOKENS)) / BLOCK_TOKENS


def _value(given: Any) -> float:
    return float(given["value"] if isinstance(given, Mapping) else given)


def _lognormal(dice: Any, given: Any, count: int) -> Any:
    """Numbers of this mean; `spread`: the deviation of their logarithm."""
    spread = float(given["spread"])
    return dice.lognormal(np.log(_value(given)) - spread * spread / 2, spread, count)


def _day(given: Mapping[str, Any], dice: Any, agents: int) -> _Day:
    sessions = dice.poisson(_lognormal(dice, given["sessions_a_day"], agents))
    owner = np.repeat(np.arange(agents), sessions)
    turns = dice.geometric(1 / _value(given["turns_of_session"]), len(owner))
    agent = np.repeat(owner, turns)
    gap = _lognormal(dice, given["seconds_between_turns"], len(agent))
    first = np.zeros(len(agent), dtype=bool)
    first[np.cumsum(turns) - turns] = True
    # Sessions lie in the day as they fall: an agent of n sessions waits a day over n for the next, on average.
    gap[first] = dice.exponential(_SECONDS_OF_DAY / sessions[owner])
    return _Day(agent, gap)


def _homes(ring: Ring, agents: int, dice: Any) -> Any:
    """The engine to which each agent belongs, by the ring. Agents' points are hashes: any numbers are as good."""
    points = np.fromiter((point for point, _ in ring._points), dtype=np.uint64)
    engines = np.fromiter((engine for _, engine in ring._points), dtype=np.int64)
    places = np.searchsorted(points, dice.integers(1 << 64, size=agents, dtype=np.uint64))
    return engines[places % len(engines)]


def _choices(given: Mapping[str, Any], ring: Ring, turns: int, dice: Any) -> tuple[float, float, float]:
    """Open turns of an engine in the busiest hour; the share of turns that the hot engine is too busy for; and the
    seconds that a gateway here takes to choose."""
    engines = int(given["engines"])
    mean = turns / _SECONDS_OF_DAY * _value(given["peak_of_day"]) * _value(given["seconds_of_turn"]) / engines
    states = [EngineState(True, int(count)) for count in dice.poisson(mean, engines)]
    began = time.thread_time()
    for number in range(_CHOICES):
        choose(ring.order(agent_point("team", f"agent-{number}")), states)
    choice_s = (time.thread_time() - began) / _CHOICES
    # Whether an engine is too busy for its own agent depends on its open turns and on their mean.
    few = states[:_ASKED]
    others = list(range(len(few)))
    moved = sum(choose([engine, *others[:engine], *others[engine + 1 :]], few, engine) != engine for engine in others)
    return mean, moved / len(few), choice_s


def _hot_share(given: Mapping[str, Any], day: _Day, sizes: Any, bytes_of_engine: Any) -> float:
    """The share of turns that come before their engine's RAM is full of newer memories."""
    room = _value(given["hot_gib_of_engine"]) * _GIB
    mean_bytes = float(bytes_of_engine.mean())
    if mean_bytes <= room:
        return 1.0
    gaps = np.sort(day.gap_s)
    # Bytes that are new in the RAM within t seconds: turns of memories that were not used within t before. A memory
    # that was not used until they fill it is gone.
    turns_per_s = len(day.agent) / _SECONDS_OF_DAY / int(given["engines"])
    older = 1 - np.arange(1, len(gaps) + 1) / len(gaps)
    filled = np.cumsum(np.diff(gaps, prepend=0.0) * older) * turns_per_s * float(sizes[day.agent].mean())
    return float(np.searchsorted(filled, room) / len(gaps))


def _costs(given: Mapping[str, Any], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Dollars a month, the largest first."""
    price = {name: _value(each) for name, each in given["prices"].items()}
    costs = {
        "engines": found["engines"] * 24 * _DAYS_OF_MONTH * price["engine_hour_usd"],
        "bytes at rest": found["stored_bytes"] / _GB * price["stored_gb_month_usd"],
        "objects written": found["puts_of_day"] * _DAYS_OF_MONTH / 1e6 * price["million_puts_usd"],
        "objects read": found["gets_of_day"] * _DAYS_OF_MONTH / 1e6 * price["million_gets_usd"],
        "bytes moved": found["restored_bytes_of_day"] * _DAYS_OF_MONTH / _GB * price["moved_gb_usd"],
    }
    return [{"cost": name, "usd_a_month": usd} for name, usd in sorted(costs.items(), key=lambda each: -each[1])]


def _limits(given: Mapping[str, Any], demand: Mapping[str, float]) -> list[dict[str, Any]]:
    """In the busiest hour; a part breaks where more is needed of it than it gives."""
    per_s = _value(given["peak_of_day"]) / _SECONDS_OF_DAY
    gateways = _value(given["gateways"])
    rows = {
        "commits of one store": (demand["turns"] * per_s, _value(given["commits_per_s_of_store"]), "1/s"),
        "writes under one prefix": (demand["puts"] * per_s, _value(given["puts_per_s_of_prefix"]), "1/s"),
        "reads under one prefix": (demand["gets"] * per_s, _value(given["gets_per_s_of_prefix"]), "1/s"),
        "link of an engine": (
            demand["bytes"] * 8 * per_s / int(given["engines"]) / 1e9,
            _value(given["link_gbit_of_engine"]),
            "Gbit/s",
        ),
        "choices of a gateway": (demand["turns"] * per_s / gateways, 1 / demand["choice_s"], "1/s"),
        "places that a gateway knows": (demand["agents"] / gateways, _value(given["places_of_gateway"]), "agents"),
    }
    found = [
        {"part": part, "asked": asked, "gives": gives, "unit": unit, "load": asked / gives}
        for part, (asked, gives, unit) in rows.items()
    ]
    return sorted(found, key=lambda row: -row["load"])  # type: ignore[arg-type,operator]
