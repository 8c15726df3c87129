"""The application: one row per route, and what every request passes: site, key, size, its API's shape of errors."""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from google.protobuf.message import Message
from kvasir.call_context import name_call
from kvasir.credentials import GATEWAY_MARK
from kvasir.errors import Internal, InvalidArgument, KvasirError, NotFound
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.names import check_agent_id
from kvasir.server.operating.log_errors import places
from kvasir.server.operating.traces import Traces
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvasir_gateway import agents, anthropic_messages, errors, models, openapi
from kvasir_gateway.answering import ClientLeft, EventStream, Ready, StreamForm, Turns, gather, unless_left
from kvasir_gateway.chunks import ReplyStream
from kvasir_gateway.door.bodies import RequestRoom, Rooms
from kvasir_gateway.door.connections import show_key
from kvasir_gateway.door.endpoint import Endpoint
from kvasir_gateway.door.security import Gate, Site
from kvasir_gateway.embedding.asking import embed
from kvasir_gateway.embedding.bodies import EmbeddingsRequest, OllamaEmbed, OllamaEmbeddings
from kvasir_gateway.engine import CallerAtEngine, EngineLink, rules_of
from kvasir_gateway.errors import api_of, refused
from kvasir_gateway.metrics import CountedApp, GatewayNumbers, is_at, route_of
from kvasir_gateway.ollama import models as ollama_models
from kvasir_gateway.ollama import turns as ollama_turns
from kvasir_gateway.openai import chat as openai_chat
from kvasir_gateway.openai import completions as openai_completions
from kvasir_gateway.openai import response_answers as openai_response_answers
from kvasir_gateway.openai import responses as openai_responses
from kvasir_gateway.page.routes import GatewayPage
from kvasir_gateway.reading import heads
from kvasir_gateway.reading.tolerance import Reading, Tolerance
from kvasir_gateway.reading.volatile import BILLING, HEADER
from kvasir_gateway.turn import Asked, Body, Said, Turn, Whole, not_stored

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=Body)
_TIMES_AS_JSON = 8  # of a list's bytes on the wire: its objects, and their JSON


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What a request may take, and all requests that are not answered yet together."""

    max_requests: int = 2000
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: int = 192 << 20


@dataclass(frozen=True, slots=True)
class Surroundings:
    """All that handlers need."""

    engine: EngineLink
    gate: Gate
    turns: Turns
    limits: GatewayLimits
    numbers: GatewayNumbers
    page: GatewayPage
    tolerance: Tolerance
    aliases: models.Aliases
    traces: Traces
    now: Callable[[], float]  # Unix seconds
    clock: Callable[[], float]
    new_request_id: Callable[[], str]
    mark: str = ""  # whose gateway this is


@dataclass(frozen=True, slots=True)
class Call:
    """One request, admitted."""

    request: Request
    caller: CallerAtEngine
    namespace: str
    agent_id: str
    request_id: str
    room: RequestRoom
    reading: Reading


Answer = Response | EventStream


class Gateway:
    """The handlers of all routes."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._document = json.dumps(openapi.document(version("kvasir"))).encode()
        self._rooms = Rooms(around.limits.max_requests, around.limits.max_bodies_bytes)

    def app(self) -> ASGIApp:
        post = partial(self._route, methods=["POST"])
        get = partial(self._route, methods=["GET"])
        routes = [
            post("/v1/chat/completions", self._chat_completions),
            post("/v1/completions", self._completions),
            post("/v1/responses", self._responses),
            post("/v1/messages", self._messages),
            post("/v1/embeddings", partial(self._embeddings, kind=EmbeddingsRequest)),
            post("/v1/messages/count_tokens", self._count_tokens),
            post("/v1/agents/{agent_id:path}/generate", self._agent_generate),
            post("/v1/agents/{agent_id:path}/fork", self._fork_agent),
            post("/v1/agents/{agent_id:path}/rollback", self._rollback_agent),
            get("/v1/agents/{agent_id:path}/versions", self._list_versions),
            get("/v1/agents", self._list_agents),
            get("/v1/agents/{agent_id:path}", self._get_agent),
            self._route("/v1/agents/{agent_id:path}", self._delete_agent, methods=["DELETE"]),
            get("/v1/models", self._list_models),
            get("/v1/models/{name:path}", self._get_model),
            post("/api/chat", partial(self._ollama, kind=ollama_turns.OllamaChat)),
            post("/api/generate", partial(self._ollama, kind=ollama_turns.OllamaGenerate)),
            post("/api/embed", partial(self._embeddings, kind=OllamaEmbed)),
            post("/api/embeddings", partial(self._embeddings, kind=OllamaEmbeddings)),
            post("/api/show", self._ollama_show),
            get("/api/tags", partial(self._ollama_models, shown=ollama_models.tags)),
            get("/api/ps", partial(self._ollama_models, shown=ollama_models.running)),
            get("/api/version", self._ollama_version),
            get("/healthz", self._healthz, is_open=True),
            get("/openapi.json", self._describe, is_open=True),
            *self._around.page.routes(self._rooms),
        ]
        handlers: Mapping[Any, Any] = {HTTPException: _refuse_route}
        app = Site(Starlette(routes=routes, exception_handlers=handlers), self._around.gate)
        return CountedApp(app, self._around.numbers)

    async def _chat_completions(self, call: Call) -> Answer:
        asked = await self._body(call, openai_chat.ChatRequest)
        wants_ids = bool(asked.return_token_ids)
        return await self._answer(
            call,
            partial(asked.turn, call.reading),
            partial(openai_chat.whole, wants_ids=wants_ids),
            partial(openai_chat.ChatChunks, wants_usage=asked.wants_usage, wants_ids=wants_ids),
        )

    async def _completions(self, call: Call) -> Answer:
        asked = await self._body(call, openai_completions.CompletionRequest)
        wants_ids = bool(asked.return_token_ids)
        whole = partial(openai_completions.whole, wants_ids=wants_ids)
        chunks = partial(openai_completions.CompletionChunks, wants_usage=asked.wants_usage, wants_ids=wants_ids)
        return await self._answer(call, partial(asked.turn, call.reading), whole, chunks)

    async def _responses(self, call: Call) -> Answer:
        asked = await self._body(call, openai_responses.ResponsesRequest)
        before = await unless_left(call.request.receive, self._earlier(call, asked))
        call.room.bill_earlier(sum(len(said.content) for said in before))
        repeated = asked.model_copy(update={"input": "", "client_metadata": None})
        whole = partial(openai_response_answers.whole, request=repeated, seals=call.reading.seals)
        chunks = partial(openai_response_answers.ResponseEvents, request=repeated, seals=call.reading.seals)
        return await self._answer(call, partial(asked.turn, call.reading, before), whole, chunks)

    async def _earlier(self, call: Call, asked: openai_responses.ResponsesRequest) -> Sequence[Said]:
        """The messages until the previous response; references to items give way to the items. Raises NotFound."""
        places = await call.room.made(partial(openai_responses.references, asked.input))
        previous = None
        if asked.previous_response_id is not None:
            previous = openai_responses.place_of(asked.previous_response_id)
            asked.follows(previous, is_append=heads.appends(call.request))
        wanted = {*places.values(), *([previous] if previous is not None else ())}
        said = await call.caller.records.said_until(wanted, self._around.turns.digests_of) if wanted else {}
        for number, place in places.items():
            given = asked.input[number]["id"]  # type: ignore[index]  # it is a list: it has references
            if place not in said:
                raise openai_responses.lost(given, f"input[{number}].id")
            asked.input[number] = openai_responses.referenced(given, place, said[place][-1])  # type: ignore[index]
        if previous is None:
            return ()
        if previous not in said:
            raise openai_responses.lost(str(asked.previous_response_id))
        begins_with_them = previous.had_instructions and said[previous][0].role == "system"
        # No instructions are appended to an agent's memory: its own ones give way to new ones only.
        before = said[previous][: -1 - previous.number]
        is_agents_own = any(each.role != "system" for each in before) and not asked.instructions
        return said[previous][1:] if begins_with_them and not is_agents_own else said[previous]

    async def _messages(self, call: Call) -> Answer:
        asked = await self._body(call, anthropic_messages.MessagesRequest)
        shown: dict[str, Any] = {"seals": call.reading.seals, "shows_thinking": asked.shows_thinking}
        whole = partial(anthropic_messages.whole, **shown)
        chunks = partial(anthropic_messages.MessageEvents, **shown)
        return await self._answer(call, partial(asked.turn, call.reading), whole, chunks)

    async def _count_tokens(self, call: Call) -> Response:
        asked = await self._body(call, anthropic_messages.CountedMessages)
        ready = await call.room.made(partial(self._ready, call, partial(asked.turn, call.reading)))
        ready = ready.if_new or ready  # all messages, also those that a turn would not append
        count = await unless_left(call.request.receive, call.caller.count(ready.turn, ready.messages))
        return JSONResponse({"input_tokens": count}, headers=self._reported(call))

    async def _embeddings(self, call: Call, kind: type[EmbeddingsRequest | OllamaEmbed | OllamaEmbeddings]) -> Response:
        asked: EmbeddingsRequest | OllamaEmbed | OllamaEmbeddings = await self._body(call, kind)
        began_s, wanted = self._around.clock(), asked.wanted(call.reading)
        if (model := self._around.aliases.model(wanted.model)) != wanted.model:
            wanted = replace(wanted, model=model, any_model=False)
        found = await unless_left(call.request.receive, embed(call.caller.client, wanted))
        found.took_s = self._around.clock() - began_s
        answer = await call.room.rendered(partial(asked.answer, found), asked.answer_bytes(found))
        headers = {"x-request-id": call.request_id, **self._reported(call)}
        return Response(answer, headers=headers, media_type="application/json")

    async def _agent_generate(self, call: Call) -> Answer:
        named = replace(
            call, agent_id=heads.agent_in_path(call.request), reading=Reading(is_strict=True, rules=call.reading.rules)
        )
        asked = await self._body(named, agents.AgentTurn)
        return await self._answer(named, partial(asked.turn, named.reading), agents.whole, agents.AgentEvents)

    async def _list_agents(self, call: Call) -> Response:
        name_prefix = call.request.query_params.get("name_prefix", "")
        found = await call.caller.client.list_agents(name_prefix=name_prefix, **heads.page(call.request))
        return await self._listed(call, found)

    async def _get_agent(self, call: Call) -> Response:
        name = heads.agent_in_path(call.request)
        return JSONResponse(agents.shown(await call.caller.at(name).get_agent(name)))

    async def _list_versions(self, call: Call) -> Response:
        name = heads.agent_in_path(call.request)
        return await self._listed(call, await call.caller.at(name).list_snapshots(name, **heads.page(call.request)))

    async def _listed(self, call: Call, found: Message) -> Response:
        made = await call.room.rendered(partial(agents.written, found), _TIMES_AS_JSON * found.ByteSize())
        return Response(made, media_type="application/json")

    async def _fork_agent(self, call: Call) -> Response:
        asked = await self._body(call, agents.ForkRequest)
        source, name = heads.agent_in_path(call.request), check_agent_id(asked.agent_id)
        forked = await call.caller.at(source).fork_agent(source, name, version=asked.version)
        return JSONResponse(agents.shown(forked), 201)

    async def _rollback_agent(self, call: Call) -> Response:
        asked = await self._body(call, agents.RollbackRequest)
        name = heads.agent_in_path(call.request)
        made = await call.caller.at(name).rollback_agent(name, asked.version, expected_version=asked.expected_version)
        return JSONResponse(agents.shown(made))

    async def _delete_agent(self, call: Call) -> Response:
        force = call.request.query_params.get("force", "false")
        if force not in ("true", "false"):
            raise InvalidArgument.of("force", "expected true or false")
        name = heads.agent_in_path(call.request)
        return JSONResponse(agents.shown(await call.caller.at(name).delete_agent(name, force=force == "true")))

    async def _list_models(self, call: Call) -> Response:
        found = await call.caller.client.list_models()
        for_anthropic = "anthropic-version" in call.request.headers
        return JSONResponse(models.listed(found, self._around.aliases, for_anthropic=for_anthropic))

    async def _get_model(self, call: Call) -> Response:
        name = call.request.scope["path"].removeprefix("/v1/models/")  # of which a route leaves out a last line's end
        if not name:  # some clients end a list's path with a slash
            return await self._list_models(call)
        found = await call.caller.client.get_model(self._around.aliases.model(name))
        return JSONResponse(models.one(name, found, for_anthropic="anthropic-version" in call.request.headers))

    async def _ollama(self, call: Call, kind: type[ollama_turns.OllamaChat | ollama_turns.OllamaGenerate]) -> Answer:
        asked: ollama_turns.OllamaChat | ollama_turns.OllamaGenerate = await self._body(call, kind)
        is_chat = kind is ollama_turns.OllamaChat
        turn = await call.room.made(partial(asked.turn, call.reading))
        if turn is None:
            found = await call.caller.model(ollama_turns.named(asked.model), any_model=call.reading.any_model)
            return JSONResponse(ollama_turns.loaded(int(self._around.now()), found.name, is_chat=is_chat))
        whole = partial(ollama_turns.whole, is_chat=is_chat, shows_thinking=asked.shows_thinking)
        lines = partial(ollama_turns.OllamaLines, is_chat=is_chat, shows_thinking=asked.shows_thinking)
        return await self._answer(call, lambda: turn, whole, lines)

    async def _ollama_show(self, call: Call) -> Response:
        asked = await self._body(call, ollama_models.ShowRequest)
        return JSONResponse(ollama_models.shown(await call.caller.model(asked.asked, any_model=call.reading.any_model)))

    async def _ollama_models(self, call: Call, shown: Callable[[Sequence[pb.Model]], dict[str, Any]]) -> Response:
        return JSONResponse(shown(await call.caller.client.list_models()))

    async def _ollama_version(self, _call: Call) -> Response:
        return JSONResponse({"version": ollama_models.VERSION})

    async def _healthz(self, _call: Call) -> Response:
        wellness = await self._around.engine.wellness()
        return JSONResponse(wellness.body(), wellness.http_status, {GATEWAY_MARK: self._around.mark})

    async def _describe(self, _call: Call) -> Response:
        return Response(self._document, media_type="application/json")

    async def _answer(
        self, call: Call, translate: Callable[[], Turn], whole: Whole, chunks: Callable[[Asked], ReplyStream]
    ) -> Answer:
        """A turn's answer in an API's words. The stream's status is sent once the turn has begun, so that a refusal
        has a status of its own."""
        turns = self._around.turns
        ready = await call.room.made(partial(self._ready, call, translate))
        # Among several namespaces a turn gives way to others', which one that keeps a cut reply does not.
        keeps_partial = len(self._around.gate.namespaces) < 2
        looking = turns.memory(ready, call.caller, call.namespace, call.agent_id, keeps_partial=keeps_partial)
        memory = await unless_left(call.request.receive, looking)
        call.reading.side_call = memory.side_call
        ready = ready.using(memory)
        turn = ready.turn
        asked = Asked(
            request_id=call.request_id,
            created=int(self._around.now()),
            model=turn.model,
            agent_id=memory.agent_id,
            messages=len(turn.messages),
            digest=ready.digest,
        )
        events = turns.events(ready, call.caller, memory, call.request_id)
        headers = {"x-request-id": call.request_id, "request-id": call.request_id, **self._reported(call)}
        try:
            if not turn.is_streamed:
                reply = await unless_left(call.request.receive, gather(events))
                memory.left()
                headers |= self._told(call, memory.agent_id, turn, reply.started)
                headers |= not_stored(reply.finished, "x-kvasir-not-stored")
                return JSONResponse(whole(asked, reply), headers=headers)
            first = await unless_left(call.request.receive, anext(events))
            headers |= self._told(call, memory.agent_id, turn, first.started)
        except BaseException:
            try:
                await events.aclose()
            finally:
                memory.left()
            raise
        api = api_of(call.request.url.path)
        error_event = partial(errors.ended_by, api, call.request_id)
        form = StreamForm(chunks(asked), error_event, {**headers, "content-type": api.stream_type})
        return EventStream(first, events, form, memory.left, self._around.numbers, self._around.clock)

    def _told(self, call: Call, agent_id: str, turn: Turn, started: pb.Started) -> dict[str, str]:
        """What is known once a turn has begun, for its reader and for the operator's page."""
        self._around.page.began(call.namespace, agent_id, started)
        return heads.told(call.reading, agent_id, turn, started) | self._reported(call)

    def _ready(self, call: Call, translate: Callable[[], Turn]) -> Ready:
        """The turn, with the request's settings beside its body. In any thread. Raises InvalidArgument."""
        reading = call.reading
        turn = heads.with_memory(call.request, call.agent_id, translate())
        side_rules = () if call.agent_id or turn.memory else reading.side_rules
        turn = replace(turn, any_model=reading.any_model, ignore=None if reading.is_strict else reading.ignore)
        turn = replace(turn, memory={**turn.memory, "volatile": reading.rules.for_engine()})
        is_exact = not reading.rules.names  # as if no rule were known
        turns = self._around.turns
        ready = turns.ready(self._around.aliases.applied(turn), side_rules, is_exact=is_exact)
        return turns.appended(ready) if heads.appends(call.request) else ready

    async def _body(self, call: Call, kind: type[_Body]) -> _Body:
        data = await call.room.read(call.request, self._around.limits.max_body_bytes)
        await call.room.loop_turn.begin(call.room.namespace, is_read=False)
        if call.agent_id and not call.reading.rules.is_asked and await call.room.made(lambda: BILLING.encode() in data):
            client = call.caller.at(call.agent_id)
            call.reading.rules = await rules_of(call.agent_id, client, call.reading.rules)

        def parse(data: bytearray) -> _Body:
            try:
                body = kind.model_validate_json(data)
                call.reading.check(body)
                return body
            except ValidationError as error:
                refusal = errors.malformed(error)
            raise refusal  # not from that error, which has all that was parsed

        return await call.room.parsed(data, parse)

    def _reported(self, call: Call) -> dict[str, str]:
        """What was not taken as it was sent, once the request is translated."""
        self._around.tolerance.log(route_of(call.request.url.path), call.reading)
        return call.reading.headers()

    def _route(
        self, path: str, handler: Callable[[Call], Awaitable[Any]], *, methods: list[str], is_open: bool = False
    ) -> Route:
        async def answered(request: Request, room: RequestRoom) -> Any:
            request_id = self._around.new_request_id()
            is_at(request.scope, path)
            try:
                call = self._admitted(request, is_open, request_id, room)
                request_id = call.request_id
                name_call(request_id)
                if methods != ["POST"]:  # a body comes first
                    await room.loop_turn.begin(room.namespace, is_read=methods == ["GET"])
                return await handler(call)
            except (ClientLeft, ClientDisconnect):
                self._around.numbers.disconnects += 1
                return Response(status_code=499)  # nobody reads it
            except KvasirError as error:
                # Some of its frames hold it, and all that was made of the request: later, the loop would free that.
                return refused(request, error.with_traceback(None), request_id)
            except Exception as error:  # noqa: BLE001 - a bug of ours
                told = (request_id, path, type(error).__name__, places(error))
                _log.error("request.failed request_id=%s path=%s error=%s at=%s", *told)
                return refused(request, Internal(f"a bug of the gateway, in request {request_id}"), request_id)
            finally:
                room.answered()

        traces = self._around.traces if not is_open else Traces()
        endpoint = Endpoint(f"{methods[0]} {route_of(path)}", answered, self._rooms, traces)
        return Route(path, endpoint, methods=methods)

    def _admitted(self, request: Request, is_open: bool, new_request_id: str, room: RequestRoom) -> Call:
        holder = None if is_open else self._around.gate.holder(request.headers)
        if holder is not None:
            show_key(request.scope)
            room.admit(holder.principal.namespace)
        return Call(
            request=request,
            caller=self._around.engine.of(
                holder.token if holder is not None else None, room.beside, room.written, room.namespace
            ),
            namespace=room.namespace,
            agent_id=heads.agent_of(request),
            request_id=heads.request_id(request, new_request_id),
            room=room,
            reading=self._around.tolerance.reading(request.headers.get(HEADER), room.namespace),
        )


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    if error.status_code == 405:
        headers = error.headers or {}
        what = f"this path takes {headers.get('Allow', 'other methods')}, not {request.method}"
        answer = refused(request, errors.NotAllowed(what), "")
        answer.headers.update(headers)
        return answer
    which = "the base URL of OpenAI's clients ends in /v1, that of Anthropic's and Ollama's does not"
    path = request.url.path[:200]
    return refused(request, NotFound(f"there is no path {path} here: {which}", reason="PATH_NOT_FOUND"), "")
