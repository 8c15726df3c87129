"""Who looks at the page: a key makes a session with a secret address; a write needs Origin and a token, too."""

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvasir.errors import PermissionDenied, Unauthenticated
from kvasir.waits import WORK_S

from kvasir_gateway.door.security import Gate, KeyHolder

LIFETIME_S = 12 * 3600
_MOST_SESSIONS = 1000
_MOST_OF_A_KEY = 32  # so that nobody ends the sessions of others
_NO_SESSION = ""
_MOST_CODES, _MOST_CODES_OF_A_KEY = 1000, 8  # so, too


@dataclass(frozen=True, slots=True)
class Visitor:
    """The caller of a page. `form_token` goes into each form of it; `address` is that of the session, if it has one."""

    holder: KeyHolder
    form_token: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A session: the key that opened it, its cookie, and the address where the cookie counts."""

    key: str
    cookie: str
    address: str
    until_s: float


class Sessions:
    """Sessions by cookie, for as long as this gateway runs; the oldest go first."""

    def __init__(self, gate: Gate, *, clock: Callable[[], float], new_secret: Callable[[], str]) -> None:
        """`clock`: seconds of any beginning, in sleep too; who sets the system's clock ends or keeps no session.
        `new_secret`: letters and digits that nobody guesses."""
        self._gate = gate
        self._clock = clock
        self._new_secret = new_secret
        self.codes = Codes(clock, new_secret)
        self._form_key = new_secret().encode()
        self._opened: OrderedDict[str, Opened] = OrderedDict()

    @property
    def lobby_token(self) -> str:
        """The form token of a visitor without a key."""
        return self._form_token(_NO_SESSION)

    def begin(self, key: str) -> Opened:
        """A session of the key's holder. Raises Unauthenticated, PermissionDenied."""
        self._gate.holder({"x-api-key": key})
        own = [each.cookie for each in self._opened.values() if each.key == key]
        for cookie in own[: max(0, len(own) + 1 - _MOST_OF_A_KEY)]:
            self.end(cookie)
        while len(self._opened) >= _MOST_SESSIONS:
            self._opened.popitem(last=False)
        opened = Opened(key, self._new_secret(), self._new_secret(), self._clock() + LIFETIME_S)
        self._opened[opened.cookie] = opened
        return opened

    def key_of(self, headers: Mapping[str, str]) -> str | None:
        """The key that a program shows; None where there are no keys. Raises Unauthenticated, PermissionDenied."""
        if not self._gate.has_keys:
            self._gate.check_local(headers)
        return self._gate.holder(headers).token

    def to_confirm(self, key: str) -> str:
        """The namespace that whoever is led to a key of it must know, where keys are of several: what they say would be
        kept before the eyes of others. Else an empty text, and so for a key that opens nothing."""
        if not key or len(self._gate.namespaces) < 2:
            return ""
        try:
            return self._gate.holder({"x-api-key": key}).principal.namespace
        except (Unauthenticated, PermissionDenied):
            return ""

    def end(self, cookie: str) -> None:
        self._opened.pop(cookie, None)

    def visitor(self, headers: Mapping[str, str], cookies: Mapping[str, str], address: str = "") -> Visitor:
        """Who looks at a page of this address. Raises Unauthenticated for a caller without a key, PermissionDenied."""
        if not self._gate.has_keys:
            self._gate.check_local(headers)
            return Visitor(self._gate.holder({}), self.lobby_token)
        if "authorization" in headers or "x-api-key" in headers:
            holder = self._gate.holder(headers)
            return Visitor(holder, self._form_token(holder.token or _NO_SESSION))
        opened = self._opened.get(cookies.get(cookie_name(address), ""))
        if opened and self._clock() >= opened.until_s:
            self.end(opened.cookie)
            opened = None
        if opened is None or not _is_same(address, opened.address):
            raise Unauthenticated("no API key", reason="NO_CREDENTIAL")
        # A page of another port may have set the cookie of its own session, and lead people to talk there.
        if headers.get("sec-fetch-site", "") in ("same-site", "cross-site"):
            raise PermissionDenied("a link of another site leads here: type the address", reason="FOREIGN_ORIGIN")
        return Visitor(self._gate.holder({"x-api-key": opened.key}), self._form_token(opened.cookie), opened.address)

    def _form_token(self, of: str) -> str:
        return hmac.new(self._form_key, of.encode(), "sha256").hexdigest()


class Codes:
    """Codes that open the page once, so that no key stands in an address, each with its key; the oldest go first."""

    def __init__(self, clock: Callable[[], float], new_secret: Callable[[], str]) -> None:
        """As of sessions."""
        self._clock = clock
        self._new_secret = new_secret
        self._made: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def new(self, key: str) -> str:
        """A code for the holder of this key."""
        own = [code for code, (made_for, _) in self._made.items() if made_for == key]
        for code in own[: max(0, len(own) + 1 - _MOST_CODES_OF_A_KEY)]:
            del self._made[code]
        while len(self._made) >= _MOST_CODES:
            self._made.popitem(last=False)
        code = self._new_secret()
        self._made[code] = key, self._clock() + WORK_S
        return code

    def key(self, code: str) -> str:
        """The code's key, while the code counts; else an empty text."""
        key, until_s = self._made.get(code, ("", 0.0))
        return key if self._clock() < until_s else ""

    def take(self, code: str) -> str:
        """The code's key; the code is used up. Raises Unauthenticated."""
        key = self.key(code)
        self._made.pop(code, None)
        if not key:
            raise Unauthenticated(f"the code was used, or is older than {WORK_S:.0f} s: run `kvasir open` again")
        return key


def cookie_name(address: str) -> str:
    """Of the session at this address, which it does not show. Pages of other ports of the host could set a cookie of a
    name that they know, and so end the session."""
    return f"kvasir_page_{hashlib.sha256(address.encode()).hexdigest()[:16]}"


def check_own_page(headers: Mapping[str, str]) -> None:
    """Raises PermissionDenied for a script of another site. Those that may call the API may not read the page."""
    if "origin" in headers and not _is_own(headers):
        raise PermissionDenied("origin: the page is shown to people, not to other sites", reason="FOREIGN_ORIGIN")


def check_own_site(headers: Mapping[str, str]) -> None:
    """Raises PermissionDenied for a form that no page of ours sent: known before any of it is read."""
    if not _is_own(headers):
        raise PermissionDenied("origin: forms are taken from this page only", reason="FOREIGN_ORIGIN")


def check_own_form(headers: Mapping[str, str], given: str, expected: str) -> None:
    """Raises PermissionDenied unless a form of ours was sent from a page of ours."""
    check_own_site(headers)
    if not _is_same(given, expected):
        raise PermissionDenied("the form is of an earlier visit: go back, reload, and send it again")


def _is_own(headers: Mapping[str, str]) -> bool:
    _, _, origin = headers.get("origin", "").partition("://")
    return bool(origin) and origin.lower() == headers.get("host", "").lower()


def _is_same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode())
