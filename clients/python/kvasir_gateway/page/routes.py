"""The page's routes: their callers, their content, and the writes, which are forms of our own."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from kvasir.clients import AioInferenceClient
from kvasir.errors import Internal, InvalidArgument, KvasirError, Unauthenticated
from kvasir.formats.digest import is_hash
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.names import check_agent_id, check_request_id
from kvasir.server.operating.log_errors import places
from kvasir.waits import SILENCE_S
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from kvasir_gateway import errors
from kvasir_gateway.door.connections import show_key
from kvasir_gateway.engine import EngineLink
from kvasir_gateway.metrics import is_at
from kvasir_gateway.page import looking
from kvasir_gateway.page.history import History
from kvasir_gateway.page.rendering import asset, link, page
from kvasir_gateway.page.sessions import COOKIE, LIFETIME_S, Sessions, Visitor, check_own_form, check_own_page

_log = logging.getLogger(__name__)
_MAX_FORM_BYTES = 16 << 10
# Pages of a session lie at its address.
_PLACES = ("/page/", "/page/{session}/")
# What a page says after a write, by the word in its address.
_DONE = {
    "cancel": "The turn was ended.",
    "fork": "This agent was made. It shares its memory with the one it came from until they part.",
    "rollback": "The version is the newest again, as a new one. Nothing was removed.",
    "delete": "The agent was deleted. Bytes that nothing else uses go after the grace period.",
}


@dataclass(frozen=True, slots=True)
class Look:
    """One request of somebody who may see the page."""

    request: Request
    visitor: Visitor
    client: AioInferenceClient
    now: float  # Unix seconds
    form: dict[str, str]

    @property
    def namespace(self) -> str:
        return self.visitor.holder.principal.namespace

    @property
    def at(self) -> str:
        return _place(self.visitor.address)

    def shown(self, template: str, /, **values: Any) -> Response:
        values.update(visitor=self.visitor, at=self.at, namespace=self.namespace, now=self.now)
        return page(template, done=_DONE.get(self.query("done"), ""), **values)

    def goto(self, name: str = "", **query: str) -> Response:
        return _goto(f"{self.at}{name}", **query)

    def query(self, name: str) -> str:
        return self.request.query_params.get(name, "")


class GatewayPage:
    """The handlers of all pages."""

    def __init__(self, engine: EngineLink, sessions: Sessions, history: History, *, now: Callable[[], float]) -> None:
        self._engine = engine
        self._sessions = sessions
        self._history = history
        self._now = now

    def routes(self) -> list[Route]:
        pages = [("", self._overview), ("turns", self._turns), ("agent", self._agent), ("messages", self._messages)]
        writes = {
            each.__name__.strip("_"): each
            for each in (self._cancel, self._fork, self._rollback, self._delete, self._logout)
        }
        return [
            self._guarded("/", self._front, methods=["GET"]),
            self._guarded("/page/login", self._login, methods=["POST"]),
            self._guarded("/page/assets/{name}", self._asset, methods=["GET"]),
            *(self._route(at, name, handler, methods=["GET"]) for at in _PLACES for name, handler in pages),
            *(self._route(at, name, handler, methods=["POST"]) for at in _PLACES for name, handler in writes.items()),
        ]

    def part(self, namespace: str, agent_id: str, started: pb.Started) -> None:
        """Note where a turn's prompt parted from its memory, for who may read that."""
        self._history.part(namespace, agent_id, started)

    async def _front(self, request: Request) -> Response:
        """The overview for browsers. Clients of Ollama's API look here for its words."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("Ollama is running", headers={"vary": "accept"})
        return await self._overview(await self._look(request))

    async def _overview(self, look: Look) -> Response:
        prefix, token = look.query("prefix"), look.query("page_token")
        health, usage, turns, agents = await asyncio.gather(
            looking.panel(looking.health(look.client, look.namespace)),
            looking.panel(look.client.get_usage()),
            looking.panel(look.client.list_turns()),
            looking.panel(looking.agents(look.client, prefix, token)),
        )
        namespace = look.namespace
        if health.value is not None:
            namespace = health.value.mine.namespace
            self._history.note(health.value.mine)
        reuse = looking.reuse(self._history, namespace, look.namespace)
        return look.shown(
            "overview.html",
            health=health,
            usage=usage,
            turns=turns,
            agents=agents,
            reuse=reuse,
            prefix=prefix,
            page_token=token,
        )

    async def _turns(self, look: Look) -> Response:
        """The live turns alone, for the script that renews them."""
        return look.shown("turns.html", turns=await looking.panel(look.client.list_turns()))

    async def _agent(self, look: Look) -> Response:
        name = check_agent_id(look.query("id"), "id")
        seen = await looking.agent(look.client, name, look.query("page_token"))
        return look.shown("agent.html", seen=seen, paged=bool(look.query("page_token")))

    async def _messages(self, look: Look) -> Response:
        name = check_agent_id(look.query("id"), "id")
        line, version = _version_of(look.query("version"))
        seen = await looking.remembered(look.client, name, line, version)
        return look.shown("messages.html", name=name, seen=seen)

    async def _cancel(self, look: Look) -> Response:
        await look.client.cancel_turn(check_request_id(look.form.get("request_id", "")))
        return look.goto(done="cancel")

    async def _fork(self, look: Look) -> Response:
        name = check_agent_id(look.form.get("name", ""), "name")
        line, version = _version_of(look.form.get("version", ""))
        await look.client.fork_agent(_named(look), name, line, version)
        return look.goto("agent", id=name, done="fork")

    async def _rollback(self, look: Look) -> Response:
        line, version = _version_of(look.form.get("version", ""))
        _, head = _version_of(look.form.get("head", ""))
        await look.client.rollback_agent(_named(look), version, line, expected_version=head)
        return look.goto("agent", id=_named(look), done="rollback")

    async def _delete(self, look: Look) -> Response:
        if look.form.get("typed") != _named(look):
            raise InvalidArgument(
                "typed: expected the agent's name, letter by letter; nothing was deleted", field="typed"
            )
        await look.client.delete_agent(_named(look), force="force" in look.form)
        return look.goto(done="delete")

    async def _login(self, request: Request) -> Response:
        form = await _form(request)
        check_own_form(request.headers, form.get("form_token", ""), self._sessions.lobby_token)
        opened = self._sessions.begin(form.get("key", "").strip())
        at, is_tls = _place(opened.address), request.url.scheme == "https"
        answer = _goto(at)
        answer.set_cookie(
            COOKIE, opened.cookie, path=at, max_age=LIFETIME_S, httponly=True, samesite="strict", secure=is_tls
        )
        return answer

    async def _logout(self, look: Look) -> Response:
        self._sessions.end(look.request.cookies.get(COOKIE, ""))
        answer = _goto("/page/")
        answer.delete_cookie(COOKIE, path=look.at)
        return answer

    async def _asset(self, request: Request) -> Response:
        return asset(request.path_params["name"]) or _error(request, 404, "There is no such file.")

    def _route(
        self, at: str, name: str, handler: Callable[[Look], Awaitable[Response]], *, methods: list[str]
    ) -> Route:
        async def looked(request: Request) -> Response:
            return await handler(await self._look(request))

        return self._guarded(f"{at}{name}", looked, methods=methods)

    async def _look(self, request: Request) -> Look:
        """Raises Unauthenticated, and PermissionDenied for a write that no form of ours sent."""
        visitor = self._sessions.visitor(request.headers, request.cookies, request.path_params.get("session", ""))
        show_key(request.scope)
        form: dict[str, str] = {}
        if request.method == "POST":
            form = await _form(request)
            check_own_form(request.headers, form.get("form_token", ""), visitor.form_token)
        return Look(request, visitor, self._engine.of(visitor.holder.token).client, self._now(), form)

    def _guarded(self, path: str, handler: Callable[[Request], Awaitable[Response]], *, methods: list[str]) -> Route:
        """The handler's route, with its refusals as pages. Who has shown no key is asked for one."""

        async def endpoint(request: Request) -> Response:
            is_at(request.scope, path)
            try:
                check_own_page(request.headers)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Unauthenticated as error:
                problem = "" if error.reason == "NO_CREDENTIAL" else error.message
                refusal: KvasirError = error
            except KvasirError as error:
                problem, refusal = error.message, error
            except Exception as error:  # noqa: BLE001 - a bug of ours
                told = (path, type(error).__name__, places(error))
                _log.error("page.failed path=%s error=%s at=%s", *told)
                problem = "a bug of the gateway; its log says where"
                refusal = Internal(problem)
            status = errors.http_status(refusal)
            errors.log_refusal(f"page.refused path={path}", status, refusal, is_of_stranger=True)
            if isinstance(refusal, Unauthenticated):
                token = self._sessions.lobby_token
                return page("login.html", status, problem=problem, form_token=token, at="/page/", visitor=None)
            return _error(request, status, problem)

        return Route(path, endpoint, methods=methods)


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form, each once. Raises BodyTooLarge, InvalidArgument."""
    data = bytearray()
    try:
        async with asyncio.timeout(SILENCE_S):
            async for piece in request.stream():
                data += piece
                if len(data) > _MAX_FORM_BYTES:
                    raise errors.BodyTooLarge(f"the form has more than {_MAX_FORM_BYTES} bytes")
    except TimeoutError:
        raise InvalidArgument(f"the form did not come within {SILENCE_S:g} s") from None
    try:
        fields = parse_qs(data.decode(), keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError:
        raise InvalidArgument("the form is no URL-encoded UTF-8") from None
    return {name: values[-1] for name, values in fields.items()}


def _named(look: Look) -> str:
    return check_agent_id(look.form.get("id", ""), "id")


def _version_of(chosen: str) -> tuple[str, int]:
    """A line's KV identity and a version of it, as forms and links have them: "hash:3"."""
    line, _, version = chosen.partition(":")
    if not is_hash(line) or re.fullmatch("[1-9][0-9]{0,17}", version) is None:
        raise InvalidArgument("version: expected a version that the page lists", field="version")
    return line, int(version)


def _place(address: str) -> str:
    """Where the pages of a session lie, or those of callers without one."""
    return f"/page/{address}/" if address else "/page/"


def _error(request: Request, status: int, message: str) -> Response:
    at = _place(request.path_params.get("session", ""))
    return page("error.html", status, message=message, at=at, visitor=None)


def _goto(path: str, **query: str) -> Response:
    return RedirectResponse(link(path, **query), 303)
