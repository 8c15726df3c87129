"""The engine behind the gateway: turns, agents and health, for one caller at a time."""

import asyncio
import copy
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle
from types import MappingProxyType
from typing import Any

from kvasir import volatile
from kvasir.clients import AioInferenceClient, GenerateOptions, Tls
from kvasir.clients.aio.large_requests import LargeRequests
from kvasir.clients.aio.service_client import Making, at_once
from kvasir.clients.channel import aio_channel, sync_channel
from kvasir.clients.inference_client_turns import READS
from kvasir.clients.messages import message_list
from kvasir.common.v1 import message_pb2
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError, NotFound
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.operating.wellness import Ailment, Wellness, memories_not_stored

from kvasir_gateway.models import unknown_alias
from kvasir_gateway.reading.records import AgentRecords, Beside
from kvasir_gateway.reading.volatile import Rules
from kvasir_gateway.turn import NO_CALLS, Said, Turn, renamed

# An engine allows 320 calls on a connection, and the gateway has many callers. Idle ones are not opened.
_CONNECTIONS = 16
_NOT_BOUND = ("NO_FORCED_CALLS", "FORMAT_INVALID", "FORMAT_TOO_COMPLEX")  # reasons why no grammar binds calls
_MAX_MESSAGES = 10_000  # as the engine takes
_ARGUMENTS = re.compile(r"(?:append_)?messages\.messages\[(\d+)\]\.tool_calls\[(\d+)\]\.arguments_json")
_LARGE_CHARS = 64 << 10  # of a prompt: a look at its model costs less than to send it twice

SentMessages = Sequence[message_pb2.Message]


class CallerAtEngine:
    """The engine as one caller may use it."""

    def __init__(self, client: AioInferenceClient, beside: Beside = at_once) -> None:
        """`beside`: does work that would hold up the event loop."""
        self.client = client
        self.records = AgentRecords(client, self.at, beside)

    def at(self, _agent_id: str) -> AioInferenceClient:
        """The engine that knows most of an agent."""
        return self.client

    async def generate(
        self, turn: Turn, messages: SentMessages, agent_id: str, request_id: str
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """A turn's events, wherever it moves. Closing the generator cancels the turn."""
        turn = await self._named(turn)
        has_begun, tried, ignore = False, None, turn.ignore
        while turn is not tried:
            tried = turn
            try:
                async with aclosing(self._generate(turn, messages, agent_id, request_id)) as events:
                    async for event in events:
                        has_begun = True
                        if turn.thinking is not None and ignore is not None:
                            for name in event.started.ignored_settings:
                                ignore(turn.thinking.name(name))
                        yield event
            except (NotFound, InvalidArgument, FailedPrecondition) as error:
                if has_begun:
                    raise
                turn = _taken_instead(turn, error)

    async def _generate(
        self, turn: Turn, messages: SentMessages, agent_id: str, request_id: str
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        options = GenerateOptions(
            agent_id=agent_id,
            model=turn.model,
            sampling=dict(turn.sampling),
            json_schema=turn.json_schema,
            regex=turn.regex,
            tools=turn.tools,
            tool_choice=turn.tool_choice,
            request_id=request_id,
            return_prompt_token_ids=turn.returns_token_ids,
            continue_final_message=turn.begun is not None,
            **(turn.thinking.options if turn.thinking is not None else {}),
            **turn.memory,
        )
        given: dict[str, Any] = {"append_messages" if turn.is_append else "messages": messages}
        if not messages:
            given = {"prompt": turn.prompt}
        async with aclosing(self.events(given, options)) as events:
            async for event in events:
                if not event.HasField("moved"):  # it is followed here: its token is used up
                    yield event

    def events(self, given: Mapping[str, Any], options: GenerateOptions) -> AsyncGenerator[pb.GenerateResponse, None]:
        """A turn of the engine that has or gets its agent, as the client's `generate`."""
        return self.client.generate(**given, options=options)

    async def _named(self, turn: Turn) -> Turn:
        """The turn, without a model's name that the engine does not know, if it is too large to be sent twice."""
        if not turn.any_model or turn.alias or not turn.model:
            return turn
        sizes = accumulate((len(message.content) for message in turn.messages), initial=len(turn.prompt))
        if all(size < _LARGE_CHARS for size in sizes):
            return turn
        try:
            await self.client.get_model(turn.model)
        except NotFound:
            return replace(turn, model="", any_model=False)
        return turn

    async def count(self, turn: Turn, messages: SentMessages) -> int:
        turn = await self._named(turn)
        count = partial(
            self.client.count_tokens,
            messages=messages,
            tools=turn.tools,
            continue_final_message=turn.begun is not None,
            **(turn.thinking.options if turn.thinking is not None else {}),
        )
        try:
            return await count(model=turn.model)
        except (NotFound, InvalidArgument) as error:
            _taken_instead(turn, error)
        return await count()

    async def model(self, name: str, *, any_model: bool) -> pb.Model:
        """The model of this name; with `any_model` the loaded one where there is none."""
        try:
            return await self.client.get_model(name)
        except NotFound:
            if not any_model:
                raise
        return await self.client.get_model("")


class EngineLink:
    """The connections to the engine, for all callers in turn."""

    def __init__(
        self, own: Sequence[AioInferenceClient], large: LargeRequests, peers: Mapping[str, AioInferenceClient]
    ) -> None:
        """`large`: sends large requests of the own clients. `peers`: the engines to which turns may move, by the names
        that the engines know them by. A turn that moves on from a peer is followed too."""
        self._own = own
        self._large = large
        self._peers = peers
        self._next = cycle(own)
        self._asked: asyncio.Task[Wellness] | None = None
        for client in (*own, *peers.values()):
            client.peers |= peers

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        peers: Mapping[str, tuple[str, Tls | None]] = MappingProxyType({}),
    ) -> "EngineLink":
        """`token`: the gateway's own, for its health and for callers without a key. `peers`: addresses by name, where
        callers' tokens hold as well. Raises InvalidArgument."""
        others = {
            name: AioInferenceClient.connect(where, token=token, tls=their_tls)
            for name, (where, their_tls) in peers.items()
        }
        large = LargeRequests(sync_channel(address, tls, READS))
        channels = [aio_channel(address, tls, READS) for _ in range(_CONNECTIONS)]
        return cls([AioInferenceClient(each, token=token, large=large) for each in channels], large, others)

    def of(
        self, token: str | None, beside: Beside = at_once, making: Making = at_once, _namespace: str = ""
    ) -> CallerAtEngine:
        """The engine for the caller with this token; None: for the gateway itself. `making`: makes its requests.
        `_namespace`: the caller's, by which several engines share agents."""
        client = next(self._next)
        if token is None:
            own = copy.copy(client)
            own.making = making
            return CallerAtEngine(own, beside)
        callers = client.with_token(token)
        callers.making = making
        theirs = {name: peer.with_token(token) for name, peer in self._peers.items()}
        for each in (callers, *theirs.values()):
            each.peers |= theirs
        return CallerAtEngine(callers, beside)

    async def wellness(self, within_s: float = 2.0) -> Wellness:
        """Whether the engine answers, reaches its store, and has a model or wakes one. Callers that wait share one
        answer: they need no key."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._wellness(within_s))
        return await asyncio.shield(self._asked)

    async def _wellness(self, within_s: float) -> Wellness:
        try:
            async with asyncio.timeout(within_s):
                stats = await self._own[0].get_stats()
                listed = [] if stats.model else await self._own[0].list_models()
                models = [model for model in listed if not model.only_embeds]
        except TimeoutError:
            return _unwell("ENGINE_HANGS", f"the engine has not answered for {within_s:g} s", engine=False)
        except KvasirError as error:
            return _unwell("ENGINE_UNREACHABLE", f"the engine does not answer ({error.reason})", engine=False)
        if not stats.store_is_reachable:
            return _unwell("STORE_UNREACHABLE", "the engine cannot reach its store: nothing is read or stored there")
        states = {model.state for model in models}
        if states & {pb.MODEL_STATE_LOADING, pb.MODEL_STATE_RETIRING}:
            return _unwell("MODEL_CHANGING", "the engine's model is being changed", store=True)
        if models and not states & {pb.MODEL_STATE_ASLEEP, pb.MODEL_STATE_LOADED}:  # loaded between the two calls
            return _unwell("MODEL_NOT_LOADED", "the engine has no model loaded", store=True)
        failed = sum(each.failed_memories for each in stats.namespaces)
        return Wellness([memories_not_stored(failed)] if failed else [], {"engine": True, "store": True})

    async def models(self, within_s: float = 2.0) -> list[str]:
        """The names of its models; none where it does not answer, or not to the gateway itself."""
        try:
            async with asyncio.timeout(within_s):
                return [model.name for model in await self._own[0].list_models()]
        except (TimeoutError, KvasirError):
            return []

    async def close(self) -> None:
        for client in (*self._own, *self._peers.values()):
            await client.close()
        self._large.close()


async def rules_of(agent_id: str, client: AioInferenceClient, rules: Rules) -> Rules:
    """The rules that an agent's label names, else these."""
    try:
        label = (await client.get_agent(agent_id)).labels.get(volatile.LABEL)
        return Rules(volatile.from_label(label), is_asked=True) if label else rules
    except KvasirError:  # there is no such agent yet, or nobody knows now
        return rules


def _unwell(reason: str, message: str, *, engine: bool = True, store: bool = False) -> Wellness:
    return Wellness([Ailment(reason, message)], {"engine": engine, "store": store})


def _taken_instead(turn: Turn, error: KvasirError) -> Turn:
    """The turn instead of a refused one: of the loaded model, without tools that it may not call, or with unbound ones.
    Raises the refusal if none."""
    if isinstance(error, InvalidArgument):
        error = _as_written(turn, error if turn.thinking is None else turn.thinking.refused(error))
    is_unknown = error.reason == "MODEL_NOT_FOUND"
    if is_unknown and turn.alias:
        raise unknown_alias(turn) from None
    if is_unknown and turn.any_model:
        return replace(turn, model="", any_model=False)
    if error.reason in ("NO_FORCED_CALLS", "NO_RESPONSE_FORMATS") and turn.tool_choice == NO_CALLS:
        return replace(turn, tools=(), tool_choice=None)
    is_of_tools = error.reason in _NOT_BOUND and (error.field or "").startswith("tools")
    if turn.ignore is None or not is_of_tools or not any(tool.strict for tool in turn.tools):
        raise error
    turn.ignore("tools.strict")
    tools = [pb.Tool(name=t.name, description=t.description, parameters_json=t.parameters_json) for t in turn.tools]
    return replace(turn, tools=tuple(tools), ignore=None)


def _as_written(turn: Turn, error: InvalidArgument) -> InvalidArgument:
    """The refusal of a call's arguments, where the request has them."""
    place = _ARGUMENTS.fullmatch(error.field or "")
    if place is None:
        return error
    call = turn.messages[int(place[1])].tool_calls[int(place[2])]
    return renamed(error, call.place) if call.place else error


def sent_messages(turn: Turn) -> SentMessages:
    """The turn's messages as the engine takes them. Raises InvalidArgument."""
    messages = turn.messages if turn.begun is None else (*turn.messages, turn.begun)
    if len(messages) > _MAX_MESSAGES:
        raise InvalidArgument.of("messages", f"expected at most {_MAX_MESSAGES}")
    return message_list([_mapping(message) for message in messages], "messages")


def _mapping(message: Said) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments_json": call.arguments_json} for call in message.tool_calls]
    fields = {"name": message.name, "tool_call_id": message.tool_call_id, "tool_calls": calls}
    fields["reasoning"] = message.reasoning
    given = {name: value for name, value in fields.items() if value}
    return {"role": message.role, "content": message.content, **given}
