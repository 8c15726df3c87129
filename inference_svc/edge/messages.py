"""Converts the wire's messages to plain data and back. Every field of a request is checked here, before any work."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.names import check_agent_id, check_request_id
from kvasir.on_full import DEFAULT_KEEP, OnFull, OnFullPolicy, checked_keep
from kvasir.server.answers import duration, written
from kvasir.volatile import BILLING_LINE, checked_rule

from inference_svc.edge.inputs.conversation_messages import write_calls
from inference_svc.edge.inputs.input_messages import (
    Input,
    begun_reply,
    input_bytes,
    read_input,
    read_objects,
    read_tools,
    turn_input_digest,
)
from inference_svc.edge.inputs.sampling_messages import choice_count, clamps_max_tokens, sampling_params
from inference_svc.edge.inputs.thinking_messages import read_thinking
from inference_svc.engine.api import Pace, Prefilled, Priority, SamplingParams, TokenLogprobs
from inference_svc.memory.outcomes import Miss
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.literal_text import from_outside, utf8_bytes
from inference_svc.turns.progress import Progress
from inference_svc.turns.turn_data import (
    MemoryUse,
    PromptInput,
    PromptSettings,
    RequestOrigin,
    Slept,
    TurnDelta,
    TurnEvent,
    TurnFinished,
    TurnMoved,
    TurnRequest,
    TurnStarted,
    Warmed,
    Work,
)

_ON_FULL = {getattr(pb, f"ON_FULL_POLICY_{policy.name}"): policy for policy in OnFullPolicy}
_MAX_SUMMARY_REQUEST_BYTES = 4096
_LONGEST_GAPS_MS = (20, 1000)  # with a shorter one a stream would take others' prompts most of their speed
_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "stop_sequence": pb.FINISH_REASON_STOP_SEQUENCE,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


def turn_request(
    request: pb.GenerateRequest,
    *,
    namespace: str,
    caller: str,
    max_prompt_bytes: int,
    new_request_id: Callable[[], str],
    new_seed: Callable[[], int],
) -> TurnRequest:
    """A checked request; its model is not checked. Raises InvalidArgument that names the field."""
    request_id = check_request_id(request.request_id) if request.request_id else new_request_id()
    agent_id = _agent_id(request)
    given, digest, prompt = _prompt(request, max_prompt_bytes)
    return TurnRequest(
        request_id=request_id,
        namespace=namespace,
        agent_id=agent_id,
        input=given,
        input_digest=digest,
        sampling=sampling_params(request, new_seed),
        clamps_max_tokens=clamps_max_tokens(request),
        memory=_memory_use(request),
        prompt=replace(prompt, returns_ids=request.return_prompt_token_ids),
        origin=RequestOrigin(caller, input_bytes(given, prompt.tools), request),
        choices=choice_count(request),
        pace=Pace(priority_of(request), _longest_gap_s(request)),
    )


def _prompt(
    request: pb.GenerateRequest | pb.CountTokensRequest | pb.WarmRequest, max_prompt_bytes: int
) -> tuple[Input, str, PromptSettings]:
    """The input, its digest, and the rest of the prompt. Raises InvalidArgument that names the field."""
    tools, begun = read_tools(request.tools), None
    # An empty prompt stands for the memory of the agent that is warmed.
    is_of_memory = isinstance(request, pb.WarmRequest) and request.WhichOneof("input") is None
    given = PromptInput("") if is_of_memory else read_input(request, max_prompt_bytes)
    digest = turn_input_digest(request, given, tools) if isinstance(request, pb.GenerateRequest) else ""
    if not isinstance(request, pb.WarmRequest):
        given, begun = begun_reply(request, given)
    return given, digest, PromptSettings(tools, read_objects(given, tools), begun, thinking=read_thinking(request))


def _memory_use(request: pb.GenerateRequest) -> MemoryUse:
    return MemoryUse(
        expected_version=request.expected_version if request.HasField("expected_version") else None,
        base_version=request.base_version if request.HasField("base_version") else None,
        keep_partial=request.keep_partial,
        is_read_only=request.memory_mode == pb.MEMORY_MODE_READ_ONLY,
        expects_memory=request.expect_existing,
        replaces=request.replace_memory,
        rules=_read_rules(request),
        has_default_rules=request.volatile.is_default,
        on_full=_on_full(request),
    )


def warm_request(
    request: pb.WarmRequest, *, namespace: str, caller: str, max_prompt_bytes: int, new_request_id: Callable[[], str]
) -> TurnRequest:
    check_agent_id(request.agent_id)
    given, digest, prompt = _prompt(request, max_prompt_bytes)
    return TurnRequest(
        request_id=new_request_id(),
        namespace=namespace,
        agent_id=request.agent_id,
        input=given,
        input_digest=digest,
        sampling=SamplingParams(max_tokens=0),
        clamps_max_tokens=False,
        prompt=prompt,
        origin=RequestOrigin(caller, input_bytes(given, prompt.tools)),
        # Turns whose reply a caller awaits come first.
        pace=Pace(Priority.BACKGROUND),
        work=Work.WARM,
    )


def sleep_request(request: pb.WarmRequest, **terms: Any) -> TurnRequest:
    """As `warm_request`, of a request that names an agent alone."""
    return replace(warm_request(request, **terms), work=Work.SLEEP)


def turn_message(turn: Progress, age_s: float) -> pb.Turn:
    tokens, state = turn.tokens, pb.TURN_STATE_RUNNING if turn.phase.has_begun else pb.TURN_STATE_WAITING
    counts = {"prompt_tokens": tokens.prompt, "cached_tokens": tokens.cached, "completion_tokens": tokens.completion}
    return written(pb.Turn, turn.request, state=state, age=age_s, **counts)


def warm_response(started: TurnStarted, warmed: Warmed, model_name: str) -> pb.WarmResponse:
    computed = warmed.tokens - warmed.cached_tokens
    return written(pb.WarmResponse, warmed, started, model=model_name, computed_tokens=computed, **_miss(started.miss))


def count_request(request: pb.CountTokensRequest, *, namespace: str, caller: str, max_prompt_bytes: int) -> TurnRequest:
    given, digest, prompt = _prompt(request, max_prompt_bytes)
    origin, nothing = RequestOrigin(caller, input_bytes(given, prompt.tools)), SamplingParams(max_tokens=0)
    return TurnRequest("", namespace, "", given, digest, nothing, clamps_max_tokens=False, prompt=prompt, origin=origin)


def response(
    event: TurnEvent, request_id: str, model_name: str, choice: int, spelling: Callable[[int], bytes]
) -> pb.GenerateResponse:
    """An event of one choice as the stream's message. `spelling`: the bytes of a token."""
    match event:
        case TurnStarted():
            named = {"request_id": request_id, "model": model_name, "prompt_token_ids": event.prompt_ids}
            return pb.GenerateResponse(started=written(pb.Started, event, **named, **_miss(event.miss)))
        case Prefilled(done, total):
            return pb.GenerateResponse(prefill_progress=pb.PrefillProgress(tokens_done=done, tokens_total=total))
        case TurnDelta():
            return pb.GenerateResponse(delta=_delta(event, choice, spelling))
        case TurnFinished():
            return pb.GenerateResponse(finished=finished(event, choice))
        case TurnMoved(peer, token, expires_s):
            moved = pb.Moved(peer=peer, resume_token=token, expires_in=duration(expires_s))
            return pb.GenerateResponse(moved=moved)
        case Warmed() | Slept():
            raise TypeError("a turn that makes no reply streams none")


def _miss(miss: Miss | None) -> dict[str, object]:
    return {"miss": miss.reason, "reason": miss.detail} if miss is not None else {"miss": None}


def model_message(model: ModelInfo, state: pb.ModelState) -> pb.Model:
    return written(
        pb.Model,
        model,
        kv_policy=model.policy_name,
        kv_policy_why=model.policy_why,
        state=state,
        embedding_dimensions=model.embedding_width,
        sampling_defaults=pb.Sampling(**model.sampling_defaults),  # type: ignore[arg-type]
    )


def _agent_id(request: pb.GenerateRequest) -> str:
    """The agent whose memory the turn uses; empty for none. Raises InvalidArgument for settings without effect then."""
    mode = request.memory_mode
    if request.agent_id:
        check_agent_id(request.agent_id)
    if mode not in pb.MemoryMode.values():
        raise InvalidArgument.of("memory_mode", f"expected one of the enum's, got {mode}")
    is_used = bool(request.agent_id) and mode != pb.MEMORY_MODE_NONE
    changes = {"keep_partial": request.keep_partial, "replace_memory": request.replace_memory}
    for field, is_given in changes.items():
        if is_given and mode == pb.MEMORY_MODE_READ_ONLY:
            raise InvalidArgument.of(field, "the memory is only read")
    if request.replace_memory and request.WhichOneof("input") != "messages":
        raise InvalidArgument.of("replace_memory", "only with messages")
    # A flag that would have no effect is refused, not ignored.
    needs_agent = {
        "memory_mode": mode in (pb.MEMORY_MODE_READ_WRITE, pb.MEMORY_MODE_READ_ONLY),
        "expect_existing": request.expect_existing,
        "base_version": request.HasField("base_version"),
        "replace_memory": request.replace_memory,
        "expected_version": request.HasField("expected_version"),
        "append_messages": request.WhichOneof("input") == "append_messages",
        "keep_partial": request.keep_partial,
        "on_full": request.HasField("on_full"),
    }
    for field, is_given in needs_agent.items():
        if is_given and not is_used:
            raise InvalidArgument.of(field, "needs an agent_id whose memory is used")
    if request.expected_version < 0:
        raise InvalidArgument.of("expected_version", f"expected 0 or more, got {request.expected_version}")
    if request.HasField("base_version") and request.base_version < 1:
        raise InvalidArgument.of("base_version", f"expected 1 or more, got {request.base_version}")
    return request.agent_id if is_used else ""


def _read_rules(request: pb.GenerateRequest) -> frozenset[str] | None:
    """The rules for volatile text; None where the request has no word of them. Raises InvalidArgument."""
    if not request.HasField("volatile"):
        return None
    for index, name in enumerate(request.volatile.names):
        field = f"volatile.names[{index}]"
        if checked_rule(name, field) == BILLING_LINE:
            raise InvalidArgument.of(field, f"{BILLING_LINE} is the HTTP gateway's")
    return frozenset(request.volatile.names)


def _on_full(request: pb.GenerateRequest) -> OnFull | None:
    if not request.HasField("on_full"):
        return None
    given = request.on_full
    if given.policy not in _ON_FULL:
        raise InvalidArgument.of("on_full.policy", f"expected REFUSE, DROP_OLDEST or SUMMARIZE, got {given.policy}")
    policy = _ON_FULL[given.policy]
    if request.WhichOneof("input") in ("prompt", "prompt_token_ids"):
        raise InvalidArgument.of("on_full", "only with messages; a prompt has no borders to cut at")
    if given.summary_request and policy is not OnFullPolicy.SUMMARIZE:
        raise InvalidArgument.of("on_full.summary_request", "only with SUMMARIZE")
    if (size_bytes := utf8_bytes(given.summary_request)) > _MAX_SUMMARY_REQUEST_BYTES:
        raise InvalidArgument.of(
            "on_full.summary_request", f"expected at most {_MAX_SUMMARY_REQUEST_BYTES} bytes, got {size_bytes}"
        )
    keep = checked_keep(given.keep, "on_full.keep") if given.HasField("keep") else DEFAULT_KEEP
    return OnFull(policy, keep, from_outside(given.summary_request))


def priority_of(request: pb.GenerateRequest | pb.EmbedRequest) -> Priority:
    known = {pb.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE, pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE}
    known[pb.PRIORITY_BACKGROUND] = Priority.BACKGROUND
    if request.priority not in known:
        raise InvalidArgument.of("priority", f"expected one of the enum's, got {request.priority}")
    return known[request.priority]


def _longest_gap_s(request: pb.GenerateRequest) -> float | None:
    """None where the request leaves it out. Raises InvalidArgument."""
    if not request.HasField("longest_gap_ms"):
        return None
    least, most = _LONGEST_GAPS_MS
    if not least <= request.longest_gap_ms <= most:
        raise InvalidArgument.of("longest_gap_ms", f"expected {least} to {most}, got {request.longest_gap_ms}")
    return request.longest_gap_ms / 1000


def _delta(event: TurnDelta, choice: int, spelling: Callable[[int], bytes]) -> pb.Delta:
    return pb.Delta(
        text=event.text,
        token_ids=event.token_ids,
        choice=choice,
        logprobs=[
            _logprobs(each, token, spelling) for each, token in zip(event.logprobs, event.token_ids, strict=False)
        ],
        reasoning_text=event.reasoning,
    )


def _logprobs(given: TokenLogprobs, token_id: int, spelling: Callable[[int], bytes]) -> pb.TokenLogprobs:
    top = [pb.TokenLogprob(token_id=token, logprob=logprob, spelling=spelling(token)) for token, logprob in given.top]
    return pb.TokenLogprobs(logprob=given.logprob, top=top, spelling=spelling(token_id))


def finished(event: TurnFinished, choice: int) -> pb.Finished:
    mask_passes = written(pb.MaskPasses, event.mask_passes) if event.mask_passes.passes else None
    return written(
        pb.Finished,
        event,
        reason=_FINISH_REASONS.get(event.finish_reason),
        usage=written(pb.Usage, event, mask_passes=mask_passes),
        tool_calls=write_calls(event.tool_calls),
        choice=choice,
    )
