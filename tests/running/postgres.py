"""A PostgreSQL server for tests, which may be killed and started again; and databases on it."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
import pytest

from tests.running import in_memory

NO_SERVER = "PostgreSQL is not here: initdb and postgres are in no PATH"
_STARTS_S = 30
_KEPT_DATABASES = 8


def is_here() -> bool:
    return bool(shutil.which("initdb") and shutil.which("postgres"))


class PostgresServer:
    """A server in a directory of its own, at a port of its own. It runs for whoever may run it: it refuses root."""

    def __init__(self, root: Path, primary: "PostgresServer | None" = None, *, follows: bool = True) -> None:
        """`primary`: a server that runs, whose standby this one becomes; or, where it does not follow, a server of its
        own with the same files."""
        self._as_whom: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        self._data, self._log = root / "data", root / "log"
        if self._as_whom:
            shutil.chown(root, **self._as_whom)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        made = ["initdb", "-D", self._data, "-A", "trust", "-U", "kvasir", "--no-sync", "-E", "UTF8", "--locale", "C"]
        if primary:
            made = ["pg_basebackup", "-D", self._data, "-c", "fast", "-d", primary.url("postgres"), "--no-sync"]
            made += ["-R"] if follows else []
        subprocess.run(made, check=True, capture_output=True, **self._as_whom)
        self._made = _KEPT_DATABASES
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        settings = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        # A standby that has just begun to wait for its primary's log again is promoted only after this time.
        settings |= {"max_connections": "300", "wal_retrieve_retry_interval": "200ms"}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        # As after a kill, until its last children are gone.
        deadline = time.monotonic() + _STARTS_S
        while time.monotonic() < deadline:
            with self._log.open("ab") as log:
                command = ["postgres", "-D", self._data, *words]
                self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_whom)
            while self._process.poll() is None:
                try:
                    psycopg.connect(self.url("postgres"), connect_timeout=1).close()
                except psycopg.OperationalError:
                    time.sleep(0.05)
                else:
                    return self
            time.sleep(0.1)
        raise AssertionError(self._log.read_text()[-2000:])

    def kill(self) -> None:
        """As a machine that loses its power, but for its disk."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGQUIT)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """For this time, as a machine that hangs: connections stay, and nothing answers."""
        assert self._process
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            found = connection.execute("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()").fetchall()
        stopped = [self._process.pid, *(pid for (pid,) in found)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def configure(self, **settings: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            for name, value in settings.items():
                connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")  # type: ignore[arg-type]
            connection.execute("SELECT pg_reload_conf()")

    def wait_for_standby(self, state: str) -> None:
        """Until a standby is there whose state is this one ("sync", "async")."""
        deadline = time.monotonic() + _STARTS_S
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            while connection.execute("SELECT sync_state FROM pg_stat_replication").fetchall() != [(state,)]:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def promote(self) -> None:
        """A standby becomes a primary."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")

    def url(self, database: str, port: int | None = None) -> str:
        return f"postgresql://kvasir@127.0.0.1:{port or self.port}/{database}"

    def new_database(self) -> str:
        """The name of a database that holds nothing."""
        self._made += 1
        name = f"test_{self._made}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
            old = f"test_{self._made - _KEPT_DATABASES}"
            connection.execute(f"DROP DATABASE IF EXISTS {old} WITH (FORCE)")  # type: ignore[arg-type]
        return name

    def _end(self, how: int) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def set_clock_of(url: str, unix_s: float) -> None:
    """From now on it is this time in a store's database, until it is set again."""
    _run(url, _clock(f"SELECT {round(unix_s * 1000)}::bigint"))


def step_clock_of(url: str, ahead_s: float) -> None:
    """From now on the clock of a store's database is so far ahead of the server's."""
    _run(url, clock_ahead(ahead_s))


def clock_ahead(ahead_s: float) -> str:
    """The statement that sets it."""
    return _clock(f"SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint + {round(ahead_s * 1000)}")


def _clock(body: str) -> str:
    return f"CREATE OR REPLACE FUNCTION kvasir.now_ms() RETURNS BIGINT LANGUAGE SQL VOLATILE AS '{body}'"


def _run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[arg-type]


@contextmanager
def running() -> Iterator[PostgresServer]:
    # Not below pytest's directory, where a server that root starts may not come.
    root = Path(tempfile.mkdtemp(prefix="kvasir-postgres-", dir=in_memory.directory()))
    try:
        with PostgresServer(root) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def running_standby(primary: PostgresServer, *, is_synchronous: bool) -> Iterator[PostgresServer]:
    """A standby of a server, which follows it. `is_synchronous`: what is acknowledged from now on is on it, too."""
    root = Path(tempfile.mkdtemp(prefix="kvasir-standby-", dir=in_memory.directory()))
    try:
        with PostgresServer(root, primary) as standby:
            primary.configure(synchronous_standby_names="*" if is_synchronous else "")
            primary.wait_for_standby("sync" if is_synchronous else "async")
            yield standby
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def running_copy(server: PostgresServer) -> Iterator[PostgresServer]:
    """A server with the same files, as a clone of its machine has them."""
    root = Path(tempfile.mkdtemp(prefix="kvasir-copy-", dir=in_memory.directory()))
    try:
        with PostgresServer(root, server, follows=False) as copied:
            yield copied
    finally:
        shutil.rmtree(root, ignore_errors=True)


@cache
def _of_this_process(config: pytest.Config) -> PostgresServer:
    """For pytest, each module that imports a fixture has one of its own: this is the server of all of them."""
    stack = ExitStack()
    config.add_cleanup(stack.close)
    return stack.enter_context(running())


@pytest.fixture(scope="session")
def postgres(pytestconfig: pytest.Config) -> PostgresServer:
    """A server that runs for all tests of a process. Skips where there is none."""
    if not is_here():
        pytest.skip(NO_SERVER)
    return _of_this_process(pytestconfig)
