"""A store that is held up does not work for callers who have left: it has room for those who come."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from kvasir.clients import AioStoreClient
from kvasir.errors import DeadlineExceeded, KvasirError, NotFound
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.waits import PAUSE_S

from cachestore_svc.index.postgres.replicas import GROUPS
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.service.running import publish, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.postgres import PostgresServer, postgres  # noqa: F401

KV = kv_identity_hash(SMALL)
_PLACES = 256  # of one caller
_AT_ONCE = 32  # calls that the store has begun, at most


async def test_a_commit_whose_caller_left_before_its_blobs_came_makes_no_version(tmp_path: Path) -> None:
    snapshot = SyntheticAgent(SMALL).turn(300)
    asked = "a", snapshot.manifest_digest, 0
    with store_home(tmp_path / "home") as home:
        async with AioStoreClient.connect(home.start().address) as client:
            assert "awaits" in (await client.get_capabilities()).features
            with pytest.raises(DeadlineExceeded):
                await client.commit(*asked, awaited=list(snapshot.new_blobs), timeout_s=0.3)
            await client.put_manifest(snapshot.manifest_bytes)
            with pytest.raises(DeadlineExceeded):  # it has the manifest now, and waits for tensors
                await client.commit(*asked, awaited=list(snapshot.new_blobs), timeout_s=0.3)
            await client.put_blobs(snapshot.new_blobs)
            with pytest.raises(NotFound):
                await client.get_agent("a")
            assert (await client.commit(*asked)).version == 1


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
        assert 1 <= leases <= _AT_ONCE  # those whose call had begun, and the third


@pytest.mark.long(4)
def test_calls_that_take_a_memory_back_keep_no_place_and_take_no_effect_once_their_callers_left(
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
) -> None:
    async def given_up(number: int, client: AioStoreClient) -> str:
        try:
            match number % 3:
                case 0:
                    await client.rollback_agent("ada", 1)
                case 1:
                    await client.fork_agent("ada", f"forked {number}")
                case _:
                    await client.delete_agent(f"to delete {number % 8}")
        except KvasirError as error:
            return error.reason or type(error).__name__
        return "done"

    async def scene(address: str, other: psycopg.Connection[tuple[object]]) -> None:
        calm, hasty = AioStoreClient.connect(address), AioStoreClient.connect(address, timeout_s=0.5)
        for number in range(8):
            await calm.fork_agent("ada", f"to delete {number}")
        other.execute(f"SELECT pg_advisory_lock({GROUPS})")
        calls = [given_up(number, hasty) for number in range(_PLACES)]
        assert set(await asyncio.gather(*calls)) == {"DEADLINE_EXCEEDED"}
        other.execute(f"SELECT pg_advisory_unlock({GROUPS})")
        give_up = time.monotonic() + 60
        while True:  # behind those whose call had begun
            with suppress(KvasirError):
                await calm.fork_agent("ada", "last")
                break
            assert time.monotonic() < give_up
        [[deleted, forked]] = other.execute(
            "SELECT count(*) FILTER (WHERE name LIKE 'to %'), count(*) FILTER (WHERE name LIKE 'f%') FROM kvasir.agents"
        ).fetchall()
        [version] = (await calm.list_snapshots("ada", page_size=1)).snapshots
        assert version.version - 1 + 8 - deleted + forked <= _AT_ONCE
        await asyncio.gather(calm.close(), hasty.close())

    url = postgres.url(postgres.new_database())
    with store_home(tmp_path / "home") as home, psycopg.connect(url, autocommit=True) as other:
        running = home.start("--catalog", url)
        with running.client() as client:
            publish(client, "ada", SyntheticAgent(SMALL, 1).turn(30), 0)
        asyncio.run(scene(running.address, other))


def _import_over(client: AioStoreClient, archive: list[bytes]) -> Awaitable[object]:
    return client.import_agent("ada", archive, replace=True)


@pytest.mark.long(6)
@pytest.mark.parametrize(
    "takes_back",
    [
        lambda client, _: client.rollback_agent("ada", 1),
        lambda client, _: client.delete_agent("ada"),
        lambda client, _: client.fork_agent("bob", "held"),
        _import_over,
    ],
    ids=["rollback", "delete", "fork", "import"],
)
def test_a_caller_who_leaves_while_an_engine_has_the_lease_takes_nothing_back(
    takes_back: Callable[[AioStoreClient, list[bytes]], Awaitable[object]], tmp_path: Path
) -> None:
    async def scene(address: str) -> None:
        client = AioStoreClient.connect(address, timeout_s=30)
        leases = {name: (await client.acquire_lease(name, KV, "engine")).lease for name in ("ada", "held")}
        archive = [piece async for piece in client.export_agent("bob")]
        leaving = asyncio.ensure_future(takes_back(client, archive))
        await asyncio.sleep(0.5)
        assert not leaving.done()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(PAUSE_S)
        for name, lease in leases.items():
            await client.release_lease(name, KV, lease)
        await asyncio.sleep(3 * PAUSE_S)
        agents = (await client.list_agents()).agents
        assert [(each.agent_id, each.lines[0].version) for each in agents] == [("ada", 1), ("bob", 1)]
        await client.close()

    with store_home(tmp_path / "home") as home:
        running = home.start()
        with running.client() as client:
            for number, name in enumerate(("ada", "bob")):
                publish(client, name, SyntheticAgent(SMALL, number).turn(30), 0)
        asyncio.run(scene(running.address))


async def test_a_caller_who_leaves_takes_a_waiting_call_away_and_a_begun_one_ends() -> None:
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
