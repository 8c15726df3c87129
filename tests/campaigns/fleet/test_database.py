"""A standby that the campaign promotes has all that was acknowledged, and so has the next one."""

import asyncio
import itertools
import shutil
import threading
import time
from pathlib import Path

import psycopg
import pytest

from tests.campaigns.fleet import database
from tests.campaigns.fleet.database import Database
from tests.running import in_memory
from tools.fleet import servers
from tools.fleet.servers import Postgres
from tools.kvasir_tiny.words import Dice

pytestmark = pytest.mark.skipif(bool(servers.missing()), reason=servers.missing())


class _Writer(threading.Thread):
    """Counts up in a table, by whichever server takes writes; what was acknowledged."""

    def __init__(self, url: str, passfile: Path) -> None:
        super().__init__(daemon=True)
        self._given = {"conninfo": url, "passfile": str(passfile), "connect_timeout": 2}
        self.acknowledged, self._is_over = list[int](), threading.Event()

    def run(self) -> None:
        numbers = itertools.count()
        while not self._is_over.is_set():
            try:
                with psycopg.connect(**self._given, target_session_attrs="read-write", autocommit=True) as connection:  # type: ignore[arg-type]
                    while not self._is_over.is_set():
                        connection.execute("INSERT INTO counted VALUES (%s)", [number := next(numbers)])
                        self.acknowledged.append(number)
            except psycopg.Error:
                self._is_over.wait(0.05)

    def end(self) -> list[int]:
        self._is_over.set()
        self.join(30)
        return self.acknowledged


@pytest.mark.long(10)
@pytest.mark.parametrize("how", ["promote", "freeze and promote"])
def test_each_server_that_is_promoted_has_what_was_acknowledged_before_and_since(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(database, "_KINDS", (how,))
    root = in_memory.home()
    root.chmod(0o711)
    for name in ("a", "b"):
        (root / name).mkdir()
    first, second = Postgres(root / "a", root), Postgres(root / "b", root, "postgres-2")
    try:
        first.prepare(first.port, second.port)
        first.part.start()
        first.part.wait_until_ready()
        first.ask("CREATE TABLE counted (number BIGINT)")
        second.follow(first)
        second.part.start()
        second.part.wait_until_ready()
        first.wait_for_standby()
        url = f"postgresql://kvasir@127.0.0.1:{first.port},127.0.0.1:{second.port}/postgres"
        writer = _Writer(url, first.passfile)
        writer.start()
        pair = Database(first, second, 1.0)
        for promoted in (second, first):
            before = len(writer.acknowledged)
            assert asyncio.run(pair.strike(Dice("a promotion"))) == f"{how} the standby of postgres"
            assert promoted.ask("SELECT pg_is_in_recovery()") == [(False,)]
            while len(writer.acknowledged) < before + 50:
                assert writer.is_alive()
                time.sleep(0.02)
        acknowledged = writer.end()
        assert set(acknowledged) <= {number for (number,) in first.ask("SELECT number FROM counted")}
        assert second.ask("SELECT pg_is_in_recovery()") == [(True,)]
    finally:
        for each in (first, second):
            each.part.kill()
        shutil.rmtree(root, ignore_errors=True)
