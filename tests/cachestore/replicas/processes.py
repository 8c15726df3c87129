"""Store processes over one PostgreSQL and one bucket of versitygw, each with a data directory and a link of its own."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.cachestore.bucket.test_over_s3 import Faults
from tests.cachestore.service.running import RunningStore, StoreHome, store_home
from tests.running.postgres import PostgresServer

WHERE = "s3://bucket/agents"


class Link(Faults):
    """The way of one replica to the bucket. It holds a request that has some words, until it is let go."""

    def __init__(self, port: int) -> None:
        self.holds: tuple[bytes, ...] = ()
        self.held, self.goes = threading.Event(), threading.Event()
        super().__init__(port)

    def hold(self, *words: bytes) -> None:
        self.held.clear()
        self.goes.clear()
        self.holds = words

    def _pass(self, data: bytes) -> None:
        if self.holds and all(word in data for word in self.holds):
            self.holds = ()
            self.held.set()
            assert self.goes.wait(120)


@dataclass
class Replicas:
    root: Path
    server: PostgresServer
    url: str
    credentials: Path
    ends: ExitStack
    homes: dict[str, StoreHome] = field(default_factory=dict)

    def home(self, name: str) -> StoreHome:
        if name not in self.homes:
            self.homes[name] = self.ends.enter_context(store_home(self.root / name))
        return self.homes[name]

    def options(self, *, url: str = "", where: str = WHERE, credentials: Path | None = None) -> list[str]:
        words = ["--catalog", url or self.url, "--blobs", where]
        return [*words, "--blob-credentials-file", str(credentials or self.credentials)]

    def start(self, name: str, *more: str, link: Link | None = None) -> RunningStore:
        credentials = self.through(link, name) if link else None
        return self.home(name).start(*self.options(credentials=credentials), *more)

    def through(self, link: Link, name: str) -> Path:
        """The bucket's keys, with the link's address."""
        file = self.root / f"{name}.keys"
        file.touch(0o600)
        lines = self.credentials.read_text().splitlines()[:-1]
        file.write_text("\n".join([*lines, f"endpoint_url = http://127.0.0.1:{link.port}\n"]))
        return file

    def copy_of_database(self) -> str:
        """Nobody may have it meanwhile."""
        name = self.url.rpartition("/")[2]
        with psycopg.connect(self.server.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE copy_of_{name} TEMPLATE {name}")  # type: ignore[arg-type]
        return self.server.url(f"copy_of_{name}")


@contextmanager
def replicas_in(root: Path, server: PostgresServer, credentials: Path) -> Iterator[Replicas]:
    with ExitStack() as ends:
        yield Replicas(root, server, server.url(server.new_database()), credentials, ends)
