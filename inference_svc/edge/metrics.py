"""Prometheus metrics over HTTP, to this machine only: the same numbers as GetStats, summed over namespaces.

Labels are words of this program (sources, reasons) and names of configured models: how many series there are does not
depend on what callers do, and no agent and no namespace is named.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from kvasir.address import parse_address
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_svc.memory.service_stats import NamespaceCounters, ServiceStatus


class StatusCollector(Collector):
    """Reads the status anew for every scrape."""

    def __init__(self, status: Callable[[], ServiceStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        counters = list(status.namespaces.values())
        yield from _turns(counters)
        yield from _tokens(counters)
        yield from _publications(counters)
        yield from _engine(status)


def serve_metrics(address: str, status: Callable[[], ServiceStatus]) -> Callable[[], None]:
    """Serve them on a thread of its own at host:port, which the configuration has found to be loopback. Returns what
    ends it. Raises OSError when the address is taken.
    """
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    parsed = parse_address(address)
    server, thread = start_http_server(parsed.port, parsed.host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _turns(counters: list[NamespaceCounters]) -> Iterator[Metric]:
    yield CounterMetricFamily("kvasir_turns", "Turns begun.", value=sum(each.turns for each in counters))
    yield _by_word("kvasir_turn_ends", "Turns by how they ended.", "end", [each.ends for each in counters])
    yield _by_word("kvasir_refusals", "Requests refused, by reason.", "reason", [each.refusals for each in counters])
    yield _by_word("kvasir_sources", "Turns by where memory came from.", "source", [each.sources for each in counters])
    yield _by_word("kvasir_misses", "Turns that missed, by reason.", "reason", [each.misses for each in counters])
    waiting, running = sum(each.waiting_turns for each in counters), sum(each.running_turns for each in counters)
    yield GaugeMetricFamily("kvasir_waiting_turns", "Turns that wait.", value=waiting)
    yield GaugeMetricFamily("kvasir_running_turns", "Turns that have begun.", value=running)


def _tokens(counters: list[NamespaceCounters]) -> Iterator[Metric]:
    named = (
        ("prefilled", "Tokens of prompts that were computed.", sum(each.prefilled_tokens for each in counters)),
        ("cached", "Tokens of prompts that were reused.", sum(each.cached_tokens for each in counters)),
        ("decoded", "Tokens that were generated.", sum(each.decoded_tokens for each in counters)),
    )
    for name, help_text, value in named:
        yield CounterMetricFamily(f"kvasir_{name}_tokens", help_text, value=value)


def _publications(counters: list[NamespaceCounters]) -> Iterator[Metric]:
    outcomes = [each.publications for each in counters]
    yield _by_word("kvasir_publications", "Publications by what came of them.", "state", outcomes)
    published = sum(each.published_bytes for each in counters)
    yield CounterMetricFamily("kvasir_published_bytes", "Bytes sent to the store.", value=published)


def _engine(status: ServiceStatus) -> Iterator[Metric]:
    engine = status.engine
    loaded = GaugeMetricFamily("kvasir_model_loaded", "1 for the model that is loaded.", labels=["model"])
    if engine.model:
        loaded.add_metric([engine.model], 1)
    yield loaded
    gauges = (
        ("kvasir_uptime_seconds", "Time since the start.", status.uptime_s),
        ("kvasir_kv_memory_bytes", "KV that may be allocated.", status.kv_memory_bytes),
        ("kvasir_kv_memory_used_bytes", "KV that is allocated, hot and running.", engine.kv_memory_used_bytes),
        ("kvasir_hot_memories", "Agents whose memory is hot.", engine.hot_memories),
        ("kvasir_prompt_bytes", "Prompts of turns that wait or run.", status.prompt_bytes),
        ("kvasir_restoring_bytes", "Memory read from the store that is not KV yet.", status.restoring_bytes),
        ("kvasir_publishing_bytes", "Copies of KV that wait for the store.", status.publishing_bytes),
    )
    for name, help_text, value in gauges:
        yield GaugeMetricFamily(name, help_text, value=value)
    totals = (
        ("kvasir_computed_tokens", "Tokens that went through the loaded model.", engine.computed_tokens),
        ("kvasir_preemptions", "Turns preempted because others needed the room.", engine.preemptions),
        ("kvasir_model_loads", "Models loaded.", status.model_loads),
    )
    for name, help_text, value in totals:
        yield CounterMetricFamily(name, help_text, value=value)


def _by_word(name: str, help_text: str, label: str, counts: Sequence[Mapping[Any, int]]) -> Metric:
    """Sums by label: a string, or the value of an enum."""
    family = CounterMetricFamily(name, help_text, labels=[label])
    total: Counter[str] = Counter()
    for each in counts:
        for word, count in list(each.items()):
            total[word.value if isinstance(word, Enum) else word] += count
    for word, count in sorted(total.items()):
        family.add_metric([word], count)
    return family
