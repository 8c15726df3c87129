"""A whole fleet in one directory: engines, stores, PostgreSQL, S3, the HTTP gateway, and a balancer for gRPC.

clients ─HTTP─▶ gateway ──┐
clients ─gRPC─▶ nginx ────┴▶ engine-1, -2, … ──▶ store-1, … ──▶ PostgreSQL (index), versitygw (blobs, as S3)
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvasir.address import accepts
from kvasir.cli.running.home import Home

from tools.fleet.part import Begin, Part, free_port
from tools.fleet.servers import BUCKET, DATABASE, S3, Door, Postgres

# From who calls ("engine-1"), whom ("store-1") and its port to the port that is called: tests put links between.
Through = Callable[[str, str, int], int]


@dataclass(frozen=True)
class Plan:
    """What a fleet has. `door`: nginx, envoy or none. `through` and `begin` are for tests."""

    engines: int = 3
    door: str = "nginx"
    memory_gib: str = "1"
    engine_settings: Sequence[str] = ()  # texts of settings files, the next engine has the next
    store_options: Sequence[str] = ()
    stores: int = 1  # each engine has one of them
    has_standby: bool = False  # of PostgreSQL, which has all that is acknowledged
    through: Through = lambda _caller, _called, port: port
    begin: Begin | None = None


class Member:
    """An engine or a store with its home, under its `kvasir up` or `kvasir store serve`, which starts it again."""

    def __init__(self, name: str, root: Path, logs: Path) -> None:
        self.name, self.home = name, Home(root / name)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.part = Part(name, (), logs / f"{name}.log", self._is_ready)

    def runs(self, *words: str) -> None:
        """What it is started with, after `kvasir --home …`."""
        self.part.argv = [sys.executable, "-m", "kvasir", "--home", str(self.home.root), *words]

    @property
    def pid(self) -> int:
        """Of the service itself; 0 while there is none."""
        running = self.home.running()
        return 0 if running is None else running.engine_pid or running.store_pid

    def _is_ready(self) -> bool:
        running, process = self.home.running(), self.part.process
        return process is not None and running is not None and running.is_ready and running.pid == process.pid


class Fleet:
    """Made for a directory, then started and stopped."""

    def __init__(self, root: Path, plan: Plan) -> None:
        """Raises FleetError for a program that is not installed. It makes the directory."""
        self.root, self.plan = root, plan
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.geteuid() == 0:
            root.chmod(0o711)  # PostgreSQL runs as another user, and must come to its own directory
        logs = root / "logs"
        for each in (logs, root / "postgres", root / "postgres-2", root / "s3", root / "door"):
            each.mkdir(exist_ok=True, mode=0o700)
        self.postgres, self.s3 = Postgres(root / "postgres", logs), S3(root / "s3", logs)
        self.standby = Postgres(root / "postgres-2", logs, "postgres-2") if plan.has_standby else None
        self.stores = [Member(f"store-{number + 1}", root, logs) for number in range(plan.stores)]
        self.engines = [Member(f"engine-{number + 1}", root, logs) for number in range(plan.engines)]
        addresses = [each.address for each in self.engines]
        self.door = None if plan.door == "none" else Door(plan.door, root / "door", logs, addresses)
        self.http = f"127.0.0.1:{free_port()}"
        self.gateway = Part("gateway", self._gateway_words(), logs / "gateway.log", lambda: accepts(self.http))
        for part in self.kvasir_parts:
            part.begin = plan.begin

    @property
    def kvasir_parts(self) -> list[Part]:
        return [*self._store_parts, *self._engine_parts, self.gateway]

    @property
    def store(self) -> Member:
        """The first, whose credentials are all members'."""
        return self.stores[0]

    @property
    def parts(self) -> list[Part]:
        """In the order of their starts."""
        before = [*self._database_parts, self.s3.part, *self.kvasir_parts]
        return before if self.door is None else [*before, self.door.part]

    @property
    def client_token(self) -> Path:
        return self.store.home.tokens / "client.token"

    def start(self) -> None:
        """All of it, until each part is ready. Raises FleetError."""
        through = self.plan.through
        servers = [self.postgres.part, self.s3.part]
        self.postgres.prepare(self.postgres.port)
        self.s3.prepare(self.s3.port)
        _start(servers)
        self.postgres.make_database()
        if self.standby is not None:
            self.standby.follow(self.postgres)
            _start([self.standby.part])
            self.postgres.wait_for_standby()
        databases = [self.postgres] if self.standby is None else [self.postgres, self.standby]
        ports = {store: [through(store.name, each.part.name, each.port) for each in databases] for store in self.stores}
        self.postgres.prepare(*(port for each in ports.values() for port in each))
        for store in self.stores:
            self._set_up_store(store, ports[store])
        _start([self.store.part])
        for member in (*self.stores[1:], *self.engines):
            _join(self.store.home, member.home)
        _start(self._store_parts[1:])
        self.set_up_engines()
        _start(self._engine_parts)
        doors = [self.gateway]
        if self.door is not None:
            self.door.prepare()
            doors.append(self.door.part)
        _start(doors)

    def set_up_engines(self) -> None:
        """Let each call a store, the next one the next."""
        for number, engine in enumerate(self.engines):
            texts = self.plan.engine_settings
            text = texts[number % len(texts)] if texts else ""
            self._set_up_engine(engine, self.stores[number % len(self.stores)], text)

    def stop(self) -> None:
        """Callers' doors first, then the engines, which store what they owe, and last what the stores stand on."""
        for wave in ([self.gateway, *([self.door.part] if self.door else [])], self._engine_parts, self._store_parts):
            _stop(wave)
        _stop([self.s3.part, *self._database_parts])

    @property
    def _database_parts(self) -> list[Part]:
        return [self.postgres.part, *([] if self.standby is None else [self.standby.part])]

    @property
    def _store_parts(self) -> list[Part]:
        return [each.part for each in self.stores]

    @property
    def _engine_parts(self) -> list[Part]:
        return [each.part for each in self.engines]

    def _set_up_store(self, store: Member, database_ports: Sequence[int]) -> None:
        catalog = f"postgresql://kvasir@{','.join(f'127.0.0.1:{port}' for port in database_ports)}/{DATABASE}"
        words = ["store", "serve", "--listen", store.address, "--catalog", catalog, "--blobs", f"s3://{BUCKET}/fleet"]
        keys = self.s3.keys_for(store.name, self.plan.through(store.name, self.s3.part.name, self.s3.port))
        words += ["--blob-credentials-file", str(keys)]
        words += ["--last-runs-dir", str(store.home.root / "last-runs")]
        store.part.env = {"PGPASSFILE": str(self.postgres.passfile)}
        store.runs(*words, *self.plan.store_options)

    def _set_up_engine(self, engine: Member, store: Member, text: str) -> None:
        port = self.plan.through(engine.name, store.name, store.port)
        words = ["up", "--no-http", "--listen", engine.address, "--store", f"127.0.0.1:{port}"]
        words += ["--memory-gib", self.plan.memory_gib]
        if text:
            settings = engine.home.root / "fleet.toml"
            settings.write_text(text)
            words += ["--config", str(settings)]
        engine.runs(*words)

    def _gateway_words(self) -> list[str]:
        words = [sys.executable, "-m", "kvasir", "--home", str(self.store.home.root)]
        return [*words, "gateway", "--listen", self.http, *self.engine_options]

    @property
    def engine_options(self) -> list[str]:
        """`--engine ADDRESS` for each, as the commands of a fleet take it."""
        return [word for each in self.engines for word in ("--engine", each.address)]

    def facts(self) -> dict[str, object]:
        """Addresses, homes and process ids, for programs."""
        return {
            "directory": str(self.root),
            "http": f"http://{self.http}",
            "door": None if self.door is None else self.door.address,
            "token_file": str(self.client_token),
            "engines": [self._facts_of(each) for each in self.engines],
            "stores": [self._facts_of(each) for each in self.stores],
            "pids": {part.name: part.process.pid for part in self.parts if part.process is not None},
        }

    def _facts_of(self, member: Member) -> dict[str, object]:
        return {"name": member.name, "address": member.address, "home": str(member.home.root), "pid": member.pid}

    def write_facts(self) -> None:
        """As fleet.json in the directory."""
        (self.root / "fleet.json").write_text(json.dumps(self.facts(), indent=2) + "\n")


@contextmanager
def running(root: Path, plan: Plan, *kept_descriptors: int) -> Iterator[Fleet]:
    """A fleet that is up, and gone afterwards whatever happens. Its parts inherit descriptors. Raises FleetError."""
    fleet = Fleet(root, plan)
    for part in fleet.parts:
        part.kept_descriptors = kept_descriptors
    try:
        fleet.start()
        fleet.write_facts()
        yield fleet
    finally:
        fleet.stop()


def _start(parts: Sequence[Part]) -> None:
    for part in parts:
        part.start()
    for part in parts:
        part.wait_until_ready()


def _stop(parts: Sequence[Part]) -> None:
    for part in parts:
        part.send(part.end_by)
    for part in parts:
        part.stop()


def _join(store: Home, home: Home) -> None:
    """Copy the credentials of the store's home, as an operator does by hand; newer ones over older ones."""
    home.make()
    for file in store.tokens.glob("*.token"):
        shutil.copy2(file, home.tokens / file.name)
    shutil.copy2(store.credentials_file, home.credentials_file)
