"""The right to call: Host and Origin, and API keys, which are tokens of Kvasir's credential file.

A browser that was led to another site may send requests to a server on its own machine. It shows in Host (DNS
rebinding) or in Origin; both are refused unless they were named. So is a key that no credential has, in constant time.
"""

import ipaddress
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvasir.credentials import ADMIN, CLIENT, OWNER, Credentials, Principal
from kvasir.errors import KvasirError, PermissionDenied, Unauthenticated
from kvasir.server.operating.audit import REFUSED, Audit
from kvasir.server.operating.log_errors import StrangersLines
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir_gateway.errors import refused

_LOCAL_NAMES = frozenset({"localhost"})
_NO_HOST = frozenset("/?#@\\ \t")
_MAX_KEY_CHARS = 4096
_REUSE = (
    "x-kvasir-reused",
    "x-kvasir-miss",
    "x-kvasir-volatile",
    "x-kvasir-ignored",
    "x-kvasir-side-call",
    "x-kvasir-not-stored",
)
_EXPOSED = ("x-request-id", "request-id", "x-agent-id", "x-agent-memory", "retry-after", *_REUSE)


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

    @property
    def namespaces(self) -> frozenset[str]:
        """Whose agents the keys open; empty where there are no keys."""
        holders = self._credentials.principals if self._credentials is not None else ()
        return frozenset(each.namespace for each in holders if each.roles & {CLIENT, ADMIN})

    def check_local(self, headers: Mapping[str, str]) -> None:
        """Raises PermissionDenied for a caller who reached this server by another name than a loopback address."""
        host = _host_of(headers.get("host", ""))
        if host not in _LOCAL_NAMES and not _is_loopback(host):
            raise PermissionDenied("host: without API keys this is served to loopback only", reason="FOREIGN_HOST")

    def check_site(self, headers: Mapping[str, str]) -> None:
        """Raises PermissionDenied for a foreign Host or Origin."""
        host = headers.get("host", "").lower()
        if not self._is_known(_host_of(host)):
            raise PermissionDenied("host: this server is not known by that name", reason="FOREIGN_HOST")
        # A page of another port of this host is another program's: without keys it could begin turns.
        own = {f"{scheme}://{host}" for scheme in ("http", "https")}
        if headers.get("origin", f"http://{host}").lower() not in self.origins | own:
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
            raise Unauthenticated("the API key is not known here: `kvasir tokens ls` lists files with those that are")
        if not principal.roles & {CLIENT, ADMIN}:
            raise PermissionDenied("the key's roles do not allow this: expected client", metadata={"roles": "client"})
        return KeyHolder(principal, key)

    def _is_known(self, host: str) -> bool:
        return host in self._hosts or host in _LOCAL_NAMES or _is_loopback(host)


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
    """The host of "host:port" or "[v6]:port", without the port; empty if it is neither."""
    if set(text) & _NO_HOST:
        return ""
    try:
        parts = urlsplit(f"//{text}")
        _ = parts.port  # raises for what is no port
    except ValueError:
        return ""
    host = parts.hostname or ""
    if text.startswith("[") and (":" not in host or text.partition("]")[2][:1] not in ("", ":")):
        return ""  # the library passes over what stands behind the bracket
    return host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
