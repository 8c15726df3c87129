"""The servers that an address of PostgreSQL names: a connection to the one that takes writes, and which stand still."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg
from kvasir.errors import InvalidArgument
from kvasir.waits import SOON_S

from cachestore_svc.index.postgres.schema import SCHEMA

# The request for encryption, with which a connection may begin: a server answers it before any other word.
_FIRST_BYTES = bytes.fromhex("00000008 04d2162f")
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


class ServerSilent(psycopg.OperationalError):
    """A server neither takes nor refuses a connection: it or its machine stands still, which TCP would never report."""


class Server:
    """One of the servers, and whether it was found to stand still: one session finds it out for all."""

    def __init__(self, where: Mapping[str, str]) -> None:
        """`where`: the words of the address that are this server's alone; none where the address names one server."""
        self.where = where
        self._host, self._port = where.get("hostaddr") or where.get("host", ""), where.get("port") or "5432"
        self.is_silent, self.silences = False, 0  # and how often it was found so

    def check_session(self, connection: "psycopg.Connection[Any]") -> None:
        """Raises ServerSilent where the server of this session takes no connection."""
        info = connection.info
        self._host, self._port = self.where.get("hostaddr") or info.host, str(info.port)
        self._check(info.hostaddr or info.host)

    def connect(self, settings: Mapping[str, Any]) -> "psycopg.Connection[tuple[Any, ...]]":
        """Raises ServerSilent, psycopg.OperationalError. One that stood still is looked at first, which takes less; its
        name is looked up again, as it may have moved."""
        if self.is_silent and self._host:
            self._check(self._host)
        try:
            connection = psycopg.connect(**{**settings, **self.where}, autocommit=True)
        except psycopg.errors.ConnectionTimeout:
            raise self._found_silent() from None
        self.is_silent = False
        return connection

    def _check(self, host: str) -> None:
        if not _answers(host, self._port):
            raise self._found_silent()
        self.is_silent = False

    def _found_silent(self) -> ServerSilent:
        self.is_silent = True
        self.silences += 1
        return ServerSilent("the server does not answer")


class Servers:
    """All of them, for all sessions of a store. Its methods may be called from any thread."""

    def __init__(self, url: str) -> None:
        """Raises InvalidArgument for what is no URL of PostgreSQL."""
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            words = "catalog: expected postgresql://USER@HOST/DATABASE"  # what was given may hold a password
            raise InvalidArgument(words, field="catalog") from None
        ours = " ".join(f"-c {name}={value}" for name, value in _OF_SERVER.items())
        # The last word is the address's, but for the schema.
        options = f"{ours} {given.get('options', '')} -c search_path={SCHEMA}"
        self._settings: dict[str, Any] = {**_SETTINGS, **given, "options": options}
        self._servers = [Server(where) for where in _named(given)]

    def connect(self) -> "tuple[psycopg.Connection[tuple[Any, ...]], Server]":
        """To the first that takes writes; those that stood still come last. Raises psycopg.OperationalError of the last
        that was tried."""
        *others, last = sorted(self._servers, key=lambda each: each.is_silent)
        for each in others:
            with suppress(psycopg.OperationalError):
                return each.connect(self._settings), each
        return last.connect(self._settings), last


def _named(given: Mapping[str, Any]) -> list[dict[str, str]]:
    """Of each server that the address names, the words that are its alone. Lists of unlike lengths are left to libpq,
    which refuses them."""
    lists = {name: str(given[name]).split(",") for name in ("host", "hostaddr", "port") if given.get(name)}
    count = max(map(len, lists.values()), default=1)
    if len(lists.get("port", ())) == 1:
        lists["port"] *= count
    if {len(each) for each in lists.values()} != {count}:
        return [{}]
    return [dict(zip(lists, words, strict=True)) for words in zip(*lists.values(), strict=True)]


def _answers(host: str, port: str) -> bool:
    within_s = SOON_S / 2  # a failover, of which this is a part, takes no longer than SOON_S
    try:
        with _connected(host, port, within_s) as begun:
            begun.sendall(_FIRST_BYTES)
            begun.recv(1)
    except TimeoutError:
        return False
    except OSError:
        pass  # also a refusal is an answer
    return True


def _connected(host: str, port: str, within_s: float) -> socket.socket:
    if not host.startswith("/"):
        return socket.create_connection((host, port), within_s)
    begun = socket.socket(socket.AF_UNIX)
    begun.settimeout(within_s)
    begun.connect(f"{host}/.s.PGSQL.{port}")
    return begun
