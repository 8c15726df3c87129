"""Converts hand-overs between two engines to the wire's messages and back. Each field that comes is checked."""

from collections.abc import Iterator
from dataclasses import fields

from google.protobuf import duration_pb2
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats.block_file import FileBytes
from kvasir.formats.digest import Digest
from kvasir.formats.manifest_checks import MAX_TEMPLATE_TIME_MS
from kvasir.inference.v1 import handover_pb2 as pb
from kvasir.inference.v1 import inference_pb2
from kvasir.names import check_agent_id, check_request_id
from kvasir.on_full import OnFullPolicy
from kvasir.server.answers import duration, written

from inference_svc.edge import messages
from inference_svc.engine.api import CarriedTurn, Timings
from inference_svc.handover.passing import Opening, Promise, Stand, Surroundings
from inference_svc.model.prompting import Tokenized
from inference_svc.text.token_ids import TokenChars, TokenIds
from inference_svc.turns.phases import BegunPrompt, BegunTurn
from inference_svc.turns.turn_data import Continuation, Shortening, TurnRequest

FORMAT = 1
FRAME_BYTES = 1 << 20
_CONTINUATIONS: dict[int, Continuation | None] = {
    inference_pb2.CONTINUATION_UNSPECIFIED: None,
    **{getattr(inference_pb2, f"CONTINUATION_{each.name}"): each for each in Continuation},
}
_POLICIES = {getattr(inference_pb2, f"ON_FULL_POLICY_{policy.name}"): policy for policy in OnFullPolicy}
_ROLES = frozenset({"system", "user", "assistant", "tool"})


def write_opening(opening: Opening) -> pb.TakeTurnRequest:
    begun, prompt = opening.begun, opening.begun.prompt
    ids, chars = prompt.tokens.ids, prompt.tokens.chars
    given = {"format": FORMAT, "request": opening.origin, "prompt_token_ids": ids, "prompt_token_chars": chars}
    return pb.TakeTurnRequest(opening=written(pb.TurnOpening, opening, begun, prompt, **given))


def read_opening(message: pb.TurnOpening, peer: str) -> Opening:
    """`peer`: an engine of another store; empty: one of this store's, which is believed. Raises InvalidArgument."""
    _check_opening(message)
    caller = check_agent_id(message.caller, "opening.caller")  # names of credentials are no freer
    begun = BegunTurn(
        seed=message.seed,
        max_tokens=message.max_tokens,
        prompt=BegunPrompt(
            Tokenized(TokenIds(message.prompt_token_ids), TokenChars(message.prompt_token_chars)),
            message.rewind_point_tokens if message.HasField("rewind_point_tokens") else None,
            tuple(message.messages),
            message.template_time_ms,
            message.tools_order if message.HasField("tools_order") else None,
        ),
        parent_manifest=_digest(message.parent_manifest) if message.HasField("parent_manifest") else None,
        is_brought=message.is_brought or bool(peer),
        continuation=_continuation(message.continuation),
        shortened=message.shortened if message.HasField("shortened") else None,
        shortening=_shortening(message.shortening) if message.HasField("shortening") else None,
        move_id=message.move_id,
        peer=peer,
        is_text_own=message.is_text_own,
        handed_over_by=_peer_before(message) if not peer else "",
        age_s=_seconds(message.age),
        first_token_s=_seconds(message.first_token) if message.HasField("first_token") else None,
    )
    surroundings = Surroundings(*(getattr(message.surroundings, each.name) for each in fields(Surroundings)))
    request_id = check_request_id(message.request_id)
    return Opening(surroundings, message.request, request_id, caller, begun, tuple(message.choices))


def _check_opening(message: pb.TurnOpening) -> None:
    if message.format != FORMAT:
        raise InvalidArgument.of("opening.format", f"expected {FORMAT}, got {message.format}")
    if message.max_tokens < 1:
        raise InvalidArgument.of("opening.max_tokens", "expected 1 or more")
    if len(message.prompt_token_ids) != len(message.prompt_token_chars):
        raise InvalidArgument.of("opening.prompt_token_chars", "expected one for each token")
    if any(said.role not in _ROLES for said in message.messages):
        raise InvalidArgument.of("opening.messages", "expected the roles of messages")
    if not 0 <= message.template_time_ms <= MAX_TEMPLATE_TIME_MS:
        raise InvalidArgument.of("opening.template_time_ms", f"expected 0 to {MAX_TEMPLATE_TIME_MS}")


def read_request(opening: Opening, namespace: str, max_prompt_bytes: int) -> TurnRequest:
    """The turn's request, checked as if its caller had sent it here. Raises InvalidArgument."""
    assert isinstance(opening.origin, inference_pb2.GenerateRequest)
    return messages.turn_request(
        opening.origin,
        namespace=namespace,
        caller=opening.caller,
        max_prompt_bytes=max_prompt_bytes,
        new_request_id=lambda: opening.request_id,
        new_seed=lambda: opening.begun.seed,
    )


def write_stand(stand: Stand, prompt_tokens: int) -> pb.TakeTurnRequest:
    carried = stand.carried
    groups = [pb.TurnGroup(window=window, first_block=first) for window, first in carried.first_blocks.items()]
    return pb.TakeTurnRequest(
        stand=written(
            pb.TurnStand,
            stand,
            carried,
            reply_token_ids=carried.token_ids[prompt_tokens:],
            computed_tokens=carried.computed,
            cached_tokens=carried.cached,
            shareable_tokens=carried.shareable,
            groups=groups,
        )
    )


def read_stand(message: pb.TurnStand, prompt: Tokenized) -> Stand:
    carried = CarriedTurn(
        token_ids=prompt.ids + TokenIds(message.reply_token_ids),
        computed=message.computed_tokens,
        cached=message.cached_tokens,
        shareable=message.shareable_tokens,
        sampler_key=tuple(message.sampler_key),
        rewind_points=tuple(message.rewind_points),
        first_blocks={int(group.window): int(group.first_block) for group in message.groups},
        spent=Timings(*(_seconds(getattr(message.spent, each.name.removesuffix("_s"))) for each in fields(Timings))),
    )
    if message.files < 0:
        raise InvalidArgument.of("stand.files", "expected 0 or more")
    return Stand(message.choice, carried, message.told_chars, message.files)


def write_file(choice: int, data: FileBytes) -> Iterator[pb.TakeTurnRequest]:
    yield pb.TakeTurnRequest(file=pb.TurnFile(choice=choice, digest=Digest.of(data).to_proto()))
    for start in range(0, len(data), FRAME_BYTES):
        yield pb.TakeTurnRequest(frame=bytes(data[start : start + FRAME_BYTES]))


class ArrivingFile:
    """A file whose frames come one by one. Raises InvalidArgument for other bytes than its digest's."""

    def __init__(self, message: pb.TurnFile) -> None:
        self.choice = message.choice
        self.digest = _digest(message.digest)
        self._data = bytearray()

    @property
    def is_whole(self) -> bool:
        return len(self._data) == self.digest.size_bytes

    def add(self, frame: bytes) -> None:
        if not frame or len(frame) > FRAME_BYTES or len(self._data) + len(frame) > self.digest.size_bytes:
            raise InvalidArgument.of("frame", "expected the bytes of the file that was announced")
        self._data += frame

    def data(self) -> bytes:
        data = bytes(self._data)
        if Digest.of(data) != self.digest:
            raise InvalidArgument.of("frame", "these bytes have another digest")
        return data


def _peer_before(message: pb.TurnOpening) -> str:
    return check_agent_id(message.handed_over_by, "opening.handed_over_by") if message.handed_over_by else ""


def _continuation(given: int) -> Continuation | None:
    if given not in _CONTINUATIONS:
        raise InvalidArgument.of("opening.continuation", "expected one of the enum's")
    return _CONTINUATIONS[given]


def _shortening(given: inference_pb2.Shortening) -> Shortening:
    if given.policy not in _POLICIES:
        raise InvalidArgument("opening.shortening.policy: expected one of the enum's", field="opening.shortening")
    return Shortening(
        _POLICIES[given.policy], given.dropped_messages, given.kept_messages, before_reply=given.before_reply
    )


def _digest(message: manifest_pb2.Digest) -> Digest:
    try:
        return Digest.from_proto(message)
    except ValueError as error:
        raise InvalidArgument.of("digest", error) from None


def _seconds(message: duration_pb2.Duration) -> float:
    return max(message.seconds + message.nanos / 1e9, 0.0)


def write_promise(promise: Promise) -> pb.TakeTurnResponse:
    expires_in = duration(promise.expires_s)
    return pb.TakeTurnResponse(prepared=pb.TurnPrepared(resume_token=promise.resume_token, expires_in=expires_in))


def read_promise(message: pb.TurnPrepared) -> Promise:
    return Promise(message.resume_token, _seconds(message.expires_in))


def commit() -> pb.TakeTurnRequest:
    return pb.TakeTurnRequest(commit=pb.TurnCommit())
