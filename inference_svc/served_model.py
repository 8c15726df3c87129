"""One loaded model and the parts that serve it: engine, tokenizer, turns."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir.waits import uptime_s

from inference_svc.config import EngineSettings
from inference_svc.embedding.turn_embedder import TurnEmbedder
from inference_svc.engine.engine import Engine
from inference_svc.handover.giving import TurnGiver
from inference_svc.kv.policy import PolicyRequest
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.lines.lines import Lines, store_owed
from inference_svc.memory.publishing.copies import Copies
from inference_svc.memory.recall import Recall
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_planning import ReusePlanner
from inference_svc.memory.service_stats import OwedCount, ServiceStats
from inference_svc.memory.store.answers import EventCursor
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model import kvasir_tiny
from inference_svc.model.embedding.pooling import Pooling
from inference_svc.model.model_host import MemoriesLeft
from inference_svc.model.prompting import Prompting
from inference_svc.model.weights.digest_check import DigestCheck
from inference_svc.turns.admission import Admission
from inference_svc.turns.asleep.allowance import Allowance
from inference_svc.turns.asleep.idle_agents import IdleAgents
from inference_svc.turns.asleep.own_turns import OwnTurns
from inference_svc.turns.asleep.returns import Returns
from inference_svc.turns.asleep.waking import WakingAhead, WakingParts
from inference_svc.turns.asleep.woken import WokenAgents
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.turn_ending import TurnEnding
from inference_svc.turns.turn_service import TurnService
from inference_svc.warming import warm_up, warm_up_text, warm_up_while_idle

_LEAST_AWAY = 6 * 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    engine: Engine
    prompting: Prompting
    turns: TurnService
    lines: dict[str, Lines]
    line_parts: LineParts
    giver: TurnGiver
    grace_s: float
    digest_check: DigestCheck
    embedder: TurnEmbedder
    woken: WokenAgents
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # that go on beside turns

    @property
    def is_idle(self) -> bool:
        return self.turns.is_idle and self.embedder.is_idle

    @property
    def owed(self) -> Mapping[str, OwedCount]:
        """The hot memories that the store lacks, by namespace. On any thread."""
        owed = defaultdict[str, OwedCount](OwedCount)
        for key in self.engine.memories.sizes():
            tag = self.engine.memories.tag_of(key)
            if isinstance(tag, AgentMemory) and tag.publication.is_owed:
                owed[key.namespace].memories += 1
                owed[key.namespace].failed += tag.publication.has_failed
                owed[key.namespace].size_bytes += tag.unstored_tokens * self.engine.model.kv_bytes_per_token
        return owed

    def add_store(self, namespace: str, store: RemoteCache, now: EventCursor | None) -> None:
        """A namespace gets a store. Hot memories go on unless changed there since `now`; None: none does."""
        for key in self.engine.memories.sizes():
            hot = self.engine.memories.get(key)
            if key.namespace == namespace and hot is not None and isinstance(hot.tag, AgentMemory):
                publication = hot.tag.publication
                publication.standing = replace(publication.standing, event_cursor=now)
        self.lines[namespace] = Lines(namespace, store, self.line_parts)
        self.lines[namespace].start()

    async def retire(self) -> MemoriesLeft:
        """Let turns end for `grace_s`, cancel the rest, and give the store as long to take the hot memories."""
        self._end_tasks()
        await asyncio.gather(self.turns.drain(self.grace_s), self.embedder.drain(self.grace_s))
        return await store_owed(self.engine, self.lines, self.grace_s, self.line_parts.clock)

    async def close(self) -> None:
        self._end_tasks()
        self.prompting.close()
        for lines in self.lines.values():
            lines.end_retries()
        await asyncio.to_thread(self.digest_check.close)
        await asyncio.gather(*(lines.close() for lines in self.lines.values()))
        await asyncio.to_thread(self.engine.close)

    def warm_up_while_idle(self, clock: Callable[[], float]) -> None:
        self.tasks.append(asyncio.create_task(warm_up_while_idle(self.engine, lambda: self.is_idle, clock)))

    def _end_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()


@dataclass(frozen=True, slots=True)
class ModelsParts:
    settings: EngineSettings
    stores: Mapping[str, RemoteCache]  # may get further namespaces later: see `ServedModel.add_store`
    lease_owner: str
    admission: Admission
    stats: ServiceStats
    clock: Callable[[], float]  # seconds, monotonic
    now_ms: Callable[[], int]  # Unix time


async def open_served(
    name: str,
    path: str,
    shared: ModelsParts,
    new_giver: Callable[[Engine, Mapping[str, Lines]], TurnGiver],
    open_engine: Callable[..., Engine],
    begin_phase: Callable[[str], None] = lambda _: None,
) -> ServedModel:
    """Load a model. Takes seconds to minutes, off the event loop. `open_engine`: `Engine.open` with a KV budget;
    `begin_phase`: see there. Raises what Engine.open raises.
    """
    settings, stores, admission, clock = shared.settings, shared.stores, shared.admission, shared.clock
    engine = await asyncio.to_thread(open_engine, path, name=name, begin_phase=begin_phase, **_engine_options(settings))
    admission.serves_with(engine.memory_budget_bytes)
    begin_phase("kernels")
    prompting = Prompting(engine.tokenizer, engine.token_text, shared.now_ms)
    await asyncio.gather(asyncio.to_thread(warm_up, engine), warm_up_text(prompting))

    copies = Copies(engine, admission.publishing)
    # A laptop that wakes must not believe in a lease that ended elsewhere while it slept, nor give a publication up.
    stats, owner, now_ms = shared.stats, shared.lease_owner, shared.now_ms
    woken = WokenAgents(Returns(_least_gap_s(settings)), lambda: now_ms() / 1e3)
    on_deleted, limits = woken.returns.forget, settings.publishing
    line_parts = LineParts(engine, copies, limits, stats, owner, clock, uptime_s, now_ms, on_deleted)
    lines = {namespace: Lines(namespace, store, line_parts) for namespace, store in stores.items()}
    parts = EngineParts(
        engine,
        prompting,
        Recall(engine, lines),
        ReusePlanner(engine, prompting, stores, RestoreCosts(clock)),
        copies,
        stores,
        settings.turn_limits,
        admission,
        stats,
        clock,
        woken,
    )
    turns = TurnService(parts, TurnEnding(parts))
    for each in lines.values():
        each.start()
    giver = new_giver(engine, lines)
    check = DigestCheck(engine.directory, settings.state_dir)
    embedder = TurnEmbedder(engine, prompting, Pooling(settings.embedding_pooling), admission, stats)
    grace_s = settings.stop_grace_s
    served = ServedModel(name, engine, prompting, turns, lines, line_parts, giver, grace_s, check, embedder, woken)
    served.warm_up_while_idle(clock)
    own_turns = OwnTurns(turns, parts.recall.is_wanted, lambda: not embedder.is_idle)
    _begin_own_turns(served, settings, WakingParts(own_turns, engine, stores, woken, stats, clock), now_ms)
    return served


def _begin_own_turns(
    served: ServedModel, settings: EngineSettings, parts: WakingParts, now_ms: Callable[[], int]
) -> None:
    """Wake agents ahead, and put idle ones to sleep, from now on."""
    allowance = Allowance(settings.wake_ahead_share, parts.engine.memory_budget_bytes, parts.woken.now_s())
    served.tasks.append(asyncio.create_task(WakingAhead(parts, allowance, settings.state_dir).run()))
    if settings.asleep_after_s is not None:
        model = parts.engine.model
        idle = IdleAgents(parts.turns, parts.stores, model.kv_identity_hash, settings.asleep_after_s, now_ms)
        served.tasks.append(asyncio.create_task(idle.run()))


def _least_gap_s(settings: EngineSettings) -> float:
    """The time after which an agent that comes again was away: it may be asleep then, or teaches when it will be."""
    return _LEAST_AWAY if settings.asleep_after_s is None else min(settings.asleep_after_s, _LEAST_AWAY)


def _engine_options(settings: EngineSettings) -> dict[str, Any]:
    return {
        "cache_dir": settings.state_dir,
        "policy": PolicyRequest.parse(settings.kv_policy, settings.kv_exact_layers),
        "context_tokens": settings.context_tokens,
        "compute_type": settings.compute_type,
        "conversations_file": kvasir_tiny.conversations_path(),
        "longest_gap_s": settings.longest_gap_ms / 1000,
        "most_drafts": settings.most_drafts,
        "drafts_from_others": settings.drafts_from == "namespace",
        "batch_invariant": settings.batch_invariant,
        "copies_weights": settings.copy_weights,
        "kernels": settings.kernels,
    }
