"""Who looks at the page: a key of the API, given once to a form or with each request; and what proves a form is ours.

A browser keeps the name of a session, never the key. A write must come from this very origin (`Origin`) and carry a
token that only a page of ours shows: a page of another site can do neither.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvasir.errors import PermissionDenied, Unauthenticated

from kvasir_gateway.door.security import Gate, KeyHolder

COOKIE = "kvasir_session"
LIFETIME_S = 12 * 3600
_MOST_SESSIONS = 1000
_MOST_OF_A_KEY = 32  # so that nobody ends the sessions of others
_NO_SESSION = ""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The caller of a page. `form_token` goes into each form of it; `has_session` says whether there is one to end."""

    holder: KeyHolder
    form_token: str
    has_session: bool


class Sessions:
    """Keys by session, for as long as this gateway runs; the oldest go first."""

    def __init__(self, gate: Gate, *, now: Callable[[], float], new_secret: Callable[[], str]) -> None:
        """`now`: Unix seconds. `new_secret`: a name that nobody guesses."""
        self._gate = gate
        self._now = now
        self._new_secret = new_secret
        self._form_key = new_secret().encode()
        self._keys: OrderedDict[str, tuple[str, float]] = OrderedDict()

    @property
    def lobby_token(self) -> str:
        """The form token of whoever has shown no key yet."""
        return self._form_token(_NO_SESSION)

    def begin(self, key: str) -> str:
        """A session of the key's holder. Raises Unauthenticated, PermissionDenied."""
        self._gate.holder({"x-api-key": key})
        own = [name for name, (shown, _) in self._keys.items() if shown == key]
        for name in own[: max(0, len(own) + 1 - _MOST_OF_A_KEY)]:
            self.end(name)
        while len(self._keys) >= _MOST_SESSIONS:
            self._keys.popitem(last=False)
        name = self._new_secret()
        self._keys[name] = key, self._now() + LIFETIME_S
        return name

    def end(self, name: str) -> None:
        self._keys.pop(name, None)

    def visitor(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> Visitor:
        """Raises Unauthenticated for whoever has to show a key, and PermissionDenied."""
        if not self._gate.has_keys:
            self._gate.check_local(headers)
            return Visitor(self._gate.holder({}), self.lobby_token, has_session=False)
        if "authorization" in headers or "x-api-key" in headers:
            holder = self._gate.holder(headers)
            return Visitor(holder, self._form_token(holder.token or _NO_SESSION), has_session=False)
        name = cookies.get(COOKIE, "")
        key, until_s = self._keys.get(name, ("", 0.0))
        if self._now() >= until_s:
            self.end(name)
            raise Unauthenticated("no API key", reason="NO_CREDENTIAL")
        return Visitor(self._gate.holder({"x-api-key": key}), self._form_token(name), has_session=True)

    def _form_token(self, of: str) -> str:
        return hmac.new(self._form_key, of.encode(), "sha256").hexdigest()


def check_own_page(headers: Mapping[str, str]) -> None:
    """Raises PermissionDenied for a script of another site. Those that may call the API may not read the page."""
    if "origin" in headers and not _is_own(headers):
        raise PermissionDenied("origin: the page is shown to people, not to other sites", reason="FOREIGN_ORIGIN")


def check_own_form(headers: Mapping[str, str], given: str, expected: str) -> None:
    """Raises PermissionDenied unless a form of ours was sent from a page of ours."""
    if not _is_own(headers):
        raise PermissionDenied("origin: forms are taken from this page only", reason="FOREIGN_ORIGIN")
    if not hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode()):
        raise PermissionDenied("the form is of an earlier visit: go back, reload, and send it again")


def _is_own(headers: Mapping[str, str]) -> bool:
    _, _, origin = headers.get("origin", "").partition("://")
    return bool(origin) and origin.lower() == headers.get("host", "").lower()
