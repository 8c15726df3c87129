"""Who may call: Host and Origin, sizes of heads and bodies, and API keys, which are tokens of Kvasir's credential file.

A browser that was led to another site may send requests to a server on its own machine. It says so in Host (DNS
rebinding) or in Origin; both are refused unless they were named. So is a key that no credential has, in constant time.
"""

import asyncio
import ipaddress
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.credentials import ADMIN, CLIENT, OWNER, Credentials, Principal
from kvasir.errors import DeadlineExceeded, KvasirError, PermissionDenied, ResourceExhausted, Unauthenticated
from kvasir.server.audit import REFUSED, Audit
from kvasir.server.fair_shares import Shares
from kvasir.server.log_errors import StrangersLines
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvasir_gateway.errors import BodyTooLarge, refused

_LOCAL_NAMES = frozenset({"localhost"})
_MAX_KEY_CHARS = 4096
_MAX_HEAD_BYTES = 64 << 10
_HEAD_S = 30.0  # for a whole head, from the connection or from the answer before
_SENDING_S = 60.0  # for a whole body
_READING_S = 60.0  # in which the reader of an answer takes some of it
_EXPOSED = ("x-request-id", "request-id", "x-agent-id", "x-agent-memory", "retry-after")


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """The caller of a request. The token is handed on to the engine, which checks it again; None: the gateway's own."""

    principal: Principal
    token: str | None


class Gate:
    """Decides from a request's headers alone, before any of its body is read."""

    def __init__(
        self,
        credentials: Credentials | None,
        *,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        audit: Audit | None = None,
    ) -> None:
        """`credentials` None: callers need no key, and act as the gateway itself does. `hosts`: names by which this
        server is known, beside loopback addresses. `origins`: whole origins, as "https://app.example"."""
        self._credentials = credentials
        self._audit = audit or Audit()
        self._strangers = StrangersLines(time.monotonic)
        self._hosts = frozenset(host.lower() for host in hosts)
        self.origins = frozenset(origin.lower() for origin in origins)

    def take(self, credentials: Credentials) -> None:
        """From now on these keys hold. The engine ends the turns of the others."""
        self._credentials = credentials

    @property
    def has_keys(self) -> bool:
        """Whether callers must show a key."""
        return self._credentials is not None

    def check_local(self, headers: Mapping[str, str]) -> None:
        """Raises PermissionDenied for a caller who reached this server by another name than a loopback address."""
        host = _host_of(headers.get("host", ""))
        if host not in _LOCAL_NAMES and not _is_loopback(host):
            raise PermissionDenied("host: without API keys this is served to loopback only", reason="FOREIGN_HOST")

    def check_site(self, headers: Mapping[str, str]) -> None:
        """Raises PermissionDenied for a foreign Host or Origin."""
        host = _host_of(headers.get("host", ""))
        if not self._is_known(host):
            raise PermissionDenied("host: this server is not known by that name", reason="FOREIGN_HOST")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self.origins and not self._is_own(origin):
            raise PermissionDenied("origin: pages of that site may not call this server", reason="FOREIGN_ORIGIN")

    def holder(self, headers: Mapping[str, str]) -> KeyHolder:
        """Raises Unauthenticated, and PermissionDenied for a key of another role."""
        try:
            return self._holder(headers)
        except (Unauthenticated, PermissionDenied) as error:
            if error.reason != "NO_CREDENTIAL" and (left_out := self._strangers.left_out()) is not None:
                self._audit.tell(None, "key", REFUSED, error.reason, left_out=left_out)
            raise

    def _holder(self, headers: Mapping[str, str]) -> KeyHolder:
        if self._credentials is None:
            return KeyHolder(OWNER, None)
        key = _key(headers)
        if not key or len(key) > _MAX_KEY_CHARS:
            raise Unauthenticated("no API key: send Authorization: Bearer KEY, or x-api-key", reason="NO_CREDENTIAL")
        principal = self._credentials.principal_of(key)
        if principal is None:
            raise Unauthenticated("the API key is not known here")
        if not principal.roles & {CLIENT, ADMIN}:
            raise PermissionDenied("the key's roles do not allow this: expected client", metadata={"roles": "client"})
        return KeyHolder(principal, key)

    def _is_known(self, host: str) -> bool:
        return host in self._hosts or host in _LOCAL_NAMES or _is_loopback(host)

    def _is_own(self, origin: str) -> bool:
        scheme, _, rest = origin.partition("://")
        return scheme in ("http", "https") and self._is_known(_host_of(rest))


class Connection(HttpToolsProtocol):
    """uvicorn's own keeps all of a head that has no end, and waits for it. Its option bounds another parser's."""

    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    # Since the last that was a whole head, or a body's: of a head, or of a trailer.
    _unread_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self._stop_watching()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader(math.inf)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching()

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes <= _MAX_HEAD_BYTES or self.transport.is_closing():
            return
        if self._is_answered:
            self.send_400_response(f"The request's head has more than {_MAX_HEAD_BYTES} bytes.")
        else:
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answered:  # else the next request is here already
            self._await_head()

    @property
    def _is_answered(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(_HEAD_S, self._close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        """It stays until its reader has taken all of the answer before."""
        self.transport.close()
        self._stop_watching()
        self._check_reader(math.inf)

    def _check_reader(self, unsent_before: float) -> None:
        if (unsent := self.transport.get_write_buffer_size()) >= unsent_before:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(_READING_S, self._check_reader, unsent)

    def _stop_watching(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class BodyRoom:
    """One request's share of the room for all bodies, from its first byte until its answer is sent."""

    def __init__(self, room: Shares) -> None:
        self._room = room
        self._held = 0
        self.namespace = ""

    async def read(self, request: Request, max_bytes: int) -> bytes:
        """The body. Raises BodyTooLarge as soon as that is known, ResourceExhausted without room for it, and
        DeadlineExceeded."""
        too_large = BodyTooLarge(f"the body has more than {max_bytes} bytes")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > max_bytes:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(_SENDING_S):
                async for piece in request.stream():
                    if len(data) + len(piece) > max_bytes:
                        raise too_large
                    self._take(len(piece))
                    data += piece
        except TimeoutError:
            text = f"the body did not come within {_SENDING_S:.0f} s"
            raise DeadlineExceeded(text, reason="SENDER_STALLED") from None
        return bytes(data)

    def release(self) -> None:
        self._room.give_back(self.namespace, self._held)
        self._held = 0

    def _take(self, count: int) -> None:
        if count and not self._room.take(self.namespace, count):
            raise ResourceExhausted(
                f"bodies of open requests take all their room: {self._room.held_by_all} of {self._room.total} bytes",
                reason="PROMPTS_TOO_LARGE",
                retry_after_s=1,
            )
        self._held += count


class Site:
    """Refuses requests of foreign sites before anything else looks at them, answers the preflights of the origins that
    were named, and leaves the names of agents as they were written."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._gate = gate
        self._app = CORSMiddleware(
            app,
            allow_origins=sorted(gate.origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self._gate.check_site(request.headers)
            except KvasirError as error:
                await refused(request, error, "")(scope, receive, send)
                return
            raw: bytes = scope.get("raw_path") or b""
            if raw.startswith(b"/v1/agents/"):
                # Decoded, an agent "a/versions" would look like the versions of "a". Handlers decode the name.
                scope = {**scope, "path": raw.decode("latin-1")}
        await self._app(scope, receive, send)


def _key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _host_of(text: str) -> str:
    """The host of "host:port" or "[v6]:port", without the port."""
    if text.startswith("["):
        return text[1:].partition("]")[0].lower()
    return text.rpartition(":")[0].lower() if ":" in text else text.lower()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
