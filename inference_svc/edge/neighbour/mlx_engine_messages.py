"""Converts the neighbour's messages to plain data and back. Settings that cannot be applied are refused by name."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from kvasir.errors import InvalidArgument, KvasirError
from kvasir.inference.v1 import inference_pb2 as pb
from smg_grpc_proto import mlx_engine_pb2 as mlx

from inference_svc.edge.inputs.input_messages import check_token_ids
from inference_svc.edge.inputs.sampling_messages import MAX_TOP_LOGPROBS, clamps_max_tokens, sampling_params, settings
from inference_svc.engine.api import TokenLogprobs
from inference_svc.engine.engine import check_fits
from inference_svc.text.conversation import input_digest
from inference_svc.text.token_ids import TokenIds
from inference_svc.turns import turn_data

_SEEDS = 1 << 64
_FINISH_REASONS = {"cancelled": "abort"}  # the neighbours' word for a turn that another call ended


def token_ids(request: mlx.GenerateRequest, *, vocabulary_size: int, context_tokens: int) -> TokenIds:
    """The prompt's token ids; `original_text` does not count. Raises InvalidArgument, ResourceExhausted."""
    field = "tokenized.input_ids"
    given = TokenIds(request.tokenized.input_ids)
    check_token_ids(given, field, vocabulary_size)
    check_fits(len(given), 1, context_tokens)
    return given


def turn_request(
    request: mlx.GenerateRequest,
    prompt: TokenIds,
    *,
    agent_id: str,
    request_id: str,
    namespace: str,
    caller: str,
    new_seed: Callable[[], int],
) -> turn_data.TurnRequest:
    wanted = pb.GenerateRequest(sampling=_sampling(request.sampling_params))
    return turn_data.TurnRequest(
        request_id=request_id,
        namespace=namespace,
        agent_id=agent_id,
        input=turn_data.TokensInput(prompt),
        input_digest=input_digest("tokens", " ".join(map(str, prompt)), (), (), settings(wanted)),
        sampling=sampling_params(wanted, new_seed),
        clamps_max_tokens=clamps_max_tokens(wanted),
        origin=turn_data.RequestOrigin(caller, request.ByteSize()),
    )


@contextlib.contextmanager
def fields_by_their_names() -> Iterator[None]:
    """What the engine refuses inside names the neighbour's fields, and not our contract's."""
    try:
        yield
    except KvasirError as error:
        ours = error.field or ""
        theirs = "input" if ours in ("prompt", "prompt_token_ids") else ours.replace("sampling.", "sampling_params.", 1)
        if theirs == ours:
            raise
        raise type(error)(
            error.message.replace(ours, theirs, 1),
            reason=error.reason,
            field=theirs,
            retry_after_s=error.retry_after_s,
            metadata=error.metadata,
        ) from None


class ReplyWriter:
    """The responses of one turn: a chunk for each delta and a short end, or, if it is not streamed, all at the end."""

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._prompt_tokens = self._cached_tokens = 0
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def response(self, event: turn_data.TurnEvent) -> mlx.GenerateResponse | None:
        match event:
            case turn_data.TurnStarted():
                self._prompt_tokens, self._cached_tokens = event.prompt_tokens, event.cached_tokens
            case turn_data.TurnDelta() if event.token_ids:
                self._ids += event.token_ids
                if self._is_streamed:
                    return mlx.GenerateResponse(chunk=self._chunk(event))
                self._logprobs += event.logprobs
            case turn_data.TurnFinished():
                return mlx.GenerateResponse(complete=self._complete(event))
        return None

    def _chunk(self, delta: turn_data.TurnDelta) -> mlx.GenerateStreamChunk:
        return mlx.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self._ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=_logprobs(delta.token_ids, delta.logprobs),
        )

    def _complete(self, end: turn_data.TurnFinished) -> mlx.GenerateComplete:
        return mlx.GenerateComplete(
            output_ids=() if self._is_streamed else self._ids,
            finish_reason=_FINISH_REASONS.get(end.finish_reason, end.finish_reason),
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=end.cached_tokens,
            output_logprobs=_logprobs(self._ids, self._logprobs),
            matched_stop_token_id=self._ids[-1] if end.finish_reason == "stop" and self._ids else None,
        )


def _sampling(given: mlx.SamplingParams) -> pb.Sampling:
    """The same settings in our own contract. The neighbour's zeros mean what its engines do without the setting."""
    if given.ignore_eos:
        raise _refused("ignore_eos", "no value: this engine cannot apply it", given.ignore_eos)
    if given.HasField("logprobs") and not 0 <= given.logprobs <= MAX_TOP_LOGPROBS:
        raise _refused("logprobs", f"0 to {MAX_TOP_LOGPROBS}", given.logprobs)
    if (least := min(given.logit_bias, default=0)) < 0:
        raise _refused("logit_bias", "token ids of 0 or more", least)
    return pb.Sampling(
        max_tokens=min(given.max_tokens, (1 << 31) - 1) if given.HasField("max_tokens") else None,
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_p=given.top_p or None,
        top_k=min(given.top_k, (1 << 31) - 1) or None,
        min_p=given.min_p or None,
        seed=given.seed % _SEEDS if given.HasField("seed") else None,
        stop_token_ids=given.stop_token_ids,
        repetition_penalty=given.repetition_penalty if given.repetition_penalty not in (0, 1) else None,
        frequency_penalty=given.frequency_penalty or None,
        presence_penalty=given.presence_penalty or None,
        logit_bias=given.logit_bias,
        logprobs=given.HasField("logprobs"),
        top_logprobs=given.logprobs,
    )


def _logprobs(ids: Sequence[int], found: Sequence[TokenLogprobs]) -> mlx.OutputLogProbs | None:
    if not found:
        return None
    tops = (
        mlx.TopLogProbs(values=[value for _, value in each.top], token_ids=[token for token, _ in each.top])
        for each in found
    )
    return mlx.OutputLogProbs(
        token_logprobs=[each.logprob for each in found], token_ids=ids[-len(found) :], top_logprobs=tops
    )


def _refused(name: str, expected: str, got: object) -> InvalidArgument:
    field = f"sampling_params.{name}"
    return InvalidArgument.of(field, f"expected {expected}, got {got}")
