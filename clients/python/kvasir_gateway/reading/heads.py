"""The meaning of a request's headers, path and query, and its answer's headers about the memory."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from kvasir.clients import enum_word
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.names import check_agent_id, check_request_id
from kvasir.volatile import BILLING_LINE
from starlette.requests import Request

from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import Turn

_MAX_PAGE = 1000
# Beside the rules for dates and clocks: the template takes no system message for the newest values.
UNTOLD = "newest-untold"
# Uses of an agent's memory that a header may request, in the words of GenerateOptions.
_MEMORY: Mapping[str, Mapping[str, Any]] = {
    "replace": {"replace_memory": True},
    "read-only": {"memory_mode": pb.MEMORY_MODE_READ_ONLY},
    "none": {"memory_mode": pb.MEMORY_MODE_NONE},
    "append": {},
}


def with_memory(request: Request, agent_id: str, turn: Turn) -> Turn:
    """The turn, with what x-agent-memory requests. Raises InvalidArgument."""
    asked = request.headers.get("x-agent-memory")
    if asked is None:
        return turn
    if asked not in _MEMORY or turn.memory:
        where = "expected the body's own fields" if turn.memory else f"expected one of {', '.join(_MEMORY)}"
        raise InvalidArgument.of("x-agent-memory", where)
    if asked != "none" and not agent_id:
        raise InvalidArgument.of("x-agent-memory", f"{asked} needs x-agent-id")
    if asked == "append" and not turn.messages:
        raise InvalidArgument.of("x-agent-memory", "append needs messages")
    return replace(turn, memory=_MEMORY[asked], is_append=asked == "append")


def appends(request: Request) -> bool:
    """Whether the request's newest messages follow what its agent remembers."""
    return request.headers.get("x-agent-memory") == "append"


def told(reading: Reading, agent_id: str, turn: Turn, started: pb.Started) -> dict[str, str]:
    """What the turn does to which agent's memory, and what else is known once it has begun."""
    reading.applied(started.kept)
    if started.is_time_untold:
        reading.applied([UNTOLD])
    headers = reading.headers() | _reuse(started, [BILLING_LINE] if reading.is_billed else [])
    done = enum_word(started, "continuation")
    if started.source == pb.CACHE_SOURCE_REPLAY:
        done = "replayed"
    elif not started.continuation:
        return {**headers, "x-agent-memory": "none"}
    elif turn.memory.get("memory_mode") == pb.MEMORY_MODE_READ_ONLY:
        done = "read-only"
    return {**headers, "x-agent-memory": done, "x-agent-id": agent_id.encode().decode("latin-1")}


def _reuse(started: pb.Started, rules_for_system: Sequence[str]) -> dict[str, str]:
    """How much of the prompt was not computed, and in ASCII why not more; of `rules_for_system`, those that are off."""
    source = enum_word(started, "source")
    headers = {"x-kvasir-reused": f"{started.cached_tokens} of {started.prompt_tokens}; {source}"}
    parted = started.difference if started.HasField("difference") else None
    if parted is None and started.miss in (pb.MISS_REASON_UNSPECIFIED, pb.MISS_REASON_NEW_AGENT):
        return headers
    why: dict[str, Any] = {"reason": enum_word(started, "miss")}
    if parted is not None:
        why |= {"character": parted.character, "memory": parted.remembered, "prompt": parted.given}
        why |= {"message": parted.message} if parted.HasField("message") else {}
        rules = [*parted.rules, *(rules_for_system if parted.role == "system" else ())]
        why |= {"role": parted.role, "what": parted.what, "rules": rules}
    return {**headers, "x-kvasir-miss": json.dumps({name: value for name, value in why.items() if value != ""})}


def agent_of(request: Request) -> str:
    """The agent that x-agent-id names: the bytes of its UTF-8, as they are."""
    given = request.headers.get("x-agent-id")
    if given is None:
        return ""
    try:
        name = given.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise InvalidArgument.of("x-agent-id", "expected UTF-8") from None
    return check_agent_id(name, "x-agent-id")


def agent_in_path(request: Request) -> str:
    """The agent that a path names; a slash of its name may be written as %2F, and must where it looks like a verb."""
    try:
        name = unquote(request.path_params["agent_id"], errors="strict")
    except UnicodeDecodeError:
        raise InvalidArgument.of("agent_id", "expected UTF-8") from None
    return check_agent_id(name)


def page(request: Request) -> dict[str, Any]:
    """Which page of a list a query requests. Raises InvalidArgument."""
    query = request.query_params
    size = query.get("page_size", "0")
    if not re.fullmatch("[0-9]{1,4}", size) or int(size) > _MAX_PAGE:
        raise InvalidArgument.of("page_size", f"expected a number up to {_MAX_PAGE}")
    return {"page_size": int(size), "page_token": query.get("page_token", "")}


def request_id(request: Request, new: str) -> str:
    given = request.headers.get("x-request-id")
    return new if given is None else check_request_id(given, "x-request-id")
