"""Requests and replies of turns, for the blocking and the asynchronous client. Knows no channel."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar, Unpack

from blake3 import blake3
from google.protobuf.message import Message as ProtoMessage

from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients.channel import Metadata, repeatable
from kvasir.clients.generate_options import GenerateOptions, TemplateSetting, template_values
from kvasir.clients.messages import GivenMessage, message_list, unheld
from kvasir.common.v1 import message_pb2
from kvasir.errors import Cancelled, DeadlineExceeded, Internal, InvalidArgument, KvasirError, Unavailable
from kvasir.inference.v1 import inference_pb2 as pb

PLACE_KEY = "kvasir-place"
"""The metadata by which a load balancer keeps an agent's turns together: the name's digest, as names are no headers."""
_Request = TypeVar("_Request", pb.GenerateRequest, pb.WarmRequest, pb.CountTokensRequest)
_Made = TypeVar("_Made", bound=ProtoMessage)
Messages = Sequence[GivenMessage]
Prompt = str | Sequence[int]  # a text, or token ids of the model

READS = repeatable(
    pb.DESCRIPTOR.services_by_name["InferenceService"], cachestore_pb2.DESCRIPTOR.services_by_name["AgentService"]
)
_BREAKS = (Unavailable, DeadlineExceeded, Cancelled, Internal)
_MAX_KNOWN_AGENTS = 10_000
# More than a service sends: what an answer names is made room for.
_MAX_CHOICES = 128
_COPIED_AT_ONCE = 256  # messages
# Options that the request has under the same name.
_AS_GIVEN = {option.name for option in fields(GenerateOptions)} - {
    *("request_id", "max_tokens", "sampling", "template_settings", "json_schema")
}
_KNOWN = {None: "which version is kept is not known here", 0: "it remembered nothing before"}


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a turn: exactly one of them."""

    prompt: Prompt | None
    messages: Messages | None
    append_messages: Messages | None


@dataclass(frozen=True, slots=True)
class Moved:
    """Where the rest of a reply is: a peer by the engine's name for it, and the token to show there."""

    peer: str
    resume_token: str

    def unknown(self) -> Unavailable:
        """The error of a caller that knows no such peer."""
        return Unavailable(
            f"the turn went on to {self.peer!r}, which this client does not know (InferenceClient.peers); its resume() "
            "takes the resume_token, and its generate() the same request_id",
            reason="TURN_MOVED",
            metadata={"peer": self.peer, "resume_token": self.resume_token},
        )


def place_of(agent_id: str) -> Metadata:
    """Where a turn's agent belongs; nothing for a turn without an agent."""
    name = agent_id.encode("utf-8", "surrogatepass")
    return ((PLACE_KEY, blake3(name).hexdigest()[:16]),) if agent_id else ()


def moved_by(response: pb.GenerateResponse) -> Moved | None:
    """Where a stream goes on after this event; None if it does so here."""
    return Moved(response.moved.peer, response.moved.resume_token) if response.HasField("moved") else None


def lost_by(error: KvasirError) -> Moved | None:
    """Where a stream may go on that ended with this error, because the engine's link to its peer broke."""
    if error.reason != "HANDOVER_UNCERTAIN":
        return None
    return Moved(error.metadata.get("peer", ""), error.metadata.get("resume_token", ""))


@dataclass(slots=True)
class Choice:
    """One of a request's replies, as far as it has arrived."""

    text: str = ""
    reasoning_text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # one per token, if they were requested
    finished: pb.Finished = field(default_factory=pb.Finished)
    reasoning_tokens: int = 0
    _tokens_to_place: int = 0  # without a text yet: markers, and parts of characters

    def count(self, delta: pb.Delta) -> None:
        """Count a delta's tokens, as `add` does. Of one with both texts, which a slow reader gets, by their lengths."""
        self._tokens_to_place += len(delta.token_ids)
        thought, said = len(delta.reasoning_text), len(delta.text)
        if thought or said:
            self.reasoning_tokens += self._tokens_to_place * thought // (thought + said)
            self._tokens_to_place = 0

    def add(self, delta: pb.Delta) -> None:
        self.count(delta)
        self.text += delta.text
        self.reasoning_text += delta.reasoning_text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs


@dataclass(slots=True)
class Reply:
    """A turn as far as its events have arrived. With several choices, `text`, `token_ids` … are those of the first."""

    started: pb.Started = field(default_factory=pb.Started)
    choices: list[Choice] = field(default_factory=lambda: [Choice()])

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reasoning_text(self) -> str:
        return self.choices[0].reasoning_text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[pb.TokenLogprobs]:
        return self.choices[0].logprobs

    @property
    def finished(self) -> pb.Finished:
        return self.choices[0].finished

    def add(self, event: pb.GenerateResponse) -> None:
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "delta":
                self.choice(event.delta.choice).add(event.delta)
            case "finished":
                self.choice(event.finished.choice).finished = event.finished
            case _:
                pass

    def choice(self, number: int) -> Choice:
        """Raises Internal for a number that no request can have."""
        if not 0 <= number < _MAX_CHOICES:
            raise Internal(f"the engine sent choice {number}")
        while len(self.choices) <= number:
            self.choices.append(Choice())
        return self.choices[number]


def turn_request(given: Input, options: GenerateOptions, request_id: str) -> pb.GenerateRequest:
    """The request's message. Raises InvalidArgument for values that it cannot hold; the service checks the rest."""
    inputs = _inputs(given)
    if len(inputs) != 1:
        raise InvalidArgument.of("input", "expected exactly one of prompt, messages and append_messages")
    schema, regex = options.json_schema, options.regex
    if schema is not None and regex is not None:
        raise InvalidArgument.of("response_format", "expected json_schema or regex, got both")
    with _refusing("sampling"):
        sampling = options.to_proto_sampling()
    with _refusing("json_schema"):
        json_schema = json.dumps(schema) if isinstance(schema, Mapping) else schema
    request = _made(
        pb.GenerateRequest,
        request_id=request_id,
        sampling=sampling,
        template_settings=template_values(options.template_settings),
        json_schema=json_schema,
        **{name: getattr(options, name) for name in _AS_GIVEN},  # None leaves a field out
    )
    return _filled(request, inputs)


class ThinkingArguments(TypedDict, total=False):
    """The fields of GenerateOptions that change a prompt: a count and a warm-up take them too."""

    thinking: pb.Thinking | None
    template_settings: Mapping[str, TemplateSetting]
    ignore_unread_settings: bool


def _prompted(named: ThinkingArguments) -> dict[str, object]:
    return {**named, "template_settings": template_values(named.get("template_settings", {}))}


def warm_request(
    given: Input, *, agent_id: str, tools: Sequence[pb.Tool], model: str, **named: Unpack[ThinkingArguments]
) -> pb.WarmRequest:
    """As turn_request. Without an input, only the agent's memory is warmed."""
    inputs = _inputs(given)
    if len(inputs) > 1:
        raise InvalidArgument.of("input", "expected at most one of prompt, messages and append_messages")
    return _filled(_made(pb.WarmRequest, agent_id=agent_id, tools=tools, model=model, **_prompted(named)), inputs)


def sleep_request(agent_id: str, model: str) -> pb.SleepRequest:
    return _made(pb.SleepRequest, agent_id=agent_id, model=model)


def count_request(
    given: Input,
    *,
    tools: Sequence[pb.Tool],
    model: str,
    continue_final_message: bool,
    **named: Unpack[ThinkingArguments],
) -> pb.CountTokensRequest:
    """As turn_request, for an input that is only counted."""
    inputs = _inputs(given)
    if len(inputs) != 1:
        raise InvalidArgument.of("input", "expected exactly one of prompt and messages")
    request = _made(
        pb.CountTokensRequest,
        tools=tools,
        model=model,
        continue_final_message=continue_final_message,
        **_prompted(named),
    )
    return _filled(request, inputs)


def embed_request(
    texts: Sequence[str | Sequence[int]], *, model: str, dimensions: int | None, truncate: bool, priority: pb.Priority
) -> pb.EmbedRequest:
    """Raises InvalidArgument for values that the message cannot hold; the service checks the rest."""
    with _refusing("inputs"):
        inputs = [
            pb.EmbedInput(text=text) if isinstance(text, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=text))
            for text in texts
        ]
    return _made(
        pb.EmbedRequest, model=model, inputs=inputs, dimensions=dimensions, truncate=truncate, priority=priority
    )


def _made(kind: type[_Made], **values: object) -> _Made:
    """A message of these values. Raises InvalidArgument, which names the first of them that it cannot hold."""
    try:
        return kind(**values)
    except (TypeError, ValueError):
        for name, value in values.items():
            enum = kind.DESCRIPTOR.fields_by_name[name].enum_type
            if enum is not None and isinstance(value, str) and value not in enum.values_by_name:
                words = ", ".join(enum.values_by_name)
                raise InvalidArgument.of(name, f"expected one of {words}, got {value[:40]!r}") from None
            with _refusing(name):
                kind(**{name: value})
        raise


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Makes InvalidArgument of protobuf's refusals: values out of range, and text that is no UTF-8."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidArgument.of(field, unheld(error)) from None


def _inputs(given: Input) -> dict[str, Prompt | list[message_pb2.Message]]:
    """The inputs that were given, by field name."""
    inputs: dict[str, Prompt | list[message_pb2.Message]] = {}
    if given.prompt is not None:
        inputs["prompt" if isinstance(given.prompt, str) else "prompt_token_ids"] = given.prompt
    for name in ("messages", "append_messages"):
        if (messages := getattr(given, name)) is not None:
            inputs[name] = message_list(messages, name)
    return inputs


def _filled(request: _Request, inputs: Mapping[str, Any]) -> _Request:
    """The request with its inputs. Messages are copied once, and some at a time: to copy all of a long conversation
    would keep the interpreter from other threads."""
    for name, value in inputs.items():
        with _refusing(name):
            if name == "prompt":
                request.prompt = value
            elif name == "prompt_token_ids":
                request.prompt_token_ids.CopyFrom(pb.TokenIds(ids=value))
            else:
                place: pb.MessageList = getattr(request, name)
                place.SetInParent()
                for at in range(0, len(value), _COPIED_AT_ONCE):
                    place.messages.extend(value[at : at + _COPIED_AT_ONCE])
    return request


class KnownVersions:
    """The newest version of each agent that the engine has acknowledged, for the errors of broken turns."""

    def __init__(self) -> None:
        self._versions: OrderedDict[str, int] = OrderedDict()

    def note(self, agent_id: str, response: pb.GenerateResponse) -> None:
        if not agent_id:
            return
        if response.HasField("started"):
            self._set(agent_id, response.started.parent_version)
        elif response.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED:
            self._set(agent_id, response.finished.snapshot.version)

    def explained(self, error: KvasirError, agent_id: str, request_id: str) -> KvasirError:
        """The error; if it broke an agent's turn, with the version that the agent remembers."""
        if not agent_id or not isinstance(error, _BREAKS):
            return error
        version = self._versions.get(agent_id)
        known = _KNOWN.get(version, f"version {version} is kept")
        return type(error)(
            f"{error.message} (agent {agent_id!r}: {known}; the broken turn was not acknowledged. A retry "
            "with its request_id does not run it twice)",
            reason=error.reason,
            field=error.field,
            retry_after_s=error.retry_after_s,
            metadata={
                **error.metadata,
                "agent_id": agent_id,
                "request_id": request_id,
                "remembered_version": "" if version is None else str(version),
            },
        )

    def _set(self, agent_id: str, version: int) -> None:
        self._versions[agent_id] = version
        self._versions.move_to_end(agent_id)
        if len(self._versions) > _MAX_KNOWN_AGENTS:
            self._versions.popitem(last=False)
