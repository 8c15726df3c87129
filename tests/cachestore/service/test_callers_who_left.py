"""A store that is held up does not work for callers who have left: it has room for those who come."""

import asyncio
import threading
import time
from pathlib import Path

import psycopg
import pytest
from kvasir.clients import AioStoreClient
from kvasir.errors import KvasirError
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.index.postgres.replicas import GROUPS
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.service.running import store_home
from tests.made_models.synthetic import SMALL
from tests.running.postgres import PostgresServer, postgres  # noqa: F401

KV = kv_identity_hash(SMALL)
_PLACES = 256  # of one caller


@pytest.mark.long(3)
def test_calls_whose_callers_left_keep_no_place_and_take_no_lease(
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
) -> None:
    async def refused(client: AioStoreClient, agent: str) -> str:
        try:
            await client.acquire_lease(agent, KV, "engine", timeout_s=0.5)
        except KvasirError as error:
            return error.reason or type(error).__name__
        return "granted"

    async def scene(address: str, other: psycopg.Connection[tuple[object]]) -> None:
        client = AioStoreClient.connect(address)
        other.execute(f"SELECT pg_advisory_lock({GROUPS})")  # as a group of another store that takes its time
        first = await asyncio.gather(*(refused(client, f"first {number}") for number in range(_PLACES)))
        assert set(first) == {"DEADLINE_EXCEEDED"}
        give_up = time.monotonic() + 20
        while "TOO_MANY_CALLS" in await asyncio.gather(*(refused(client, f"second {number}") for number in range(100))):
            assert time.monotonic() < give_up  # it hears a little later that they left
        other.execute(f"SELECT pg_advisory_unlock({GROUPS})")
        give_up = time.monotonic() + 60
        while await refused(client, "third") != "granted":
            assert time.monotonic() < give_up
        await client.close()

    url = postgres.url(postgres.new_database())
    with store_home(tmp_path / "home") as home, psycopg.connect(url, autocommit=True) as other:
        asyncio.run(scene(home.start("--catalog", url).address, other))
        [[leases]] = other.execute("SELECT count(*) FROM kvasir.leases").fetchall()
        assert 1 <= leases <= 32  # those whose call had begun, and the third


def test_a_caller_who_leaves_takes_a_waiting_call_away_and_a_begun_one_ends() -> None:
    async def scene() -> None:
        threads, go_on, done = StoreThreads(1), threading.Event(), list[str]()

        def work(name: str) -> None:
            assert go_on.wait(20)
            done.append(name)

        calls = [asyncio.create_task(threads.run_if_awaited("a", work, name)) for name in ("begun", "left", "stays")]
        await asyncio.sleep(0.05)
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        calls[0].cancel()
        await asyncio.sleep(0.05)
        assert not calls[0].done()
        go_on.set()
        await asyncio.wait(calls)
        assert calls[0].cancelled()
        assert done == ["begun", "stays"]
        assert threads.room.held_units == 0
        threads.close()

    asyncio.run(scene())
