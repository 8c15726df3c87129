"""Loads a model, and makes the parts that serve it."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.formats.block_file import MAX_HEADER_BYTES
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.waits import uptime_s

from inference_svc.config import EngineSettings
from inference_svc.engine.engine import Engine
from inference_svc.engine.scheduling.schedulable import DraftRules
from inference_svc.kv.kept_files import kept_folder
from inference_svc.kv.policy import PolicyRequest
from inference_svc.memory.costs_file import CostsFile
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.publishing.copies import Copies
from inference_svc.memory.recall import Recall
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_planning import ReusePlanner
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model import kvasir_tiny
from inference_svc.model.embedding.pooling import Pooling
from inference_svc.model.prompting import Prompting
from inference_svc.model.weights.digest_check import DigestCheck
from inference_svc.served_model import ServedModel
from inference_svc.turns.admission import Admission
from inference_svc.turns.asleep.allowance import Allowance
from inference_svc.turns.asleep.idle_agents import IdleAgents
from inference_svc.turns.asleep.own_turns import OwnTurns
from inference_svc.turns.asleep.returns import Returns
from inference_svc.turns.asleep.waking import WakingAhead, WakingParts
from inference_svc.turns.asleep.woken import WokenAgents
from inference_svc.turns.embedding.turn_embedder import TurnEmbedder
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.turn_ending import TurnEnding
from inference_svc.turns.turn_service import TurnService
from inference_svc.warming import warm_up, warm_up_text

_LEAST_AWAY = 6 * 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class ModelsParts:
    settings: EngineSettings
    stores: Mapping[str, RemoteCache]  # may get further namespaces later: see `ServedModel.add_store`
    lease_owner: str
    admission: Admission
    stats: ServiceStats
    clock: Callable[[], float]  # seconds, monotonic
    now_ms: Callable[[], int]  # Unix time
    surely_ms: Callable[[], int]  # the same, but never ahead of it: deletions are for good


async def open_served(
    name: str,
    path: str,
    shared: ModelsParts,
    open_engine: Callable[..., Engine],
    begin_phase: Callable[[str], None] = lambda _: None,
) -> ServedModel:
    """Load a model. Takes seconds to minutes, off the event loop. `open_engine`: `Engine.open` with a KV budget;
    `begin_phase`: see there. Raises what Engine.open raises.
    """
    options = _engine_options(shared.settings)
    engine = await asyncio.to_thread(open_engine, path, name=name, begin_phase=begin_phase, **options)
    try:
        return await _served_by(engine, name, shared, begin_phase)
    except BaseException:
        await asyncio.to_thread(engine.close)  # as nobody else has it
        raise


async def _served_by(engine: Engine, name: str, shared: ModelsParts, begin_phase: Callable[[str], None]) -> ServedModel:
    settings, stores, admission, clock = shared.settings, shared.stores, shared.admission, shared.clock
    admission.serves_with(engine.memory_budget_bytes)
    begin_phase("kernels")
    warming = asyncio.get_running_loop().run_in_executor(None, warm_up, engine, clock)  # beside a template's compiler
    prompting = Prompting(engine.tokenizer, engine.token_text, shared.now_ms)
    await _make_ready(engine, prompting, stores, warming)

    copies = Copies(engine, admission.publishing)
    # A laptop that wakes must not believe in a lease that ended elsewhere while it slept, nor give a publication up.
    stats, owner, now_ms = shared.stats, shared.lease_owner, shared.now_ms
    woken = WokenAgents(Returns(_least_gap_s(settings)), lambda: now_ms() / 1e3)
    on_deleted, publishing = woken.returns.forget, settings.publishing
    line_parts = LineParts(engine, copies, publishing, stats, owner, clock, uptime_s, now_ms, on_deleted)
    costs_file = await asyncio.to_thread(_known_costs, engine, shared)
    # Nothing is awaited from here on: stores that come later get lines by `ServedModel.add_store`.
    lines = {namespace: Lines(namespace, store, line_parts) for namespace, store in stores.items()}
    recall, planner = Recall(engine, lines), ReusePlanner(engine, prompting, stores, costs_file.costs)
    limits = settings.turn_limits
    parts = EngineParts(engine, prompting, recall, planner, copies, stores, limits, admission, stats, clock, woken)
    turns = TurnService(parts, TurnEnding(parts))
    for each in lines.values():
        each.start()
    check = DigestCheck(engine.directory, settings.state_dir)
    embedder = TurnEmbedder(engine, prompting, Pooling(settings.embedding_pooling), admission, stats)
    grace_s = settings.stop_grace_s
    served = ServedModel(name, engine, prompting, turns, lines, line_parts, grace_s, check, embedder, woken)
    served.tasks.append(asyncio.create_task(costs_file.keep()))
    served.warm_up_while_idle(clock)
    own_turns = OwnTurns(turns, parts.recall.is_wanted, lambda: not embedder.is_idle or served.is_leaving.is_set())
    _begin_own_turns(served, settings, WakingParts(own_turns, engine, stores, woken, stats, clock), shared.surely_ms)
    return served


async def _make_ready(
    engine: Engine, prompting: Prompting, stores: Mapping[str, RemoteCache], warming: "asyncio.Future[None]"
) -> None:
    """Do the work for which first turns would wait."""
    file_bytes = engine.model.kv_bytes_per_token * BLOCK_TOKENS + MAX_HEADER_BYTES
    memory = [asyncio.to_thread(store.blobs.make_ready, file_bytes) for store in [*stores.values()][:1]]  # all share it
    await asyncio.gather(warming, warm_up_text(prompting), *memory)


def _begin_own_turns(
    served: ServedModel, settings: EngineSettings, parts: WakingParts, surely_ms: Callable[[], int]
) -> None:
    """Wake agents ahead, and put idle ones to sleep, from now on."""
    allowance = Allowance(settings.wake_ahead_share, parts.engine.memory_budget_bytes, parts.woken.now_s())
    served.tasks.append(asyncio.create_task(WakingAhead(parts, allowance, settings.state_dir).run()))
    if settings.asleep_after_s is not None:
        model = parts.engine.model
        idle = IdleAgents(parts.turns, parts.stores, model.kv_identity_hash, settings.asleep_after_s, surely_ms)
        served.tasks.append(asyncio.create_task(idle.run()))


def _known_costs(engine: Engine, shared: ModelsParts) -> CostsFile:
    """With the costs that an engine of this model and device learned before."""
    conditions = f"{engine.model.kv_identity_hash} {engine.device}"
    file = CostsFile(shared.settings.state_dir, conditions, RestoreCosts(shared.clock), shared.now_ms)
    file.read()
    return file


def _least_gap_s(settings: EngineSettings) -> float:
    """The time after which an agent that comes again was away: it may be asleep then, or teaches when it will be."""
    return _LEAST_AWAY if settings.asleep_after_s is None else min(settings.asleep_after_s, _LEAST_AWAY)


def _engine_options(settings: EngineSettings) -> dict[str, Any]:
    return {
        "cache_dir": settings.state_dir,
        "kept_dir": kept_folder(),
        "policy": PolicyRequest.parse(settings.kv_policy, settings.kv_exact_layers),
        "context_tokens": settings.context_tokens,
        "compute_type": settings.compute_type,
        "conversations_file": kvasir_tiny.conversations_path(),
        "longest_gap_s": settings.longest_gap_ms / 1000,
        "drafts": DraftRules(settings.most_drafts, settings.drafts_from == "namespace"),
        "batch_invariant": settings.batch_invariant,
        "copies_weights": settings.copy_weights,
        "kernels": settings.kernels,
    }
