"""The request id, the trace and the size of the call that this task serves; its own calls get the first two."""

import contextlib
from contextvars import ContextVar

from kvasir.errors import InvalidArgument
from kvasir.names import check_request_id

REQUEST_ID_KEY, TRACE_KEY = "x-request-id", "traceparent"
# Which of its namespaces a paired store calls for, in UTF-8. A token implies its namespace.
NAMESPACE_KEY = "x-kvasir-namespace-bin"

_request_id: ContextVar[str] = ContextVar("kvasir_request_id", default="")
_traceparent: ContextVar[str] = ContextVar("kvasir_traceparent", default="")
_request_bytes: ContextVar[int] = ContextVar("kvasir_request_bytes", default=0)


def name_call(request_id: str) -> None:
    """Give the call under way this name, if it may be one: only what is fit to be logged is."""
    with contextlib.suppress(InvalidArgument):
        _request_id.set(check_request_id(request_id))


def call_name() -> str:
    """The request id of the call under way; empty if it has none."""
    return _request_id.get()


def measure_call(request_bytes: int) -> None:
    """The newest message of the call under way had so many bytes."""
    _request_bytes.set(request_bytes)


def call_bytes() -> int:
    """Bytes of the newest message of the call under way; 0 if none came. The message itself would be serialized again
    to know them."""
    return _request_bytes.get()


def place_call(traceparent: str) -> None:
    """Calls that are made from here on belong to this span (W3C Trace Context); empty: to none."""
    _traceparent.set(traceparent)


def onward() -> tuple[tuple[str, str], ...]:
    """The metadata of calls that the call under way makes."""
    told = ((REQUEST_ID_KEY, _request_id.get()), (TRACE_KEY, _traceparent.get()))
    return tuple((key, value) for key, value in told if value)
