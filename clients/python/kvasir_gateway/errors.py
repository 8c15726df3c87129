"""Refusals in each API's shape: status, body and headers. Of a request they repeat field names and nothing else."""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from kvasir.errors import (
    Internal,
    InvalidArgument,
    KvasirError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from kvasir.server.operating.log_errors import StrangersLines
from kvasir.status import answer_to, to_status
from kvasir.waits import ANSWER_S
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvasir_gateway.turn import AsWritten, json_line, renamed, sse

_log = logging.getLogger(__name__)
# Reasons for which a caller must shorten its conversation: to try again would not help.
_TOO_LONG = ("CONTEXT_EXCEEDED", "MEMORY_EXCEEDED", "PROMPT_TOO_LARGE")
# gRPC's words for an engine that does not answer, or ended in a reply, as one that was killed and starts again.
_NOBODY = re.compile(r"(cannot connect to |Stream removed|Socket closed).*?(?= \(agent '|$)", re.DOTALL)
_strangers = StrangersLines(time.monotonic)


class BodyTooLarge(InvalidArgument):
    """The request has more bytes than the gateway reads."""

    reason = "BODY_TOO_LARGE"


class NotAllowed(InvalidArgument):
    """The path exists, for another method."""

    reason = "METHOD_NOT_ALLOWED"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as an API answers it."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]


Shape = Callable[[KvasirError, str], Refusal]


def http_status(error: KvasirError) -> int:
    """The status of an error, the same in every API but for the few that an API has of its own."""
    if isinstance(error, BodyTooLarge):
        return 413
    if isinstance(error, NotAllowed):
        return 405
    if error.reason == "SENDER_STALLED":
        return 408
    if error.reason in _TOO_LONG:
        return 400
    return answer_to(error).http_status


def _message(error: KvasirError) -> str:
    """A client compacts its history where a refusal has the words of its own service: most of them read no code."""
    if error.reason not in _TOO_LONG or (error.field or "").endswith("max_tokens"):
        return plain(error)
    given, most = (error.metadata.get(name) for name in ("prompt_tokens", "context_tokens"))
    if given is None or most is None:
        return f"{error.message}: prompt is too long"
    maximum = f"this model's maximum context length is {most} tokens"
    return f"{error.message}: prompt is too long: {given} tokens > {most} maximum; {maximum}"


def plain(error: KvasirError) -> str:
    """An error's message, without gRPC's own words for an engine that ended. A refusal has a caller's words."""
    if not isinstance(error, Unavailable | Internal):
        return error.message
    return _NOBODY.sub("the engine does not answer: it may be starting again", error.message)


def openai(error: KvasirError, request_id: str) -> Refusal:
    """{"error": {message, type, param, code}}"""
    status = http_status(error)
    code: str | None = error.reason.lower()
    if isinstance(error, Unauthenticated):
        code = "invalid_api_key"
    elif error.reason in _TOO_LONG:
        code = "context_length_exceeded"
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": _message(error), "type": kind, "param": error.field, "code": code}}
    return Refusal(status, body, {"x-request-id": request_id, **_retry_after(error)})


def anthropic(error: KvasirError, request_id: str) -> Refusal:
    """{"type": "error", "error": {type, message}, "request_id"}"""
    status = http_status(error)
    if isinstance(error, Unavailable):
        status = 529  # "overloaded": its SDK waits and retries
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    said: dict[str, Any] = {"type": kind, "message": _message(error)}
    if error.field == "thread":  # then its SDK leaves it out, and sends the whole conversation
        said["details"] = {"error_code": "thread_unsupported_request"}
    body = {"type": "error", "error": said, "request_id": request_id or None}
    return Refusal(status, body, {"request-id": request_id, **_retry_after(error)})


def kvasir(error: KvasirError, request_id: str) -> Refusal:
    """{"error": google.rpc.Status}: what a gRPC client gets, so that `kvasir.status.from_status` reads it."""
    body = {"error": MessageToDict(to_status(error))}
    return Refusal(http_status(error), body, {"x-request-id": request_id, **_retry_after(error)})


def ollama(error: KvasirError, request_id: str) -> Refusal:
    """{"error": message}"""
    return Refusal(http_status(error), {"error": _message(error)}, {"x-request-id": request_id, **_retry_after(error)})


ErrorEvent = Callable[[KvasirError, str, int], str]
"""An error inside a stream that has begun, of a request, behind so many events."""


def _as_event(shape: Shape, event: str = "") -> ErrorEvent:
    return lambda error, request_id, _: sse(shape(error, request_id).body, event)


def _responses_event(error: KvasirError, request_id: str, number: int) -> str:
    said = openai(error, request_id).body["error"]
    told = {name: said[name] for name in ("code", "message", "param")}
    return sse({"type": "error", "sequence_number": number, **told}, "error")


def _ollama_event(error: KvasirError, request_id: str, _number: int) -> str:
    return json_line(ollama(error, request_id).body)


@dataclass(frozen=True, slots=True)
class Api:
    """How one API tells errors, as an answer and inside a stream, and what its streams are. `error`: the schema of its
    errors. `names`: its fields for the engine's, of whose settings it has `options` before them; None: the names are
    the engine's."""

    error: str
    shape: Shape
    error_event: ErrorEvent
    names: Mapping[str, str] | None
    options: str = ""
    stream_type: str = "text/event-stream; charset=utf-8"

    def in_its_words(self, error: KvasirError) -> KvasirError:
        """The refusal of a field of the engine's."""
        if isinstance(error, AsWritten) or not isinstance(error, InvalidArgument):
            return error
        found = _ENGINES_FIELD.fullmatch(error.field or "")
        if found is None or self.names is None:
            return error
        setting, name, more = found.groups()
        if setting is None and name not in self.names:
            return error
        return renamed(error, f"{self.options if setting else ''}{self.names.get(name, name)}{more}")


_ENGINES_FIELD = re.compile(r"(sampling\.)?([a-z_]+)(.*)")
_CHAT = {"json_schema": "response_format.json_schema.schema", "prompt_token_ids": "prompt"}
_RESPONSES = {"json_schema": "text.format.schema", "max_tokens": "max_output_tokens", "messages": "input"}
_MESSAGES = {"json_schema": "output_config.format.schema", "stop": "stop_sequences"}
_OLLAMA = {
    "json_schema": "format",
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "repetition_tokens": "repeat_last_n",
}
_APIS = (
    ("/v1/messages", Api("AnthropicError", anthropic, _as_event(anthropic, "error"), _MESSAGES)),
    ("/v1/responses", Api("OpenAiError", openai, _responses_event, _RESPONSES)),
    ("/v1/agents", Api("KvasirError", kvasir, _as_event(kvasir, "error"), None)),
    ("/api/", Api("OllamaError", ollama, _ollama_event, _OLLAMA, "options.", "application/x-ndjson")),
    ("", Api("OpenAiError", openai, _as_event(openai), _CHAT)),
)


def api_of(path: str) -> Api:
    return next(api for prefix, api in _APIS if path.startswith(prefix))


def refused(request: Request, error: KvasirError, request_id: str) -> Response:
    """The refusal in the shape of the API that was called. `request_id`: empty for what no route has admitted."""
    path = request.url.path
    is_of_anthropic = path.startswith("/v1/models") and "anthropic-version" in request.headers
    api = api_of("/v1/messages" if is_of_anthropic else path)
    refusal = api.shape(api.in_its_words(error), request_id)
    is_of_stranger = not request_id or isinstance(error, Unauthenticated | PermissionDenied)
    what = f"request.refused request_id={request_id or 'none'}"
    log_refusal(what, refusal.status, error, is_of_stranger=is_of_stranger)
    return JSONResponse(refusal.body, refusal.status, {name: value for name, value in refusal.headers.items() if value})


def ended_by(api: Api, request_id: str, error: KvasirError, number: int = 0) -> str:
    """The event with which a stream ends by this error. The log has its reason, as of a refusal."""
    log_refusal(f"answer.refused request_id={request_id}", http_status(error), error, is_of_stranger=False)
    return api.error_event(error, request_id, number)


def log_refusal(what: str, status: int, error: KvasirError, *, is_of_stranger: bool) -> None:
    """A line without a word of the request. Of strangers' a few a second: they could fill the disk."""
    left_out = _strangers.left_out() if is_of_stranger else 0
    if left_out is not None:
        unheard = f" left_out={left_out}" if left_out else ""
        _log.info("%s status=%d reason=%s%s", what, status, error.reason, unheard)


def malformed(error: ValidationError) -> InvalidArgument:
    """The first of what a body's schema found, without the value: it may be somebody's text."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return InvalidArgument(f"the body is no JSON: {found[0]['msg']}", reason="INVALID_JSON")
    places = [_path(each["loc"]) for each in found]
    # Only members of a union fail at one place, or one of them inside it: that one has the form that was meant.
    inside = (f"{places[0]}.", f"{places[0]}[")
    place = next((each for each in places if places[0] and each.startswith(inside)), places[0])
    problems = [each for each, at in zip(found, places, strict=True) if at == place]
    reason = {"extra_forbidden": "UNKNOWN_PARAMETER", "missing": "MISSING_PARAMETER"}.get(problems[0]["type"])
    what = "; or: ".join(dict.fromkeys(each["msg"] for each in problems if place or each is problems[0]))
    return InvalidArgument.of(place or "body", what, reason=reason)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") → messages[0].content, without the names that pydantic gives members of unions."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[:1].isupper() and part != "str":
            path += f".{part}" if path else part
    return path


def _retry_after(error: KvasirError) -> dict[str, str]:
    may_pass = error.reason not in _TOO_LONG and isinstance(error, Unavailable | ResourceExhausted | PermissionDenied)
    is_away = isinstance(error, Unavailable) and error.reason == Unavailable.reason  # its own refusals have a time
    # Without a time OpenAI's and Anthropic's SDKs give up after a second and a half; an engine needs longer to start.
    wait_s = ANSWER_S if is_away and error.retry_after_s is None else error.retry_after_s
    if wait_s is None or not may_pass:
        return {}
    return {"retry-after": str(max(1, math.ceil(wait_s)))}
