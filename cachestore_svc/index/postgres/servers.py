"""The servers that an address of PostgreSQL names: a connection to the one that takes writes, and which stand still."""

import errno
import itertools
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg
from kvasir.errors import InvalidArgument
from kvasir.waits import SOON_S

from cachestore_svc.index.postgres.schema import SCHEMA

# A request for GSSAPI's encryption, with which a connection may begin: a server answers it before any other word. It
# logs nothing of a client that leaves then, as it does of one that wanted TLS.
_FIRST_BYTES = bytes.fromhex("00000008 04d21630")
# These come from routers, or from this machine.
_NO_ANSWERS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
# What each side does where the other is gone. The server ends the transaction, and then the session, which holds locks.
_OF_SERVER = {
    "idle_in_transaction_session_timeout": "30s",
    "lock_timeout": "30s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10s",
}
_SETTINGS = {
    "application_name": "kvasir",
    "connect_timeout": "2",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "target_session_attrs": "read-write",
}
_NUMBERS = itertools.count(1)


class ServerSilent(psycopg.OperationalError):
    """A server neither takes nor refuses a connection: it or its machine stands still, which TCP would never report."""


class Server:
    """One of the servers, and whether it was left: one session finds out for all that it stands still, or is behind."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: with the one address that is this server's. A file of services (`service=`) may name others."""
        self._settings = settings
        self._has_address = bool(settings.get("hostaddr") or settings.get("host"))
        self._place: tuple[str, str] | None = None  # of the last session
        self.left = 0  # its number among those that were left; none if it was found well since
        self.silences = 0

    def check_session(self, connection: "psycopg.Connection[Any]") -> None:
        """Raises ServerSilent where the server of this session takes no connection."""
        self._check(_place_of(connection))

    def connect(self) -> "psycopg.Connection[tuple[Any, ...]]":
        """Raises ServerSilent, psycopg.OperationalError. One that was left is looked at first, which takes less."""
        if self.left and self._has_address and self._place:
            self._check(self._place)
        try:
            connection = psycopg.connect(**self._settings, autocommit=True)
        except psycopg.errors.ConnectionTimeout:
            raise self._found_silent() from None
        self._place, self.left = _place_of(connection), 0
        return connection

    def leave(self) -> None:
        """From now on it comes last."""
        self.left = next(_NUMBERS)

    def _check(self, place: tuple[str, str]) -> None:
        if not _answers(*place):
            raise self._found_silent()
        self.left = 0

    def _found_silent(self) -> ServerSilent:
        self.leave()
        self.silences += 1
        return ServerSilent("the server does not answer")


class Servers:
    """All of them, for all sessions of a store. Its methods may be called from any thread."""

    def __init__(self, url: str) -> None:
        """Raises InvalidArgument for what is no URL of PostgreSQL. It is not repeated: it may hold a password."""
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            raise InvalidArgument.of("catalog", "expected postgresql://USER@HOST/DATABASE") from None
        _check_given(given)
        ours = " ".join(f"-c {name}={value}" for name, value in _OF_SERVER.items())
        # The last word is the address's, but for the schema.
        options = f"{ours} {given.get('options', '')} -c search_path={SCHEMA}"
        self._settings: dict[str, Any] = {**_SETTINGS, **given, "options": options}
        self._servers: dict[frozenset[tuple[str, Any]], Server] = {}

    def connect(self) -> "tuple[psycopg.Connection[tuple[Any, ...]], Server]":
        """To the first that takes writes; those that were left come last, the one left last behind the others. Raises
        psycopg.OperationalError of the last that was tried."""
        *others, last = sorted(self._named(), key=lambda each: each.left)
        for each in others:
            with suppress(psycopg.OperationalError):
                return each.connect(), each
        return last.connect(), last

    def _named(self) -> list[Server]:
        """By the address, or by libpq's variables, at this moment: a name may have several addresses, and get others.
        Raises psycopg.OperationalError for a name that has none, and for lists of unlike lengths."""
        attempts = psycopg.conninfo.conninfo_attempts(self._settings)
        return [self._servers.setdefault(frozenset(each.items()), Server(each)) for each in attempts]


def _check_given(given: Mapping[str, Any]) -> None:
    """What libpq would refuse as it connects, and Python's own modules refuse in words of no server. Raises
    InvalidArgument."""
    try:
        for host in str(given.get("host") or "").split(","):
            if not host.startswith(("/", "@")):  # else it is a socket's directory
                host.encode("idna")
    except UnicodeError:
        raise InvalidArgument.of("catalog", "expected a host's name, with a label between two dots") from None
    try:
        psycopg.conninfo.timeout_from_conninfo({**given})
    except psycopg.ProgrammingError:
        raise InvalidArgument.of("catalog", "expected connect_timeout in seconds") from None


def _place_of(connection: "psycopg.Connection[Any]") -> tuple[str, str]:
    info = connection.info
    return info.hostaddr or info.host, str(info.port)


def _answers(host: str, port: str) -> bool:
    within_s = SOON_S / 2  # a failover, of which this is a part, takes no longer than SOON_S
    try:
        with _connected(host, port, within_s) as begun:
            begun.sendall(_FIRST_BYTES)
            begun.recv(1)
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _NO_ANSWERS  # a refusal is an answer
    return True


def _connected(host: str, port: str, within_s: float) -> socket.socket:
    if not host.startswith("/"):
        return socket.create_connection((host, port), within_s)
    begun = socket.socket(socket.AF_UNIX)
    begun.settimeout(within_s)
    try:
        begun.connect(f"{host}/.s.PGSQL.{port}")
    except OSError:
        begun.close()
        raise
    return begun
