"""What the gateway counts, and its Prometheus metrics. Labels are routes of this program, methods and statuses."""

from collections import Counter
from collections.abc import Iterator

from kvasir.server.operating.durations import SHORT_S, Durations
from kvasir.server.operating.operator_page import counter, gauge, histogram
from prometheus_client import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Paths that are none of this program's. Their names would be whatever callers send.
_NO_ROUTE = "none"
_ROUTE = "kvasir.route"


class GatewayNumbers:
    """Counts since the start. Only the event loop changes them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by route, method and status
        self.open_streams = 0
        self.disconnects = 0
        self.written = Durations(SHORT_S)

    def metrics(self) -> Iterator[Metric]:
        labels = ("route", "method", "status")
        yield counter("kvasir_http_requests", "Requests that were answered.", self.requests, *labels)
        yield gauge("kvasir_http_open_streams", "Answers that are being streamed.", self.open_streams)
        yield counter("kvasir_http_disconnects", "Readers that left before the end.", self.disconnects)
        about = "From an event of the engine to its bytes written to the reader."
        yield histogram("kvasir_http_written_seconds", about, self.written)


class CountedApp:
    def __init__(self, app: ASGIApp, numbers: GatewayNumbers) -> None:
        self._app = app
        self._numbers = numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found: list[str] = []

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                [route, method] = [found[0], scope["method"]] if found else [_NO_ROUTE, _NO_ROUTE]
                self._numbers.requests[route, method, str(message["status"])] += 1
            await send(message)

        await self._app({**scope, _ROUTE: found}, receive, counted)


def is_at(scope: Scope, path: str) -> None:
    """The request belongs to this route, as Starlette writes it."""
    scope[_ROUTE].append(route_of(path))


def route_of(path: str) -> str:
    """A route's path as people write it."""
    return path.replace(":path}", "}")
