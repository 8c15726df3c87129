"""The service's status as messages. A caller sees its own namespace, an admin of the whole service sees all."""

from collections.abc import Mapping, Sequence

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.names import check_agent_id
from kvasir.server.answers import duration, written

from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.service_stats import NamespaceCounters, OwedCount, ServiceStatus
from inference_svc.model.model_host import MemoriesLeft

_MAX_AGENTS = 1000


def stats(status: ServiceStatus, namespace: str | None, *, store_is_reachable: bool) -> pb.GetStatsResponse:
    """`namespace`: the only visible one; None for all, and for the engine."""
    return pb.GetStatsResponse(
        model=status.engine.model,
        uptime=duration(status.uptime_s),
        namespaces=[
            _namespace(name, counters, status.engine.hot_bytes.get(name, 0), status.engine.owed.get(name, OwedCount()))
            for name, counters in sorted(_visible(status, namespace).items())
        ],
        engine=written(pb.EngineStats, status, status.engine) if namespace is None else None,
        store_is_reachable=store_is_reachable,
    )


def agent_ids(request: pb.ListHotMemoriesRequest) -> Sequence[str]:
    if len(request.agent_ids) > _MAX_AGENTS:
        raise InvalidArgument.of("agent_ids", f"expected at most {_MAX_AGENTS}")
    return [check_agent_id(name, "agent_ids") for name in request.agent_ids]


def hot_memory(agent_id: str, kv_bytes: int, tag: object, *, is_woken_ahead: bool) -> pb.HotMemory:
    hot = pb.HotMemory(agent_id=agent_id, kv_bytes=kv_bytes, is_woken_ahead=is_woken_ahead)
    if isinstance(tag, AgentMemory):
        hot.tokens = len(tag.transcript.token_ids)
        hot.version = tag.publication.standing.version
        hot.is_stored = tag.publication.standing.is_safe
    return hot


def memories_left(left: MemoriesLeft) -> pb.MemoriesLeft:
    return pb.MemoriesLeft(stored=left.stored, dropped=left.unstored)


def _visible(status: ServiceStatus, namespace: str | None) -> Mapping[str, NamespaceCounters]:
    if namespace is None:
        return status.namespaces
    return {namespace: status.namespaces.get(namespace, NamespaceCounters())}


def _namespace(name: str, counters: NamespaceCounters, hot_bytes: int, owed: OwedCount) -> pb.NamespaceStats:
    return written(
        pb.NamespaceStats,
        counters,
        namespace=name,
        turn_ends=counters.ends,
        **{f"{kind}_tokens": counters.tokens[kind] for kind in ("prefilled", "cached", "decoded")},
        kv_memory_used_bytes=hot_bytes,
        owed_memories=owed.memories,
        owed_bytes=owed.size_bytes,
        failed_memories=owed.failed,
    )
