"""`/metrics` and `/healthz` for this machine, by threads of their own; without a credential, so they name no agent."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvasir.address import Address, AddressTaken, parse_address
from kvasir.server.operating.audit import Audit
from kvasir.server.operating.durations import Durations, RpcCounts
from kvasir.server.operating.wellness import Ailment, Wellness
from kvasir.waits import PATIENCE_S, SOON_S

MOST_READERS = 32  # that have sent a request, and as many that have not
_LOOP_S = 3.0
_INFINITE = float("inf")
_PACKAGE = "kvasir"


@dataclass(frozen=True, slots=True)
class About:
    service: str
    protocol: str
    device: Callable[[], str] = str  # what computes; empty: nothing does


class OperatorPage(Collector):
    """Reads a service's numbers and its wellness for each request."""

    def __init__(self, about: About, numbers: Callable[[], Iterable[Metric]], wellness: Callable[[], Wellness]) -> None:
        """`numbers` and `wellness` are called on a thread of the page; `wellness` may take its time."""
        self._about = about
        self._numbers = numbers
        self._wellness = wellness
        self._build = {"service": about.service, "version": metadata.version(_PACKAGE), "commit": _commit()}

    def serve(self, address: str) -> Callable[[], None]:
        """Serve at host:port of loopback. Returns what ends it. Raises AddressTaken."""
        parsed = parse_address(address)
        try:
            server = _Server((parsed.host, parsed.port), self._handler())
        except OSError as error:
            raise AddressTaken(f"--metrics-listen {address}: {error.strerror or error}") from None
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop

    def collect(self) -> Iterator[Metric]:
        facts = {**self._build, "protocol": self._about.protocol, "device": self._about.device()}
        family = GaugeMetricFamily("kvasir_build_info", "1, with what runs.", labels=list(facts))
        family.add_metric(list(facts.values()), 1)
        yield family
        yield from self._numbers()

    def describe(self) -> Iterable[Metric]:
        return ()  # the registry would call collect() before there is anything to report

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page, registry = self, CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if not cast("_Server", self.server).asks(self.connection):
                    self._answer(503, "text/plain", b"others ask for too much at once\n")
                elif not all(map(_is_local, self.headers.get_all("host", ["localhost"]))):
                    self._answer(403, "text/plain", b"this machine alone: ask for 127.0.0.1\n")
                elif path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif path == "/healthz":
                    wellness = page._wellness()
                    self._answer(wellness.http_status, "application/json", json.dumps(wellness.body()).encode())
                else:
                    self._answer(404, "text/plain", b"/metrics or /healthz\n")

            do_HEAD = do_GET  # noqa: N815 - the library's name

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
                """Scrapes are not worth a line."""

        return Handler


class _Server(ThreadingHTTPServer):
    """Each connection has a thread, so their number is bounded: anybody on this machine may open one."""

    daemon_threads = True
    request_queue_size = 128  # of few, a crowd's connections would make others wait for a second

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._lock = threading.Lock()
        self._silent: OrderedDict[socket.socket, None] = OrderedDict()
        self._asking: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """The oldest connection without a request makes way for the newest."""
        with self._lock:
            self._silent[request] = None
            oldest = self._silent.popitem(last=False)[0] if len(self._silent) > MOST_READERS else None
        if oldest is not None:
            with contextlib.suppress(OSError):  # its other end is gone
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def asks(self, request: socket.socket) -> bool:
        """Whether a connection whose whole request came has a place."""
        with self._lock:
            is_silent = self._silent.pop(request, request) is None  # else another took its place
            if is_silent and len(self._asking) < MOST_READERS:
                self._asking.add(request)
        return request in self._asking

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._silent.pop(request, None)
            self._asking.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who leaves before its answer is no fault of the service's."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine. A site whose name was made to point here would read what it gets."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return Address(host=name.lower()).is_loopback


def on_loop(
    loop: asyncio.AbstractEventLoop, ask: Callable[[], Coroutine[Any, Any, Wellness]]
) -> Callable[[], Wellness]:
    """Calls a service on its event loop, from a thread of the page. A loop that does not answer hangs."""

    def wellness() -> Wellness:
        asked = asyncio.run_coroutine_threadsafe(ask(), loop)
        try:
            return asked.result(_LOOP_S)
        except TimeoutError:
            asked.cancel()
            return Wellness([Ailment("HANGS", f"the service has not answered itself for {_LOOP_S:g} s")])

    return wellness


def counter(name: str, help_text: str, counts: Mapping[Any, float] | float, *labels: str) -> Metric:
    """A counter. With labels: `counts` by their values, a string or a tuple of strings."""
    return _family(CounterMetricFamily, name, help_text, counts, labels)


def gauge(name: str, help_text: str, values: Mapping[Any, float] | float, *labels: str) -> Metric:
    """The same for a number that also falls."""
    return _family(GaugeMetricFamily, name, help_text, values, labels)


def histogram(name: str, help_text: str, durations: Durations | Mapping[str, Durations], *labels: str) -> Metric:
    """A histogram of seconds; with a label, one for each of its values."""
    family = HistogramMetricFamily(name, help_text, labels=labels)
    by_label = {"": durations} if isinstance(durations, Durations) else dict(durations)
    for value, each in sorted(by_label.items()):
        buckets = [("+Inf" if bound == _INFINITE else str(bound), count) for bound, count in each.up_to()]
        family.add_metric([value] if labels else [], buckets, each.sum_s)
    return family


def rpc_metrics(prefix: str, counts: RpcCounts) -> Iterator[Metric]:
    """What a gRPC service counts of its calls."""
    yield counter(f"{prefix}_rpcs", "Calls that have ended.", counts.calls, "rpc", "status")
    yield histogram(f"{prefix}_rpc_seconds", "How long calls took; of a stream, all of it.", counts.seconds, "rpc")
    refused = counts.refused_credentials
    yield counter(f"{prefix}_refused_credentials", "Calls without a credential that allows them.", refused, "reason")


def audit_metric(prefix: str, audit: Audit) -> Metric:
    """Lines of the audit; the lost ones found no room, or a disk that did not take them in time."""
    return counter(f"{prefix}_audit_lines", "Lines of the audit.", audit.counts, "what")


def _commit() -> str:
    """The commit that was installed from a repository, or the one of the checkout that runs; else empty."""
    try:
        told = json.loads(metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")
    except ValueError:
        told = {}
    return str(told.get("vcs_info", {}).get("commit_id", "")) or _of_checkout(Path(__file__).parents[5])


def _of_checkout(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    try:
        argv = ["git", "-C", str(root), "rev-parse", "HEAD"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=SOON_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _family(
    kind: Any, name: str, help_text: str, counts: Mapping[Any, float] | float, labels: tuple[str, ...]
) -> Metric:
    if not labels:
        return cast("Metric", kind(name, help_text, value=counts))
    family = kind(name, help_text, labels=labels)
    for values, count in sorted(dict(counts).items()):  # type: ignore[arg-type]  # it has labels
        family.add_metric([values] if isinstance(values, str) else list(values), count)
    return cast("Metric", family)
