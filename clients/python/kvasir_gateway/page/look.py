"""One request of somebody who may see the page: the caller, the subject, and how the answer is shown."""

import re
from binascii import a2b_qp
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvasir.clients import AioInferenceClient
from kvasir.errors import InvalidArgument
from kvasir.formats.digest import is_hash
from kvasir.names import check_agent_id
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kvasir_gateway.answering import EventStream
from kvasir_gateway.door.bodies import RequestRoom
from kvasir_gateway.engine import CallerAtEngine
from kvasir_gateway.page.rendering import HEADERS, link, page
from kvasir_gateway.page.sessions import Visitor
from kvasir_gateway.turn import sse

FORM_BYTES = 16 << 10
_MOST_FIELDS = 16
_PART_BYTES = 16 << 10  # of a form at once: a longer call into C would keep the interpreter from the event loop
_NO_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
# A page's line after a write, by the word in its address.
DONE = {
    "cancel": "The turn was ended.",
    "load": "The model is loaded.",
    "unload": "The model is unloaded. The next turn of it is refused until it is loaded again.",
    "label": "The label is set.",
    "move": "The agent has moved. Here is what was copied.",
    "rename": "This is its title now.",
    "pin": "It is pinned: it stays at the top, and nothing makes room by dropping it.",
    "unpin": "It is pinned no longer.",
    "branch": "This is a conversation of its own now. The one that it came from stays as it is.",
    "fork": "This agent was made. It shares its memory with the one it came from until they part.",
    "rollback": "The version is the newest again, as a new one. Nothing was removed.",
    "revoke": "The token is removed. Its calls have ended.",
    "unpair": "It is no peer any more. Its running calls were ended, and its key opens nothing here.",
    "delete": "The agent was deleted. Bytes that nothing else uses go after the grace period.",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """What parts of the page would else take from the system."""

    now: Callable[[], float]  # Unix seconds
    clock: Callable[[], float]  # seconds of any beginning
    new_id: Callable[[], str]  # hex digits that are new each time


@dataclass(frozen=True, slots=True)
class Look:
    """One request of somebody who may see the page."""

    request: Request
    visitor: Visitor
    caller: CallerAtEngine
    now: float  # Unix seconds
    form: dict[str, str]
    is_operator: bool = False
    command: Callable[[str], str] = "kvasir {}".format  # words as a person types them

    @property
    def client(self) -> AioInferenceClient:
        """An engine. About one agent, `caller.at` knows more, where there are several."""
        return self.caller.client

    @property
    def namespace(self) -> str:
        return self.visitor.holder.principal.namespace

    @property
    def at(self) -> str:
        return place_of(self.visitor.address)

    @property
    def is_scripts(self) -> bool:
        """A script of ours calls, not a person who goes to an address."""
        return is_scripts(self.request)

    def shown(self, template: str, /, **values: Any) -> Response:
        values.update(visitor=self.visitor, at=self.at, namespace=self.namespace, now=self.now)
        values.update(is_operator=self.is_operator, command=self.command)
        return page(template, done=DONE.get(self.query("done"), ""), **values)

    def goto(self, name: str = "", **query: str) -> Response:
        return goto(f"{self.at}{name}", **query)

    def query(self, name: str) -> str:
        return self.request.query_params.get(name, "")

    def named(self) -> str:
        """The agent that the form is about. Raises InvalidArgument."""
        return check_agent_id(self.form.get("id", ""), "id")


Answer = Response | EventStream
Handler = Callable[[Look], Awaitable[Answer]]


class Part(Protocol):
    """A part of the page: what it shows and what it changes, by the names that stand behind a session's address."""

    def pages(self) -> Mapping[str, Handler]: ...

    def writes(self) -> Mapping[str, Handler]: ...


def is_scripts(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def is_programs(request: Request) -> bool:
    """A program shows a key, which no browser does by itself, and wants no HTML."""
    headers = request.headers
    has_key = "authorization" in headers or "x-api-key" in headers
    return has_key and "text/html" not in headers.get("accept", "")


def refusal(status: int, message: str) -> Response:
    """A refusal for a script of ours, in the form in which a stream has it."""
    headers = {**HEADERS, "content-type": "text/event-stream"}
    return Response(sse({"problem": message}, "refused"), status, headers)


def place_of(address: str) -> str:
    """Where the pages of a session lie, or those of callers without one."""
    return f"/page/{address}/" if address else "/page/"


def goto(path: str, **query: str) -> Response:
    return RedirectResponse(link(path, **query), 303)


def version_of(chosen: str) -> tuple[str, int]:
    """A line's KV identity and a version of it, as forms and links have them: "hash:3". Raises InvalidArgument."""
    line, _, version = chosen.partition(":")
    if not is_hash(line) or re.fullmatch("[1-9][0-9]{0,17}", version) is None:
        raise InvalidArgument.of("version", "expected a version that the page lists")
    return line, int(version)


async def form_of(request: Request, room: RequestRoom, most_bytes: int = FORM_BYTES) -> dict[str, str]:
    """The fields of a form, each once. Raises BodyTooLarge, InvalidArgument, ResourceExhausted without room for it, and
    DeadlineExceeded."""
    data = await room.read(request, most_bytes)
    return await room.made(lambda: _fields(data))


def _fields(data: bytearray) -> dict[str, str]:
    """As `urllib.parse.parse_qs` with `keep_blank_values`, whose Python takes a tenth of a second for a megabyte of
    escapes. Raises InvalidArgument."""
    fields = data.split(b"&", _MOST_FIELDS)
    if len(fields) > _MOST_FIELDS:
        raise InvalidArgument(f"the form has more than {_MOST_FIELDS} fields")
    try:
        data.decode()
        return {_text(name): _text(value) for name, _, value in (each.partition(b"=") for each in fields if each)}
    except UnicodeDecodeError:
        raise InvalidArgument("the form is no URL-encoded UTF-8") from None


def _text(encoded: bytearray) -> str:
    """Raises UnicodeDecodeError."""
    return b"".join(map(_unescaped, _parts(encoded))).decode()


def _unescaped(part: bytearray) -> bytes:
    """Python's library unescapes in C what is quoted-printable: "=" before the hex digits in place of "%"."""
    escaped = _NO_ESCAPE.sub(b"%25", part)  # a sign that stands for itself
    return a2b_qp(escaped.replace(b"+", b" ").replace(b"=", b"=3D").replace(b"%", b"="))


def _parts(encoded: bytearray) -> Iterator[bytearray]:
    """Pieces that cut no escape."""
    begin = 0
    while begin < len(encoded):
        end = begin + _PART_BYTES
        if (sign := encoded.rfind(b"%", end - 2, end)) >= 0 and end < len(encoded):
            end = sign
        yield encoded[begin:end]
        begin = end
