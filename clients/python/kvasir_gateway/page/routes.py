"""The page's routes: their callers, and the guard before every part of the page."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from kvasir.errors import Internal, KvasirError, Unauthenticated
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.operating.log_errors import places
from kvasir.server.operating.traces import Traces
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvasir_gateway import errors
from kvasir_gateway.answering import ClientLeft
from kvasir_gateway.door.bodies import RequestRoom, Rooms
from kvasir_gateway.door.connections import show_key
from kvasir_gateway.door.endpoint import Endpoint
from kvasir_gateway.engine import EngineLink
from kvasir_gateway.metrics import GatewayNumbers, is_at
from kvasir_gateway.page.conversation.listing import ConversationList
from kvasir_gateway.page.conversation.talking import SAY_BYTES, Talking
from kvasir_gateway.page.look import (
    FORM_BYTES,
    Answer,
    Handler,
    Look,
    Part,
    Sources,
    form_of,
    goto,
    is_programs,
    is_scripts,
    place_of,
    refusal,
)
from kvasir_gateway.page.managing import Managing
from kvasir_gateway.page.numbers.history import History
from kvasir_gateway.page.numbers.status import Status
from kvasir_gateway.page.operating.part import Operating
from kvasir_gateway.page.rendering import HEADERS, asset, page
from kvasir_gateway.page.sessions import (
    LIFETIME_S,
    Sessions,
    check_own_form,
    check_own_page,
    check_own_site,
    cookie_name,
)

_log = logging.getLogger(__name__)
# Pages of a session lie at its address.
_PLACES = ("/page/", "/page/{session}/")
_Guarded = Callable[[Request, RequestRoom], Awaitable[Answer]]


class GatewayPage:
    """The handlers of all pages."""

    def __init__(
        self,
        engine: EngineLink,
        sessions: Sessions,
        history: History,
        numbers: GatewayNumbers,
        operating: Operating,
        sources: Sources,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._history = history
        self._operating = operating
        self._now = sources.now
        self._first = ConversationList()
        self._parts: Sequence[Part] = (
            self._first,
            Status(history, engine),
            Managing(history),
            Talking(numbers, history, sources),
            operating,
        )

    def routes(self, rooms: Rooms) -> list[Route]:
        """`rooms`: where requests of the page count like all others."""
        pages = [each for part in self._parts for each in part.pages().items()]
        writes = [("logout", self._logout), *(each for part in self._parts for each in part.writes().items())]
        at_root: Sequence[tuple[str, str, _Guarded]] = (
            ("GET", "/", self._front),
            ("POST", "/page/login", self._login),
            ("POST", "/page/code", self._new_code),
            ("GET", "/page/open", self._open),
            ("GET", "/page/assets/{name}", self._asset),
        )
        looks = [("GET", *each) for each in pages] + [("POST", *each) for each in writes]
        in_places = [
            (method, f"{at}{name}", self._looked(name, part)) for at in _PLACES for method, name, part in looks
        ]
        return [self._guarded(method, path, handler, rooms) for method, path, handler in (*at_root, *in_places)]

    def began(self, namespace: str, agent_id: str, started: pb.Started) -> None:
        """Note what a turn reused, and where its prompt parted from its memory, for who may read that."""
        self._history.began(namespace, agent_id, started)

    async def _front(self, request: Request, room: RequestRoom) -> Answer:
        """The first page for browsers. Clients of Ollama's API look here for its words."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("Ollama is running", headers={"vary": "accept"})
        return await self._first.overview(await self._look(request, room))

    async def _login(self, request: Request, room: RequestRoom) -> Response:
        form = await _own_form(request, room, self._sessions.lobby_token)
        key = self._sessions.codes.take(form["code"]) if "code" in form else form.get("key", "").strip()
        opened = self._sessions.begin(key)
        at, name, is_tls = place_of(opened.address), cookie_name(opened.address), request.url.scheme == "https"
        answer = goto(at)
        answer.set_cookie(
            name, opened.cookie, path=at, max_age=LIFETIME_S, httponly=True, samesite="strict", secure=is_tls
        )
        return answer

    async def _new_code(self, request: Request, _room: RequestRoom) -> Answer:
        """A code for whoever shows a key, which no browser does by itself; an empty one where there are no keys."""
        key = self._sessions.key_of(request.headers)
        show_key(request.scope)
        return JSONResponse({"code": self._sessions.codes.new(key) if key is not None else ""}, headers=HEADERS)

    async def _open(self, request: Request, _room: RequestRoom) -> Answer:
        """The form that sends a code; by itself, unless the link may be of somebody else. To look at it uses nothing
        up."""
        code = request.query_params.get("code", "")
        return self._sign_in(200, code=code, confirmed=self._sessions.to_confirm(self._sessions.codes.key(code)))

    def _sign_in(self, status: int, *, problem: str = "", code: str = "", confirmed: str = "") -> Response:
        """`confirmed`: the namespace that a person confirms."""
        shown = {"problem": problem, "code": code, "confirmed": confirmed, "form_token": self._sessions.lobby_token}
        return page("login.html", status, **shown, at="/page/", visitor=None)

    async def _logout(self, look: Look) -> Response:
        name = cookie_name(look.visitor.address)
        self._sessions.end(look.request.cookies.get(name, ""))
        answer = goto("/page/")
        answer.delete_cookie(name, path=look.at)
        return answer

    async def _asset(self, request: Request, _room: RequestRoom) -> Response:
        return asset(request.path_params["name"]) or _error(request, 404, "There is no such file.")

    def _looked(self, name: str, handler: Handler) -> _Guarded:
        async def looked(request: Request, room: RequestRoom) -> Answer:
            return await handler(await self._look(request, room, SAY_BYTES if name == "say" else FORM_BYTES))

        return looked

    async def _look(self, request: Request, room: RequestRoom, most_bytes: int = FORM_BYTES) -> Look:
        """Raises Unauthenticated, ResourceExhausted, and PermissionDenied for a write that no form of ours sent."""
        visitor = self._sessions.visitor(request.headers, request.cookies, request.path_params.get("session", ""))
        show_key(request.scope)
        room.admit(visitor.holder.principal.namespace)
        form: dict[str, str] = {}
        if request.method == "POST":
            form = await _own_form(request, room, visitor.form_token, most_bytes)
        await room.loop_turn.begin(room.namespace, is_read=request.method == "GET")
        caller = self._engine.of(visitor.holder.token, room.beside, room.written, room.namespace)
        is_operator, command = self._operating.is_operator(visitor.holder), self._operating.command(visitor.holder)
        return Look(request, visitor, caller, self._now(), form, is_operator, command)

    def _guarded(self, method: str, path: str, handler: _Guarded, rooms: Rooms) -> Route:
        """The handler's route, with its refusals as pages. A caller without a key gets a form for one."""

        async def answered(request: Request, room: RequestRoom) -> Answer:
            is_at(request.scope, path)
            try:
                check_own_page(request.headers)
                return await handler(request, room)
            except (ClientDisconnect, ClientLeft):
                return Response(status_code=499)  # nobody reads it
            except KvasirError as error:
                await room.loop_turn.begin(room.namespace, is_read=True)  # strangers have not begun
                return self._refused(request, path, error.with_traceback(None))
            except Exception as error:  # noqa: BLE001 - a bug of ours
                told = (path, type(error).__name__, places(error))
                _log.error("page.failed path=%s error=%s at=%s", *told)
                return self._refused(request, path, Internal("a bug of the gateway; see its log"))
            finally:
                room.answered()

        return Route(path, Endpoint(f"{method} {path}", answered, rooms, Traces()), methods=[method])

    def _refused(self, request: Request, path: str, error: KvasirError) -> Response:
        status, problem = errors.http_status(error), error.message
        errors.log_refusal(f"page.refused path={path}", status, error, is_of_stranger=True)
        if is_scripts(request):
            is_out = error.reason == "NO_CREDENTIAL"
            return refusal(status, "the session has ended: reload, and sign in" if is_out else problem)
        if is_programs(request):
            return JSONResponse(errors.kvasir(error, "").body, status, HEADERS)
        if isinstance(error, Unauthenticated):
            return self._sign_in(status, problem="" if error.reason == "NO_CREDENTIAL" else problem)
        return _error(request, status, problem)


async def _own_form(request: Request, room: RequestRoom, token: str, most_bytes: int = FORM_BYTES) -> dict[str, str]:
    """Raises as `form_of`, and PermissionDenied: for another site's form before any of it is read."""
    check_own_site(request.headers)
    form = await form_of(request, room, most_bytes)
    check_own_form(request.headers, form.get("form_token", ""), token)
    return form


def _error(request: Request, status: int, message: str) -> Response:
    at = place_of(request.path_params.get("session", ""))
    return page("error.html", status, message=message, at=at, visitor=None)
