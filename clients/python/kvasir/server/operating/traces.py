"""One trace through gateway, engine and store: spans go to OpenTelemetry, if an address is given, and hold no texts."""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from kvasir.address import AddressError, check_endpoint
from kvasir.call_context import place_call
from kvasir.errors import KvasirError
from kvasir.waits import SOON_S

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class _Place:
    """The span of the call under way."""

    tracer: Any
    context: Any
    clock_ns: Callable[[], int]


_place: ContextVar[_Place | None] = ContextVar("kvasir_span", default=None)


class Traces:
    """The spans of one process. Without an address: none, and what comes is passed on."""

    def __init__(
        self,
        endpoint: str = "",
        service: str = "",
        roots: Collection[str] | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`endpoint`: OTLP over gRPC. `roots`: the calls that begin a trace; None: all. Raises AddressError."""
        self._provider = _provider(endpoint, f"kvasir-{service}") if endpoint else None
        self._tracer = self._provider.get_tracer("kvasir") if self._provider is not None else None
        self._roots = roots
        self._clock_ns = clock_ns

    @contextmanager
    def serving(self, name: str, traceparent: str) -> Iterator[None]:
        """A span around a call; `traceparent`: what came with it, or nothing."""
        given = traceparent if _TRACEPARENT.fullmatch(traceparent) else ""
        # Also if it is none: a request may begin in the context of the one before it on its connection.
        place_call(given)
        _place.set(None)
        if self._tracer is None or not (given or self._roots is None or name in self._roots):
            yield
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        w3c, carrier = TraceContextTextMapPropagator(), dict[str, str]()
        above = w3c.extract({"traceparent": given}) if given else None
        span = self._tracer.start_span(name, context=above, kind=trace.SpanKind.SERVER)
        context = trace.set_span_in_context(span)
        w3c.inject(carrier, context)
        place_call(carrier.get("traceparent", ""))
        _place.set(_Place(self._tracer, context, self._clock_ns))
        try:
            yield
        except KvasirError as error:
            span.set_attribute("reason", error.reason)
            if error.is_failure:
                span.set_status(trace.StatusCode.ERROR)
            raise
        except Exception as error:
            span.set_attribute("reason", type(error).__name__)
            span.set_status(trace.StatusCode.ERROR)
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Send what was not sent yet, for a few seconds at most. Blocks."""
        if self._provider is not None:
            self._provider.shutdown()


def told(name: str, ended_ago_s: float, seconds: float, counts: Mapping[str, int | str]) -> None:
    """A part of the call under way, which took so long and ended so long ago."""
    place = _place.get()
    if place is not None:
        ended_ns = place.clock_ns() - int(ended_ago_s * 1e9)
        began_ns = ended_ns - int(seconds * 1e9)
        span = place.tracer.start_span(name, context=place.context, start_time=began_ns, attributes=dict(counts))
        span.end(ended_ns)


def _provider(endpoint: str, service: str) -> Any:
    check_endpoint(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise AddressError(f"traces need other packages: install kvasir[traces] ({error.name})") from None
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http:"), timeout=SOON_S)
    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return provider
