"""The one table between typed errors and gRPC statuses with google.rpc details, in both directions.

A service raises a `kvasir.errors` type; `to_status` writes it as a status with ErrorInfo (domain "kvasir"), BadRequest
when a field is wrong, and RetryInfo when waiting helps. A client calls `from_rpc_error` and has the same type, reason,
field and metadata again. Statuses made by gRPC itself (a dead peer, a deadline) map by their code.
"""

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvasir import errors

DOMAIN = "kvasir"
DETAILS_KEY = "grpc-status-details-bin"

# HTTP/2 peers accept 8 KiB of trailers by default, and the message travels twice (percent-encoded and base64).
_MAX_MESSAGE_BYTES = 1024
_MAX_METADATA_VALUE_BYTES = 256
_MAX_METADATA_ENTRIES = 8
_DEFAULT_RETRY_AFTER_S = 1.0

CODES: dict[type[errors.KvasirError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Internal: grpc.StatusCode.INTERNAL,
}
_TYPES = {code: error_type for error_type, code in CODES.items()} | {
    # Codes that Kvasir never sends, but gRPC or a proxy may.
    grpc.StatusCode.UNIMPLEMENTED: errors.FailedPrecondition,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
}
_RETRYABLE = (errors.Unavailable, errors.ResourceExhausted)


def code_of(error: errors.KvasirError) -> grpc.StatusCode:
    """The status code of an error, by its nearest type in the table."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def to_status(error: errors.KvasirError) -> status_pb2.Status:
    """The error as google.rpc.Status, with texts cut so that it fits into HTTP/2 trailers."""
    message = _cut(error.message, _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    metadata = {
        _cut(key, 64): _cut(value, _MAX_METADATA_VALUE_BYTES)
        for key, value in list(error.metadata.items())[:_MAX_METADATA_ENTRIES]
    }
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_cut(error.field, 128), description=message[:256])
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, _RETRYABLE):
        seconds = _DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(seconds * 1000))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


# What grpc.aio says of a call that ends while it sends a message. Why it ended is on its way, and told to the next try.
_CUT = (grpc.StatusCode.INTERNAL, "Internal error from Core")


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: errors.KvasirError) -> None:
    """End an RPC with the error's status and details. Never returns: grpc raises AbortError."""
    status = to_status(error)
    await context.abort(code_of(error), status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))


def from_rpc_error(error: Any) -> errors.KvasirError:
    """The typed error of a failed call (grpc.RpcError of a sync call, or grpc.aio.AioRpcError)."""
    if not hasattr(error, "code"):
        return errors.Internal(str(error))
    code, message = error.code(), error.details() or ""
    error_type = _TYPES.get(code, errors.Internal)
    status = _details(error)
    if status is None and (code, message) == _CUT:
        return errors.Unavailable("the call ended while a message was being sent", reason="STREAM_CUT")
    if status is None:
        return error_type(message or f"the call ended with {code.name}", reason=_plain_reason(code, error_type))
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    found = {id(target) for detail in status.details for target in (info, bad_request, retry) if detail.Unpack(target)}
    violations = bad_request.field_violations
    return error_type(
        status.message or message,
        reason=info.reason or None,
        field=violations[0].field if violations else None,
        retry_after_s=retry.retry_delay.ToMilliseconds() / 1000 if id(retry) in found else None,
        metadata=dict(info.metadata),
    )


def _plain_reason(code: grpc.StatusCode, error_type: type[errors.KvasirError]) -> str:
    """A status without details was not made by a Kvasir service: its code is all that is known."""
    return error_type.reason if code in CODES.values() and code is not grpc.StatusCode.ABORTED else code.name


def _details(error: Any) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None  # a proxy's own details are not ours to read
    return None


def _pack(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _cut(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= max_bytes else data[: max_bytes - 3].decode("utf-8", "ignore") + "…"
