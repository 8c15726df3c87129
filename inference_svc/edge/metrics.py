"""Prometheus metrics: the numbers of GetStats, summed over namespaces; their labels do not depend on callers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from kvasir.server.operating.audit import Audit
from kvasir.server.operating.durations import RpcCounts
from kvasir.server.operating.operator_page import audit_metric, counter, gauge, histogram, rpc_metrics
from prometheus_client import Metric

from inference_svc.memory.outcomes import MissReason, SnapshotState, Source, Wake
from inference_svc.memory.service_stats import NamespaceCounters, ServiceStatus, TurnTimes

_ENDS = ("finished", "cancelled", "moved", "refused", "failed")  # as TurnFlow counts them
_MADE_GOOD = (SnapshotState.PENDING, SnapshotState.FAILED)
_PUBLISHED = (SnapshotState.PENDING, SnapshotState.COMMITTED, SnapshotState.FAILED)


def numbers_of(status: ServiceStatus, rpcs: RpcCounts, audit: Audit) -> Iterator[Metric]:
    counters = list(status.namespaces.values())
    yield from _turns(counters)
    yield from _times(TurnTimes().add_all(each.times for each in counters))
    yield from _tokens(counters)
    yield from _publications(counters)
    yield from _engine(status)
    yield from rpc_metrics("kvasir_engine", rpcs)
    yield audit_metric("kvasir_engine", audit)


def _times(times: TurnTimes) -> Iterator[Metric]:
    yield histogram("kvasir_queue_seconds", "How long turns waited to begin, or to be given up.", times.queue)
    yield histogram("kvasir_restore_seconds", "How long memories took to come from the store.", times.restore)
    yield histogram("kvasir_first_token_seconds", "From a request's arrival to its first token.", times.first_token)
    yield histogram("kvasir_token_gap_seconds", "From one token of a reply to the next.", times.token_gap)
    yield histogram("kvasir_commit_seconds", "From a turn's end until its memory was durable.", times.commit)
    yield histogram("kvasir_last_event_seconds", "From a turn's last token to its last event.", times.last_event)


def _turns(counters: list[NamespaceCounters]) -> Iterator[Metric]:
    yield counter("kvasir_turns", "Turns begun.", sum(each.turns for each in counters))
    yield _by_word("kvasir_turn_ends", "Turns by how they ended.", "end", [each.ends for each in counters], _ENDS)
    yield _by_word(
        "kvasir_refusals", "Turns and counts refused, by reason.", "reason", [each.refusals for each in counters]
    )
    sources, misses = [each.sources for each in counters], [each.misses for each in counters]
    yield _by_word("kvasir_sources", "Turns by where memory came from.", "source", sources, Source)
    yield _by_word("kvasir_misses", "Turns that missed, by reason.", "reason", misses, MissReason)
    wakes = [each.wakes for each in counters]
    yield _by_word("kvasir_wakes", "Wakes of agents that were asleep, by how they ended.", "turn", wakes, Wake)
    waiting, running = sum(each.waiting_turns for each in counters), sum(each.running_turns for each in counters)
    yield gauge("kvasir_waiting_turns", "Turns that wait.", waiting)
    yield gauge("kvasir_running_turns", "Turns that have begun.", running)


def _tokens(counters: list[NamespaceCounters]) -> Iterator[Metric]:
    named = (
        ("prefilled", "Tokens of prompts that were computed."),
        ("cached", "Tokens of prompts that were reused."),
        ("decoded", "Tokens that were generated."),
        ("drafted", "Tokens that were tried ahead, of turns that finished."),
        ("accepted_draft", "Tokens that were tried ahead and are the reply's."),
    )
    for name, help_text in named:
        yield counter(f"kvasir_{name}_tokens", help_text, sum(each.tokens[name] for each in counters))


def _publications(counters: list[NamespaceCounters]) -> Iterator[Metric]:
    outcomes = [each.publications for each in counters]
    yield _by_word("kvasir_publications", "Publications by their outcome.", "state", outcomes, _PUBLISHED)
    made_good = [each.made_good for each in counters]
    help_text = "Publications committed after they had been reported so."
    yield _by_word("kvasir_publications_made_good", help_text, "was", made_good, _MADE_GOOD)
    published = sum(each.published_bytes for each in counters)
    yield counter("kvasir_published_bytes", "Bytes sent to the store.", published)


def _engine(status: ServiceStatus) -> Iterator[Metric]:
    engine, owed = status.engine, status.engine.owed.values()
    loaded = {engine.model: 1} if engine.model else {}
    yield gauge("kvasir_model_loaded", "1 for the model that is loaded.", loaded, "model")
    gauges = (
        ("kvasir_uptime_seconds", "Time since the start.", status.uptime_s),
        ("kvasir_kv_memory_limit_bytes", "KV that may be allocated.", status.kv_memory_bytes),
        ("kvasir_kv_memory_used_bytes", "KV that is allocated, hot and running.", engine.kv_memory_used_bytes),
        ("kvasir_kernels_failed", "1 if kernels failed their check: the reference serves.", engine.kernels_failed),
        ("kvasir_hot_memories", "Agents whose memory is hot.", engine.hot_memories),
        ("kvasir_owed_memories", "Hot memories that the store lacks.", sum(each.memories for each in owed)),
        ("kvasir_owed_bytes", "Bytes of them that the store lacks.", sum(each.size_bytes for each in owed)),
        ("kvasir_prompt_bytes", "Prompts of turns that wait or run.", status.prompt_bytes),
        ("kvasir_restoring_bytes", "Memory read from the store that is not KV yet.", status.restoring_bytes),
        ("kvasir_publishing_bytes", "Copies of KV that wait for the store.", status.publishing_bytes),
    )
    for name, help_text, value in gauges:
        yield gauge(name, help_text, value)
    totals = (
        ("kvasir_computed_tokens", "Tokens that went through the loaded model.", engine.computed_tokens),
        ("kvasir_preemptions", "Turns preempted because others needed the room.", engine.preemptions),
        ("kvasir_model_loads", "Models loaded.", status.model_loads),
    )
    for name, help_text, value in totals:
        yield counter(name, help_text, value)


def _by_word(
    name: str, help_text: str, label: str, counts: Sequence[Mapping[Any, int]], known: Iterable[str | Enum] = ()
) -> Metric:
    """Sums by label: a string, or the value of an enum. Known words begin at 0: rate() misses a series' first step."""
    total = Counter({word.value if isinstance(word, Enum) else word: 0 for word in known})
    for each in counts:
        for word, count in list(each.items()):
            total[word.value if isinstance(word, Enum) else word] += count
    return counter(name, help_text, total, label)
