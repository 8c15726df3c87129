"""The one table of typed errors, gRPC codes and HTTP statuses, and errors as google.rpc.Status in both directions.

A service raises a `kvasir.errors` type. `to_status` writes it as a status with ErrorInfo (domain "kvasir"), BadRequest
with INVALID_ARGUMENT (a field of another refusal is in the metadata), and RetryInfo when waiting helps.
`from_rpc_error` and `from_status` give a client the same type, reason, field and metadata again. Statuses made by gRPC
itself (a dead peer, a deadline) map by their code."""

import re
from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvasir import errors
from kvasir.waits import RETRY_S

DOMAIN = "kvasir"
DETAILS_KEY = "grpc-status-details-bin"

# HTTP/2 peers accept 8 KiB of trailers by default, and the message travels twice (percent-encoded and base64).
_MAX_MESSAGE_BYTES = 1024
_MAX_METADATA_VALUE_BYTES = 256
_MAX_METADATA_ENTRIES = 8


class Answer(NamedTuple):
    """How a service answers with an error: over gRPC, and over HTTP through a gateway."""

    code: grpc.StatusCode
    http_status: int


# The HTTP statuses are those of google/rpc/code.proto, which other gateways and proxies use too. Several types share
# one, so that it does not lead back to its type: a gateway sends `to_status` in the body, and `from_status` reads it.
ANSWERS: dict[type[errors.KvasirError], Answer] = {
    errors.InvalidArgument: Answer(grpc.StatusCode.INVALID_ARGUMENT, 400),
    errors.NotFound: Answer(grpc.StatusCode.NOT_FOUND, 404),
    errors.AlreadyExists: Answer(grpc.StatusCode.ALREADY_EXISTS, 409),
    errors.Conflict: Answer(grpc.StatusCode.ABORTED, 409),
    errors.FailedPrecondition: Answer(grpc.StatusCode.FAILED_PRECONDITION, 400),
    errors.ResourceExhausted: Answer(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    errors.DataLoss: Answer(grpc.StatusCode.DATA_LOSS, 500),
    errors.Unavailable: Answer(grpc.StatusCode.UNAVAILABLE, 503),
    errors.DeadlineExceeded: Answer(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    errors.Cancelled: Answer(grpc.StatusCode.CANCELLED, 499),
    errors.Unauthenticated: Answer(grpc.StatusCode.UNAUTHENTICATED, 401),
    errors.PermissionDenied: Answer(grpc.StatusCode.PERMISSION_DENIED, 403),
    errors.Internal: Answer(grpc.StatusCode.INTERNAL, 500),
}
_OWN_CODES = {answer.code for answer in ANSWERS.values()}
_TYPES: dict[int, type[errors.KvasirError]] = {
    **{answer.code.value[0]: error_type for error_type, answer in ANSWERS.items()},
    # Codes that Kvasir never sends, but gRPC or a proxy may.
    grpc.StatusCode.UNIMPLEMENTED.value[0]: errors.FailedPrecondition,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: errors.InvalidArgument,
}
# gRPC's own words, with a code in capitals that is not the call's.
_NOBODY_THERE = re.compile(
    r"failed to connect to all addresses; last error: [A-Z_]+: (.+?): "
    r"(?:connect failed: addr: .+? error: |Failed to connect to remote host: )?(.*)",
    re.DOTALL,
)
_RETRYABLE = (errors.Unavailable, errors.ResourceExhausted)


def answer_to(error: errors.KvasirError) -> Answer:
    """The row of an error's nearest type in the table."""
    return next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), ANSWERS[errors.Internal])


def to_status(error: errors.KvasirError) -> status_pb2.Status:
    """The error as google.rpc.Status, with texts cut so that it fits into HTTP/2 trailers."""
    message = _cut(error.message, _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=answer_to(error).code.value[0], message=message)
    metadata = {
        _cut(key, 64): _cut(value, _MAX_METADATA_VALUE_BYTES)
        for key, value in list(error.metadata.items())[:_MAX_METADATA_ENTRIES]
    }
    is_of_field = error.field is not None and isinstance(error, errors.InvalidArgument)
    if error.field is not None and not is_of_field:
        metadata["field"] = _cut(error.field, 128)
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.field is not None and is_of_field:
        field, what = _cut(error.field, 128), message.removeprefix(f"{error.field}: ")
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=what[:256])
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, _RETRYABLE):
        seconds = RETRY_S if error.retry_after_s is None else error.retry_after_s
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(seconds * 1000))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


# The status that grpc.aio gives a call that ends while it sends a message. The next try learns why it ended.
_CUT = (grpc.StatusCode.INTERNAL, "Internal error from Core")
# HTTP/2's REFUSED_STREAM, in a status of gRPC's own: a connection has more calls than its service takes.
_REFUSED = "RST_STREAM with error code 7"


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: errors.KvasirError) -> None:
    """End an RPC with the error's status and details. Never returns: grpc raises AbortError."""
    status = to_status(error)
    await context.abort(
        answer_to(error).code, status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),)
    )


def from_status(status: status_pb2.Status) -> errors.KvasirError:
    """The typed error of a status that `to_status` made, whichever way it came."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    found = {id(target) for detail in status.details for target in (info, bad_request, retry) if detail.Unpack(target)}
    violations, metadata = bad_request.field_violations, dict(info.metadata)
    field = violations[0].field if violations else metadata.pop("field", None)
    return _TYPES.get(status.code, errors.Internal)(
        status.message,
        reason=info.reason or None,
        field=field,
        retry_after_s=max(0.0, retry.retry_delay.ToMilliseconds() / 1000) if id(retry) in found else None,
        metadata=metadata,
    )


def from_rpc_error(error: Any) -> errors.KvasirError:
    """The typed error of a failed call (grpc.RpcError of a sync call, or grpc.aio.AioRpcError)."""
    if not hasattr(error, "code"):
        return errors.Internal(str(error))
    code, message = error.code(), error.details() or ""
    if (status := _details(error)) is not None:
        return from_status(status)
    if (code, message) == _CUT:
        return errors.Unavailable("the call ended while a message was being sent", reason="STREAM_CUT")
    if _REFUSED in message:
        text = "the service takes no more calls of this client now: let some end"
        return errors.Unavailable(text, retry_after_s=RETRY_S)
    error_type = _TYPES.get(code.value[0], errors.Internal)
    message = _NOBODY_THERE.sub(r"cannot connect to \1: \2", message)
    return error_type(message or f"the call ended with {code.name}", reason=_plain_reason(code, error_type))


def _plain_reason(code: grpc.StatusCode, error_type: type[errors.KvasirError]) -> str:
    """A status without details was not made by a Kvasir service: its code is all that is known."""
    return error_type.reason if code in _OWN_CODES and code is not grpc.StatusCode.ABORTED else code.name


def _details(error: Any) -> status_pb2.Status | None:
    """The status in a call's trailers. One of another code than the call's was made by something else."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                return None  # a proxy's own details are not ours to read
            return status if status.code == error.code().value[0] else None
    return None


def _pack(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _cut(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= max_bytes else data[: max_bytes - 3].decode("utf-8", "ignore") + "…"
