"""Converts a turn's report of reuse: the rules for volatile text, and the KV that was reused when it began."""

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.volatile import BILLING_LINE, checked_rule

from inference_svc.memory.outcomes import Miss, Source
from inference_svc.text.differences import Difference
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns.turn_data import Continuation, TurnStarted

SOURCES = {source: getattr(pb, f"CACHE_SOURCE_{source.name}") for source in Source}
MATCHES = {outcome: getattr(pb, f"PREFIX_MATCH_{outcome.name}") for outcome in Outcome}


def read_rules(request: pb.GenerateRequest) -> frozenset[str] | None:
    """The rules for what is volatile; None where the request has no word of them. Raises InvalidArgument."""
    if not request.HasField("volatile"):
        return None
    for index, name in enumerate(request.volatile.names):
        field = f"volatile.names[{index}]"
        if checked_rule(name, field) == BILLING_LINE:
            raise InvalidArgument(f"{field}: {BILLING_LINE} is the HTTP gateway's", field=field)
    return frozenset(request.volatile.names)


def write_started(event: TurnStarted, request_id: str, model_name: str) -> pb.Started:
    return pb.Started(
        request_id=request_id,
        model=model_name,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        source=SOURCES[event.source],
        reason=event.miss.detail if event.miss is not None else "",
        miss=write_miss(event.miss),
        match=MATCHES[event.match],
        parent_version=event.parent_version,
        continuation=write_continuation(event.continuation),
        base_version=event.base_version,
        kept=event.kept,
        is_time_untold=event.is_time_untold,
        difference=_difference(event.difference),
        prompt_token_ids=event.prompt_ids,
        ignored_settings=event.ignored_settings,
    )


def _difference(found: Difference | None) -> pb.Difference | None:
    if found is None:
        return None
    return pb.Difference(
        character=found.character,
        remembered=found.remembered,
        given=found.given,
        role=found.role,
        message=found.message,  # type: ignore[arg-type]  # None leaves it out
        what=found.what,
        rules=found.rules,
    )


def write_continuation(continuation: Continuation | None) -> pb.Continuation:
    if continuation is None:
        return pb.CONTINUATION_UNSPECIFIED
    return getattr(pb, f"CONTINUATION_{continuation.name}")  # type: ignore[no-any-return]


def write_miss(miss: Miss | None) -> pb.MissReason:
    if miss is None:
        return pb.MISS_REASON_UNSPECIFIED
    return getattr(pb, f"MISS_REASON_{miss.reason.name}")  # type: ignore[no-any-return]
